"""Gradients of an earlier step that are still there when a step begins: a loop that does not clear or apply them.

torch would add to them. Here they are no part of the state: a worker that joins does not have them, so the sum would
depend on the number of workers and its history. Zeros, as `zero_grad(set_to_none=False)` leaves them, are no leftovers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_FIRST, _EVERY = 8, 64
"""Reading a gradient waits for its device, so the first steps are looked at, and then one in `_EVERY`."""


class Leftovers:
    """Counts steps, and looks at some of them; not at the first one, which follows what is no part of the training."""

    def __init__(self) -> None:
        self._step = -1

    def look(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> frozenset[str]:
        """Return the names of the parameters whose gradients are not zero; none in most steps."""
        self._step += 1
        if self._step == 0 or (self._step >= _FIRST and self._step % _EVERY):
            return frozenset()
        return frozenset(name for name, p in parameters if p.grad is not None and _any(p.grad))


def _any(gradient: torch.Tensor) -> bool:
    """Whether an element is not zero; of a shard, among this worker's own, without a collective."""
    own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool((own.coalesce().values() if own.is_sparse else own).any())


def uncleared(name: str) -> LoopError:
    """Return the error for a parameter whose gradients would be added to an earlier step's."""
    return LoopError(
        f"the gradients of an earlier step were not cleared before parameter {name!r} got another one: they would add "
        "up, and a worker that joins does not have the first; job.backward adds micro-batches up by itself, so call "
        "optimizer.step() and optimizer.zero_grad() in every iteration (they act where a step is complete), those of "
        "every optimizer, and give global_batch_size in place of accumulating in the loop"
    )


_IN_A_ROW = 2
"""Steps whose gradients may stay where they are."""


class UnappliedSteps:
    """Finds a loop that accumulates gradients by itself: it would apply those of some steps only, or of none."""

    def __init__(self) -> None:
        self.steps_are_applied = False  # the script has called optimizer.step()
        self._step: int | None = None  # the step before, if no optimizer acted on it
        self._in_a_row = 0

    def note(self, step: int | None) -> None:
        """A step is over; `step`: its number, if no optimizer acted on it."""
        self._step = step

    def check(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Raise LoopError if the gradients of the step before are still there as another one begins.

        At once if the script has called `optimizer.step()` before, in the third step if it never has.
        """
        step, self._step = self._step, None
        if step is None or all(p.grad is None or not _any(p.grad) for _, p in parameters):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self.steps_are_applied or self._in_a_row == _IN_A_ROW:
            raise LoopError(
                f"the gradients of step {step} were neither applied nor cleared; job.backward adds micro-batches up by "
                "itself, so call optimizer.step() and optimizer.zero_grad() in every iteration (they act where a step "
                "is complete), and give global_batch_size in place of accumulating in the loop"
            )
