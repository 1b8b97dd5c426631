"""Connects ElasticJobs to the membership service: sets its targets, and records the events that it reports.

Invariant: a generation number is never used twice, not even by two processes that both act as the leader:

- `epoch * EPOCH_SPAN` is added to it, and each leader has an epoch of its own (`leaseTransitions`);
- numbers are reserved in the job's status in blocks before their use, and a number is sent only after the API server
  has stored its block (`RuntimeState.durable`). So numbers still increase if the Lease is deleted and epochs restart.

Rejected: the epoch alone, since deleting the Lease resets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.jobs.job_book import Change
from kfp_gpuquota.cluster.jobs.lifecycle import finished, progressed
from kfp_gpuquota.cluster.jobs.records import Intent, JobRecord, WorkerRecord, leaving
from kfp_gpuquota.cluster.jobs.size_changes import after_commit
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import index_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import service as membership_service
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.conversion import RESERVED_AT_ONCE
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers import pod_builder
from kfp_gpuquota.cluster.kubernetes.shards.leader_end import ShardedMembership
from kfp_gpuquota.cluster.kubernetes.shards.messages import shard_of
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership.service import MembershipService, NotStoredYetError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import StatusRequests, WorkerKiller
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.membership import AnnounceCommit

EPOCH_SPAN: Final = 1_000_000
"""The number of generation numbers in an epoch."""

LIMITS: Final = Limits(starting_s=math.inf, isolated_s=math.inf, return_s=30.0)
"""The limits of every job. Starting workers are judged by startup_timeout.py: an image pull may take an hour. A worker
is not killed while none of its peers is connected: this service, its address or its certificate may be the cause.
`return_s` is three times the longest time in which a worker reconnects to a coordinator.
"""

log = logging.getLogger(__name__)


class JobMembership:
    """Memberships of all jobs."""

    def __init__(
        self,
        book: Book,
        settings: pod_builder.PodSettings,
        workers: WorkerKiller,
        statuses: StatusRequests,
        *,
        epoch: int = 0,
    ) -> None:
        self._book, self._settings, self._workers, self._statuses = book, settings, workers, statuses
        self._epoch = epoch
        self.service: MembershipService | ShardedMembership
        if settings.shards:
            self.service = ShardedMembership(self, settings.shards, settings.key, epoch)
        else:
            self.service = MembershipService(self)

    def begin_epoch(self) -> None:
        """Raise this leader's epoch above that of all stored numbers, in case the Lease was recreated."""
        stored = max((state.reserved // EPOCH_SPAN for state in self._book.runtime_states.values()), default=0)
        if stored > self._epoch:
            self._epoch = stored + 1

    def open(self, job: JobRecord) -> None:
        """Open the job's membership, with the workers that still run."""
        state = self._book.runtime_states[job.uid]
        running = [record.worker.id for record in self._book.alive_of(job.uid)]
        first = max(state.reserved, self._epoch * EPOCH_SPAN) + 1
        state.reserved = first - 1 + RESERVED_AT_ONCE
        shards = len(self._settings.shards)
        if shards and not 0 <= state.shard < shards:
            state.shard = shard_of(job.uid, shards)
        self._statuses.changed(job.uid)
        self.service.open(
            job.uid,
            pod_builder.token_of(job.uid, self._settings.key),
            min_workers=job.spec.smallest // job.spec.worker_gpus,
            first_generation=first,
            running=running,
            limits=dataclasses.replace(LIMITS, leave_s=job.spec.grace_period_s),
            trained=[worker for worker in running if index_of(worker) in state.ranks],
            worker_prefix=f"{job.uid}-",
            attempt=job.attempt,
            stored=state.durable,
        )
        self.update_target(job.uid)

    # As `shards.leader_end.ShardedJobs`

    def shard_of(self, uid: str) -> int:
        """Return the number of the job's shard."""
        return self._book.runtime_states[uid].shard

    @property
    def authority(self) -> bytes:
        """Return the certificate with which the shards' own are signed."""
        return self._settings.authority

    def reopen(self, uid: str) -> None:
        """Open the job's membership again after its shard was replaced."""
        if (job := self._book.jobs.get(uid)) is None:
            self.service.close(uid)
        else:
            self.open(job)

    # For ElasticJobs

    @asynccontextmanager
    async def serving(self, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[str]:
        """Serve workers here or by the shards; yield the location, for the log."""
        if isinstance(self.service, ShardedMembership):
            async with self.service.serving():
                yield f"by {len(self._settings.shards)} shards"
        else:
            async with membership_service.serving(self.service, port, tls) as listens_on:
                yield f"on port {listens_on}"

    def update_target(self, uid: str) -> None:
        """Set the membership's target: all workers that have not been released."""
        wanted = [record.worker.id for record in self._book.alive_of(uid) if not record.released]
        with contextlib.suppress(NotFoundError):
            self.service.set_target(uid, wanted)

    # As `server.membership.Notices`

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Reserve a block of generation numbers if needed; raise NotStoredYetError until this number is stored."""
        state = self._book.runtime_states[job_uid]
        if generation + RESERVED_AT_ONCE // 2 > state.reserved:
            state.reserved = max(state.reserved, generation) + RESERVED_AT_ONCE
            self._statuses.changed(job_uid)
        if generation > state.durable:
            raise NotStoredYetError(f"generation {generation} of job {job_uid}")

    def status_stored(self, job_uid: str, reserved: int) -> None:
        """Allow numbers up to `reserved` after the API server has stored them as `generationReserved`."""
        state = self._book.runtime_states.get(job_uid)
        if state is not None and reserved > state.durable:
            state.durable = reserved
            self.service.resume(job_uid, reserved)

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """Record a committed generation: the workers' ranks and the change of size."""
        job, state = self._book.jobs.get(job_uid), self._book.runtime_states.get(job_uid)
        if job is None or state is None or not commit.complete:
            return
        state.generation = commit.generation
        state.ranks = tuple(index_of(worker) for worker in commit.members)
        after, ranked = after_commit(job, self._book.attempt_of(job), commit, self._book.now())
        self._book.workers.update((record.worker.id, record) for record in ranked)
        self._book.record(self._without_released(after, commit.members))
        log.info(
            "job %s: generation %d of %d workers at step %d, paused for %.1f ms, %d steps lost",
            state.object.metadata.name, commit.generation, len(commit.members), commit.step, commit.pause_ms,
            commit.lost_steps,
        )  # fmt: skip
        self._statuses.changed(job_uid)

    def _without_released(self, job: JobRecord, members: tuple[str, ...]) -> JobRecord:
        """Return the job after the first report of a restored generation.

        A worker that ended with 0 under an earlier controller, and is no member, was released and has not finished.
        """
        unseen = self._book.runtime_states[job.uid].ended_unseen
        released = unseen.difference(members)
        unseen.clear()
        for worker in released:
            self._book.workers[worker] = msgspec.structs.replace(self._book.workers[worker], released=True)
        if not released or any(finished(record) for record in self._book.attempt_of(job)):
            return job
        return msgspec.structs.replace(job, completing=False)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Kill a worker's process on request of the membership."""
        record = self._worker_of(job_uid, worker)
        if record is None:
            return
        log.warning("killing worker %s of job %s: %s", worker, job_uid, why)
        self._book.workers[worker] = msgspec.structs.replace(record, killed_for=why)
        self._workers.kill(worker)

    def _worker_of(self, job_uid: str, worker: str) -> WorkerRecord | None:
        """Return the worker's record; None if it belongs to another job or does not exist."""
        record = self._book.workers.get(worker)
        return record if record is not None and record.worker.job_uid == job_uid else None

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """Record that the worker left the membership; it holds its devices until its process exits."""
        log.info("worker %s of job %s left after step %d", worker, job_uid, step)
        record = self._worker_of(job_uid, worker)
        if (
            record is not None and record.alive and not record.released
        ):  # released without a decision of this controller
            self._book.commit(Change(workers={worker: leaving(record, self._book.now())}))
            self._statuses.changed(job_uid)

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """Record that the training applied its last step: the job gets no more workers."""
        job = self._book.jobs.get(job_uid)
        if job is not None and not job.completing and job.intent is Intent.RUN:
            log.info("job %s finished its training with step %d of worker %s", job_uid, step, worker)
            self._book.record(msgspec.structs.replace(job, completing=True))

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """Record the training's progress; all workers report the same steps, so only rank 0's report is kept."""
        job, record = self._book.jobs.get(job_uid), self._worker_of(job_uid, worker)
        if job is not None and record is not None and record.worker.rank in {None, 0}:
            self._book.record(progressed(job, progress))
            self._statuses.changed(job_uid)
