"""Bounds how often a failed collective is repeated at one point of the training, between the same members.

A lost peer changes the members. What fails without one, such as a sum that the library refuses, would be repeated
permanently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastic_runtime.errors import RunError

if TYPE_CHECKING:
    from elastic_runtime.errors import CollectiveError
    from elastic_runtime.state.training_state import TrainingState

MOST_IN_A_ROW: Final = 5


class RepeatedFailures:
    """Counts the failures in a row at one point of the training."""

    def __init__(self) -> None:
        self._point: object = None
        self._in_a_row = 0

    def note(self, error: CollectiveError, members: tuple[str, ...], state: TrainingState) -> None:
        """Count one. RunError if it is one too many."""
        point = (members, state.position.step, state.rounds)
        self._in_a_row = self._in_a_row + 1 if point == self._point else 1
        self._point = point
        if self._in_a_row >= MOST_IN_A_ROW:
            raise RunError(
                f"the workers could not exchange data at step {state.position.step} {MOST_IN_A_ROW} times in a row, "
                f"and none of them was lost; the last failure: {error}"
            ) from error
