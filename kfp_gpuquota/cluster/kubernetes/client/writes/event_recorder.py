"""Records Kubernetes Events on users' objects, rate limited and without repetitions.

An event for each pod would double the API server's work, so only disruptions (an eviction, a refusal) are recorded;
beyond the rate limit they are only logged. Each namespace has a limit of its own below the global one, so that a team
that causes many events (for example by invalid annotations) does not suppress those of other teams.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join, with_query
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject

BURST: Final = 100.0
PER_SECOND: Final = 10.0
NAMESPACE_BURST: Final = 40.0
NAMESPACE_PER_SECOND: Final = 2.0
REPEATED_AFTER_S: Final = 600.0
MAX_TRACKED: Final = 4096
MAX_MESSAGE_LENGTH: Final = 300
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

log = logging.getLogger(__name__)


class _TokenBucket:
    """Rate limit: at most `burst` at once, and `per_second` on average."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._tokens, self._at = burst, 0.0

    def available(self, now: float) -> float:
        """Return the tokens available at `now`, which is in seconds of the event loop's clock."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return self._tokens

    def use(self) -> None:
        """Consume one token."""
        self._tokens -= 1


class Recorder:
    """Writes events within the rate limits; the same event again only after REPEATED_AFTER_S.

    `recorded(subject, reason, message)` is called with each, whether it is written or not, but not with a `copy` of one
    on another object.
    """

    recorded: Callable[[Subject, str, str], None] = staticmethod(lambda *_: None)

    def __init__(self, writer: Writer, component: str = "gpuquota-controller") -> None:
        self._writer, self._component = writer, component
        self._global, self._by_namespace = _TokenBucket(BURST, PER_SECOND), dict[str, _TokenBucket]()
        self._recorded: dict[tuple[Subject, str, str], float] = {}

    def record(self, subject: Subject, reason: str, message: str, *, warning: bool = False, copy: bool = False) -> None:
        """Log the event, and write it unless a rate limit is reached or the same one was written recently."""
        log.info("%s %s/%s: %s: %s", subject.kind, subject.namespace, subject.name, reason, message)
        if not copy:
            self.recorded(subject, reason, message)
        now = asyncio.get_running_loop().time()
        key = (subject, reason, message)
        recently = now - self._recorded.get(key, -REPEATED_AFTER_S) < REPEATED_AFTER_S
        if recently or not self._acquire_token(subject.namespace, now):
            return
        if len(self._recorded) >= MAX_TRACKED:
            self._recorded.clear()
        self._recorded[key] = now
        at, suffix = datetime.now(UTC), uuid.uuid4().hex[:12]
        write = event(subject, reason, message, warning=warning, at=at, suffix=suffix, component=self._component)
        self._writer.submit(write, lambda _: None, lambda _: None)

    def _acquire_token(self, namespace: str, now: float) -> bool:
        if len(self._by_namespace) >= MAX_TRACKED:
            self._by_namespace.clear()
        own = self._by_namespace.setdefault(namespace, _TokenBucket(NAMESPACE_BURST, NAMESPACE_PER_SECOND))
        if self._global.available(now) < 1 or own.available(now) < 1:
            return False
        self._global.use()
        own.use()
        return True


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    reason: str = ""
    message: str = ""
    last_timestamp: datetime | None = None
    event_time: datetime | None = None


class _EventList(msgspec.Struct, frozen=True):
    items: tuple[_Event, ...] = ()


def list_warnings_request(namespace: str, uid: str) -> Write:
    """Return the request for a pod's events of type Warning."""
    events = join("/api/v1/namespaces", namespace, "events")
    path = with_query(events, fieldSelector=f"involvedObject.uid={uid},type=Warning")
    return Write(verb="GET", path=path, about=f"{namespace}/{uid}", level=logging.DEBUG)


def last_warning(answer: bytes) -> str:
    """Return the newest event of the list as "Reason: message"; "" if it is empty."""
    events = msgspec.json.decode(answer, type=_EventList).items
    last = max(events, key=lambda e: e.last_timestamp or e.event_time or _LONG_AGO, default=None)
    return "" if last is None else f"{last.reason}: {last.message}"[:MAX_MESSAGE_LENGTH]


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
    """Return the request that creates the event; for cluster-scoped objects in namespace default, as in client-go."""
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
    path = join("/api/v1/namespaces", namespace, "events")
    return Write(verb="POST", path=path, about=about, lane=Lane.EVENT, body=body)
