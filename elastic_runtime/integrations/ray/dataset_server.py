"""The Ray datasets of a training, as streams of numbered rows: one actor, which the workers ask for blocks.

Ray Data splits a stream among a fixed number of workers. Here each epoch is one execution of the dataset, whose rows
are numbered as they come, and a step is a range of numbers: so each row is in one step of each epoch at every size, and
a transformation is computed again in each epoch. The actor hands out references; workers read the blocks from Ray's
object store, without copies on the node where they are.

Memory: a block's reference is dropped once a step after its last row was applied; Ray Data computes ahead what its own
limits allow. The counts of the epoch's blocks are kept, for workers that join.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_runtime.integrations.ray.ray_internals import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + rows) of a block. `block` holds its reference, which Ray would resolve as a plain argument;
    None: dropped.
    """

    rows: int
    first: int
    block: tuple[Any, ...] | None

    def dropped(self) -> Piece:
        """Return the piece without its block."""
        return Piece(self.rows, self.first, None)


@dataclass
class Epoch:
    """One execution: the pieces that have come so far, in order. `applied`: rows that the training is done with."""

    number: int
    coming: Iterator[Piece] = field(repr=False)
    pieces: list[Piece] = field(default_factory=list)
    ended: bool = False
    applied: tuple[int, int] = (0, 0)  # before the newest note, and by it
    _dropped: tuple[int, int] = (0, 0)  # pieces, and the rows in them

    def need(self, number: int) -> None:
        """Let piece `number` come, unless the epoch ends before it."""
        while len(self.pieces) <= number and not self.ended:
            piece = next(self.coming, None)
            if piece is None:
                self.ended = True
            elif piece.rows:
                self.pieces.append(piece)

    def note_applied(self, rows: int) -> None:
        """Drop the blocks whose rows were applied before the note before this one: a step may be repeated."""
        if rows <= self.applied[1]:
            return
        self.applied = (self.applied[1], rows)
        number, before = self._dropped
        while number < len(self.pieces) and before + self.pieces[number].rows <= self.applied[0]:
            before += self.pieces[number].rows
            self.pieces[number] = self.pieces[number].dropped()
            number += 1
        self._dropped = (number, before)

    def close(self) -> None:
        """End the execution, and drop all references."""
        self.ended = True
        self.pieces = [piece.dropped() for piece in self.pieces]
        close = getattr(self.coming, "close", None)
        if close is not None:
            close()
        self.coming = iter(())


class DatasetServer:
    """The actor. `datasets` by the name of `get_dataset_shard`."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self._datasets = dict(datasets)
        self._epochs: dict[str, list[Epoch]] = {name: [] for name in self._datasets}
        self._whole: dict[str, list[Piece]] = {}

    def pieces(self, name: str, epoch: int, have: int, applied: int) -> tuple[list[Piece], bool]:
        """Return the pieces of an epoch from number `have` on, at least one, and whether that was the last one.

        `applied`: rows of the epoch in steps that the caller has applied.
        """
        found = self._epoch(name, epoch)
        found.note_applied(applied)
        found.need(have)
        return found.pieces[have:], found.ended

    def some(self, name: str) -> Piece | None:
        """Return rows of the epoch that is read, whichever; None where there are none."""
        epochs = self._epochs[name]
        held = (piece for epoch in reversed(epochs) for piece in epoch.pieces if piece.block is not None)
        return next(held, None) or next(iter(self.whole(name)), None)

    def whole(self, name: str) -> list[Piece]:
        """Return all rows, which are computed once and stay in the object store: for evaluation, and by number."""
        if name not in self._whole:
            computed = self._datasets[name].materialize()
            self._whole[name] = [piece for piece in _pieces(computed) if piece.rows]
        return self._whole[name]

    def schema(self, name: str) -> Any:
        """Return the dataset's schema."""
        return self._datasets[name].schema()

    def _epoch(self, name: str, number: int) -> Epoch:
        epochs = self._epochs[name]
        for epoch in epochs:
            if epoch.number == number:
                return epoch
        for epoch in epochs:
            epoch.close()
        epochs.append(Epoch(number, _pieces(self._datasets[name])))
        del epochs[:-2]  # a worker may ask for the end of the one before
        return epochs[-1]


def _pieces(dataset: Any) -> Iterator[Piece]:
    for block, first, rows in blocks_of(dataset):
        yield Piece(rows, first, (block,))


def start_server(datasets: Mapping[str, Any]) -> Any:
    """Start the actor on the node of the calling program. It ends with its handles."""
    given = {name: each() if callable(each) else each for name, each in datasets.items()}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(DatasetServer).options(num_cpus=0, scheduling_strategy=here).remote(given)
