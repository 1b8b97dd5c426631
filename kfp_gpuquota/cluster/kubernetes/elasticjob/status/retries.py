"""Converts the retry state of workers that do not start to an ElasticJob's status, and back. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypedDict

from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import Retry
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import NotReadyWorker, RetryState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class RetryFields(TypedDict):
    """The status fields of the retry state."""

    not_ready: tuple[NotReadyWorker, ...]
    requeue_state: RetryState | None
    grow_state: RetryState | None


NO_RETRIES: Final[RetryFields] = {"not_ready": (), "requeue_state": None, "grow_state": None}


def retry_fields(complaints: Mapping[int, tuple[float, str]], requeue: Retry | None, grow: Retry | None) -> RetryFields:
    """Return the status fields; `complaints` are (since, message) by the worker's index."""
    workers = (NotReadyWorker(index, _time(since), text) for index, (since, text) in sorted(complaints.items()))
    return {"not_ready": tuple(workers), "requeue_state": _stored(requeue), "grow_state": _stored(grow)}


def complaints_of(stored: Iterable[NotReadyWorker]) -> dict[int, tuple[float, str]]:
    """Return (since, message) by worker's index from the status."""
    return {worker.index: (worker.since.timestamp(), worker.message) for worker in stored}


def retry_of(stored: RetryState | None) -> Retry | None:
    """Return the retry from the status."""
    if stored is None:
        return None
    until = None if stored.retry_at is None else stored.retry_at.timestamp()
    return Retry(stored.count, stored.time.timestamp(), until, stored.message, stored.attempt, stored.workers)


def _stored(retry: Retry | None) -> RetryState | None:
    if retry is None:
        return None
    until = None if retry.until is None else _time(retry.until)
    return RetryState(retry.count, _time(retry.at), until, retry.message, retry.attempt, retry.workers)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)
