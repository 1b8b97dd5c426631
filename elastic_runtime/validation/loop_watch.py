"""The interface of what looks at a loop's first iterations for what would be wrong on several workers."""

from __future__ import annotations


class LoopWatch:
    """Looks at iterations until `end`. What it finds raises LoopError or UsageError where it happens."""

    def before_iteration(self, samples: int) -> None:
        """Another iteration begins, over `samples` samples."""
        raise NotImplementedError

    def before_backward(self) -> None:
        """A backward pass of the job's begins."""

    def accept(self) -> None:
        """What was changed in this iteration so far belongs to the step's beginning."""

    def end(self) -> None:
        """Look no more: remove hooks."""
        raise NotImplementedError
