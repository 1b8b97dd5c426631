"""Carries out what the scheduler plans, and tells it what the workers really did.

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
from kfp_gpuquota.cluster.change_recorder import ChangeRecorder
from kfp_gpuquota.cluster.lifecycle import after_reboot, after_worker_gone, progressed, resized
from kfp_gpuquota.cluster.local import shims
from kfp_gpuquota.cluster.local.environment import worker_environment
from kfp_gpuquota.cluster.local.home import Home, write_private
from kfp_gpuquota.cluster.local.sharing import Sharing
from kfp_gpuquota.cluster.plan_pacing import PlanPacing
from kfp_gpuquota.cluster.planning import PlanningHealth
from kfp_gpuquota.cluster.records import Intent, JobRecord, WorkerRecord, leaving, with_status
from kfp_gpuquota.errors import NotFoundError, PlanningFailedError, StateFileError
from kfp_gpuquota.fractions import Policy
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership import MembershipService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kfp_gpuquota.cluster.local.state import ClusterState
    from kfp_gpuquota.membership import AnnounceCommit

RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What holds for all workers: their soft limit on open files (0: as inherited), and how much of a log is kept."""

    open_files: int = 0
    log_limit: int = 0


class Driver:
    """One per daemon; it is also what the membership service tells its news to. All of it runs in the event loop.

    `give_up()` is called when plans fail again and again: the daemon ends, and `health.check()` says why.
    """

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        policy: Policy | None = None,
        settings: Settings | None = None,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._home = home
        self._state = state
        self.membership = MembershipService(self)
        self._shims = shims.Shims(self._on_started, self._on_ended, self._on_not_started)
        self._loop = asyncio.get_running_loop()
        self.sharing = Sharing(home, state, policy or Policy(), self._loop, self._start, self._explain)
        self._planning: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._pace = PlanPacing()
        self._settings = settings or Settings()
        self._start_failures: dict[str, int] = {}
        self.health = PlanningHealth(self._loop.time)
        self._give_up = give_up

    def wake(self) -> None:
        """Something changed: plan in the next turn of the loop."""
        if self._planning is None:
            self.health.requested()
            delay_s = max(self._pace.delay_s, self.health.pause_s)
            self._planning = self._loop.call_later(delay_s, self._plan) if delay_s else self._loop.call_soon(self._plan)

    def recover(self) -> None:
        """Take up what an earlier daemon left: adopt what runs, learn how the rest ended, do what was not done."""
        for job in list(self._state.jobs.values()):
            if self._state.alive_of(job.uid):
                with self._logging_errors(job):
                    self._open_membership(job)
        for record in list(self._state.workers.values()):
            if record.alive:
                self._recover_worker(record)
        for worker in shims.without_record(self._home.jobs, self._state.workers):
            log.error("worker %s runs, but no job of this cluster has it: it is ended", worker)
            shims.end_leftovers(worker)
        self.sharing.wake()
        self.wake()

    def close(self) -> None:
        """Let go of everything; what runs goes on."""
        for timer in (self._planning, self._later):
            if timer:
                timer.cancel()
        self.sharing.close()
        self._shims.close()

    @contextlib.contextmanager
    def decide(self) -> Iterator[ChangeRecorder]:
        """Write a decision, commit it when the block ends, then carry it out. Raises StateFileError."""
        with self._state.change() as change:
            transcript = ChangeRecorder(self._state, change, self._state.clock())
            yield transcript
        self._start_all(transcript.started)
        self._stop_all(transcript.stopped)
        for uid, job in change.jobs.items():
            if job is None:
                self._home.remove_job(uid)
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
        now = self._state.clock()
        plan = scheduler.plan(self._state.scheduler, now)
        self._plan_again(None if plan.again_at is None else plan.again_at - now)
        for uid, reason in plan.waiting.items():
            self._state.note_waiting(uid, reason)
        self._pace.planned(empty=plan.empty)
        if self._pace.reached_limit:
            log.error("%d plans in a row had something to do; the last one: %s", self._pace.in_a_row, plan)
        if plan.empty:
            return
        try:
            with self.decide() as transcript:
                transcript.plan(plan)
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
        directory = self._home.worker(job.uid, worker.id)
        command = shims.WorkerCommand(
            command=job.spec.command,
            environment=worker_environment(self._home, job, worker, self._state.nodes),
            working_directory=job.spec.working_directory or str(self._home.job(job.uid)),
            grace_period_s=job.spec.grace_period_s,
            open_files=self._settings.open_files,
            log_limit=self._settings.log_limit,
        )
        try:
            if not self.membership.is_open(job.uid):
                self._open_membership(job)
            self._shims.start(worker.id, directory, command)
        except OSError as error:
            self._on_not_started(worker.id, str(error))

    def _on_not_started(self, worker: str, why: str) -> None:
        """The machine could not start it: it lacks descriptors, processes, memory or disk for now. Try again."""
        record = self._state.workers.get(worker)
        if record is None or not record.alive:
            return
        failures = self._start_failures[worker] = self._start_failures.get(worker, 0) + 1
        delay_s = min(RETRY_S * 2 ** (failures - 1), LONGEST_RETRY_S)
        message = f"worker {record.worker.index} could not be started ({why}); it is tried again in {delay_s:g} s"
        log.error("worker %s: %s", worker, message)
        with self._noting(worker) as transcript:
            job = self._state.jobs[record.worker.job_uid]
            transcript.record(with_status(job, reason=Reason(code=ReasonCode.WORKER_FAILED, message=message)))
        self._loop.call_later(delay_s, self._start_again, worker)

    def _start_again(self, worker: str) -> None:
        record = self._state.workers.get(worker)
        if record is not None and record.alive and not self._shims.watches(worker):
            self._recover_worker(record)

    def _stop_all(self, workers: Iterable[str]) -> None:
        records = [self._state.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            self._update_target(uid)
        for record in records:
            self._ask_to_go(record)

    def _ask_to_go(self, record: WorkerRecord) -> None:
        """By membership where it takes part in one, which kills it after its grace period; else by SIGTERM.

        Not by both: SIGTERM goes to the whole process group, and would end the data loader's processes, too, while
        the training still needs them for its last step.
        """
        if self.sharing.gives_up(record.worker.id) or not self._is_started(record):
            self._recover_worker(record)  # it was never started, and is prevented from being
        elif not self._takes_part(record.worker):
            self._shims.terminate(record.worker.id)

    def _is_started(self, record: WorkerRecord) -> bool:
        return record.worker.id not in self._start_failures or self._shims.watches(record.worker.id)

    def _takes_part(self, worker: Worker) -> bool:
        if self._state.jobs[worker.job_uid].managed:
            return True
        if not self.membership.is_open(worker.job_uid):
            return False
        member = self.membership.machine(worker.job_uid).members.get(worker.id)
        return member is not None and member.last_message_at is not None

    def _open_membership(self, job: JobRecord) -> None:
        token_file = self._home.job_token_file(job.uid)
        self._home.checkpoints(job.uid).mkdir(parents=True, exist_ok=True, mode=0o700)
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

    # What the shims tell

    def _recover_worker(self, record: WorkerRecord) -> None:
        try:
            self._take_up(self._state.workers.get(record.worker.id, record))
        except OSError as error:
            log.error("worker %s is looked after again in %g s: %s", record.worker.id, RETRY_S, error)
            self._loop.call_later(RETRY_S, self._recover_worker, record)

    def _take_up(self, record: WorkerRecord) -> None:
        worker = record.worker
        if not record.alive:
            return
        directory = self._home.worker(worker.job_uid, worker.id)
        match self._shims.adopt(worker.id, directory):
            case shims.Found.RUNNING:
                self._on_started(worker.id)
                if record.released:
                    self._ask_to_go(record)
            case shims.Found.REBOOTED:
                self._requeue_after_reboot(record)
            case shims.Found.ENDED:
                self._loop.call_soon(self._on_ended, worker.id, shims.exit_code(directory))
            case shims.Found.NEVER_STARTED if not record.released:
                self._start_in_turn(record)
            case shims.Found.NEVER_STARTED if shims.prevent(directory):
                self._loop.call_soon(self._on_ended, worker.id, shims.EXIT_SHIM_LOST)
            case shims.Found.NEVER_STARTED:
                self._loop.call_later(RETRY_S, self._recover_worker, record)

    def _requeue_after_reboot(self, record: WorkerRecord) -> None:
        worker = record.worker
        try:
            with self._state.change() as change:
                transcript = ChangeRecorder(self._state, change, self._state.clock())
                transcript.record(after_reboot(self._state.jobs[worker.job_uid]))
        except StateFileError as error:
            log.error("the restart of the machine is recorded in %s s: %s", RETRY_S, error)
            self._loop.call_later(RETRY_S, self._recover_worker, record)
            return
        self._loop.call_soon(self._on_ended, worker.id, shims.EXIT_SHIM_LOST)

    def _on_started(self, worker: str) -> None:
        self._start_failures.pop(worker, None)
        record = self._state.workers.get(worker)
        if record is None or record.worker.phase is not WorkerPhase.STARTING:
            return
        job = self._state.jobs[record.worker.job_uid]
        pid = shims.process_id(self._home.worker(job.uid, worker))
        running = msgspec.structs.replace(record.worker, phase=WorkerPhase.RUNNING, pid=pid)
        if job.status.phase is Phase.STARTING:
            job = with_status(job, phase=Phase.RUNNING)
        with self._noting(worker) as transcript:
            transcript.change.workers[worker] = msgspec.structs.replace(record, worker=running)
            transcript.record(self._unmanaged_size(job, transcript.now))

    def _unmanaged_size(self, job: JobRecord, now: float) -> JobRecord:
        """A job without a membership has the size of its processes."""
        if job.managed or job.intent is not Intent.RUN:
            return job
        alive = [record.worker for record in self._state.alive_of(job.uid) if not record.released]
        return resized(job, sum(len(worker.devices) for worker in alive), now)

    def _on_ended(self, worker: str, code: int) -> None:
        self._start_failures.pop(worker, None)
        record = self._state.workers.get(worker)
        if record is None or not record.alive:
            return
        try:
            self._record_end(record, code)
        except StateFileError as error:
            log.error("the end of worker %s is recorded in %s s: %s", worker, RETRY_S, error)
            self._loop.call_later(RETRY_S, self._on_ended, worker, code)

    def _record_end(self, record: WorkerRecord, code: int) -> None:
        before = self._state.jobs[record.worker.job_uid]
        with self.decide() as transcript:
            gone = msgspec.structs.replace(
                record.worker, phase=WorkerPhase.GONE, exit_code=code, finished_at=transcript.now
            )
            record = msgspec.structs.replace(record, worker=gone)
            workers = [record if w.worker.id == gone.id else w for w in self._state.attempt_of(before)]
            after = after_worker_gone(before, record, workers, transcript.now)
            if why := self.sharing.why_ended(gone.id):
                after = with_status(after, reason=why)
            transcript.note(after, EventKind.WORKER_GONE, worker=gone.id, gpus=-gone.gpus)
            transcript.change.workers[gone.id] = record
            transcript.record(after)
            if after.intent is Intent.FAIL and before.intent is not Intent.FAIL and not after.status.phase.final:
                transcript.fail(after, [w.worker.id for w in workers if w.alive])
        self.membership.worker_gone(gone.job_uid, gone.id, finished=code == 0 and not record.released)
        self._after_end(gone.job_uid)

    def _after_end(self, uid: str) -> None:
        if not self._state.alive_of(uid):
            self.membership.close(uid)
            return
        self._update_target(uid)
        with self._noting(uid) as transcript:
            transcript.record(self._unmanaged_size(self._state.jobs[uid], transcript.now))

    # What the membership service tells: see server.membership.Notices

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Store a generation's number before anybody hears of it."""
        job = msgspec.structs.replace(self._state.jobs[job_uid], generation_high=generation)
        with self._noting(job_uid, durable=True) as transcript:
            transcript.record(job)
        self._state.jobs[job_uid] = job  # also where it could not be written: the next commit writes it

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """A generation is in force: give the workers their ranks, and record the change of size."""
        job = self._state.jobs.get(job_uid)
        if job is None or not commit.complete:
            return
        with self._noting(job_uid) as transcript:
            for rank, worker in enumerate(commit.members):
                record = self._worker_of(job_uid, worker)
                if record is None:
                    continue
                ranked = msgspec.structs.replace(record.worker, rank=rank)
                transcript.change.workers[worker] = msgspec.structs.replace(record, worker=ranked)
            # Until its first generation a job's size was that of its processes, which is not what it trained with.
            size = job.size if job.managed else 0
            changed = resized(
                msgspec.structs.replace(job, managed=True, size=size),
                len(commit.members) * job.spec.worker_gpus,
                transcript.now,
                generation=commit.generation,
                step=commit.step,
                pause_ms=round(commit.pause_ms, 1),
                lost_steps=commit.lost_steps,
            )
            transcript.record(changed)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Membership wants the worker's process ended."""
        if self._worker_of(job_uid, worker) is None:
            return
        log.warning("killing worker %s of job %s: %s", worker, job_uid, why)
        self._shims.kill(worker)

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
        with self._noting(worker) as transcript:  # it was told to go by somebody else
            transcript.change.workers[worker] = leaving(record, transcript.now)
        self.wake()

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """A worker applied the training's last step: the job takes no more workers."""
        job = self._state.jobs.get(job_uid)
        if job is None or job.completing or job.intent is not Intent.RUN:
            return
        log.info("job %s finished its training with step %s of worker %s", job_uid, step, worker)
        with self._noting(job_uid) as transcript:
            transcript.record(msgspec.structs.replace(job, completing=True))
        self.wake()

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """What the training says about itself. Every worker says the same of its steps: the first one's is kept."""
        job, record = self._state.jobs.get(job_uid), self._worker_of(job_uid, worker)
        if job is None or record is None or record.worker.rank not in {None, 0}:
            return
        with self._noting(job_uid) as transcript:
            transcript.record(progressed(job, progress))

    def _explain(self, job: JobRecord, reason: Reason) -> None:
        """Its GPU memory was taken back: part of the history, and what `describe` shows."""
        with self._noting(job.uid) as transcript:
            transcript.note(job, EventKind.GPU_MEMORY_RECLAIMED, reason=reason)
            transcript.record(with_status(self._state.jobs[job.uid], reason=reason))

    @contextlib.contextmanager
    def _noting(self, what: str, *, durable: bool = False) -> Iterator[ChangeRecorder]:
        """For facts that are learnt again: a full disk delays them, and must not stop the daemon."""
        try:
            with self._state.change(durable=durable) as change:
                yield ChangeRecorder(self._state, change, self._state.clock())
        except StateFileError as error:
            log.error("%s: %s", what, error)
