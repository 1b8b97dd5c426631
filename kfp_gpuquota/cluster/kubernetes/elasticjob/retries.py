"""What of workers that do not come up stands in an ElasticJob's status: pure. A restarted controller knows no more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypedDict

from kfp_gpuquota.cluster.kubernetes.elasticjob.startup_backoff import Retry
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import NotReadyWorker, RetryState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class RetryFields(TypedDict):
    """These fields of a status."""

    not_ready: tuple[NotReadyWorker, ...]
    requeue_state: RetryState | None
    grow_state: RetryState | None


NOTHING_GIVEN_BACK: Final[RetryFields] = {"not_ready": (), "requeue_state": None, "grow_state": None}


def retry_fields(complaints: Mapping[int, tuple[float, str]], requeue: Retry | None, grow: Retry | None) -> RetryFields:
    """For the status; `complaints` are by worker's index: since when, and what is said."""
    workers = (NotReadyWorker(index, _time(since), text) for index, (since, text) in sorted(complaints.items()))
    return {"not_ready": tuple(workers), "requeue_state": _stored(requeue), "grow_state": _stored(grow)}


def complaints_of(told: Iterable[NotReadyWorker]) -> dict[int, tuple[float, str]]:
    """What the status told of them."""
    return {worker.index: (worker.since.timestamp(), worker.message) for worker in told}


def retry_of(told: RetryState | None) -> Retry | None:
    """What the status told of it."""
    if told is None:
        return None
    until = None if told.retry_at is None else told.retry_at.timestamp()
    return Retry(told.count, told.time.timestamp(), until, told.message, told.attempt, told.workers)


def _stored(retry: Retry | None) -> RetryState | None:
    if retry is None:
        return None
    until = None if retry.until is None else _time(retry.until)
    return RetryState(retry.count, _time(retry.at), until, retry.message, retry.attempt, retry.workers)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)
