"""The life of ElasticJobs: their pods are made and told to go as plans say, and what becomes of them is recorded.

    objects, pods ─► records ─► scheduler's events
    plans ─► records ─► pods made and deleted, membership told
    membership ─► records ─► status

A worker that is told to go has its pod deleted with the job's grace period, at once: the membership lets it leave by
agreement, the kubelet kills it when the grace is over, and the deletion is the record of the decision. So a pod that is
being deleted, by whomever, is a worker that was told to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase, Progress, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.cluster.kubernetes import elastic_pods, labels, writes
from kfp_gpuquota.cluster.kubernetes.connection import ApiError
from kfp_gpuquota.cluster.kubernetes.deadlines import Due, next_deadline
from kfp_gpuquota.cluster.kubernetes.elastic_book import Book
from kfp_gpuquota.cluster.kubernetes.elastic_status import RESERVED_AT_ONCE, record_of, worker_id, worker_record
from kfp_gpuquota.cluster.kubernetes.objects import Pod
from kfp_gpuquota.cluster.kubernetes.translate import KILLED, PodView, Stage
from kfp_gpuquota.cluster.kubernetes.writes import Write
from kfp_gpuquota.cluster.lifecycle import after_worker_gone, resized
from kfp_gpuquota.cluster.local.state import Change
from kfp_gpuquota.cluster.local.transcript import Transcript
from kfp_gpuquota.cluster.records import Intent, JobRecord, WorkerRecord, with_status
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership import MembershipService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.kubernetes.objects import ElasticJob
    from kfp_gpuquota.cluster.kubernetes.seats import Seats
    from kfp_gpuquota.cluster.kubernetes.writer import Writer
    from kfp_gpuquota.cluster.local.state import ClusterState
    from kfp_gpuquota.membership import AnnounceCommit

KILL_GRACE_S: Final = 1.0
DELETE_AGAIN_S: Final = 5.0
FIRST_HOLD_S: Final = 2.0
LONGEST_HOLD_S: Final = 120.0

log = logging.getLogger(__name__)


class Facts:
    """What is remembered of one job beside its record; all of it is learnt again after a restart."""

    def __init__(self, job: ElasticJob, now: float) -> None:
        self.object = job
        self.generation = job.status.generation
        self.reserved = job.status.generation_reserved
        self.ran_s = job.status.ran_seconds
        self.ended = set(job.status.ended)
        self.lease_seen_at = now
        self.refused = ""  # why its specification cannot be
        self.held_back = ""  # why its pods could not be made
        self.hold_s = FIRST_HOLD_S
        self.trouble: dict[str, str] = {}  # worker -> why it does not get going
        self.has_secret = False
        self.timer: asyncio.TimerHandle | None = None
        self.conditions = job.status.conditions


class ElasticJobs:
    """All ElasticJobs; also what the membership service tells its news to. All of it runs in the event loop.

    `noted(pod)` gets the answers of writes, `changed(uid)` is called where a job's status is to be written.
    """

    def __init__(
        self,
        tell: Callable[[scheduler.Event], None],
        seats: Seats,
        nodes: Mapping[str, Node],
        writer: Writer,
        settings: elastic_pods.PodSettings,
        *,
        noted: Callable[[Pod], None],
        changed: Callable[[str], None],
    ) -> None:
        self.book = Book(tell, seats, nodes)
        self.facts: dict[str, Facts] = {}
        self.membership = MembershipService(self)
        self._tell, self._seats, self._writer, self._settings = tell, seats, writer, settings
        self._noted, self._changed = noted, changed
        self._pod = msgspec.json.Decoder(Pod)
        self._pods: dict[str, PodView] = {}  # worker id -> its pod
        self._killed: set[str] = set()
        self.started = False

    def start(self) -> None:
        """All has been listed: take up what an earlier controller left."""
        self.started = True
        for uid, job in list(self.book.jobs.items()):
            alive = self.book.alive_of(uid)
            if alive:
                self._open_membership(job)
            elif not job.status.phase.final and job.attempt and job.status.phase is not Phase.SUSPENDED:
                self._settle_lost(job)
            if alive and job.intent is not Intent.RUN:
                self._stop_all([record.worker.id for record in alive])
            self._after_change(uid)

    def knows(self, pod: PodView) -> bool:
        """The pod is a worker of a job that is known here."""
        return pod.job_uid in self.book.jobs

    # Objects

    def put_job(self, job: ElasticJob) -> None:
        """A job is as given."""
        uid = job.metadata.uid
        facts = self.facts.get(uid)
        if facts is None:
            self._take_in(job)
            return
        before, facts.object = facts.object, job
        if job.spec.lease != before.spec.lease:
            facts.lease_seen_at = time.time()
        if facts.refused:
            self._take_in(job)
            return
        if job.spec != before.spec:
            self._follow_spec(uid)
            self._set_clock(uid)
        if job.metadata.deletion_timestamp is not None:
            self.drop_job(uid)

    def drop_job(self, uid: str) -> None:
        """A job's object is gone: its pods follow; it is forgotten when they are gone."""
        facts, job = self.facts.get(uid), self.book.jobs.get(uid)
        if facts is None:
            return
        if facts.timer:
            facts.timer.cancel()
        if job is None or not self.book.alive_of(uid):
            self._forget(uid)
            return
        if job.intent is not Intent.DELETE:
            with self._decide() as transcript:
                transcript.stop(job, Intent.DELETE, Reason(code=ReasonCode.USER, message="deleted by a user"))

    def _take_in(self, job: ElasticJob) -> None:
        uid = job.metadata.uid
        facts = self.facts.setdefault(uid, Facts(job, time.time()))
        facts.object, facts.refused = job, ""
        try:
            record = record_of(job)
        except (GpuQuotaError, ValueError) as error:
            facts.refused = str(error)
            self._changed(uid)
            return
        self.book.commit(Change(jobs={uid: record}))
        self._follow_spec(uid)
        self._after_change(uid)

    def _follow_spec(self, uid: str) -> None:
        """The user's wishes that may change: whether it is suspended, and what its waiting is judged by."""
        job, spec = self.book.jobs[uid], self.facts[uid].object.spec
        if job.status.phase.final or job.ending:
            return
        suspended = job.status.phase is Phase.SUSPENDED or job.intent is Intent.SUSPEND
        if spec.suspend and not suspended:
            with self._decide() as transcript:
                reason = Reason(code=ReasonCode.SUSPENDED, message="suspended by a user")
                transcript.stop(job, Intent.SUSPEND, reason)
        elif suspended and not spec.suspend:
            job = (
                msgspec.structs.replace(job, intent=Intent.REQUEUE)
                if job.intent is Intent.SUSPEND and self.book.alive_of(uid)
                else with_status(msgspec.structs.replace(job, intent=Intent.RUN), phase=Phase.PENDING, reason=None)
            )
            self._record(job)
        else:
            self._ask_anew(uid)

    def _ask_anew(self, uid: str) -> None:
        """A priority or a time limit was changed while it waits: it is submitted again, with its age."""
        before = self.book.jobs[uid]
        try:
            spec = record_of(self.facts[uid].object).spec
        except GpuQuotaError as error:
            self.facts[uid].held_back = error.message
            return
        if spec == before.spec:
            return
        after = msgspec.structs.replace(before, spec=spec)
        if self.book.alive_of(uid):
            self.book.jobs[uid] = after  # the scheduler goes by it from the next start on
            return
        self.book.commit(Change(jobs={uid: None}))
        self.book.commit(Change(jobs={uid: after}))

    def _forget(self, uid: str) -> None:
        self.membership.close(uid)
        if uid in self.book.jobs:
            self.book.commit(Change(jobs={uid: None}))
        del self.facts[uid]

    # Pods

    def put_pod(self, pod: PodView) -> None:
        """A worker's pod is as given."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self.book.workers.get(worker)
        if before is not None and not before.alive:
            return
        if pod.stage is Stage.OVER:
            if before is not None or pod.index not in self.facts[pod.job_uid].ended:
                self._ended(pod, pod.exit_code)
            return
        if not pod.holds:
            return
        known = self._pods.get(worker)
        if known is not None and known.uid != pod.uid:
            return  # another object under the worker's name: not ours
        self._pods[worker] = pod
        self._hold(pod, worker, before)

    def drop_pod(self, pod: PodView) -> None:
        """A worker's pod is gone."""
        record = self.book.workers.get(worker_id(pod.job_uid, pod.index))
        if record is not None and record.alive:
            self._ended(pod, pod.exit_code)

    def _hold(self, pod: PodView, worker: str, before: WorkerRecord | None) -> None:
        if worker in self._killed and pod.stage is Stage.LEAVING:
            pod = msgspec.structs.replace(pod, stage=Stage.HELD)  # its end is a failure, not our wish
        job, facts = self.book.jobs[pod.job_uid], self.facts[pod.job_uid]
        after = worker_record(pod, self._devices_of(pod, worker), before, time.time())
        self._note_trouble(facts, worker, pod.trouble)
        if before is None:
            job = _counting(job, pod)
        if pod.running and job.status.phase is Phase.STARTING:
            job = with_status(job, phase=Phase.RUNNING)
            facts.held_back, facts.hold_s = "", FIRST_HOLD_S
        if after == before and job is self.book.jobs[job.uid]:
            return
        self.book.commit(Change(jobs={job.uid: job}, workers={worker: after}))
        self._after_workers_changed(job.uid)
        if before is None and self.started and (job.status.phase.final or job.ending):
            self._delete(worker, job.spec.grace_period_s)

    def _devices_of(self, pod: PodView, worker: str) -> tuple[int, ...]:
        held = self._seats.held(worker)
        if held is None:
            return self._seats.take(worker, pod.node, max(1, pod.gpus), pod.devices)
        return held[1]

    def _note_trouble(self, facts: Facts, worker: str, trouble: str) -> None:
        if trouble != facts.trouble.get(worker, ""):
            facts.trouble[worker] = trouble
            self._changed(facts.object.metadata.uid)

    def _ended(self, pod: PodView, exit_code: int | None) -> None:
        """The worker is gone: what becomes of the job is for cluster/lifecycle.py to say."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self.book.jobs[pod.job_uid]
        known = self.book.workers.get(worker) or worker_record(pod, (), None, time.time())
        now = time.time()
        gone = msgspec.structs.replace(
            known.worker,
            phase=WorkerPhase.GONE,
            finished_at=now,
            exit_code=KILLED if exit_code is None or worker in self._killed else exit_code,
        )
        record = msgspec.structs.replace(known, worker=gone)
        workers = [w for w in self.book.attempt_of(before) if w.worker.id != worker]
        after = before
        if pod.attempt == before.attempt and not before.status.phase.final:
            after = after_worker_gone(before, record, [*workers, record], now)
        self._carry_on(before, after, record, [w.worker.id for w in workers if w.alive])
        self._pods.pop(worker, None)
        self._killed.discard(worker)
        self.membership.worker_gone(gone.job_uid, worker)
        self._after_workers_changed(gone.job_uid)

    def _carry_on(self, before: JobRecord, after: JobRecord, gone: WorkerRecord, others: list[str]) -> None:
        facts = self.facts[before.uid]
        facts.ended.add(gone.worker.index)
        facts.trouble.pop(gone.worker.id, None)
        if after.status.started_at is None and before.status.started_at is not None:
            facts.ran_s += max(0.0, time.time() - before.status.started_at)
            facts.ended.clear()
        with self._decide() as transcript:
            transcript.change.workers[gone.worker.id] = gone
            transcript.change.jobs[after.uid] = after
            if after.intent is Intent.FAIL and before.intent is not Intent.FAIL and not after.status.phase.final:
                transcript.fail(after, others)

    def _settle_lost(self, job: JobRecord) -> None:
        """No pod of the run that the status tells of is left: whatever happened to them, it is over."""
        if job.intent is Intent.DELETE:
            return
        fresh = msgspec.structs.replace(job, intent=Intent.RUN, managed=False, completing=False, size=0)
        match job.intent:
            case Intent.CANCEL:
                self._record(with_status(job, phase=Phase.CANCELLED, finished_at=time.time()))
            case Intent.FAIL:
                self._record(with_status(job, phase=Phase.FAILED, finished_at=time.time()))
            case Intent.SUSPEND:
                self._record(with_status(fresh, phase=Phase.SUSPENDED, started_at=None))
            case _:
                self._record(with_status(fresh, phase=Phase.PENDING, started_at=None))

    def _after_workers_changed(self, uid: str) -> None:
        job = self.book.jobs[uid]
        if not self.started:
            return
        if not self.book.alive_of(uid):
            self.membership.close(uid)
            if job.intent is Intent.DELETE:
                self._forget(uid)
                return
        else:
            self._update_target(uid)
            self._record(self._unmanaged_size(job, time.time()))
        self._after_change(uid)

    def _unmanaged_size(self, job: JobRecord, now: float) -> JobRecord:
        """A job without a membership has the size of its processes."""
        if job.managed or job.intent is not Intent.RUN:
            return job
        running = [r.worker for r in self.book.alive_of(job.uid) if not r.released and r.worker.phase is _RUNNING]
        return resized(job, sum(len(worker.devices) for worker in running), now)

    # Plans

    def plan(self, plan: scheduler.Plan) -> None:
        """Carry out what the plan says of our jobs; the rest of it is somebody else's."""
        ours = scheduler.Plan(
            bind=tuple(b for b in plan.bind if b.job in self.book.jobs),
            resize=tuple(r for r in plan.resize if r.job in self.book.jobs),
            evict=tuple(e for e in plan.evict if e.job in self.book.jobs),
            move=tuple(m for m in plan.move if m.job in self.book.jobs),
        )
        if not ours.empty:
            with self._decide() as transcript:
                transcript.plan(ours)
        for uid, reason in plan.waiting.items():
            self._note_waiting(uid, reason)

    def _note_waiting(self, uid: str, reason: Reason) -> None:
        job = self.book.jobs.get(uid)
        if job is None or self.facts[uid].held_back or job.status.reason == reason:
            return
        self.book.jobs[uid] = with_status(job, reason=reason)
        self._changed(uid)

    @contextlib.contextmanager
    def _decide(self) -> Iterator[Transcript]:
        """Write a decision, remember it when the block ends, then carry it out."""
        change = Change()
        # The transcript reads of a state what the book has, too: nodes, jobs, workers, alive_of.
        transcript = Transcript(cast("ClusterState", self.book), change, time.time())
        yield transcript
        self.book.commit(change)
        self._start_all(transcript.started)
        self._stop_all(transcript.stopped)
        for uid in change.jobs:
            if uid in self.facts:
                self._after_change(uid)

    def _start_all(self, workers: Iterable[str]) -> None:
        by_job: dict[str, list[Worker]] = {}
        for worker in workers:
            record = self.book.workers[worker].worker
            by_job.setdefault(record.job_uid, []).append(record)
        for uid, started in by_job.items():
            job = self.book.jobs[uid]
            if job.status.phase is Phase.STARTING:
                self.facts[uid].ended.clear()
                self._open_membership(job)
            else:
                self._update_target(uid)
            self._make_pods(uid, started)

    def _make_pods(self, uid: str, workers: list[Worker]) -> None:
        """The job's Secret first, once: a kubelet that does not find it waits long before it looks again."""
        facts = self.facts[uid]
        if facts.has_secret:
            for worker in workers:
                self._make_pod(uid, worker)
            return

        def made(_: bytes) -> None:
            facts.has_secret = True
            self._make_pods(uid, workers)

        def failed(error: Exception) -> None:
            if isinstance(error, ApiError) and error.status == 409:
                made(b"")  # by an earlier controller: it holds the same token
                return
            for worker in workers:
                self._not_made(worker, error)

        self._writer.submit(_make_secret(facts.object, self._settings), made, failed)

    def _make_pod(self, uid: str, worker: Worker) -> None:
        record = self.book.workers.get(worker.id)
        if record is None or record.released or uid not in self.facts:
            self._never_made(worker)
            return
        body = elastic_pods.worker_pod(self.facts[uid].object, self.book.jobs[uid], worker, self._settings)
        namespace = body["metadata"]["namespace"]
        write = Write(
            verb="POST",
            path=writes.pods_path(namespace),
            about=f"{namespace}/{body['metadata']['name']}",
            body=body,
        )
        self._writer.submit(write, partial(self._made, worker), partial(self._not_made, worker))

    def _made(self, worker: Worker, answer: bytes) -> None:
        self._noted(self._pod.decode(answer))
        record = self.book.workers.get(worker.id)
        if record is not None and record.released:  # told to go while it was being made
            self._delete(worker.id, self.book.jobs[worker.job_uid].spec.grace_period_s)

    def _not_made(self, worker: Worker, error: Exception) -> None:
        """A name that is taken: the next worker has another one. Anything else: the job is held back for a while."""
        if worker.id in self._pods:
            return  # an earlier attempt of the same write came through, and the watch has told
        taken = isinstance(error, ApiError) and error.status == 409
        if not taken:
            self._hold_back(worker.job_uid, str(error))
        asyncio.get_running_loop().call_later(0.5 if taken else 0.0, self._never_made, worker)

    def _never_made(self, worker: Worker) -> None:
        record = self.book.workers.get(worker.id)
        if record is None or not record.alive or worker.id in self._pods:
            return
        job = self.book.jobs[worker.job_uid]
        self.book.workers[worker.id] = record = msgspec.structs.replace(record, released=True)
        gone = msgspec.structs.replace(record.worker, phase=WorkerPhase.GONE, finished_at=time.time())
        record = msgspec.structs.replace(record, worker=gone)
        others = [w for w in self.book.attempt_of(job) if w.worker.id != worker.id]
        after = after_worker_gone(job, record, [*others, record], time.time())
        self._carry_on(job, after, record, [])
        self.membership.worker_gone(job.uid, worker.id)
        self._after_workers_changed(job.uid)

    def _hold_back(self, uid: str, why: str) -> None:
        """Its pods are refused (a ResourceQuota, pod security, a template that cannot be): not again at once."""
        facts = self.facts.get(uid)
        if facts is None or facts.held_back == why:
            return
        log.warning("pods of job %s are refused: %s", facts.object.metadata.name, why)
        facts.held_back = why
        self._tell(scheduler.JobSuspended(uid))
        asyncio.get_running_loop().call_later(facts.hold_s, self._release_hold, uid)
        facts.hold_s = min(2 * facts.hold_s, LONGEST_HOLD_S)
        job = self.book.jobs[uid]
        self.book.jobs[uid] = with_status(job, reason=Reason(code=ReasonCode.WORKER_FAILED, message=why))
        self._changed(uid)

    def _release_hold(self, uid: str) -> None:
        job = self.book.jobs.get(uid)
        if job is not None and uid in self.facts:
            self.facts[uid].held_back = ""
            if job.status.phase is not Phase.SUSPENDED and not job.status.phase.final and not job.ending:
                self._tell(scheduler.JobResumed(uid))

    def _stop_all(self, workers: Iterable[str]) -> None:
        records = [self.book.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            self._update_target(uid)
        for record in records:
            self._delete(record.worker.id, self.book.jobs[record.worker.job_uid].spec.grace_period_s)

    def _delete(self, worker: str, grace_s: float) -> None:
        pod = self._pods.get(worker)
        if pod is not None:
            write = writes.deletion(pod.namespace, pod.name, pod.uid, grace_s)
            self._writer.submit(write, lambda _: None, partial(self._not_deleted, worker, grace_s))

    def _not_deleted(self, worker: str, grace_s: float, error: Exception) -> None:
        if isinstance(error, ApiError) and error.status in {404, 409}:
            return  # it is gone: the watch says so
        asyncio.get_running_loop().call_later(DELETE_AGAIN_S, self._delete, worker, grace_s)

    # Time

    def _after_change(self, uid: str) -> None:
        """Write its status, and set the clock for what waits for time."""
        self._changed(uid)
        self._set_clock(uid)

    def _set_clock(self, uid: str) -> None:
        """By its lease, its longest run and when it is to be forgotten."""
        facts, job = self.facts[uid], self.book.jobs[uid]
        if facts.timer:
            facts.timer.cancel()
        deadline = next_deadline(facts.object, job, lease_seen_at=facts.lease_seen_at, ran_s=facts.ran_s)
        if deadline is not None:
            delay = max(0.0, deadline.at - time.time())
            facts.timer = asyncio.get_running_loop().call_later(delay, self._due, uid, deadline.due)

    def _due(self, uid: str, due: Due) -> None:
        facts, job = self.facts.get(uid), self.book.jobs.get(uid)
        if facts is None or job is None:
            return
        if due is Due.FORGET:
            meta = facts.object.metadata
            path = f"/apis/{labels.API_VERSION}/namespaces/{meta.namespace}/elasticjobs/{meta.name}"
            body = {"preconditions": {"uid": meta.uid}, "propagationPolicy": "Background"}
            write = Write(verb="DELETE", path=path, about=f"{meta.namespace}/{meta.name}", body=body)
            self._writer.submit(write, lambda _: None, lambda _: None)
            return
        if due is Due.LEASE_ENDED:
            held = facts.object.spec.lease.duration_seconds if facts.object.spec.lease else 0
            why = f"nobody has waited for it any more for {held:g} s: its launcher has ended"
            intent, reason = Intent.CANCEL, Reason(code=ReasonCode.LEASE_ENDED, message=why)
        else:
            why = f"it ran for {facts.object.spec.max_runtime_seconds:g} s, which is its maxRuntimeSeconds"
            intent, reason = Intent.FAIL, Reason(code=ReasonCode.USER, message=why)
        with self._decide() as transcript:
            transcript.stop(job, intent, reason)

    # Membership

    def _open_membership(self, job: JobRecord) -> None:
        facts = self.facts[job.uid]
        first = facts.reserved + 1
        facts.reserved = max(facts.reserved, 0) + RESERVED_AT_ONCE
        self.membership.open(
            job.uid,
            elastic_pods.token_of(job.uid, self._settings.key),
            min_workers=job.spec.smallest // job.spec.worker_gpus,
            first_generation=first,
            running=[record.worker.id for record in self.book.alive_of(job.uid)],
            limits=Limits(starting_s=math.inf, leave_s=job.spec.grace_period_s),
        )
        self._update_target(job.uid)

    def _update_target(self, uid: str) -> None:
        wanted = [record.worker.id for record in self.book.alive_of(uid) if not record.released]
        with contextlib.suppress(NotFoundError):
            self.membership.set_target(uid, wanted)

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Numbers are stored in blocks, ahead of their use: an answer of the API server cannot be waited for here."""
        facts = self.facts[job_uid]
        if generation + RESERVED_AT_ONCE // 2 > facts.reserved:
            facts.reserved += RESERVED_AT_ONCE
            self._changed(job_uid)

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """A generation is in force: give the workers their ranks, and record the change of size."""
        job, facts = self.book.jobs.get(job_uid), self.facts.get(job_uid)
        if job is None or facts is None or not commit.complete:
            return
        facts.generation = commit.generation
        for rank, worker in enumerate(commit.members):
            if record := self.book.workers.get(worker):
                ranked = msgspec.structs.replace(record.worker, rank=rank)
                self.book.workers[worker] = msgspec.structs.replace(record, worker=ranked)
        size = job.size if job.managed else 0
        after = resized(
            msgspec.structs.replace(job, managed=True, size=size),
            len(commit.members) * job.spec.worker_gpus,
            time.time(),
            generation=commit.generation,
            step=commit.step,
            pause_ms=round(commit.pause_ms, 1),
            lost_steps=commit.lost_steps,
        )
        self._record(after)
        log.info(
            "job %s: generation %d of %d workers at step %d, paused for %.1f ms, %d steps lost",
            facts.object.metadata.name, commit.generation, len(commit.members), commit.step, commit.pause_ms,
            commit.lost_steps,
        )  # fmt: skip
        self._changed(job_uid)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Membership wants the worker's process ended."""
        log.warning("killing worker %s of job %s: %s", worker, job_uid, why)
        self._killed.add(worker)
        self._delete(worker, KILL_GRACE_S)

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """The worker left by agreement; its process ends by itself, and until then holds its devices."""
        log.info("worker %s of job %s left after step %d", worker, job_uid, step)

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """A worker applied the training's last step: the job takes no more workers."""
        job = self.book.jobs.get(job_uid)
        if job is not None and not job.completing and job.intent is Intent.RUN:
            log.info("job %s finished its training with step %d of worker %s", job_uid, step, worker)
            self._record(msgspec.structs.replace(job, completing=True))

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """What the training says about itself. Every worker says the same of its steps: the first one's is kept."""
        job, record = self.book.jobs.get(job_uid), self.book.workers.get(worker)
        if job is not None and record is not None and record.worker.rank in {None, 0}:
            self._record(with_status(job, progress=progress))
            self._changed(job_uid)

    def _record(self, job: JobRecord) -> None:
        if job is not self.book.jobs[job.uid]:
            self.book.commit(Change(jobs={job.uid: job}))


_RUNNING: Final = WorkerPhase.RUNNING


def _counting(job: JobRecord, pod: PodView) -> JobRecord:
    """The job with a worker that somebody else started for it: the controller before this one."""
    job = msgspec.structs.replace(
        job, next_index=max(job.next_index, pod.index + 1), attempt=max(job.attempt, pod.attempt)
    )
    if job.status.phase is Phase.PENDING and pod.stage is Stage.HELD:
        job = with_status(job, phase=Phase.STARTING, started_at=pod.created)
    return job


def _make_secret(job: ElasticJob, settings: elastic_pods.PodSettings) -> Write:
    body = elastic_pods.membership_secret(job, settings)
    meta = body["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/secrets"
    return Write(verb="POST", path=path, about=f"{meta['namespace']}/{meta['name']}", body=body)
