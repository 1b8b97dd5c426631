"""Streams of numbered rows, without Ray's processes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray")

import pyarrow as pa
import ray

from elastic_runtime.integrations.ray.dataset_server import Epoch, Piece
from elastic_runtime.integrations.ray.datasets import Rows, RowStream

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECES = 50
ROWS_OF_PIECE = 10


def table(first: int, rows: int = ROWS_OF_PIECE) -> pa.Table:
    return pa.table({"x": list(range(first, first + rows))})


def pieces(count: int = PIECES) -> Iterator[Piece]:
    """Pieces of ten rows that carry their number."""
    return (Piece(ROWS_OF_PIECE, 0, (table(number * ROWS_OF_PIECE),)) for number in range(count))


def held(epoch: Epoch) -> int:
    return sum(piece.block is not None for piece in epoch.pieces)


@pytest.fixture(autouse=True)
def _blocks_are_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda reference: reference)


def test_the_actor_of_datasets_starts_without_torch() -> None:
    code = "import elastic_runtime.integrations.ray.dataset_server, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_epoch_holds_the_blocks_of_two_steps_however_long_it_is() -> None:
    epoch = Epoch(0, pieces())
    most = 0
    for step in range(PIECES * ROWS_OF_PIECE // 25):
        epoch.note_applied(step * 25)
        epoch.need((step + 1) * 25 // ROWS_OF_PIECE)
        most = max(most, held(epoch))
    assert most <= 7
    epoch.need(PIECES)
    assert epoch.ended
    assert len(epoch.pieces) == PIECES
    assert sum(piece.rows for piece in epoch.pieces) == PIECES * ROWS_OF_PIECE


def test_the_rows_of_a_step_that_is_repeated_are_still_there() -> None:
    epoch = Epoch(0, pieces())
    epoch.need(10)
    epoch.note_applied(40)
    epoch.note_applied(60)  # by the first worker; another one repeats the step from 40 to 60
    assert [piece.block is not None for piece in epoch.pieces[3:6]] == [False, True, True]


def test_an_epoch_that_was_left_early_ends_its_execution() -> None:
    closed = []

    def coming() -> Iterator[Piece]:
        try:
            yield from pieces()
        finally:
            closed.append(True)

    epoch = Epoch(0, coming())
    epoch.need(3)
    epoch.close()
    assert closed == [True]
    assert held(epoch) == 0
    assert epoch.ended


def test_rows_are_found_in_their_blocks_in_any_order() -> None:
    rows = Rows([Piece(2, 0, (table(0),)), Piece(3, 5, (table(10),)), Piece(1, 0, (table(30),))])
    assert len(rows) == 6
    assert rows.block([0, 1]).column("x").to_pylist() == [0, 1]
    assert rows.block(range(1, 6)).column("x").to_pylist() == [1, 15, 16, 17, 30]
    assert rows.block([5, 3, 2]).column("x").to_pylist() == [30, 16, 15]


class _Pieces:
    """Stands for the handle of the actor's method."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch

    def remote(self, _name: str, _epoch: int, have: int, applied: int) -> tuple[list[Piece], bool]:
        self.epoch.note_applied(applied)
        self.epoch.need(have)
        return self.epoch.pieces[have:], self.epoch.ended


class _Server:
    def __init__(self, epoch: Epoch) -> None:
        self.pieces: Any = _Pieces(epoch)


def stream(monkeypatch: pytest.MonkeyPatch, window: int) -> RowStream:
    monkeypatch.setattr(RowStream, "_applied", lambda _: 0)
    found = RowStream(_Server(Epoch(0, pieces(5))), "train", window, seed=1)
    found.begun = True
    return found


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_a_stream_gives_each_number_once_and_goes_on_where_its_state_was_taken(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    whole = list(stream(monkeypatch, window))
    assert sorted(whole) == list(range(50))
    assert (whole == sorted(whole)) == (window == 1)
    first = stream(monkeypatch, window)
    numbers = iter(first)
    begun = [next(numbers) for _ in range(21)]
    second = stream(monkeypatch, window)
    second.load_state_dict(first.state_dict())
    assert begun + list(second) == whole


def test_a_stream_of_a_worker_that_has_not_joined_asks_for_nothing() -> None:
    found = RowStream(None, "train", 1, seed=1)
    assert [number for number, _ in zip(found, range(100), strict=False)] == list(range(100))
