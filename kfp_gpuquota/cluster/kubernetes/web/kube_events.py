"""Kubernetes Events of jobs and of their workers' pods: of the controller, kube-scheduler, kubelets and others.

They are read when a job's page is shown, at most once in `KEPT_S` for each namespace, and not watched: a cluster has
many more of them than anybody looks at. The API server cannot select the events of several pods, so those of a
namespace's pods are read, `MAX_PAGES` answers of `PAGE` events at most. Their text is whatever their writer chose.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.web.source import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

KEPT_S: Final = 5.0
READ_WITHIN_S: Final = 3.0
PAGE: Final = 500
MAX_PAGES: Final = 4
MAX_NAMESPACES: Final = 64
MAX_NOTICES: Final = 200
MAX_REASON, MAX_MESSAGE = 100, 1000
MAX_COUNT: Final = 1_000_000
_KINDS: Final = ("ElasticJob", "Pod")

log = logging.getLogger(__name__)


class _Involved(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Series(msgspec.Struct, frozen=True, rename="camel"):
    count: int = 0
    last_observed_time: datetime | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    creation_timestamp: datetime | None = None


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _Metadata = _Metadata()
    involved_object: _Involved = _Involved()
    reason: str | None = None
    message: str | None = None
    type: str | None = None
    count: int | None = None
    last_timestamp: datetime | None = None
    event_time: datetime | None = None
    series: _Series | None = None


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    continue_: str | None = msgspec.field(default=None, name="continue")


class _EventList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata = _ListMetadata()
    items: tuple[_Event, ...] = ()


class _Read(NamedTuple):
    """The events of a namespace, by (kind, name) of their object."""

    at: float
    notices: dict[tuple[str, str], tuple[tuple[str, Notice], ...]]  # each with its object's uid


class KubeEvents:
    """Reads the events of namespaces. `clock` is of seconds that pass."""

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection, self._clock = connection, clock
        self._read: dict[str, _Read] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def look_up(self, namespace: str) -> None:
        """Read the events of a namespace, unless that was done just now; a failure is logged, and the old ones stay."""
        found = self._read.get(namespace)
        if found is not None and self._clock() < found.at + KEPT_S:
            return
        if namespace not in self._reading:
            task = asyncio.create_task(self._update(namespace))
            self._reading[namespace] = task
            task.add_done_callback(lambda _: self._reading.pop(namespace, None))
        await asyncio.shield(self._reading[namespace])

    def of(self, job: Job) -> tuple[Notice, ...]:
        """Return what was reported about the job and its workers' pods, as of the last `look_up`; the newest ones."""
        found = self._read.get(job.spec.project)
        if found is None:
            return ()
        notices = sorted(_of_job(found, job), key=lambda notice: notice.at)
        return tuple(notices[-MAX_NOTICES:])

    async def _update(self, namespace: str) -> None:
        notices = self._read[namespace].notices if namespace in self._read else {}
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                notices = {}
                for kind in _KINDS:
                    notices |= _by_object(await self._events(namespace, kind), kind)
        except (ApiError, ClusterUnavailableError, TimeoutError, msgspec.DecodeError) as error:
            notices = self._read[namespace].notices if namespace in self._read else {}
            log.warning("the events of namespace %s cannot be read: %s", namespace, error or type(error).__name__)
        self._read.pop(namespace, None)
        self._read[namespace] = _Read(self._clock(), notices)
        while len(self._read) > MAX_NAMESPACES:
            del self._read[next(iter(self._read))]

    async def _events(self, namespace: str, kind: str) -> list[_Event]:
        found: list[_Event] = []
        params = {"fieldSelector": f"involvedObject.kind={kind}", "limit": str(PAGE)}
        for _ in range(MAX_PAGES):
            path = join("/api/v1/namespaces", namespace, "events")
            answer = await self._connection.call("GET", path, params=params, retry_for_s=0)
            page = msgspec.json.decode(answer, type=_EventList)
            found += page.items
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        return found


def _by_object(events: list[_Event], kind: str) -> dict[tuple[str, str], tuple[tuple[str, Notice], ...]]:
    found: dict[tuple[str, str], list[tuple[str, Notice]]] = {}
    for event in events:
        name = event.involved_object.name
        found.setdefault((kind, name), []).append((event.involved_object.uid, _notice(event, kind)))
    return {key: tuple(notices) for key, notices in found.items()}


def _notice(event: _Event, kind: str) -> Notice:
    series = event.series or _Series()
    times = (series.last_observed_time, event.last_timestamp, event.event_time, event.metadata.creation_timestamp)
    return Notice(
        at=next((at.timestamp() for at in times if at is not None), 0.0),
        about=event.involved_object.name if kind == "Pod" else "",
        reason=(event.reason or "event")[:MAX_REASON],
        message=(event.message or "")[:MAX_MESSAGE],
        warning=event.type == "Warning",
        count=min(MAX_COUNT, max(1, series.count, event.count or 1)),
    )


def _of_job(read: _Read, job: Job) -> Iterator[Notice]:
    """Yield the notices of the job's object, and of the pods of its workers, also of those that are gone."""
    yield from (notice for uid, notice in read.notices.get(("ElasticJob", job.spec.name), ()) if uid == job.uid)
    worker = re.compile(re.escape(job.spec.name) + r"-\d+")
    names = {one.id for one in job.status.workers}
    for (kind, name), notices in read.notices.items():
        if kind == "Pod" and (name in names or worker.fullmatch(name)):
            yield from (notice for _, notice in notices if notice.at >= job.status.submitted_at - 1)
