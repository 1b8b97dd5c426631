"""What is seen of ElasticJobs' workers: their pods come, run, are told to go and end; what follows for their jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Phase, Worker, WorkerPhase
from kfp_gpuquota.cluster.job_book import Change
from kfp_gpuquota.cluster.kubernetes.convert.pods import KILLED, PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import worker_id
from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import FIRST_HOLD_S, Facts
from kfp_gpuquota.cluster.kubernetes.elasticjob.status import counting, worker_record
from kfp_gpuquota.cluster.lifecycle import after_worker_gone
from kfp_gpuquota.cluster.records import Intent, JobRecord, WorkerRecord, with_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import Seats
    from kfp_gpuquota.cluster.kubernetes.elasticjob.decisions import Decisions
    from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import JobMembership
    from kfp_gpuquota.cluster.kubernetes.elasticjob.pod_manager import WorkerPods
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book

KILL_GRACE_S: Final = 1.0


class WorkerNews:
    """`changed(uid)`: a job's status is to be written. `moved(uid)`: it has other workers, or in another phase.

    Until `started`, pods are those that an earlier controller made.
    """

    def __init__(
        self,
        book: Book,
        seats: Seats,
        membership: JobMembership,
        workers: WorkerPods,
        decisions: Decisions,
        *,
        changed: Callable[[str], None],
        moved: Callable[[str], None],
    ) -> None:
        self._book, self._seats, self._membership = book, seats, membership
        self._workers, self._decisions = workers, decisions
        self._changed, self._moved = changed, moved
        self._killed: set[str] = set()
        self.started = False

    def put_pod(self, pod: PodView) -> None:
        """A worker's pod is as given."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self._book.workers.get(worker)
        if before is not None and not before.alive:
            return
        if pod.stage is Stage.OVER:
            if before is not None or pod.index not in self._book.facts[pod.job_uid].ended:
                self._ended(pod, pod.exit_code)
            else:
                self._remember_ended(pod, worker)
            return
        if not pod.holds:
            return
        known = self._workers.pods.get(worker)
        if known is not None and known.uid != pod.uid:
            return  # another object under the worker's name: not ours
        self._workers.pods[worker] = pod
        self._hold(pod, worker, before)

    def drop_pod(self, pod: PodView) -> None:
        """A worker's pod is gone."""
        record = self._book.workers.get(worker_id(pod.job_uid, pod.index))
        if record is not None and record.alive:
            self._ended(pod, pod.exit_code)

    def _hold(self, pod: PodView, worker: str, before: WorkerRecord | None) -> None:
        if worker in self._killed and pod.stage is Stage.LEAVING:
            pod = msgspec.structs.replace(pod, stage=Stage.HELD)  # its end is a failure, not our wish
        job, facts = self._book.jobs[pod.job_uid], self._book.facts[pod.job_uid]
        after = worker_record(pod, self._devices_of(pod, worker), self._share_of(pod), before, time.time())
        self._note_trouble(facts, worker, pod)
        if before is None:
            job = counting(job, pod)
        if pod.running and job.status.phase is Phase.STARTING:
            job = with_status(job, phase=Phase.RUNNING)
            facts.held_back, facts.hold_s = "", FIRST_HOLD_S
        if after == before and job is self._book.jobs[job.uid]:
            return
        self._book.commit(Change(jobs={job.uid: job}, workers={worker: after}))
        self._moved(job.uid)
        if before is None and self.started and (job.status.phase.final or job.ending):
            self._workers.delete(worker, job.spec.grace_period_s)

    def _devices_of(self, pod: PodView, worker: str) -> tuple[int, ...]:
        held = self._seats.held(worker)
        if held is None:
            wanted = pod.devices or ()
            shared = self._book.jobs[pod.job_uid].spec.shared
            return self._seats.take(worker, pod.node, max(1, pod.gpus, len(wanted)), pod.devices, part=shared)
        return held[1]

    def _share_of(self, pod: PodView) -> float:
        spec, node = self._book.jobs[pod.job_uid].spec, self._book.nodes.get(pod.node)
        return spec.share_of(node.gpu_memory_mib) if spec.shared and node is not None else 1.0

    def _note_trouble(self, facts: Facts, worker: str, pod: PodView) -> None:
        if pod.running or pod.prepared:
            facts.heard.pop(worker, None)
        trouble = pod.trouble or facts.heard.get(worker, "")
        if trouble != facts.trouble.get(worker, ""):
            facts.trouble[worker] = trouble
            self._changed(facts.object.metadata.uid)

    def _ended(self, pod: PodView, exit_code: int | None) -> None:
        """The worker is gone: what becomes of the job is for cluster/lifecycle.py to say."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self._book.jobs[pod.job_uid]
        known = self._book.workers.get(worker) or worker_record(pod, (), 1.0, None, time.time())
        now = time.time()
        gone = msgspec.structs.replace(
            known.worker,
            phase=WorkerPhase.GONE,
            finished_at=now,
            exit_code=KILLED if exit_code is None or worker in self._killed else exit_code,
        )
        record = msgspec.structs.replace(known, worker=gone)
        workers = [w for w in self._book.attempt_of(before) if w.worker.id != worker]
        after = before
        if pod.attempt == before.attempt and not before.status.phase.final:
            after = after_worker_gone(before, record, [*workers, record], now)
        self._carry_on(before, after, record, [w.worker.id for w in workers if w.alive])
        self._workers.pods.pop(worker, None)
        self._killed.discard(worker)
        self._membership.service.worker_gone(gone.job_uid, worker, finished=gone.exit_code == 0 and not record.released)
        self._moved(gone.job_uid)

    def _remember_ended(self, pod: PodView, worker: str) -> None:
        """An earlier controller has accounted for it; how it ended says what the others' ends mean."""
        job = self._book.jobs[pod.job_uid]
        known = worker_record(pod, (), 1.0, None, time.time())
        gone = msgspec.structs.replace(known.worker, phase=WorkerPhase.GONE, exit_code=pod.exit_code)
        if pod.attempt == job.attempt and pod.exit_code == 0 and not job.status.phase.final:
            job = msgspec.structs.replace(job, completing=True)
        record = msgspec.structs.replace(known, worker=gone)
        self._book.commit(Change(jobs={job.uid: job}, workers={worker: record}))

    def _carry_on(self, before: JobRecord, after: JobRecord, gone: WorkerRecord, others: list[str]) -> None:
        facts = self._book.facts[before.uid]
        facts.ended.add(gone.worker.index)
        facts.trouble.pop(gone.worker.id, None)
        facts.heard.pop(gone.worker.id, None)
        if after.status.started_at is None and before.status.started_at is not None:
            facts.ran_s += max(0.0, time.time() - before.status.started_at)
            facts.ended.clear()
        with self._decisions.transcript() as transcript:
            transcript.change.workers[gone.worker.id] = gone
            transcript.change.jobs[after.uid] = after
            if after.intent is Intent.FAIL and before.intent is not Intent.FAIL and not after.status.phase.final:
                transcript.fail(after, others)

    def never_made(self, worker: Worker) -> None:
        """Its pod could not be made."""
        record = self._book.workers.get(worker.id)
        if record is None or not record.alive or worker.id in self._workers.pods:
            return
        job = self._book.jobs[worker.job_uid]
        self._book.workers[worker.id] = record = msgspec.structs.replace(record, released=True)
        gone = msgspec.structs.replace(record.worker, phase=WorkerPhase.GONE, finished_at=time.time())
        record = msgspec.structs.replace(record, worker=gone)
        others = [w for w in self._book.attempt_of(job) if w.worker.id != worker.id]
        after = after_worker_gone(job, record, [*others, record], time.time())
        self._carry_on(job, after, record, [])
        self._membership.service.worker_gone(job.uid, worker.id)
        self._moved(job.uid)

    def remake(self, pod: PodView) -> None:
        """Take away a worker that cannot stay where it is: that says nothing about the job, which gets another one."""
        worker = worker_id(pod.job_uid, pod.index)
        record = self._book.workers.get(worker)
        if record is not None and record.alive and not record.released:
            leaving = msgspec.structs.replace(record, released=True, released_at=time.time())
            self._book.commit(Change(workers={worker: leaving}))
            self._workers.delete(worker, KILL_GRACE_S)

    def kill(self, worker: str) -> None:
        """End its process: that is a failure of it, not our wish."""
        self._killed.add(worker)
        self._workers.delete(worker, KILL_GRACE_S)
