"""Writes the status of jobs and quotas by server-side apply, at a limited rate.

An unchanged status is not written. Fields that change constantly (progress, a team's GPUs) are written every few
seconds; a change of phase at once.

While the cluster's kinds are older than this release, they lack fields that it writes, and server-side apply refuses
an object with such a field. These fields are left out until this process ends: the rest of the status is written.

A status that is refused for another reason (an older kind lacks a value) is written again after growing pauses, which
end with a change of an urgent field or a success. Only refusals of the object itself (400, 403, 413, 422) let them grow
to minutes: an API server that fails or does not answer is tried again after 10 s. Rejected: to give up, since the kinds
may be updated at any time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join, with_query
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer

QUIET_S: Final = 0.05
SELDOM_S: Final = 5.0
AGAIN_S: Final = 5.0
LONGEST_AGAIN_S: Final = 300.0
LONGEST_TRANSIENT_S: Final = 10.0
REFUSES_THE_OBJECT: Final = frozenset({400, 403, 413, 422})
UNDECLARED: Final = re.compile(r"\.status\.(\w+): field not declared in schema")

log = logging.getLogger(__name__)


class _Refusal:
    """Why a status is refused, its urgent part, and when it is written again, in seconds of the event loop's clock."""

    def __init__(self, jitter: Random) -> None:
        self._pauses = Backoff(AGAIN_S, LONGEST_AGAIN_S)
        self._transient = Backoff(AGAIN_S, LONGEST_TRANSIENT_S, jitter=jitter)
        self.message, self.urgent, self.until = "", None, 0.0

    def repeat(self, error: Exception, urgent: Any, now: float) -> bool:
        """Set the next pause; return whether it is refused for another reason than before."""
        if urgent != self.urgent:
            self._pauses.reset()
        new, self.message, self.urgent = str(error) != self.message, str(error), urgent
        of_the_object = isinstance(error, ApiError) and error.status in REFUSES_THE_OBJECT
        self.until = now + (self._pauses if of_the_object else self._transient).next_s()
        return new


class StatusWriter:
    """Writes statuses that differ from the last written one. `build(key)` returns the status to write, if any."""

    def __init__(self, writer: Writer, build: Callable[[str], Built | None]) -> None:
        self._writer, self._build = writer, build
        self._dirty: dict[str, asyncio.TimerHandle] = {}
        self._written: dict[str, tuple[float, bytes, Any]] = {}
        self._under_way: set[str] = set()
        self._undeclared: set[str] = set()  # fields that the cluster's kind lacks
        self._refused: dict[str, _Refusal] = {}
        self._jitter = Random()  # noqa: S311 - it spreads attempts

    def changed(self, key: str) -> None:
        """Write the status soon, if it has changed."""
        if key not in self._dirty and key not in self._under_way:
            self._dirty[key] = asyncio.get_running_loop().call_later(QUIET_S, self._look, key)

    def decided(self, key: str) -> None:
        """Write the status at once if an urgent field has changed, even if a delayed write is pending."""
        timer = self._dirty.get(key)
        if timer is not None and timer.when() > asyncio.get_running_loop().time() + QUIET_S:
            timer.cancel()
            del self._dirty[key]
        self.changed(key)

    def forget(self, key: str) -> None:
        """Drop a deleted object."""
        self._written.pop(key, None)
        self._refused.pop(key, None)
        if timer := self._dirty.pop(key, None):
            timer.cancel()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._dirty.values():
            timer.cancel()
        self._dirty.clear()

    def _look(self, key: str) -> None:
        self._dirty.pop(key, None)
        built = self._build(key)
        if built is None:
            self.forget(key)
            return
        if self._undeclared:
            built = built.without(self._undeclared)
        at, body, urgent = self._written.get(key, (0.0, b"", None))
        encoded = msgspec.json.encode(built.body)
        if encoded == body:
            return
        loop = asyncio.get_running_loop()
        refusal = self._refused.get(key)
        if refusal is not None and refusal.urgent == built.urgent:
            wait = refusal.until - loop.time()
        else:
            wait = 0.0 if built.urgent != urgent else at + SELDOM_S - loop.time()
        if wait > 0:
            self._dirty[key] = loop.call_later(wait, self._look, key)
            return
        self._written[key] = (loop.time(), encoded, built.urgent)
        self._under_way.add(key)
        self._writer.submit(_apply(built), partial(self._done, key, built), partial(self._failed, key, built.urgent))

    def _done(self, key: str, built: Built, _answer: bytes) -> None:
        self._under_way.discard(key)
        if self._refused.pop(key, None):
            log.info("the status of %s is accepted again", key)
        if built.stored is not None:
            built.stored()
        self.changed(key)  # it may have changed in the meantime

    def _failed(self, key: str, urgent: Any, error: Exception) -> None:
        self._under_way.discard(key)
        self._written.pop(key, None)
        if isinstance(error, ApiError) and error.status == 404:
            return
        if self._leave_out(set(UNDECLARED.findall(str(error)))):
            self.changed(key)
            return
        loop = asyncio.get_running_loop()
        refusal = self._refused.setdefault(key, _Refusal(self._jitter))
        if refusal.repeat(error, urgent, loop.time()):
            pause_s = refusal.until - loop.time()
            log.warning("the status of %s is refused, and written again after %.0f s: %s", key, pause_s, error)
        self._dirty[key] = loop.call_at(refusal.until, self._look, key)

    def _leave_out(self, fields: set[str]) -> bool:
        """Write these fields no more; return whether one of them was written until now."""
        if added := fields - self._undeclared:
            self._undeclared |= added
            log.warning("the cluster's kinds are older than this release and lack status.%s", ", status.".join(added))
        return bool(added)


class Built(msgspec.Struct, frozen=True):
    """A status to write. A change of `urgent` is written at once; `stored` is called after the write."""

    path: str
    about: str
    body: Any
    urgent: Any
    stored: Callable[[], None] | None = None

    def without(self, fields: Collection[str]) -> Built:
        """Return it without these fields of the status."""
        status = {name: value for name, value in self.body["status"].items() if name not in fields}
        return msgspec.structs.replace(self, body={**self.body, "status": status})


def _apply(built: Built) -> Write:
    return Write(
        verb="PATCH",
        path=with_query(join(built.path, "status"), fieldManager=labels.FIELD_MANAGER, force="true"),
        about=built.about,
        lane=Lane.STATUS,
        body=built.body,
        content_type=APPLY_PATCH,
        level=logging.DEBUG,
    )
