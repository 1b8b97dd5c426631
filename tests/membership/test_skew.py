"""Workers of 0.1.0 with today's membership service, as during an upgrade of the controller.

`release_0_1.jsonl` is what the `elastic_runtime` of 0.1.0 sent and received in a training of two workers that shrank to
one and finished; of repeated reports and heartbeats one of each is kept. A row is [what, worker, content]:

- target: the workers that the cluster wants
- send: an event of the worker; the first one opens its connection
- order: an order to the worker
- store: [generation, operation, request, answer] of the rendezvous store
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.membership.test_service import JOB, TOKEN, Bench, Connection, run

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = Path(__file__).with_name("release_0_1.jsonl")


def rows() -> Iterator[tuple[str, str, Any]]:
    for line in ROWS.read_text().splitlines():
        what, worker, content = json.loads(line)
        yield what, worker, content


class Player:
    """Plays rows to a service, and checks what it does."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._connections: dict[str, Connection] = {}
        self._stored: list[asyncio.Task[None]] = []  # a worker waits in the store for what another one sets

    async def play(self, what: str, worker: str, content: Any) -> None:
        """Play one row."""
        if what == "store":
            self._stored.append(asyncio.create_task(self._store(*content)))
            return
        await asyncio.gather(*self._stored)
        if what == "target":
            self._bench.service.set_target(JOB, content)
        elif what == "order":
            await self._receive(worker, content)
        elif worker in self._connections:
            self._connections[worker].send(**{name: value for name, value in content.items() if name != "worker"})
        else:
            self._connections[worker] = Connection(self._bench.session, worker, TOKEN, incarnation="1")
            assert (await self._connections[worker].open(content["event"])).status == 200

    async def _store(self, generation: int, operation: str, request: dict[str, Any], answer: Any) -> None:
        assert await self._bench.store(operation, generation, **request) == (200, answer)

    async def _receive(self, worker: str, order: dict[str, Any]) -> None:
        received = await self._connections[worker].receive(order["order"])
        if "why" in order:  # it is for people
            received["why"] = order["why"]
        assert received == order


def test_a_training_of_the_last_release_forms_shrinks_and_finishes() -> None:
    async def scenario(bench: Bench) -> None:
        player = Player(bench)
        for row in rows():
            await player.play(*row)
        await bench.recorder.until("finished", "job-1-0", 1600)
        assert ("committed", 2, "by all") in bench.recorder.rows
        assert ("released", "job-1-1", 1306) in bench.recorder.rows
        assert ("progress", "job-1-0", 1600) in bench.recorder.rows
        assert "kill" not in {row[0] for row in bench.recorder.rows}

    run(scenario)


def test_the_recording_has_every_message_of_a_training_without_failures() -> None:
    sent = {content["event"] for what, _, content in rows() if what == "send"}
    assert sent == {
        "WorkerJoined",
        "WorkerReady",
        "WorkerHeard",
        "GenerationPrepared",
        "GenerationAdopted",
        "ProgressReported",
        "StepsTimed",
        "TrainingFinished",
    }
    assert {content["order"] for what, _, content in rows() if what == "order"} == {
        "Stay",
        "Recover",
        "Propose",
        "Release",
    }
