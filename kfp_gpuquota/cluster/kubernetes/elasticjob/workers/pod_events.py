"""Processes changes of workers' pods: they are created, run, terminate and end; and updates their jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Phase, Worker, WorkerPhase
from kfp_gpuquota.api.resources import other_gpus_of
from kfp_gpuquota.cluster.kubernetes.convert.pod_status import KILLED
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import worker_id
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.conversion import counting, with_rank, worker_record
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_manager import KILL_GRACE_S
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.lifecycle import after_worker_runs, finished
from kfp_gpuquota.engine.records import Intent, WorkerRecord, leaving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_manager import WorkerPods
    from kfp_gpuquota.engine.decisions import Decisions


class WorkerPodEvents:
    """Changes of workers' pods. Until `started`, all pods are those of an earlier controller."""

    def __init__(
        self,
        book: ElasticJobStore,
        allocator: DeviceAllocator,
        workers: WorkerPods,
        decisions: Decisions,
        *,
        statuses: StatusRequests,
    ) -> None:
        self._book, self._allocator = book, allocator
        self._workers, self._decisions, self._statuses = workers, decisions, statuses
        self._exits: dict[str, dict[str, PodView]] = {}  # until `start`: by job and worker
        self.started = False

    def start(self) -> None:
        """Process the workers that ended while no controller ran, after all that are alive are known.

        Those of one job are processed together, completed ones first: an exit is judged by the job's other workers.
        """
        for uid, exits in self._exits.items():
            pods = sorted(exits.values(), key=lambda pod: (pod.exit_code != 0, pod.index))
            self._count_unseen_run(uid, max(pods, key=lambda pod: (pod.attempt, pod.index)))
            records = [self._last_known(pod) for pod in pods]
            for position, (pod, record) in enumerate(zip(pods, records, strict=True)):
                if record.alive:
                    self._ended(pod, pod.exit_code, records[position + 1 :])
        self._exits.clear()
        self.started = True

    def _count_unseen_run(self, uid: str, pod: PodView) -> None:
        """Count a run whose pods were created and have ended before its start was written to the status."""
        job = self._book.jobs[uid]
        if pod.attempt > job.attempt:
            self._book.record(counting(job, msgspec.structs.replace(pod, stage=Stage.ASSIGNED)))

    def put_pod(self, pod: PodView) -> None:
        """Process a new or changed pod of a worker."""
        worker = worker_id(pod.job_uid, pod.index)
        before = self._book.workers.get(worker)
        if before is not None and not before.alive:
            return
        if pod.stage is Stage.ENDED:
            if before is None and pod.index in self._book.runtime_states[pod.job_uid].ended:
                self._restore_ended(pod)
            elif self.started:
                self._ended(pod, pod.exit_code)
            else:
                self._exits.setdefault(pod.job_uid, {})[worker] = pod
            return
        if not pod.holds:
            return
        known = self._workers.pods.get(worker)
        if known is not None and known.uid != pod.uid:
            return  # another pod with the worker's index
        self._workers.pods[worker] = pod
        self._hold(pod, worker, before)

    def drop_pod(self, pod: PodView) -> None:
        """Process the deletion of a worker's pod."""
        record = self._book.workers.get(worker_id(pod.job_uid, pod.index))
        if record is not None and record.alive:
            self._ended(pod, pod.exit_code)

    def _hold(self, pod: PodView, worker: str, before: WorkerRecord | None) -> None:
        if worker in self._workers.killed and pod.stage is Stage.TERMINATING:
            pod = msgspec.structs.replace(pod, stage=Stage.ASSIGNED)  # its exit is a failure, not a release
        job, state = self._book.jobs[pod.job_uid], self._book.runtime_states[pod.job_uid]
        after = worker_record(
            pod, self._held_by(pod, worker), self._share_of(pod), before, self._book.clock(), job.spec
        )
        if before is None:
            after = with_rank(after, job.members)
        self._note_trouble(state, worker, pod)
        if before is None:
            job = counting(job, pod)
        if pod.running and job.status.phase is Phase.STARTING:
            job = after_worker_runs(job)
            state.held_back = ""
            state.hold_pauses.reset()
        if after == before and job is self._book.jobs[job.uid]:
            return
        self._book.commit(Change(jobs={job.uid: job}, workers={worker: after}))
        if self.started:
            self._decisions.workers_changed(job.uid)
        if before is None and self.started and (job.over or job.intent is not Intent.RUN):
            self._workers.delete(worker, job.spec.grace_period_s)

    def _held_by(self, pod: PodView, worker: str) -> tuple[str, tuple[int, ...]]:
        """Return the node and the devices that the worker holds, which are where its pod was bound or is reserved."""
        held = self._allocator.held(worker)
        if held is None:
            wanted = pod.devices or ()
            spec = self._book.jobs[pod.job_uid].spec
            count = 0 if other_gpus_of(spec) else max(1, pod.gpus, len(wanted))
            return pod.node, self._allocator.take(worker, pod.node, count, pod.devices, part=spec.shared)
        if pod.located in {"", held[0]}:
            return held
        return pod.located, self._allocator.move(worker, pod.located, pod.devices)

    def _share_of(self, pod: PodView) -> float:
        spec, node = self._book.jobs[pod.job_uid].spec, self._book.nodes.get(pod.node)
        return spec.share_of(node.gpu_memory_mib) if spec.shared and node is not None else 1.0

    def _note_trouble(self, state: RuntimeState, worker: str, pod: PodView) -> None:
        if pod.running or pod.prepared:
            state.last_warnings.pop(worker, None)
        start_failure = pod.start_failure or state.last_warnings.get(worker, "")
        if start_failure != state.start_failure.get(worker, ""):
            state.start_failure[worker] = start_failure
            self._statuses.changed(state.object.metadata.uid)

    def _ended(self, pod: PodView, exit_code: int | None, ending: Sequence[WorkerRecord] = ()) -> None:
        """Record the worker's exit; `ending` are workers whose exits are recorded after this one."""
        worker, known = worker_id(pod.job_uid, pod.index), self._last_known(pod)
        killed = worker in self._workers.killed
        if pod.leaving and not known.released and not killed:
            known = leaving(known, self._book.clock())
        # Its membership has often asked for its end by then: the peers notice first that a node is gone.
        known = msgspec.structs.replace(known, lost_with=pod.lost or known.lost_with, error=pod.error)
        self._workers.pods.pop(worker, None)
        self._workers.killed.discard(worker)
        code = KILLED if exit_code is None or killed else exit_code
        self._decisions.worker_ended(known, code, at=pod.ended_at, ending=ending)

    def _restore_ended(self, pod: PodView) -> None:
        """Restore a worker whose exit an earlier controller has processed.

        Exit code 0 means that the job completes, unless the worker was released, or that run of the job has ended.
        """
        job, known = self._book.jobs[pod.job_uid], self._last_known(pod)
        gone = msgspec.structs.replace(known.worker, phase=WorkerPhase.GONE, exit_code=pod.exit_code)
        record = msgspec.structs.replace(known, worker=gone)
        runs = pod.attempt == job.attempt and job.status.started_at is not None
        if runs and finished(record) and not job.status.phase.final:
            job = msgspec.structs.replace(job, completing=True)
        self._book.commit(Change(jobs={job.uid: job}, workers={gone.id: record}))

    def _last_known(self, pod: PodView) -> WorkerRecord:
        """Return the last record of a worker that has ended, also of one that this controller never saw alive.

        Of such a one exit code 0 does not tell whether it finished the training or was released. It was released if its
        pod is being deleted, or if it is no member of the last generation. Where neither was stored any more,
        `lifecycle.members_reported` corrects the record when the worker's peers have reconnected.
        """
        if known := self._book.workers.get(worker_id(pod.job_uid, pod.index)):
            return known
        job = self._book.jobs[pod.job_uid]
        members = job.members
        record = with_rank(worker_record(pod, (pod.node, ()), 1.0, None, self._book.clock(), job.spec), members)
        if pod.exit_code != 0 or record.released:
            return record
        if members and record.worker.id not in members:
            return leaving(record, self._book.clock())
        return msgspec.structs.replace(record, unseen=True)

    def never_made(self, worker: Worker) -> None:
        """Record that the worker's pod could not be created."""
        record = self._book.workers.get(worker.id)
        if record is None or not record.alive or worker.id in self._workers.pods:
            return
        self._decisions.worker_ended(msgspec.structs.replace(record, released=True), None)

    def remake(self, pod: PodView) -> None:
        """Replace a worker that cannot stay on its node, which does not count as a failure."""
        worker = worker_id(pod.job_uid, pod.index)
        record = self._book.workers.get(worker)
        if record is not None and record.alive and not record.released:
            leaving = msgspec.structs.replace(record, released=True, released_at=self._book.clock())
            self._book.commit(Change(workers={worker: leaving}))
            self._workers.delete(worker, KILL_GRACE_S)
