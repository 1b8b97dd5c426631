"""The controller's state of one ElasticJob beside its record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.retries import complaints_of, retry_of

if TYPE_CHECKING:
    import asyncio

    from kfp_gpuquota.api import Worker
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob

FIRST_HOLD_S: Final = 2.0
LONGEST_HOLD_S: Final = 120.0


class RuntimeState:
    """State of one job beside its record; all of it is restored from the API server after a restart."""

    def __init__(self, job: ElasticJob) -> None:
        self.object = job
        self.reserved = self.durable = job.status.generation_reserved  # claimed; stored by the API server
        self.ended = set(job.status.ended)
        self.default_runtime_s = job.status.default_runtime_seconds  # without a maximum run time of its own
        self.refused = ""  # why its specification is invalid
        self.explained_at = -math.inf  # when the reason why it waits was last written
        self.held_back = ""  # why its pods could not be created
        self.uncountable = False  # it waits, since what its workers would claim cannot be counted
        self.hold_pauses = Backoff(FIRST_HOLD_S, LONGEST_HOLD_S)
        self.start_failure: dict[str, str] = {}  # worker -> why it does not start
        self.complaints = complaints_of(job.status.not_ready)  # index -> (since, message) of the reported failure
        self.last_warnings: dict[str, str] = {}  # worker -> its last warning event, if its status has no reason
        self.events_read_at = 0.0
        self.requeue = retry_of(job.status.requeue_state)
        self.grow = retry_of(job.status.grow_state)
        self.excluded_nodes: tuple[str, ...] = ()  # nodes to which a worker of it could not be bound
        self.shard = job.status.membership_shard  # the shard of its workers; -1: none yet
        self.secret = job.status.membership_digest  # digest of the workers' Secret, as stored
        self.secret_ensured_at = -math.inf  # when this process last ensured that it exists
        self.network_policy = job.status.network_policy  # name of the workers' NetworkPolicy, if one was created
        self.isolation_ensured_at = -math.inf  # when this process last ensured that it exists
        self.look: asyncio.TimerHandle | None = None
        self.conditions = job.status.conditions

    def worker_ended(self, worker: Worker) -> None:
        """Record that the exit of a worker was processed, and forget why it did not start."""
        self.ended.add(worker.index)
        self.start_failure.pop(worker.id, None)
        self.last_warnings.pop(worker.id, None)

    def start_again(self) -> None:
        """Discard the state of the workers of earlier starts."""
        self.ended.clear()
        self.complaints.clear()
        self.shard = -1
