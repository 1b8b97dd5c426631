"""The loss that is logged: that of this worker's iterations, weighted within a step as their gradients are."""

from __future__ import annotations


class MeanLoss:
    """Over steps, of this worker's part of each."""

    def __init__(self) -> None:
        self.newest = 0.0
        """Return the loss of the last step."""
        self._step: list[tuple[float, float]] = []
        self._unlogged: list[float] = []
        self._summed, self._steps = 0.0, 0

    def note(self, loss: float, weight: float | None) -> None:
        """Record the loss of one iteration; a `weight` of None is the same for all iterations of a step."""
        self._step.append((loss, 1.0 if weight is None else weight))

    def end_step(self) -> None:
        """End a step: compute its mean loss, and add it to the sums."""
        total = sum(weight for _, weight in self._step)
        self.newest = sum(loss * weight for loss, weight in self._step) / (total or 1.0)
        self._step = []
        self._unlogged.append(self.newest)
        self._summed, self._steps = self._summed + self.newest, self._steps + 1

    def since_the_last_log(self) -> float:
        """The mean over the steps since it was last asked for."""
        found, self._unlogged = self._unlogged, []
        return sum(found) / max(1, len(found))

    @property
    def of_all(self) -> float:
        """The mean over all steps that this worker took part in."""
        return self._summed / max(1, self._steps)
