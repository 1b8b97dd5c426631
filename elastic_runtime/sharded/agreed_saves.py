"""When a worker writes its parts of a sharded state: at a step on which all have agreed, so that all are of one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CollectiveError
from elastic_runtime.sharded.files import Saved
from elastic_runtime.sharded.holdings import new_number
from elastic_runtime.sharded.state import take_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.sharded.checkpoint_schedule import ShardedCheckpoints
    from elastic_runtime.sharded.state import Parts
    from elastic_runtime.state.training_state import TrainingState

_log = logging.getLogger("elastic_runtime")


class AgreedSaves:
    """`group()` returns the members in force, `capture()` this rank's parts, `capture_standing()` the state within a
    step.
    """

    def __init__(
        self,
        checkpoints: ShardedCheckpoints,
        state: TrainingState,
        group: Callable[[], Group],
        capture: Callable[[], Parts],
        capture_standing: Callable[[], dict[str, Any]],
    ) -> None:
        self._checkpoints, self._state, self._group = checkpoints, state, group
        self._capture, self._capture_standing = capture, capture_standing
        self._number = 0  # of the checkpoint that was agreed on; 0: none
        self._number_in_time = 0  # that of checkpoints without agreement
        self._saved_in_time = -1  # the step of the last one
        self.preempted = False  # a worker was asked to leave, as all know

    def begin_generation(self, number_in_time: int) -> None:
        """Use this number for checkpoints without agreement; it is the same on all members."""
        self._number_in_time, self._saved_in_time = number_in_time, -1
        self._number = 0  # a joiner has not agreed

    def due(self) -> int:
        """Rank 0: the number of the checkpoint that is to be made after this step; 0: none."""
        return new_number() if self._checkpoints.due() else 0

    def agreed(self, *, save: int, preempted: bool) -> None:
        """Record what the workers agreed on in the sum at a step's end."""
        self._number = save
        self.preempted |= preempted

    def save_if_agreed(self) -> None:
        """Between two steps: write this rank's parts if all workers agreed."""
        number, self._number = self._number, 0
        if not self._writes:
            return
        self._checkpoints.prepare(self._capture)
        if number:
            self._checkpoints.save_soon(self._saved(number), self._group().rank, self._capture)

    def save_now(self) -> None:
        """Write all parts before returning; all workers call this at the same step."""
        group = self._group()
        try:
            number = int(group.all_gather(torch.tensor([new_number()]))[0])
        except CollectiveError as error:
            _log.warning("the steps since the last checkpoint are lost with a worker: %s", error)
            return
        if self._writes:
            self._checkpoints.save_now(self._saved(number), group.rank, self._capture)

    def save_in_time(
        self,
        rewound: Callable[[dict[str, Any]], dict[str, Any]],
        standing_still: Callable[[Callable[[], None]], bool],
    ) -> None:
        """From another thread, during a long step: write the parts of the step's beginning, once.

        No agreement is needed. If all workers must leave, they save in the same step, because none can begin the next
        one alone, or else in the next one. A checkpoint that not all workers have written is not valid.
        """

        def save() -> None:
            if not self._writes:
                return
            step, rank = self._state.position.step, self._group().rank
            if step != self._saved_in_time:
                self._saved_in_time = step
                saved = self._saved(self._number_in_time)
                self._checkpoints.save_soon(saved, rank, lambda: take_apart(rewound(self._capture_standing()), {}))

        standing_still(save)

    @property
    def _writes(self) -> bool:
        """Whether this rank is in the first replica group, which writes for all."""
        group = self._group()
        return group.grid.group_of(group.rank) == 0

    def _saved(self, number: int) -> Saved:
        return Saved(self._state.position.step, number, self._group().grid.shards)
