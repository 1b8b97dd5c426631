"""What is remembered of one ElasticJob beside its record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.elasticjob.retries import complaints_of, retry_of

if TYPE_CHECKING:
    import asyncio

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob

FIRST_HOLD_S: Final = 2.0


class Facts:
    """What is remembered of one job beside its record; all of it is learnt again after a restart."""

    def __init__(self, job: ElasticJob, now: float) -> None:
        self.object = job
        self.generation = job.status.generation
        self.reserved = self.durable = job.status.generation_reserved  # claimed; stored by the API server
        self.ran_s = job.status.ran_seconds
        self.ended = set(job.status.ended)
        self.ranks = job.status.ranks
        self.lease_seen_at = now
        self.refused = ""  # why its specification cannot be
        self.held_back = ""  # why its pods could not be made
        self.hold_s = FIRST_HOLD_S
        self.trouble: dict[str, str] = {}  # worker -> why it does not get going
        self.complaints = complaints_of(job.status.not_ready)  # index -> since when somebody says why
        self.heard: dict[str, str] = {}  # worker -> what the last event about it said, where its status says nothing
        self.asked_at = 0.0
        self.requeue = retry_of(job.status.requeue_state)
        self.grow = retry_of(job.status.grow_state)
        self.avoids: tuple[str, ...] = ()  # nodes on which there was no room for a worker of it
        self.shard = job.status.membership_shard  # that its workers were given; -1: none yet
        self.secret = job.status.membership_digest  # of what the workers' Secret holds, as stored
        self.secret_ensured_at = -math.inf  # when this process last saw that it exists
        self.timer: asyncio.TimerHandle | None = None
        self.look: asyncio.TimerHandle | None = None
        self.conditions = job.status.conditions

    def start_anew(self) -> None:
        """None of the workers of its earlier starts counts any more."""
        self.ended.clear()
        self.complaints.clear()
        self.ranks = ()
        self.shard = -1
