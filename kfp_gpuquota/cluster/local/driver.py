"""Carries out the scheduler's plans, and reports the workers' actual state to it.

Planning happens on change, never by polling: whatever changes the state calls `wake`, and the next turn of the event
loop makes one plan for all that changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.job_timers import JobTimers
from kfp_gpuquota.cluster.local.home import Home, make_private, write_private
from kfp_gpuquota.cluster.local.shared.files import make_owners_directory
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.cgroups import NONE, Cgroups
from kfp_gpuquota.cluster.local.workers.runtime import LocalRuntime
from kfp_gpuquota.cluster.local.workers.sharing import Sharing
from kfp_gpuquota.cluster.plan_pacing import LONGEST_FORECAST_S, PlanPacing, RestAfterPlans, within
from kfp_gpuquota.cluster.planning import PlanningHealth
from kfp_gpuquota.engine.change_recorder import ChangeRecorder
from kfp_gpuquota.engine.decisions import Decisions
from kfp_gpuquota.engine.expected_starts import RunTimesOfWaiting, note_expected, run_times
from kfp_gpuquota.engine.lifecycle import after_reboot
from kfp_gpuquota.engine.memberships import Access, open_membership
from kfp_gpuquota.engine.notices import MembershipNotices
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord, with_status
from kfp_gpuquota.errors import PlanningFailedError, StateFileError
from kfp_gpuquota.fractions import Policy
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.scheduler.forecast import Forecast
from kfp_gpuquota.server.membership.service import MembershipService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.cluster.local.workers.runtime import WorkerRuntime

RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0
FORECAST_AFTER_S: Final = 0.5
FORECAST_EVERY_S: Final = 30.0

LIMITS: Final = Limits(starting_s=math.inf)
"""A script may build its model for an hour."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Settings of all workers: their soft limit on open files (0: as inherited), and the size of a kept log.

    `device_locks` are the descriptors that their shims inherit, so that the GPUs stay locked while they run.
    Their limits on memory and CPU are enforced in `cgroups`. `shared`: jobs run as their owners.
    """

    open_files: int = 0
    log_limit: int = 0
    device_locks: tuple[int, ...] = ()
    cgroups: Cgroups = NONE
    shared: bool = False


class Driver:
    """One per daemon. All of it runs in the event loop.

    `give_up()` is called when plans fail repeatedly: the daemon ends, and `health.check()` returns why.
    """

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        policy: Policy | None = None,
        settings: Settings | None = None,
        give_up: Callable[[], None] = lambda: None,
        runtime: WorkerRuntime | None = None,
    ) -> None:
        self._home = home
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._settings = settings or Settings()
        self.runtime = runtime or self._local_runtime()
        self.membership = MembershipService(MembershipNotices(state, self.runtime), clock=self._loop.time)
        self.decisions = Decisions(state, self.membership, self)
        self.timers = JobTimers(state, self.decisions)
        state.replan = self.wake
        self.sharing = Sharing(home, state, policy or Policy(), self._loop, self._start, self._explain)
        self._planning: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._forecast: asyncio.TimerHandle | None = None
        self._pace = PlanPacing()
        self._run_times = RunTimesOfWaiting(state)
        self._rest = RestAfterPlans()
        self._start_failures: dict[str, Backoff] = {}
        self.health = PlanningHealth(self._loop.time)
        self._give_up = give_up

    def _local_runtime(self) -> WorkerRuntime:
        settings = self._settings
        return LocalRuntime(
            self._home,
            self._state.nodes,
            self,
            open_files=settings.open_files,
            log_limit=settings.log_limit,
            device_locks=settings.device_locks,
            cgroups=settings.cgroups,
            shared=settings.shared,
        )

    def wake(self) -> None:
        """Something changed: plan in the next turn of the loop."""
        if self._planning is None:
            self.health.requested()
            delay_s = max(self._pace.delay_s, self.health.pause_s, self._rest.delay_s(self._loop.time()))
            self._planning = (
                self._loop.call_later(delay_s, self._plan) if delay_s > 0 else self._loop.call_soon(self._plan)
            )

    def recover(self) -> None:
        """Recover from an earlier daemon: adopt running workers, read how others ended, complete decisions."""
        for job in list(self._state.jobs.values()):
            if self._state.alive_of(job.uid):
                with self._logging_errors(job):
                    self._open_membership(job)
            self.timers.set(job.uid)
        for record in list(self._state.workers.values()):
            if record.alive:
                self._recover_worker(record)
        self.runtime.end_unrecorded(self._state.workers)
        self.sharing.wake()
        self.wake()

    def close(self) -> None:
        """Release all resources; running workers continue."""
        for timer in (self._planning, self._later, self._forecast):
            if timer:
                timer.cancel()
        self.timers.close()
        self.sharing.close()
        self.runtime.close()

    # Plans

    def _plan(self) -> None:
        try:
            self._plan_once()
        except Exception:
            log.exception("the plan failed")
            self._plan_failed()
        else:
            self.health.succeeded()

    def _plan_failed(self) -> None:
        try:
            self.health.failed()
        except PlanningFailedError as error:
            log.error("%s", error.message)
            self._give_up()
        else:
            self._plan_again(self.health.pause_s)

    def _plan_once(self) -> None:
        self._planning = None
        began = self._loop.time()
        now = self._state.clock()
        for event in self._run_times.changes(self._state.scheduler):
            self._state.scheduler.apply(event)
        plan = scheduler.plan(self._state.scheduler, now)
        self._rest.planned(began, self._loop.time())
        self._plan_again(None if plan.again_at is None else plan.again_at - now)
        self._pace.planned(empty=plan.empty)
        if self._pace.reached_limit:
            log.error("%d plans in a row had something to do; the last one: %s", self._pace.in_a_row, plan)
        self._forecast_in(FORECAST_AFTER_S)
        try:
            self.decisions.plan(plan)
        except StateFileError as error:
            log.error("the plan was dropped and is made again in %s s: %s", RETRY_S, error)
            self._loop.call_later(RETRY_S, self.wake)

    def _forecast_in(self, delay_s: float) -> None:
        """Forecast when the waiting jobs start, once after all plans until then."""
        if self._forecast is None:
            self._forecast = self._loop.call_later(delay_s, self._forecast_starts)

    def _forecast_starts(self) -> None:
        """Forecast, and again while jobs wait: run times that pass change it as well. It takes a 20th of the time."""
        now = self._state.clock()
        self._forecast_step(Forecast(self._state.scheduler, now, run_times(self._state, now)), now, 0.0)

    def _forecast_step(self, forecast: Forecast, now: float, took_s: float) -> None:
        """Make one play in each turn of the loop, so that requests do not wait for all of them."""
        self._forecast, began = None, self._loop.time()
        more = forecast.step(within(LONGEST_FORECAST_S))
        took_s += self._loop.time() - began
        if more:
            self._forecast = self._loop.call_later(0.0, self._forecast_step, forecast, now, took_s)
            return
        if note_expected(self._state, forecast.starts(), now):
            self._state.wake()
        if self._state.scheduler.ledger.has_waiting:
            self._forecast_in(max(FORECAST_EVERY_S, 20 * took_s))

    def _plan_again(self, delay_s: float | None) -> None:
        """A decision waits for time to pass. Only the newest plan's time counts."""
        if self._later:
            self._later.cancel()
        self._later = None if delay_s is None else self._loop.call_later(delay_s, self.wake)

    # As `engine.protocols.Workers`

    def start_workers(self, job: JobRecord, workers: Sequence[WorkerRecord]) -> None:
        """Start these workers."""
        self.timers.set(job.uid)
        for record in workers:
            self._start_in_turn(record)

    def forget_job(self, uid: str) -> None:
        """Delete the job's files."""
        self.timers.forget(uid)
        self.runtime.remove_job(uid)
        self._home.take_reserve()

    def _start_in_turn(self, record: WorkerRecord) -> None:
        """Now; a worker that shares a GPU as soon as its part is free."""
        if not self.sharing.takes_over(record):
            self._start(record)

    def _start(self, record: WorkerRecord) -> None:
        worker = record.worker
        job = self._state.jobs[worker.job_uid]
        try:
            if not self.membership.is_open(job.uid):
                self._open_membership(job)
            self.runtime.start(job, worker)
        except OSError as error:
            self.worker_not_started(worker.id, str(error))

    def worker_not_started(self, worker: str, why: str) -> None:
        """The machine could not start it: it lacks descriptors, processes, memory or disk for now. Try again."""
        record = self._state.workers.get(worker)
        if record is None or not record.alive:
            return
        if record.released:  # its stop was requested before it could start: the start is not retried
            self._recover_worker(record)
            return
        delay_s = self._start_failures.setdefault(worker, Backoff(RETRY_S, LONGEST_RETRY_S)).next_s()
        message = f"worker {record.worker.index} could not be started ({why}); it is tried again in {delay_s:g} s"
        log.error("worker %s: %s", worker, message)
        self.decisions.explain(record.worker.job_uid, Reason(code=ReasonCode.WORKER_FAILED, message=message))
        self._loop.call_later(delay_s, self._start_again, worker)

    def _start_again(self, worker: str) -> None:
        record = self._state.workers.get(worker)
        if record is not None and record.alive and not self.runtime.watches(worker):
            self._recover_worker(record)

    def ask_to_leave(self, record: WorkerRecord) -> None:
        """By membership where it takes part in one, which kills it after its grace period; else by SIGTERM.

        Not by both: SIGTERM is sent to the whole process group, and would also end the data loader's processes while
        the training still needs them for its last step.
        """
        if self.sharing.gives_up(record.worker.id) or not self._is_started(record):
            self._recover_worker(record)  # it was never started, and is prevented from being
        elif not self._takes_part(record.worker):
            self.runtime.terminate(record.worker.id)

    def _is_started(self, record: WorkerRecord) -> bool:
        return record.worker.id not in self._start_failures or self.runtime.watches(record.worker.id)

    def _takes_part(self, worker: Worker) -> bool:
        if self._state.jobs[worker.job_uid].managed:
            return True
        if not self.membership.is_open(worker.job_uid):
            return False
        member = self.membership.machine(worker.job_uid).members.get(worker.id)
        return member is not None and member.last_message_at is not None

    def _open_membership(self, job: JobRecord) -> None:
        token_file = self._home.job_token_file(job.uid)
        make_private(token_file.parent if job.owner else self._home.checkpoints(job.uid))
        if not token_file.exists():
            write_private(token_file, secrets.token_urlsafe(32))
        token = token_file.read_text()
        if job.owner:
            make_owners_directory(self._home, job.uid, job.owner.uid, token)
        access = Access(token, job.generation_high + 1)
        open_membership(self._state, self.membership, job, access, LIMITS)

    @contextlib.contextmanager
    def _logging_errors(self, job: JobRecord) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.error("the membership of job %s cannot be served: %s", job.uid, error)

    # Events from the shims

    def _recover_worker(self, record: WorkerRecord) -> None:
        try:
            self._take_up(self._state.workers.get(record.worker.id, record))
        except OSError as error:
            log.error("worker %s is looked after again in %g s: %s", record.worker.id, RETRY_S, error)
            self._loop.call_later(RETRY_S, self._recover_worker, record)

    def _take_up(self, record: WorkerRecord) -> None:
        worker = record.worker
        job = self._state.jobs.get(worker.job_uid)
        if job is None or not record.alive:  # deleted, or ended, since another attempt was scheduled
            return
        match self.runtime.adopt(job, worker, wanted=not record.released):
            case shims.Found.RUNNING:
                self.worker_started(worker.id)
                if record.released:
                    self.ask_to_leave(record)
            case shims.Found.REBOOTED:
                self._requeue_after_reboot(record)
            case shims.Found.ENDED:
                self._loop.call_soon(self.worker_ended, worker.id, self.runtime.exit_code(worker))
            case shims.Found.NEVER_STARTED if not record.released:
                self._start_in_turn(record)
            case shims.Found.NEVER_STARTED if self.runtime.prevent(worker):
                self._loop.call_soon(self.worker_ended, worker.id, shims.EXIT_SHIM_LOST)
            case shims.Found.NEVER_STARTED:
                self._loop.call_later(RETRY_S, self._recover_worker, record)

    def worker_lost(self, worker: str, why: str) -> None:
        """Record that the worker ended with its node, which is no failure of its job."""
        record = self._state.workers.get(worker)
        if record is None or not record.alive:
            return
        log.warning("worker %s is lost: %s", worker, why)
        self.worker_ended(worker, shims.EXIT_SHIM_LOST, why)

    def nodes_changed(self, nodes: Iterable[Node], taken: Mapping[str, tuple[int, ...]]) -> None:
        """Plan with these nodes from now on, and without the devices that are taken."""
        try:
            changed = self._state.set_nodes(nodes, taken)
        except StateFileError as error:
            log.error("a change of the nodes is recorded with the next one: %s", error)
        else:
            if changed:
                self.wake()

    def _requeue_after_reboot(self, record: WorkerRecord) -> None:
        worker = record.worker
        try:
            with self._state.change() as change:
                recorder = ChangeRecorder(self._state, change, self._state.clock())
                recorder.record(after_reboot(self._state.jobs[worker.job_uid]))
        except StateFileError as error:
            log.error("the restart of the machine is recorded in %s s: %s", RETRY_S, error)
            self._loop.call_later(RETRY_S, self._recover_worker, record)
            return
        self._loop.call_soon(self.worker_ended, worker.id, shims.EXIT_SHIM_LOST)

    def worker_started(self, worker: str) -> None:
        """Record that the worker runs."""
        self._start_failures.pop(worker, None)
        record = self._state.workers.get(worker)
        if record is None or record.worker.phase is not WorkerPhase.STARTING:
            return
        pid = self.runtime.process_id(record.worker)
        running = msgspec.structs.replace(record.worker, phase=WorkerPhase.RUNNING, pid=pid)
        self.decisions.worker_runs(msgspec.structs.replace(record, worker=running))

    def worker_ended(self, worker: str, code: int, lost_with: str = "") -> None:
        """Record that the worker has ended, by itself or with its node, and plan with its devices."""
        self._start_failures.pop(worker, None)
        record = self._state.workers.get(worker)
        if record is None or not record.alive:
            return
        job, error = self._state.jobs[record.worker.job_uid], self.runtime.last_error(record.worker)
        lost = msgspec.structs.replace(record, lost_with=lost_with, error=error)
        why = self.sharing.why_ended(worker) or self.runtime.why_ended(job.spec, record.worker)
        try:
            self.decisions.worker_ended(lost, code, at=self.runtime.ended_at(record.worker), why=why)
        except StateFileError as error:
            log.error("the end of worker %s is recorded in %s s: %s", worker, RETRY_S, error)
            self._loop.call_later(RETRY_S, self.worker_ended, worker, code, lost_with)

    def _explain(self, job: JobRecord, reason: Reason) -> None:
        """Its GPU memory was taken back: part of the history, and what `describe` shows."""
        with self._state.noting(job.uid) as recorder:
            recorder.note(job, EventKind.GPU_MEMORY_RECLAIMED, reason=reason)
            recorder.record(with_status(self._state.jobs[job.uid], reason=reason))
