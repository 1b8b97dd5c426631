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
from kfp_gpuquota.api import Phase, Progress, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.jobs.change_recorder import ChangeRecorder
from kfp_gpuquota.cluster.jobs.lifecycle import after_reboot, after_worker_exited, progressed
from kfp_gpuquota.cluster.jobs.records import Intent, JobRecord, WorkerRecord, leaving, with_status
from kfp_gpuquota.cluster.jobs.size_changes import after_commit, after_processes_changed
from kfp_gpuquota.cluster.local.home import Home, make_private, write_private
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.cgroups import NONE, Cgroups
from kfp_gpuquota.cluster.local.workers.runtime import LocalRuntime
from kfp_gpuquota.cluster.local.workers.sharing import Sharing
from kfp_gpuquota.cluster.plan_pacing import PlanPacing, RestAfterPlans
from kfp_gpuquota.cluster.planning import PlanningHealth
from kfp_gpuquota.errors import NotFoundError, PlanningFailedError, StateFileError
from kfp_gpuquota.fractions import Policy
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership.service import MembershipService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.cluster.local.workers.runtime import WorkerRuntime
    from kfp_gpuquota.membership import AnnounceCommit

RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Settings of all workers: their soft limit on open files (0: as inherited), and the size of a kept log.

    `device_locks` are the descriptors that their shims inherit, so that the GPUs stay locked while they run.
    Their limits on memory and CPU are enforced in `cgroups`.
    """

    open_files: int = 0
    log_limit: int = 0
    device_locks: tuple[int, ...] = ()
    cgroups: Cgroups = NONE


class Driver:
    """One per daemon. It also receives the membership service's notices. All of it runs in the event loop.

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
        self.membership = MembershipService(self, clock=self._loop.time)
        self._settings = settings or Settings()
        self.runtime = runtime or self._local_runtime()
        self.sharing = Sharing(home, state, policy or Policy(), self._loop, self._start, self._explain)
        self._planning: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._pace = PlanPacing()
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
        for record in list(self._state.workers.values()):
            if record.alive:
                self._recover_worker(record)
        self.runtime.end_unrecorded(self._state.workers)
        self.sharing.wake()
        self.wake()

    def close(self) -> None:
        """Release all resources; running workers continue."""
        for timer in (self._planning, self._later):
            if timer:
                timer.cancel()
        self.sharing.close()
        self.runtime.close()

    @contextlib.contextmanager
    def decide(self) -> Iterator[ChangeRecorder]:
        """Write a decision, commit it when the block ends, then carry it out. Raises StateFileError."""
        with self._state.change() as change:
            recorder = ChangeRecorder(self._state, change, self._state.clock())
            yield recorder
        self._start_all(recorder.started)
        self._stop_all(recorder.stopped)
        for uid, job in change.jobs.items():
            if job is None:
                self.runtime.remove_job(uid)
                self._home.take_reserve()
        self.wake()

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
        plan = scheduler.plan(self._state.scheduler, now)
        self._rest.planned(began, self._loop.time())
        self._plan_again(None if plan.again_at is None else plan.again_at - now)
        for uid, reason in plan.waiting.items():
            self._state.note_waiting(uid, reason)
        self._pace.planned(empty=plan.empty)
        if self._pace.reached_limit:
            log.error("%d plans in a row had something to do; the last one: %s", self._pace.in_a_row, plan)
        if plan.empty and not self._state.new_promises(plan):
            return
        try:
            with self.decide() as recorder:
                recorder.plan(plan)
        except StateFileError as error:
            log.error("the plan was dropped and is made again in %s s: %s", RETRY_S, error)
            self._loop.call_later(RETRY_S, self.wake)

    def _plan_again(self, delay_s: float | None) -> None:
        """A decision waits for time to pass. Only the newest plan's time counts."""
        if self._later:
            self._later.cancel()
        self._later = None if delay_s is None else self._loop.call_later(delay_s, self.wake)

    # Starting and stopping

    def _start_all(self, workers: Iterable[str]) -> None:
        records = [self._state.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            if self._state.jobs[uid].status.phase is Phase.STARTING:
                self.membership.close(uid)  # that of an earlier attempt; `_start` opens it anew
            else:
                self._update_target(uid)
        for record in records:
            self._start_in_turn(record)

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
        with self._noting(worker) as recorder:
            job = self._state.jobs[record.worker.job_uid]
            recorder.record(with_status(job, reason=Reason(code=ReasonCode.WORKER_FAILED, message=message)))
        self._loop.call_later(delay_s, self._start_again, worker)

    def _start_again(self, worker: str) -> None:
        record = self._state.workers.get(worker)
        if record is not None and record.alive and not self.runtime.watches(worker):
            self._recover_worker(record)

    def _stop_all(self, workers: Iterable[str]) -> None:
        records = [self._state.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            self._update_target(uid)
        for record in records:
            self._ask_to_go(record)

    def _ask_to_go(self, record: WorkerRecord) -> None:
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
        make_private(self._home.checkpoints(job.uid))
        if not token_file.exists():
            write_private(token_file, secrets.token_urlsafe(32))
        self.membership.open(
            job.uid,
            token_file.read_text(),
            min_workers=job.spec.smallest // job.spec.worker_gpus,
            first_generation=job.generation_high + 1,
            running=[record.worker.id for record in self._state.alive_of(job.uid)],
            limits=Limits(starting_s=math.inf, leave_s=job.spec.grace_period_s),
            worker_prefix=f"{job.uid}-",
        )
        self._update_target(job.uid)

    @contextlib.contextmanager
    def _logging_errors(self, job: JobRecord) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.error("the membership of job %s cannot be served: %s", job.uid, error)

    def _update_target(self, uid: str) -> None:
        wanted = [record.worker.id for record in self._state.alive_of(uid) if not record.released]
        with contextlib.suppress(NotFoundError):
            self.membership.set_target(uid, wanted)

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
                    self._ask_to_go(record)
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
        job = self._state.jobs[record.worker.job_uid]
        pid = self.runtime.process_id(record.worker)
        running = msgspec.structs.replace(record.worker, phase=WorkerPhase.RUNNING, pid=pid)
        if job.status.phase is Phase.STARTING:
            job = with_status(job, phase=Phase.RUNNING)
        with self._noting(worker) as recorder:
            recorder.change.workers[worker] = msgspec.structs.replace(record, worker=running)
            recorder.record(self._unmanaged_size(job, recorder.now))

    def _unmanaged_size(self, job: JobRecord, now: float) -> JobRecord:
        """A job without a membership has the size of its processes."""
        if job.managed or job.intent is not Intent.RUN:
            return job
        running = [record for record in self._state.alive_of(job.uid) if not record.released]
        return after_processes_changed(job, self._state.attempt_of(job), running, now)

    def worker_ended(self, worker: str, code: int, lost_with: str = "") -> None:
        """Record that the worker has ended, by itself or with its node, and plan with its devices."""
        self._start_failures.pop(worker, None)
        record = self._state.workers.get(worker)
        if record is None or not record.alive:
            return
        try:
            self._record_end(msgspec.structs.replace(record, lost_with=lost_with), code)
        except StateFileError as error:
            log.error("the end of worker %s is recorded in %s s: %s", worker, RETRY_S, error)
            self._loop.call_later(RETRY_S, self.worker_ended, worker, code, lost_with)

    def _record_end(self, record: WorkerRecord, code: int) -> None:
        before = self._state.jobs[record.worker.job_uid]
        with self.decide() as recorder:
            gone = msgspec.structs.replace(
                record.worker, phase=WorkerPhase.GONE, exit_code=code, finished_at=recorder.now
            )
            record = msgspec.structs.replace(record, worker=gone)
            workers = [record if w.worker.id == gone.id else w for w in self._state.attempt_of(before)]
            after = after_worker_exited(before, record, workers, recorder.now)
            if why := self.sharing.why_ended(gone.id) or self.runtime.why_ended(before.spec, gone):
                after = with_status(after, reason=why)
            recorder.note(after, EventKind.WORKER_GONE, worker=gone.id, gpus=-gone.gpus)
            recorder.change.workers[gone.id] = record
            recorder.record(after)
            if after.intent is Intent.FAIL and before.intent is not Intent.FAIL and not after.status.phase.final:
                recorder.fail(after, [w.worker.id for w in workers if w.alive])
        self.membership.worker_exited(gone.job_uid, gone.id, finished=code == 0 and not record.released)
        self._after_end(gone.job_uid)

    def _after_end(self, uid: str) -> None:
        if not self._state.alive_of(uid):
            self.membership.close(uid)
            return
        self._update_target(uid)
        with self._noting(uid) as recorder:
            recorder.record(self._unmanaged_size(self._state.jobs[uid], recorder.now))

    # Notices of the membership service (server.membership.Notices)

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Store a generation's number before any order with it is sent."""
        job = msgspec.structs.replace(self._state.jobs[job_uid], generation_high=generation)
        with self._noting(job_uid, durable=True) as recorder:
            recorder.record(job)
        self._state.jobs[job_uid] = job  # also where it could not be written: the next commit writes it

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """A generation is in force: give the workers their ranks, and record the change of size."""
        job = self._state.jobs.get(job_uid)
        if job is None or not commit.complete:
            return
        with self._noting(job_uid) as recorder:
            after, ranked = after_commit(job, self._state.attempt_of(job), commit, recorder.now)
            recorder.change.workers.update((record.worker.id, record) for record in ranked)
            recorder.record(after)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Membership wants the worker's process ended."""
        record = self._worker_of(job_uid, worker)
        if record is None:
            return
        log.warning("killing worker %s of job %s: %s", worker, job_uid, why)
        with self._noting(worker) as recorder:
            recorder.change.workers[worker] = msgspec.structs.replace(record, killed_for=why)
        self.runtime.kill(worker)

    def _worker_of(self, job_uid: str, worker: str) -> WorkerRecord | None:
        """The worker as recorded; None for one of another job, or one that was never started."""
        record = self._state.workers.get(worker)
        return record if record is not None and record.worker.job_uid == job_uid else None

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """The worker left by agreement; its process ends by itself, and until then holds its devices."""
        log.info("worker %s of job %s left after step %s", worker, job_uid, step)
        record = self._worker_of(job_uid, worker)
        if record is None or record.released or not record.alive:
            return
        with self._noting(worker) as recorder:  # its stop was requested by another program
            recorder.change.workers[worker] = leaving(record, recorder.now)
        self.wake()

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """A worker applied the training's last step: the job takes no more workers."""
        job = self._state.jobs.get(job_uid)
        if job is None or job.completing or job.intent is not Intent.RUN:
            return
        log.info("job %s finished its training with step %s of worker %s", job_uid, step, worker)
        with self._noting(job_uid) as recorder:
            recorder.record(msgspec.structs.replace(job, completing=True))
        self.wake()

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """Store a training's report. All workers report the same steps: the first report is kept."""
        job, record = self._state.jobs.get(job_uid), self._worker_of(job_uid, worker)
        if job is None or record is None or record.worker.rank not in {None, 0}:
            return
        with self._noting(job_uid) as recorder:
            recorder.record(progressed(job, progress))

    def _explain(self, job: JobRecord, reason: Reason) -> None:
        """Its GPU memory was taken back: part of the history, and what `describe` shows."""
        with self._noting(job.uid) as recorder:
            recorder.note(job, EventKind.GPU_MEMORY_RECLAIMED, reason=reason)
            recorder.record(with_status(self._state.jobs[job.uid], reason=reason))

    @contextlib.contextmanager
    def _noting(self, what: str, *, durable: bool = False) -> Iterator[ChangeRecorder]:
        """For facts that are learnt again: a full disk delays them, and must not stop the daemon."""
        try:
            with self._state.change(durable=durable) as change:
                yield ChangeRecorder(self._state, change, self._state.clock())
        except StateFileError as error:
            log.error("%s: %s", what, error)
