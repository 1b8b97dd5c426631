"""Records what the memberships of elastic jobs report; the same for every kind of cluster."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.engine.lifecycle import members_reported, progressed, trained
from kfp_gpuquota.engine.records import Intent, WorkerRecord, leaving
from kfp_gpuquota.engine.size_changes import after_commit

if TYPE_CHECKING:
    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.engine.protocols import KillsWorkers, Store
    from kfp_gpuquota.membership import AnnounceCommit

log = logging.getLogger(__name__)


class MembershipNotices:
    """Implements `server.membership.service.Notices` for the jobs of a store."""

    def __init__(self, store: Store, workers: KillsWorkers) -> None:
        self._store, self._workers = store, workers

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Store a generation's number before any order with it is sent. Raises NotStoredYetError."""
        self._store.reserve_generation(job_uid, generation)

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """A generation is in force: give the workers their ranks, and record the change of size.

        Not of a run that is over: the end of its last worker completes a generation, too.
        """
        job = self._store.jobs.get(job_uid)
        if job is None or not commit.complete or not self._store.alive_of(job_uid):
            return
        with self._store.noting(job_uid) as recorder:
            after, ranked = after_commit(job, self._store.attempt_of(job), commit, recorder.now)
            after, judged = members_reported(after, self._store.attempt_of(job), commit.members)
            recorder.change.workers.update((record.worker.id, record) for record in (*judged, *ranked))
            recorder.record(after)
        log.info(
            "job %s: generation %d of %d workers at step %d, paused for %.1f ms, %d steps lost",
            job.spec.name, commit.generation, len(commit.members), commit.step, commit.pause_ms, commit.lost_steps,
        )  # fmt: skip

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Kill a worker's process on request of its membership."""
        record = self._worker_of(job_uid, worker)
        if record is None:
            return
        log.warning("killing worker %s of job %s: %s", worker, job_uid, why)
        with self._store.noting(worker) as recorder:
            recorder.change.workers[worker] = msgspec.structs.replace(record, killed_for=why)
        self._workers.kill(worker)

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """Record that the worker left by agreement; it holds its devices until its process has ended."""
        log.info("worker %s of job %s left after step %s", worker, job_uid, step)
        record = self._worker_of(job_uid, worker)
        if record is None or record.released or not record.alive:
            return
        with self._store.noting(worker) as recorder:  # its stop was requested by another program
            recorder.change.workers[worker] = leaving(record, recorder.now)

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """Record that a worker applied the training's last step: the job gets no more workers."""
        job = self._store.jobs.get(job_uid)
        if job is None or job.completing or job.intent is not Intent.RUN:
            return
        log.info("job %s finished its training with step %s of worker %s", job_uid, step, worker)
        with self._store.noting(job_uid) as recorder:
            recorder.record(trained(job, step, recorder.now))

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """Record a training's progress. All workers report the same steps: only rank 0's report is kept."""
        job, record = self._store.jobs.get(job_uid), self._worker_of(job_uid, worker)
        if job is None or record is None or record.worker.rank not in {None, 0}:
            return
        with self._store.noting(job_uid) as recorder:
            recorder.record(progressed(job, progress))

    def _worker_of(self, job_uid: str, worker: str) -> WorkerRecord | None:
        """Return the worker's record; None for one of another job, or one that was never started."""
        record = self._store.workers.get(worker)
        return record if record is not None and record.worker.job_uid == job_uid else None
