"""What a stream sends: nothing twice, nothing too little, and nothing is rendered for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from kfp_gpuquota.web import live as live_module
from kfp_gpuquota.web.live import Elements, Live, LivePage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kfp_gpuquota.web.source import Source

START = 1000


class Board:
    """A source of one list of rows and one part, which counts how often it is rendered."""

    def __init__(self, revision: int = START) -> None:
        self.number, self.rendered = revision, 0
        self.rows, self.part = {"a": "A", "b": "B"}, "P"
        self.trouble = ""
        self._changed = asyncio.Event()

    def problem(self) -> str:
        return self.trouble

    def revision(self) -> int:
        return self.number

    async def changed(self, after: int, timeout_s: float) -> None:
        self._changed.clear()
        if self.number == after:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    def change(self) -> None:
        self.number += 1
        self._changed.set()

    def render(self) -> Elements:
        self.rendered += 1
        return Elements({"part": self.part}, {"list": dict(self.rows)})

    def messages(self, live: Live, after: int) -> AsyncGenerator[tuple[int, bytes] | None, None]:
        return live.messages("/", LivePage(self.render, inputs=lambda: (self.part, dict(self.rows))), after)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders follow each other at once."""
    monkeypatch.setattr(live_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(live_module, "REST", 0.0)


async def settled() -> None:
    """Return when everything that could happen by now has."""
    for _ in range(50):
        await asyncio.sleep(0)


def live_of(board: Board) -> Live:
    return Live(cast("Source", board))


async def following(stream: AsyncGenerator[tuple[int, bytes] | None, None]) -> tuple[int, dict[str, Any]]:
    message = await anext(stream)
    assert message is not None
    return message[0], json.loads(message[1])


def test_only_what_changed_is_sent_rows_one_by_one_and_a_new_order_as_a_whole() -> None:
    async def play() -> None:
        board = Board()
        stream = board.messages(live_of(board), START)
        waiting = asyncio.create_task(following(stream))
        await settled()
        board.rows["b"] = "B2"
        board.change()
        version, message = await waiting
        assert message == {"parts": {"b": "B2"}, "lists": {}}
        assert version > START
        board.rows, board.part = {"b": "B2", "c": "C"}, "P2"
        board.change()
        assert (await following(stream))[1] == {"parts": {"part": "P2"}, "lists": {"list": "B2C"}}
        await stream.aclose()

    asyncio.run(play())


def test_a_browser_that_was_away_gets_all_that_is_newer_also_from_the_next_server() -> None:
    async def play() -> None:
        board = Board()
        live = live_of(board)
        stays = board.messages(live, START)
        for part in ("P1", "P2"):
            waiting = asyncio.create_task(following(stays))
            await settled()
            board.part = part
            board.change()
            _, message = await waiting
        assert message == {"parts": {"part": "P2"}, "lists": {}}
        back = board.messages(live, START)
        last, message = await following(back)
        assert message == {"parts": {"part": "P2"}, "lists": {}}
        again = Board(last + 50)
        after_restart = again.messages(live_of(again), last)
        _, message = await following(after_restart)
        assert message == {"parts": {"part": "P"}, "lists": {"list": "AB"}}
        for stream in (stays, back, after_restart):
            await stream.aclose()

    asyncio.run(play())


def test_a_problem_of_the_cluster_is_shown_though_its_state_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "PROBLEM_EVERY_S", 0.0)

    async def play() -> None:
        board = Board()
        page = LivePage(lambda: Elements({"problem": board.trouble}))
        stream = live_of(board).messages("/", page, START)
        waiting = asyncio.create_task(following(stream))
        await settled()
        board.trouble = "Ray's head has not answered"
        assert (await waiting)[1]["parts"] == {"problem": "Ray's head has not answered"}
        await stream.aclose()

    asyncio.run(play())


def test_all_browsers_share_what_is_rendered_and_nothing_is_while_inputs_stay_or_nobody_looks() -> None:
    async def play() -> None:
        board = Board()
        live = live_of(board)
        streams = [board.messages(live, START) for _ in range(5)]
        waiting = [asyncio.create_task(following(stream)) for stream in streams]
        await settled()
        for _ in range(3):
            board.change()
            await settled()
        assert board.rendered == 1
        board.part = "P1"
        board.change()
        assert len({json.dumps(message) for message in await asyncio.gather(*waiting)}) == 1
        assert board.rendered == 2
        for stream in streams:
            await stream.aclose()
        board.part = "P2"
        board.change()
        await settled()
        assert board.rendered == 2

    asyncio.run(play())
