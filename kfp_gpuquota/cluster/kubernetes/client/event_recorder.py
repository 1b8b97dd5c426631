"""Events that users see on their objects, few enough for any cluster: repeated ones are counted, all are rationed.

One event per pod in bulk would double what a pod costs the API server, so only what happened to somebody (an eviction,
a refusal) is reported, and beyond the ration it is left to the log. Each namespace has its own ration within that of
all: a team that causes events without end (by annotations that cannot be read, say) leaves room for others.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer

BURST: Final = 100.0
PER_SECOND: Final = 10.0
NAMESPACE_BURST: Final = 40.0
NAMESPACE_PER_SECOND: Final = 2.0
REPEATED_AFTER_S: Final = 600.0
REMEMBERED: Final = 4096
SHOWN: Final = 300
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CORE: Final = "v1"

log = logging.getLogger(__name__)


class Subject(msgspec.Struct, frozen=True):
    """What an event is about."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = _CORE


class _Ration:
    """At most `burst` at once, and `per_second` in the long run."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._tokens, self._at = burst, 0.0

    def left(self, now: float) -> float:
        """What may be used at that time, in seconds of the loop's clock."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return self._tokens

    def use(self) -> None:
        """One of them is used."""
        self._tokens -= 1


class Recorder:
    """Writes events, as many as the rations allow; the same again only after a while."""

    def __init__(self, writer: Writer, component: str = "gpuquota-controller") -> None:
        self._writer, self._component = writer, component
        self._all, self._of_namespace = _Ration(BURST, PER_SECOND), dict[str, _Ration]()
        self._told: dict[tuple[Subject, str, str], float] = {}

    def tell(self, subject: Subject, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell it, unless the ration is used up or the same was told lately."""
        log.info("%s %s/%s: %s: %s", subject.kind, subject.namespace, subject.name, reason, message)
        now = asyncio.get_running_loop().time()
        key = (subject, reason, message)
        if now - self._told.get(key, -REPEATED_AFTER_S) < REPEATED_AFTER_S or not self._may(subject.namespace, now):
            return
        if len(self._told) >= REMEMBERED:
            self._told.clear()
        self._told[key] = now
        at, suffix = datetime.now(UTC), uuid.uuid4().hex[:12]
        write = event(subject, reason, message, warning=warning, at=at, suffix=suffix, component=self._component)
        self._writer.submit(write, lambda _: None, lambda _: None)

    def _may(self, namespace: str, now: float) -> bool:
        if len(self._of_namespace) >= REMEMBERED:
            self._of_namespace.clear()
        own = self._of_namespace.setdefault(namespace, _Ration(NAMESPACE_BURST, NAMESPACE_PER_SECOND))
        if self._all.left(now) < 1 or own.left(now) < 1:
            return False
        self._all.use()
        own.use()
        return True


class _Told(msgspec.Struct, frozen=True, rename="camel"):
    reason: str = ""
    message: str = ""
    last_timestamp: datetime | None = None
    event_time: datetime | None = None


class _Listed(msgspec.Struct, frozen=True):
    items: tuple[_Told, ...] = ()


def warnings_of(namespace: str, uid: str) -> Write:
    """The request for what was said of a pod where something went wrong."""
    query = f"fieldSelector=involvedObject.uid%3D{uid}%2Ctype%3DWarning"
    path = f"/api/v1/namespaces/{namespace}/events?{query}"
    return Write(verb="GET", path=path, about=f"{namespace}/{uid}", level=logging.DEBUG)


def last_warning(answer: bytes) -> str:
    """The newest of them, as "Reason: message"; "" where there is none."""
    told = msgspec.json.decode(answer, type=_Listed).items
    last = max(told, key=lambda e: e.last_timestamp or e.event_time or _LONG_AGO, default=None)
    return "" if last is None else f"{last.reason}: {last.message}"[:SHOWN]


def event(
    subject: Subject,
    reason: str,
    message: str,
    *,
    warning: bool,
    at: datetime,
    suffix: str,
    component: str = "gpuquota-controller",
) -> Write:
    """The request. Of a cluster-scoped object the event lies in the namespace default, as client-go has it."""
    namespace = subject.namespace or "default"
    involved: dict[str, Any] = {
        "apiVersion": subject.api_version,
        "kind": subject.kind,
        "name": subject.name,
        "uid": subject.uid,
        **({"namespace": subject.namespace} if subject.namespace else {}),
    }
    when = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    body = {
        "metadata": {"name": f"{subject.name}.{suffix}", "namespace": namespace},
        "involvedObject": involved,
        "reason": reason,
        "message": message[:1000],
        "type": "Warning" if warning else "Normal",
        "source": {"component": component},
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
    about = f"{namespace}/{subject.name}"
    path = f"/api/v1/namespaces/{namespace}/events"
    return Write(verb="POST", path=path, about=about, lane=Lane.EVENT, body=body)
