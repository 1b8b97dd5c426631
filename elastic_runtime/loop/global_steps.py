"""A loop of global steps: one turn of the script's loop is one step, with its micro-batches in a loop inside.

The inner loop ends where the step is complete, at any size. So a step that is repeated after a loss is repeated within
it, and what follows it (clipping, logging, `optimizer.step()`) is what a plain loop has there. A function that computes
one micro-batch, called as often as needed, was rejected: it takes the loop's variables out of sight, and a debugger's
and a reader's way through the step with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elastic_runtime.loop.session import Session


class GlobalSteps:
    """Iterates over (step, its micro-batches). `len()` is that of the loader."""

    def __init__(self, session: Session, batches: Iterable[Any]) -> None:
        self._session, self._batches = session, batches

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError where they have none, as for a generator

    def __iter__(self) -> Iterator[tuple[int, MicroBatches]]:
        session = self._session
        batches = iter(self._batches)
        for first in batches:
            step = session.steps_before
            micro_batches = MicroBatches(session, first, batches)
            yield step, micro_batches
            if not micro_batches.over:
                raise LoopError(
                    f"the loop over the micro-batches of step {step} was not run to its end; run it once in each turn, "
                    "with job.backward (or job.skip) in each iteration, and optimizer.step() after it"
                )


class MicroBatches:
    """This worker's micro-batches of one step, in the order in which they are computed; some twice after a loss."""

    def __init__(self, session: Session, first: Any, batches: Iterator[Any]) -> None:
        self._session, self._first, self._batches = session, first, batches
        self.over = False

    def __iter__(self) -> Iterator[Any]:
        if self.over:
            raise LoopError("the micro-batches of a step are iterated twice; their gradients are summed already")
        yield self._first
        while not self._session.applied:
            try:
                batch = next(self._batches)
            except StopIteration:  # after a loss others are an epoch ahead, and this worker has their state
                break
            yield batch
        self.over = True
