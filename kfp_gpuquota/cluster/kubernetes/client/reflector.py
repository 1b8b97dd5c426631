"""Reports the objects of one kind and all their changes: it lists them, then watches until it is cancelled.

The list is read in pages; the watch starts at its resource version. Bookmarks advance that version, so that a watch can
be reopened after minutes without events and without another list. After a 410 (the version was compacted) the kind is
listed again, and tracked objects that are not in the list are reported as deleted. A kind whose CRD is not installed
has no objects; it is requested again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import aiohttp
import msgspec

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, StatusBody
from kfp_gpuquota.cluster.kubernetes.objects.core_types import ListMetadata, Metadata, Page, WatchLine
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod

PAGE: Final = 1000
WATCH_S: Final = 300
NOT_INSTALLED_S: Final = 30.0
DENIED_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
LARGE_BYTES: Final = 64 << 10
LARGE_PART: Final = 0.1  # of the time of this process: most that is spent with objects of LARGE_BYTES or more
DELETED_UIDS_KEPT: Final = 1024  # a write's response may arrive after the watch has reported the object's deletion

_JITTER: Final = random.Random()  # noqa: S311 - not a secret

log = logging.getLogger(__name__)


class Object(Protocol):
    """Protocol of all objects."""

    @property
    def metadata(self) -> Metadata:
        """Return the object's metadata."""


O = TypeVar("O", bound=Object)  # noqa: E741 - an object, as the API calls it


class _Identified(msgspec.Struct, frozen=True):
    """The metadata of an object that cannot be decoded as its kind."""

    metadata: Metadata


class _Key(msgspec.Struct, frozen=True, rename="camel"):
    """What identifies a version of an object: to read more of a megabyte takes ten times as long."""

    uid: str
    resource_version: str


class _Keyed(msgspec.Struct, frozen=True):
    metadata: _Key


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: ListMetadata


def version_of(metadata: Metadata) -> int:
    """Return the object's resource version as a number; 0 if it is not a number."""
    text = metadata.resource_version
    return int(text) if text.isdecimal() and len(text) < 20 else 0


class WrittenPods(Protocol):
    """Receives pods that writes have returned, before the watch delivers them; implemented by the pods' reflector."""

    def note(self, found: Pod, /) -> None:
        """Process the pod, unless the watch has reported its deletion."""


class Reflector(Generic[O]):
    """Watches one kind and reports its objects to `changed(object)` and `deleted(uid)`.

    Both are synchronous and run while the stream is read. Versions older than the newest one are not reported; `note`
    reports the object that a write returned. An `optional` kind that may not be read for DENIED_S counts as not
    installed, unless it was read before: an API server that has just started denies all requests.

    An object that cannot be decoded as `kind`, or for which `changed` raises, is passed to
    `quarantined(metadata, problem)`, and the watch continues. `recover(raw, problem)` returns the readable part of an
    object that cannot be decoded.

    A tenant may change pods of a megabyte in a loop. The newest version of each large object is processed when there
    is time for it, the one that waits longest first, so that the changes of all others are not delayed.
    """

    def __init__(
        self,
        connection: Connection,
        path: str,
        kind: type[O],
        *,
        changed: Callable[[O], None],
        deleted: Callable[[str], None],
        selector: str = "",
        fields: str = "",
        not_installed_s: float = NOT_INSTALLED_S,
        optional: bool = False,
        quarantined: Callable[[Metadata, str], None] = lambda _metadata, _problem: None,
        recover: Callable[[msgspec.Raw, str], O] | None = None,
    ) -> None:
        self._connection, self._path = connection, path
        self._selection = {"labelSelector": selector, "fieldSelector": fields}
        self._changed, self._deleted = changed, deleted
        self._not_installed_s, self._optional = not_installed_s, optional
        self._quarantined, self._recover = quarantined, recover
        self._page = msgspec.json.Decoder(Page[msgspec.Raw])
        self._one = msgspec.json.Decoder(kind)
        self._versions: dict[str, int] = {}  # uid -> newest version seen
        self._deleted_uids: deque[str] = deque(maxlen=DELETED_UIDS_KEPT)
        self._large: dict[str, msgspec.Raw] = {}  # uid -> newest version that waits
        self._large_at = 0.0  # when the next one may be processed
        self._large_timer: asyncio.TimerHandle | None = None
        self._version = ""
        self._received = False
        self._denied_since: float | None = None
        self.synced = asyncio.Event()
        self.installed = True
        self.lists = 0
        self.pages = 0

    async def synced_or_unread(self, limit_s: float) -> bool:
        """Return True when all objects were listed, False when no page was read for `limit_s`.

        For kinds of other projects: their conversion webhook may fail for any time, and it is not ours to wait for.
        """
        while not self.synced.is_set():
            before = self.pages
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self.synced.wait()
            if self.pages == before:
                return self.synced.is_set()
        return True

    @property
    def path(self) -> str:
        """Return the path of the kind that is watched."""
        return self._path

    async def run(self) -> None:
        """List and watch until cancelled."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=_JITTER)
        while True:
            self._received, at_least_s = False, 0.0
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                if self._received:
                    backoff.reset()
                    continue
                log.info("%s: the watch ended without an event and is opened again after a pause", self._path)
            except ApiError as error:
                at_least_s = self._after_refusal(error)
                if error.status == 410:
                    backoff.reset()
            except (aiohttp.ClientError, ClusterUnavailableError, TimeoutError, OSError) as error:
                log.info("%s: the watch failed and is opened again: %s", self._path, error or type(error).__name__)
            except msgspec.DecodeError as error:  # a proxy's error page, or a truncated line
                log.warning("%s: a response cannot be decoded; listing again: %s", self._path, error)
                self._version = ""
            if self._received:  # the watch worked until now, so it is opened again soon; backoff is for failing servers
                backoff.reset()
            await asyncio.sleep(backoff.next_s(at_least_s))

    def note(self, found: O) -> None:
        """Report the object that a write returned, before the watch delivers it."""
        if found.metadata.uid not in self._deleted_uids:
            self._report(found)

    def _after_refusal(self, error: ApiError) -> float:
        """Return the shortest pause in seconds after a refusal."""
        if self._is_missing(error):
            self._note_not_installed()
            return self._not_installed_s
        if error.status == 410:
            log.info("%s: version %s was compacted; listing again", self._path, self._version)
            self._version = ""
        else:
            log.warning("%s: %s", self._path, error)
        return 0.0

    def _is_missing(self, error: ApiError) -> bool:
        """Return whether the kind is not installed. Kubernetes' core kinds are: a 404 is another server's."""
        if error.status == HTTPStatus.NOT_FOUND:
            return not self._path.startswith("/api/")
        if error.status != HTTPStatus.FORBIDDEN or not self._optional or self._versions:
            return False
        now = time.monotonic()
        if self._denied_since is None:
            self._denied_since = now
        return now - self._denied_since >= DENIED_S

    def _note_not_installed(self) -> None:
        if self.installed:
            log.info("%s is not installed; retrying every %g s", self._path, self._not_installed_s)
        self.installed, self._version = False, ""
        self._large.clear()
        for uid in list(self._versions):
            self._forget(uid)
        self.synced.set()

    # Listing

    async def _list(self) -> None:
        seen: set[str] = set()
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                for raw in page.items or ():
                    if (found := self._read(raw)) is not None:
                        seen.add(found.metadata.uid)
                        self._put(found)
        self._large.clear()  # the list has a newer version, or the object does not exist
        self._denied_since = None
        self._version, self.installed = page.metadata.resource_version, True
        self._drop_missing(seen, int(self._version) if self._version.isdecimal() else 0)
        self.lists += 1
        self.synced.set()

    async def _pages(self) -> AsyncGenerator[Page[msgspec.Raw], None]:
        """Yield all pages. The next one is requested while the current one is processed."""
        token, request = "", self._request_page("")
        try:
            while True:
                page = self._page.decode(await request)
                self.pages += 1
                if token := page.metadata.continue_:
                    request = self._request_page(token)
                    await asyncio.sleep(0)  # the request is sent, and other tasks run
                yield page
                if not token:
                    return
        finally:
            request.cancel()

    def _request_page(self, token: str) -> asyncio.Task[bytes]:
        return asyncio.create_task(self._connection.call("GET", self._path, params=self._list_params(token)))

    def _list_params(self, token: str) -> dict[str, str]:
        params = {"limit": str(PAGE)}
        if token:
            params["continue"] = token
        return self._selected(params)

    def _selected(self, params: dict[str, str]) -> dict[str, str]:
        return params | {name: value for name, value in self._selection.items() if value}

    def _drop_missing(self, seen: set[str], listed: int) -> None:
        """Drop objects that are not in the list, unless they are newer: created during the list, and noted."""
        for uid in [uid for uid, version in self._versions.items() if uid not in seen and version <= listed]:
            self._forget(uid)

    # Watching

    async def _watch(self) -> None:
        seconds = int(WATCH_S * (0.7 + 0.6 * random.random()))  # noqa: S311 - jitter: not all kinds at once
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        async for lines in self._connection.stream(self._path, self._selected(params)):
            for line in lines:
                if line:
                    self._take(msgspec.json.decode(line, type=WatchLine))

    def _take(self, line: WatchLine) -> None:
        if line.type == "ERROR":
            status = msgspec.json.decode(line.object, type=StatusBody)
            raise ApiError(status.code, status.reason, status.message)
        self._received = True
        if line.type == "BOOKMARK":
            self._version = msgspec.json.decode(line.object, type=_Bookmark).metadata.resource_version
            return
        if len(memoryview(line.object)) >= LARGE_BYTES and self._takes_large(line):
            return
        found = self._read(line.object)
        if found is None:
            return
        self._version = found.metadata.resource_version or self._version
        if line.type == "DELETED":
            self._forget(found.metadata.uid)
        else:
            self._large.pop(found.metadata.uid, None)
            self._put(found)

    def _takes_large(self, line: WatchLine) -> bool:
        """Keep a large object until there is time for it, or drop it; return False if it cannot be read at all."""
        try:
            key = msgspec.json.decode(line.object, type=_Keyed).metadata
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        self._version = key.resource_version
        if line.type == "DELETED":
            self._forget(key.uid)
        else:
            self._large[key.uid] = line.object
            self._process_large_later()
        return True

    def _process_large_later(self) -> None:
        if self._large and self._large_timer is None:
            loop = asyncio.get_running_loop()
            self._large_timer = loop.call_at(max(self._large_at, loop.time()), self._process_large)

    def _process_large(self) -> None:
        """Process the large object that waits longest, then pause in proportion."""
        began, self._large_timer = asyncio.get_running_loop().time(), None
        self._put_large()
        now = asyncio.get_running_loop().time()
        self._large_at = now + (now - began) / LARGE_PART
        self._process_large_later()

    def _put_large(self) -> None:
        if self._large and (found := self._read(self._large.pop(next(iter(self._large))))) is not None:
            self._put(found)

    def catch_up(self) -> None:
        """Process all large objects that wait."""
        while self._large:
            self._put_large()

    def _put(self, found: O | _Identified) -> None:
        """Report an object; one that cannot be decoded stays tracked, so that a list does not count it as deleted."""
        if isinstance(found, _Identified):
            self._versions.setdefault(found.metadata.uid, 0)
        else:
            self._report(found)

    def _read(self, raw: msgspec.Raw) -> O | _Identified | None:
        """Return the object; its metadata if it cannot be decoded as its kind; None if that fails as well."""
        try:
            return self._one.decode(raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            log.error("%s: an object cannot be decoded: %s: %s", self._path, error, bytes(raw)[:300])
            return self._unreadable(raw, error)

    def _unreadable(self, raw: msgspec.Raw, error: Exception) -> O | _Identified | None:
        try:
            found = msgspec.json.decode(raw, type=_Identified)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        problem = f"the object cannot be read: {error}"
        if self._recover is not None:
            return self._recover(raw, problem)
        self._quarantined(found.metadata, problem)
        return found

    def _report(self, found: O) -> None:
        uid, version = found.metadata.uid, version_of(found.metadata)
        if version <= self._versions.get(uid, -1):
            return
        self._versions[uid] = version
        try:
            self._changed(found)
        except Exception as error:
            log.exception("%s: %s could not be processed", self._path, found.metadata.name)
            self._quarantined(found.metadata, f"the object could not be handled: {type(error).__name__}: {error}")

    def _forget(self, uid: str) -> None:
        self._large.pop(uid, None)
        if self._versions.pop(uid, None) is not None:
            self._deleted_uids.append(uid)
            try:
                self._deleted(uid)
            except Exception:
                log.exception("%s: the deletion of %s could not be processed", self._path, uid)
