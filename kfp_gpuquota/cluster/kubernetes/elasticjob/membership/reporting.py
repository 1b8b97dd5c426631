"""Connects ElasticJobs to the membership service: opens their memberships, and sets their targets.

Invariant: a generation number is never used twice, not even by two processes that both act as the leader:

- `epoch * EPOCH_SPAN` is added to it, and each leader has an epoch of its own (`leaseTransitions`);
- numbers are reserved in the job's status in blocks before their use, and a number is sent only after the API server
  has stored its block (`ElasticJobStore.reserve_generation`). So numbers increase also if the Lease is deleted and
  epochs restart.

Rejected: the epoch alone, since deleting the Lease resets it.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import service as membership_service
from kfp_gpuquota.cluster.kubernetes.elasticjob.store import RESERVED_AT_ONCE
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers import pod_builder
from kfp_gpuquota.cluster.kubernetes.shards.messages import shard_of
from kfp_gpuquota.cluster.kubernetes.shards.sharded_membership import ShardedMembership
from kfp_gpuquota.engine.memberships import Access, open_membership
from kfp_gpuquota.engine.notices import MembershipNotices
from kfp_gpuquota.membership import Limits
from kfp_gpuquota.server.membership.service import MembershipService

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.engine.protocols import KillsWorkers
    from kfp_gpuquota.engine.records import JobRecord

EPOCH_SPAN: Final = 1_000_000
"""The number of generation numbers in an epoch."""

LIMITS: Final = Limits(starting_s=math.inf, isolated_s=math.inf, return_s=30.0)
"""The limits of every job. Starting workers are judged by startup_timeout.py: an image pull may take an hour. A worker
is not killed while none of its peers is connected: this service, its address or its certificate may be the cause.
`return_s` is three times the longest time in which a worker reconnects to a coordinator.
"""


class JobMembership:
    """Memberships of all jobs."""

    def __init__(
        self,
        book: ElasticJobStore,
        settings: pod_builder.PodSettings,
        workers: KillsWorkers,
        statuses: StatusRequests,
        *,
        epoch: int = 0,
    ) -> None:
        self._book, self._settings, self._statuses = book, settings, statuses
        self._epoch, self._notices = epoch, MembershipNotices(book, workers)
        self.service: MembershipService | ShardedMembership
        if settings.shards:
            self.service = ShardedMembership(self, self._notices, settings.shards, settings.key, epoch)
        else:
            self.service = MembershipService(self._notices)

    def begin_epoch(self) -> None:
        """Raise this leader's epoch above that of all stored numbers, in case the Lease was recreated."""
        stored = max((state.reserved // EPOCH_SPAN for state in self._book.runtime_states.values()), default=0)
        if stored > self._epoch:
            self._epoch = stored + 1

    def open(self, job: JobRecord) -> None:
        """Open the job's membership, with the workers that still run."""
        state = self._book.runtime_states[job.uid]
        first = max(state.reserved, self._epoch * EPOCH_SPAN) + 1
        state.reserved = first - 1 + RESERVED_AT_ONCE
        shards = len(self._settings.shards)
        if shards and not 0 <= state.shard < shards:
            state.shard = shard_of(job.uid, shards)
        self._statuses.changed(job.uid)
        access = Access(pod_builder.token_of(job.uid, self._settings.key), first, state.durable)
        open_membership(self._book, self.service, job, access, LIMITS)

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

    def status_stored(self, job_uid: str, reserved: int) -> None:
        """Allow numbers up to `reserved` after the API server has stored them as `generationReserved`."""
        state = self._book.runtime_states.get(job_uid)
        if state is not None and reserved > state.durable:
            state.durable = reserved
            self.service.resume(job_uid, reserved)
