"""Keeps a copy of one kind in step with the API server: list, then watch, for ever.

The list is read in pages; the watch goes on from its version, with bookmarks, so that it can be taken up again after
minutes of silence without another list. A 410 (the server has forgotten that version) starts with a list again, and
what was known and is not in it is gone. A kind that is not installed has no objects, and is asked for again later.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import aiohttp
import msgspec

from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError, StatusBody
from kfp_gpuquota.cluster.kubernetes.objects.core_types import ListMetadata, Metadata, Page, WatchLine
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kfp_gpuquota.cluster.kubernetes.client.async_client import Connection

PAGE: Final = 1000
WATCH_S: Final = 300
NOT_INSTALLED_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
REMEMBERED_DEAD: Final = 1024  # a write's answer may come after the watch told of the object's end

log = logging.getLogger(__name__)


class Object(Protocol):
    """What every object has."""

    @property
    def metadata(self) -> Metadata:
        """Its name, version and so on."""


O = TypeVar("O", bound=Object)  # noqa: E741 - an object, as the API calls it


class _Identified(msgspec.Struct, frozen=True):
    """All that is read of an object that cannot be read as its kind."""

    metadata: Metadata


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: ListMetadata


def version_of(metadata: Metadata) -> int:
    """The object's resource version as a number; 0 for one that is none."""
    text = metadata.resource_version
    return int(text) if text.isdecimal() and len(text) < 20 else 0


class Reflector(Generic[O]):
    """One kind's objects, told to `changed(object)` and `gone(uid)` as they come.

    Neither may await: they run inside the stream's reading; `batch_done` follows what arrived together. What is older
    than what is known is not told; `note` makes known what a write's answer said. An `optional` kind that may not be
    read counts as not installed, unless it was read before: an API server that has just started refuses everybody.

    An object that cannot be read as `kind`, or that `changed` raises for, goes to `quarantined(metadata, problem)`, and
    the watch goes on. `recover(raw, problem)` gives what can be read of an object that cannot be read whole.
    """

    def __init__(
        self,
        connection: Connection,
        path: str,
        kind: type[O],
        *,
        changed: Callable[[O], None],
        gone: Callable[[str], None],
        selector: str = "",
        fields: str = "",
        batch_done: Callable[[], None] = lambda: None,
        not_installed_s: float = NOT_INSTALLED_S,
        optional: bool = False,
        quarantined: Callable[[Metadata, str], None] = lambda _metadata, _problem: None,
        recover: Callable[[msgspec.Raw, str], O] | None = None,
    ) -> None:
        self._connection, self._path = connection, path
        self._selection = {"labelSelector": selector, "fieldSelector": fields}
        self._changed, self._gone, self._batch_done = changed, gone, batch_done
        self._not_installed_s, self._optional = not_installed_s, optional
        self._quarantined, self._recover = quarantined, recover
        self._page = msgspec.json.Decoder(Page[msgspec.Raw])
        self._one = msgspec.json.Decoder(kind)
        self._versions: dict[str, int] = {}  # uid -> newest version seen
        self._buried: deque[str] = deque(maxlen=REMEMBERED_DEAD)
        self._version = ""
        self._heard = False
        self.synced = asyncio.Event()
        self.installed = True
        self.lists = 0

    async def run(self) -> None:
        """Until cancelled."""
        pause = FIRST_PAUSE_S
        while True:
            self._heard = False
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                if self._heard:
                    pause = FIRST_PAUSE_S
                    continue
                log.info("%s: the watch ended without an event and is opened again after a pause", self._path)
            except ApiError as error:
                pause = self._after_refusal(error, pause)
            except (aiohttp.ClientError, ClusterUnavailableError, TimeoutError, OSError) as error:
                log.info("%s: the watch broke and is taken up again: %s", self._path, error or type(error).__name__)
            except msgspec.DecodeError as error:  # a proxy's page, or half a line: nothing of it can be relied on
                log.warning("%s: an answer cannot be read, so all is listed again: %s", self._path, error)
                self._version = ""
            if self._heard:  # what has worked until now is taken up at once: pauses are for a server that has troubles
                pause = FIRST_PAUSE_S
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - jitter, not a secret
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def note(self, found: O) -> None:
        """A write's answer: newer than what the watch has told so far."""
        if found.metadata.uid not in self._buried:
            self._tell(found)

    def _after_refusal(self, error: ApiError, pause: float) -> float:
        if error.status == 404 or (error.status == 403 and self._optional and not self._versions):
            self._nothing_installed()
            return self._not_installed_s
        if error.status == 410:
            log.info("%s: version %s is forgotten; listing again", self._path, self._version)
            self._version = ""
            return FIRST_PAUSE_S
        log.warning("%s: %s", self._path, error)
        return pause

    def _nothing_installed(self) -> None:
        if self.installed:
            log.info("%s is not installed; asked for again every %g s", self._path, self._not_installed_s)
        self.installed, self._version = False, ""
        for uid in list(self._versions):
            self._forget(uid)
        self._batch_done()
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
        self._version, self.installed = page.metadata.resource_version, True
        self._drop_missing(seen, int(self._version) if self._version.isdecimal() else 0)
        self.lists += 1
        self._batch_done()
        self.synced.set()

    async def _pages(self) -> AsyncGenerator[Page[msgspec.Raw], None]:
        """All pages. The server makes the next one while we read this one."""
        token, asked = "", self._ask_for_page("")
        try:
            while True:
                page = self._page.decode(await asked)
                if token := page.metadata.continue_:
                    asked = self._ask_for_page(token)
                    await asyncio.sleep(0)  # it is sent, and others take their turn
                yield page
                if not token:
                    return
        finally:
            asked.cancel()

    def _ask_for_page(self, token: str) -> asyncio.Task[bytes]:
        return asyncio.create_task(self._connection.call("GET", self._path, params=self._list_params(token)))

    def _list_params(self, token: str) -> dict[str, str]:
        params = {"limit": str(PAGE)}
        if token:
            params["continue"] = token
        return self._selected(params)

    def _selected(self, params: dict[str, str]) -> dict[str, str]:
        return params | {name: value for name, value in self._selection.items() if value}

    def _drop_missing(self, seen: set[str], listed: int) -> None:
        """What is not in the list is gone, unless it is newer: made while the list was on its way, and noted."""
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
            self._batch_done()

    def _take(self, line: WatchLine) -> None:
        if line.type == "ERROR":
            status = msgspec.json.decode(line.object, type=StatusBody)
            raise ApiError(status.code, status.reason, status.message)
        self._heard = True
        if line.type == "BOOKMARK":
            self._version = msgspec.json.decode(line.object, type=_Bookmark).metadata.resource_version
            return
        found = self._read(line.object)
        if found is None:
            return
        self._version = found.metadata.resource_version or self._version
        if line.type == "DELETED":
            self._forget(found.metadata.uid)
        else:
            self._put(found)

    def _put(self, found: O | _Identified) -> None:
        """An unreadable object stays known, so that a list does not take it for gone."""
        if isinstance(found, _Identified):
            self._versions.setdefault(found.metadata.uid, 0)
        else:
            self._tell(found)

    def _read(self, raw: msgspec.Raw) -> O | _Identified | None:
        """One object; its identity where it cannot be read as its kind; None for what has no identity either."""
        try:
            return self._one.decode(raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            log.error("%s: an object cannot be read: %s: %s", self._path, error, bytes(raw)[:300])
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

    def _tell(self, found: O) -> None:
        uid, version = found.metadata.uid, version_of(found.metadata)
        if version <= self._versions.get(uid, -1):
            return
        self._versions[uid] = version
        try:
            self._changed(found)
        except Exception as error:
            log.exception("%s: %s could not be handled", self._path, found.metadata.name)
            self._quarantined(found.metadata, f"the object could not be handled: {type(error).__name__}: {error}")

    def _forget(self, uid: str) -> None:
        if self._versions.pop(uid, None) is not None:
            self._buried.append(uid)
            try:
                self._gone(uid)
            except Exception:
                log.exception("%s: the end of %s could not be handled", self._path, uid)
