"""The membership service's part in ElasticJobs: what it is told of their workers, and what it tells (Notices).

Generation numbers are never used twice, not even by two processes that both believe to lead:

- `epoch * EPOCH_SPAN` is added to them, and each leader has an epoch of its own (`leaseTransitions`);
- they are stored in the job's status in blocks, ahead of their use, and a number is sent only once the API server has
  stored its block (`Facts.durable`). So they still grow where the Lease was deleted and epochs begin anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.job_book import Change
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import index_of
from kfp_gpuquota.cluster.kubernetes.elasticjob import membership_service, pod_builder
from kfp_gpuquota.cluster.kubernetes.elasticjob.status import RESERVED_AT_ONCE
from kfp_gpuquota.cluster.kubernetes.shards.leader_end import ShardedMembership
from kfp_gpuquota.cluster.kubernetes.shards.messages import shard_of
from kfp_gpuquota.cluster.lifecycle import progressed, resized
from kfp_gpuquota.cluster.records import Intent, JobRecord, WorkerRecord, leaving
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership import MembershipService, NotStoredYetError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from kfp_gpuquota.api import Progress
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.membership import AnnounceCommit

EPOCH_SPAN: Final = 1_000_000
"""How many generation numbers an epoch has."""

LIMITS: Final = Limits(starting_s=math.inf, isolated_s=math.inf, return_s=30.0)
"""Of every job. Workers that start are `elastic_readiness`'s to judge: pulling an image may take an hour. A worker none
of whose peers is heard is not killed: it is this service, its address or its certificate that may be lost to them.
`return_s` is three times what a worker takes at most to come back to a coordinator.
"""

log = logging.getLogger(__name__)


class JobMembership:
    """`kill(worker)` ends a process that membership wants ended, `changed(uid)` is for the status."""

    def __init__(
        self,
        book: Book,
        settings: pod_builder.PodSettings,
        *,
        kill: Callable[[str], None],
        changed: Callable[[str], None],
        epoch: int = 0,
    ) -> None:
        self._book, self._settings, self._kill, self._changed, self._epoch = book, settings, kill, changed, epoch
        self.service: MembershipService | ShardedMembership
        if settings.shards:
            self.service = ShardedMembership(
                self,
                settings.shards,
                settings.key,
                epoch,
                shard_of=lambda uid: self._book.facts[uid].shard,
                reopen=self._reopen,
                authority=lambda: settings.authority,
            )
        else:
            self.service = MembershipService(self)

    def begin_epoch(self) -> None:
        """Choose this leader's epoch: a later one than that of any number stored, where the Lease was made anew."""
        stored = max((facts.reserved // EPOCH_SPAN for facts in self._book.facts.values()), default=0)
        if stored > self._epoch:
            self._epoch = stored + 1

    def open(self, job: JobRecord) -> None:
        """Serve the job's workers, those that may still run first of all."""
        facts = self._book.facts[job.uid]
        running = [record.worker.id for record in self._book.alive_of(job.uid)]
        first = max(facts.reserved, self._epoch * EPOCH_SPAN) + 1
        facts.reserved = first - 1 + RESERVED_AT_ONCE
        shards = len(self._settings.shards)
        if shards and not 0 <= facts.shard < shards:
            facts.shard = shard_of(job.uid, shards)
        self._changed(job.uid)
        self.service.open(
            job.uid,
            pod_builder.token_of(job.uid, self._settings.key),
            min_workers=job.spec.smallest // job.spec.worker_gpus,
            first_generation=first,
            running=running,
            limits=dataclasses.replace(LIMITS, leave_s=job.spec.grace_period_s),
            trained=[worker for worker in running if index_of(worker) in facts.ranks],
            worker_prefix=f"{job.uid}-",
            attempt=job.attempt,
            stored=facts.durable,
        )
        self.update_target(job.uid)

    def _reopen(self, uid: str) -> None:
        """The process that served the job has ended, and another one takes its place."""
        if (job := self._book.jobs.get(uid)) is None:
            self.service.close(uid)
        else:
            self.open(job)

    @asynccontextmanager
    async def serving(self, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[str]:
        """Have workers served, here or by the shards; gives where, for the log."""
        if isinstance(self.service, ShardedMembership):
            async with self.service.serving():
                yield f"by {len(self._settings.shards)} shards"
        else:
            async with membership_service.serving(self.service, port, tls) as listens_on:
                yield f"on port {listens_on}"

    def update_target(self, uid: str) -> None:
        """The workers that were not told to go are those that the job should have."""
        wanted = [record.worker.id for record in self._book.alive_of(uid) if not record.released]
        with contextlib.suppress(NotFoundError):
            self.service.set_target(uid, wanted)

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Numbers are stored in blocks, ahead of their use; NotStoredYetError until the API server has this one."""
        facts = self._book.facts[job_uid]
        if generation + RESERVED_AT_ONCE // 2 > facts.reserved:
            facts.reserved = max(facts.reserved, generation) + RESERVED_AT_ONCE
            self._changed(job_uid)
        if generation > facts.durable:
            raise NotStoredYetError(f"generation {generation} of job {job_uid}")

    def status_stored(self, job_uid: str, reserved: int) -> None:
        """The API server has stored a status with this `generationReserved`: numbers up to it may be sent."""
        facts = self._book.facts.get(job_uid)
        if facts is not None and reserved > facts.durable:
            facts.durable = reserved
            self.service.resume(job_uid, reserved)

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """A generation is in force: give the workers their ranks, and record the change of size."""
        job, facts = self._book.jobs.get(job_uid), self._book.facts.get(job_uid)
        if job is None or facts is None or not commit.complete:
            return
        facts.generation = commit.generation
        facts.ranks = tuple(index_of(worker) for worker in commit.members)
        for rank, worker in enumerate(commit.members):
            if record := self._worker_of(job_uid, worker):
                ranked = msgspec.structs.replace(record.worker, rank=rank)
                self._book.workers[worker] = msgspec.structs.replace(record, worker=ranked)
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
        self._book.record(after)
        log.info(
            "job %s: generation %d of %d workers at step %d, paused for %.1f ms, %d steps lost",
            facts.object.metadata.name, commit.generation, len(commit.members), commit.step, commit.pause_ms,
            commit.lost_steps,
        )  # fmt: skip
        self._changed(job_uid)

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """Membership wants the worker's process ended."""
        if self._worker_of(job_uid, worker) is None:
            return
        log.warning("killing worker %s of job %s: %s", worker, job_uid, why)
        self._kill(worker)

    def _worker_of(self, job_uid: str, worker: str) -> WorkerRecord | None:
        """The worker as recorded; None for one of another job, or one without a pod."""
        record = self._book.workers.get(worker)
        return record if record is not None and record.worker.job_uid == job_uid else None

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """The worker left by agreement; its process ends by itself, and until then holds its devices."""
        log.info("worker %s of job %s left after step %d", worker, job_uid, step)
        record = self._worker_of(job_uid, worker)
        if record is not None and record.alive and not record.released:  # it was told to go by somebody else
            self._book.commit(Change(workers={worker: leaving(record, time.time())}))
            self._changed(job_uid)

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """A worker applied the training's last step: the job takes no more workers."""
        job = self._book.jobs.get(job_uid)
        if job is not None and not job.completing and job.intent is Intent.RUN:
            log.info("job %s finished its training with step %d of worker %s", job_uid, step, worker)
            self._book.record(msgspec.structs.replace(job, completing=True))

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """What the training says about itself. Every worker says the same of its steps: the first one's is kept."""
        job, record = self._book.jobs.get(job_uid), self._worker_of(job_uid, worker)
        if job is not None and record is not None and record.worker.rank in {None, 0}:
            self._book.record(progressed(job, progress))
            self._changed(job_uid)
