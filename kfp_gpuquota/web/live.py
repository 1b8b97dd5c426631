"""Pages that stay live: what changed on a page is rendered once, and sent to all browsers that show it.

A page is a set of elements, each with an id and the HTML that it has now. Every element has a version, the revision of
the cluster at which its HTML last changed; a browser names the version of its page (as the stream's last event id after
a reconnect), and receives all elements that are newer. Versions only grow, also over restarts of the server, so what
happened while a browser was not connected reaches it with the first message.

A page is rendered at once after a change of what it shows, then not again for `REST` times as long as that took of the
processor, and `PAUSE_S` at least. (Time on the clock would add up what a busy machine does beside it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping

    from kfp_gpuquota.web.source import Source

PAUSE_S: Final = 0.2
REST: Final = 10.0
PROBLEM_EVERY_S: Final = 1.0
"""How often it is looked whether the cluster has another problem, which is no change of its state."""
BEAT_S: Final = 15.0
"""A stream without events carries a comment this often, so that both ends detect a lost connection."""


@dataclass(frozen=True)
class Elements:
    """A page's HTML by element id: `parts`, each with its own tags, and `lists`, the rows of an element in order.

    A list that the page had before, and has no longer, is sent empty.
    """

    parts: Mapping[str, str]
    lists: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class LivePage:
    """How to render a page, and how often it changes although nothing in the cluster does (a chart that moves on).

    `inputs` returns what else the page depends on, where that is cheaper than to render it: while it is equal to what
    it was before, the page is not rendered again. `prepare` is awaited before the page is rendered or compared: it
    reads what is not in memory, and raises nothing.
    """

    render: Callable[[], Elements]
    every_s: float = 3600.0
    inputs: Callable[[], object] | None = None
    prepare: Callable[[], Awaitable[None]] | None = None

    async def prepared(self) -> None:
        """Read what is not in memory."""
        if self.prepare is not None:
            await self.prepare()


class Live:
    """The pages that browsers show at the moment, by address."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._topics: dict[str, _Topic] = {}

    async def messages(
        self, address: str, page: LivePage, after: int
    ) -> AsyncGenerator[tuple[int, bytes] | None, None]:
        """Yield (version, message) for what is newer than `after`, and None where nothing was for a while.

        A message is JSON: `parts` and rows that replace elements, `lists` that replace the contents of elements.
        """
        topic = self._topics.setdefault(address, _Topic(self._source, page))
        try:
            with topic.shown():
                while True:
                    found = await topic.newer(after)
                    after = max(after, topic.version)
                    yield found
        finally:
            if topic.unused and self._topics.get(address) is topic:
                del self._topics[address]


class _Topic:
    """One address, and the elements that it has now."""

    def __init__(self, source: Source, page: LivePage) -> None:
        self._source, self._page = source, page
        self.version = 0
        self._viewers = 0
        self._following: asyncio.Task[None] | None = None
        self._html: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self._orders: dict[str, tuple[str, ...]] = {}
        self._order_versions: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._latest: tuple[int, tuple[int, bytes]] | None = None
        self._inputs: object = None
        self._problem = ""
        self._due = 0.0

    @property
    def unused(self) -> bool:
        """Whether no browser shows it."""
        return self._viewers == 0

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the elements up to date while one browser more shows them."""
        self._viewers += 1
        try:
            if self._following is None:
                revision = self._source.revision()
                self._following = asyncio.create_task(self._follow(revision, self._take()))
            yield
        finally:
            self._viewers -= 1
            if self.unused and self._following is not None:
                self._following.cancel()

    async def newer(self, after: int) -> tuple[int, bytes] | None:
        """Return what is newer, as soon as anything is; None after a while without. Raises what rendering raises."""
        if self.version <= after:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), BEAT_S)
        if self._following is not None and self._following.done():
            self._following.result()
        if self.version <= after:
            return None
        if self._latest is None or self._latest[0] != after:
            self._latest = (after, (self.version, self._message(after)))
        return self._latest[1]

    def _message(self, after: int) -> bytes:
        lists = [name for name, version in self._order_versions.items() if version > after]
        whole = {row for name in lists for row in self._orders[name]}
        return json.dumps(
            {
                "parts": {
                    name: self._html[name]
                    for name, version in self._versions.items()
                    if version > after and name not in whole
                },
                "lists": {name: "".join(self._html[row] for row in self._orders[name]) for name in lists},
            }
        ).encode()

    async def _follow(self, revision: int, took_s: float) -> None:
        try:
            while True:
                await asyncio.sleep(max(PAUSE_S, REST * took_s))
                await self._source.changed(revision, min(PROBLEM_EVERY_S, max(0.1, self._due - time.monotonic())))
                if self._is_unchanged_since(revision):
                    continue
                revision = self._source.revision()
                await self._page.prepared()
                took_s = self._take() if self._is_outdated() else 0.0
        finally:
            self._changed.set()

    def _is_unchanged_since(self, revision: int) -> bool:
        """Whether neither the cluster nor its problem has changed, and the page is not due."""
        same = self._source.revision() == revision and self._source.problem() == self._problem
        return same and time.monotonic() < self._due

    def _is_outdated(self) -> bool:
        """Whether the page may look different by now."""
        return time.monotonic() >= self._due or self._page.inputs is None or self._page.inputs() != self._inputs

    def _take(self) -> float:
        """Render the page, and let the browsers have what differs; return how long the processor took, in seconds."""
        began = time.thread_time()
        self._due = time.monotonic() + self._page.every_s
        self._problem = self._source.problem()
        self._inputs = self._page.inputs() if self._page.inputs is not None else None
        now = self._page.render()
        version = max(self._source.revision(), self.version + 1)
        html = {**now.parts, **{row: text for rows in now.lists.values() for row, text in rows.items()}}
        orders = {**dict.fromkeys(self._orders, ()), **{name: tuple(rows) for name, rows in now.lists.items()}}
        changed = [name for name, text in html.items() if self._html.get(name) != text]
        reordered = [name for name, order in orders.items() if self._orders.get(name) != order]
        if changed or reordered:
            kept = {name: old for name, old in self._versions.items() if name in html}
            self._versions = kept | dict.fromkeys(changed, version)
            self._order_versions |= dict.fromkeys(reordered, version)
            self._html, self._orders, self._latest = html, orders, None
            self.version = version
            event, self._changed = self._changed, asyncio.Event()
            event.set()
        return time.thread_time() - began
