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
import time
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.cluster.kubernetes import elastic_pods, labels
from kfp_gpuquota.cluster.kubernetes.deadlines import Due, next_deadline
from kfp_gpuquota.cluster.kubernetes.elastic_book import Book
from kfp_gpuquota.cluster.kubernetes.elastic_facts import FIRST_HOLD_S, Facts
from kfp_gpuquota.cluster.kubernetes.elastic_membership import JobMembership
from kfp_gpuquota.cluster.kubernetes.elastic_status import counting, record_of, without_pods, worker_id, worker_record
from kfp_gpuquota.cluster.kubernetes.elastic_workers import WorkerPods
from kfp_gpuquota.cluster.kubernetes.objects import ElasticJob
from kfp_gpuquota.cluster.kubernetes.translate import KILLED, PodView, Stage
from kfp_gpuquota.cluster.kubernetes.writes import Write
from kfp_gpuquota.cluster.lifecycle import after_worker_gone, resized
from kfp_gpuquota.cluster.local.state import Change
from kfp_gpuquota.cluster.local.transcript import Transcript
from kfp_gpuquota.cluster.records import Intent, JobRecord, WorkerRecord, with_status
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.kubernetes.objects import Pod
    from kfp_gpuquota.cluster.kubernetes.seats import Seats
    from kfp_gpuquota.cluster.kubernetes.writer import Writer
    from kfp_gpuquota.cluster.local.state import ClusterState

KILL_GRACE_S: Final = 1.0
PROMPT_S: Final = 5.0  # an API server that takes longer to answer was away
UNHEARD_S: Final = 30.0  # three times what a worker takes at most to come back to a coordinator

log = logging.getLogger(__name__)


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
        self._seats, self._writer, self._changed = seats, writer, changed
        self.membership = JobMembership(self.book, settings.key, kill=self._kill, changed=changed)
        self.workers = WorkerPods(
            self.book, writer, settings, tell=tell, noted=noted, changed=changed, given_up=self._never_made
        )
        self._killed: set[str] = set()
        self.started = False

    def start(self) -> None:
        """All has been listed: take up what an earlier controller left."""
        self.started = True
        for uid, job in list(self.book.jobs.items()):
            alive = self.book.alive_of(uid)
            if alive:
                self.membership.open(job)
                asyncio.get_running_loop().call_later(UNHEARD_S, self.membership.kill_unheard, uid)
            elif not job.status.phase.final and job.attempt and job.status.phase is not Phase.SUSPENDED:
                self.book.record(without_pods(job, time.time()))
            if alive and job.intent is not Intent.RUN:
                self._stop_all([record.worker.id for record in alive])
            self._after_change(uid)

    def knows(self, pod: PodView) -> bool:
        """The pod is a worker of a job that is known here."""
        return pod.job_uid in self.book.jobs

    def accounted(self, pod: PodView) -> bool:
        """An earlier controller has drawn its conclusions from the worker's end."""
        facts = self.book.facts.get(pod.job_uid)
        return facts is not None and pod.stage is Stage.OVER and pod.index in facts.ended

    # Objects

    def put_job(self, job: ElasticJob) -> None:
        """A job is as given."""
        uid = job.metadata.uid
        facts = self.book.facts.get(uid)
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
        facts, job = self.book.facts.get(uid), self.book.jobs.get(uid)
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
        facts = self.book.facts.setdefault(uid, Facts(job, time.time()))
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
        job, spec = self.book.jobs[uid], self.book.facts[uid].object.spec
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
            self.book.record(job)
        else:
            self._ask_anew(uid)

    def _ask_anew(self, uid: str) -> None:
        """A priority or a time limit was changed while it waits: it is submitted again, with its age."""
        before = self.book.jobs[uid]
        try:
            spec = record_of(self.book.facts[uid].object).spec
        except GpuQuotaError as error:
            self.book.facts[uid].held_back = error.message
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
        self.membership.service.close(uid)
        if uid in self.book.jobs:
            self.book.commit(Change(jobs={uid: None}))
        del self.book.facts[uid]

    # Pods

    def put_pod(self, pod: PodView) -> None:
        """A worker's pod is as given."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self.book.workers.get(worker)
        if before is not None and not before.alive:
            return
        if pod.stage is Stage.OVER:
            if before is not None or pod.index not in self.book.facts[pod.job_uid].ended:
                self._ended(pod, pod.exit_code)
            else:
                self._remember_ended(pod, worker)
            return
        if not pod.holds:
            return
        known = self.workers.pods.get(worker)
        if known is not None and known.uid != pod.uid:
            return  # another object under the worker's name: not ours
        self.workers.pods[worker] = pod
        self._hold(pod, worker, before)

    def drop_pod(self, pod: PodView) -> None:
        """A worker's pod is gone."""
        record = self.book.workers.get(worker_id(pod.job_uid, pod.index))
        if record is not None and record.alive:
            self._ended(pod, pod.exit_code)

    def _hold(self, pod: PodView, worker: str, before: WorkerRecord | None) -> None:
        if worker in self._killed and pod.stage is Stage.LEAVING:
            pod = msgspec.structs.replace(pod, stage=Stage.HELD)  # its end is a failure, not our wish
        job, facts = self.book.jobs[pod.job_uid], self.book.facts[pod.job_uid]
        after = worker_record(pod, self._devices_of(pod, worker), self._share_of(pod), before, time.time())
        self._note_trouble(facts, worker, pod.trouble)
        if before is None:
            job = counting(job, pod)
        if pod.running and job.status.phase is Phase.STARTING:
            job = with_status(job, phase=Phase.RUNNING)
            facts.held_back, facts.hold_s = "", FIRST_HOLD_S
        if after == before and job is self.book.jobs[job.uid]:
            return
        self.book.commit(Change(jobs={job.uid: job}, workers={worker: after}))
        self._after_workers_changed(job.uid)
        if before is None and self.started and (job.status.phase.final or job.ending):
            self.workers.delete(worker, job.spec.grace_period_s)

    def _devices_of(self, pod: PodView, worker: str) -> tuple[int, ...]:
        held = self._seats.held(worker)
        if held is None:
            wanted = pod.devices or ()
            shared = self.book.jobs[pod.job_uid].spec.shared
            return self._seats.take(worker, pod.node, max(1, pod.gpus, len(wanted)), pod.devices, part=shared)
        return held[1]

    def _share_of(self, pod: PodView) -> float:
        spec, node = self.book.jobs[pod.job_uid].spec, self.book.nodes.get(pod.node)
        return spec.share_of(node.gpu_memory_mib) if spec.shared and node is not None else 1.0

    def _note_trouble(self, facts: Facts, worker: str, trouble: str) -> None:
        if trouble != facts.trouble.get(worker, ""):
            facts.trouble[worker] = trouble
            self._changed(facts.object.metadata.uid)

    def _ended(self, pod: PodView, exit_code: int | None) -> None:
        """The worker is gone: what becomes of the job is for cluster/lifecycle.py to say."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self.book.jobs[pod.job_uid]
        known = self.book.workers.get(worker) or worker_record(pod, (), 1.0, None, time.time())
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
        self.workers.pods.pop(worker, None)
        self._killed.discard(worker)
        self.membership.service.worker_gone(gone.job_uid, worker)
        self._after_workers_changed(gone.job_uid)

    def _remember_ended(self, pod: PodView, worker: str) -> None:
        """An earlier controller has accounted for it; how it ended says what the others' ends mean."""
        job = self.book.jobs[pod.job_uid]
        known = worker_record(pod, (), 1.0, None, time.time())
        gone = msgspec.structs.replace(known.worker, phase=WorkerPhase.GONE, exit_code=pod.exit_code)
        if pod.attempt == job.attempt and pod.exit_code == 0 and not job.status.phase.final:
            job = msgspec.structs.replace(job, completing=True)
        record = msgspec.structs.replace(known, worker=gone)
        self.book.commit(Change(jobs={job.uid: job}, workers={worker: record}))

    def _carry_on(self, before: JobRecord, after: JobRecord, gone: WorkerRecord, others: list[str]) -> None:
        facts = self.book.facts[before.uid]
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

    def _never_made(self, worker: Worker) -> None:
        record = self.book.workers.get(worker.id)
        if record is None or not record.alive or worker.id in self.workers.pods:
            return
        job = self.book.jobs[worker.job_uid]
        self.book.workers[worker.id] = record = msgspec.structs.replace(record, released=True)
        gone = msgspec.structs.replace(record.worker, phase=WorkerPhase.GONE, finished_at=time.time())
        record = msgspec.structs.replace(record, worker=gone)
        others = [w for w in self.book.attempt_of(job) if w.worker.id != worker.id]
        after = after_worker_gone(job, record, [*others, record], time.time())
        self._carry_on(job, after, record, [])
        self.membership.service.worker_gone(job.uid, worker.id)
        self._after_workers_changed(job.uid)

    def remake(self, pod: PodView) -> None:
        """Take away a worker whose place was taken: that says nothing about the job, which is given another one."""
        worker = worker_id(pod.job_uid, pod.index)
        record = self.book.workers.get(worker)
        if record is not None and record.alive and not record.released:
            leaving = msgspec.structs.replace(record, released=True, released_at=time.time())
            self.book.commit(Change(workers={worker: leaving}))
            self.workers.delete(worker, KILL_GRACE_S)

    def _kill(self, worker: str) -> None:
        self._killed.add(worker)
        self.workers.delete(worker, KILL_GRACE_S)

    def _after_workers_changed(self, uid: str) -> None:
        job = self.book.jobs[uid]
        if not self.started:
            return
        if not self.book.alive_of(uid):
            self.membership.service.close(uid)
            if job.intent is Intent.DELETE:
                self._forget(uid)
                return
        else:
            self.membership.update_target(uid)
            self.book.record(self._unmanaged_size(job, time.time()))
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
        if job is None or self.book.facts[uid].held_back or job.status.reason == reason:
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
            if uid in self.book.facts:
                self._after_change(uid)

    def _start_all(self, workers: Iterable[str]) -> None:
        by_job: dict[str, list[Worker]] = {}
        for worker in workers:
            record = self.book.workers[worker].worker
            by_job.setdefault(record.job_uid, []).append(record)
        for uid, started in by_job.items():
            job = self.book.jobs[uid]
            if job.status.phase is Phase.STARTING:
                self.book.facts[uid].start_anew()
                self.membership.open(job)
            else:
                self.membership.update_target(uid)
            self.workers.make(uid, started)

    def _stop_all(self, workers: Iterable[str]) -> None:
        records = [self.book.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            self.membership.update_target(uid)
        for record in records:
            self.workers.delete(record.worker.id, self.book.jobs[record.worker.job_uid].spec.grace_period_s)

    # Time

    def _after_change(self, uid: str) -> None:
        """Write its status, and set the clock for what waits for time."""
        self._changed(uid)
        self._set_clock(uid)

    def _set_clock(self, uid: str) -> None:
        """By its lease, its longest run and when it is to be forgotten."""
        facts, job = self.book.facts[uid], self.book.jobs[uid]
        if facts.timer:
            facts.timer.cancel()
        deadline = next_deadline(facts.object, job, lease_seen_at=facts.lease_seen_at, ran_s=facts.ran_s)
        if deadline is not None:
            delay = max(0.0, deadline.at - time.time())
            facts.timer = asyncio.get_running_loop().call_later(delay, self._due, uid, deadline.due)

    def _due(self, uid: str, due: Due) -> None:
        facts, job = self.book.facts.get(uid), self.book.jobs.get(uid)
        if facts is None or job is None:
            return
        meta = facts.object.metadata
        path = f"/apis/{labels.API_VERSION}/namespaces/{meta.namespace}/elasticjobs/{meta.name}"
        if due is Due.FORGET:
            body = {"preconditions": {"uid": meta.uid}, "propagationPolicy": "Background"}
            write = Write(verb="DELETE", path=path, about=f"{meta.namespace}/{meta.name}", body=body)
            self._writer.submit(write, lambda _: None, lambda _: None)
        elif due is Due.LEASE_ENDED:
            write = Write(verb="GET", path=path, about=f"{meta.namespace}/{meta.name}")
            found = partial(self._lease_ended, uid, time.time())
            self._writer.submit(write, found, lambda _: self._lend_a_lease(uid))
        else:
            why = f"it ran for {facts.object.spec.max_runtime_seconds:g} s, which is its maxRuntimeSeconds"
            with self._decide() as transcript:
                transcript.stop(job, Intent.FAIL, Reason(code=ReasonCode.USER, message=why))

    def _lease_ended(self, uid: str, asked_at: float, answer: bytes) -> None:
        """A lease seems to have ended. Who waits for the job cannot renew it while the API server is away.

        So the server is asked first; where it took its time to answer, they get a whole lease to come back.
        """
        facts, job = self.book.facts.get(uid), self.book.jobs.get(uid)
        if facts is None or job is None or job.status.phase.final or job.ending:
            return
        found = msgspec.json.decode(answer, type=ElasticJob)
        if time.time() - asked_at > PROMPT_S:
            self._lend_a_lease(uid)
        elif found.spec.lease != facts.object.spec.lease:
            self.put_job(found)
        else:
            held = found.spec.lease.duration_seconds if found.spec.lease else 0
            why = f"nobody has waited for it any more for {held:g} s: its launcher has ended"
            with self._decide() as transcript:
                transcript.stop(job, Intent.CANCEL, Reason(code=ReasonCode.LEASE_ENDED, message=why))

    def _lend_a_lease(self, uid: str) -> None:
        if (facts := self.book.facts.get(uid)) and uid in self.book.jobs:
            facts.lease_seen_at = time.time()
            self._set_clock(uid)


_RUNNING: Final = WorkerPhase.RUNNING
