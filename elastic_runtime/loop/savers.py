"""Saving a training: whole, by rank 0, or in shards, each worker its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_runtime.process.preemption import StableState
    from elastic_runtime.process.reporting import Reporter
    from elastic_runtime.reduction.step_modes import Mode
    from elastic_runtime.sharded.sharding import Sharding
    from elastic_runtime.state.checkpoint_schedule import Keeper
    from elastic_runtime.state.random_streams import RandomStreams
    from elastic_runtime.state.training_state import TrainingState


class Saving:
    """`sharding`: where the state is held in shards. `leader`: whether this worker is rank 0."""

    sharding: Sharding | None = None

    def __init__(self, keeper: Keeper, streams: RandomStreams, reporter: Reporter) -> None:
        self._keeper, self._streams, self._reporter = keeper, streams, reporter

    def load(self, state: TrainingState) -> bool:
        """Load the newest complete checkpoint; return whether there is one."""
        found = self._keeper.load()
        if found is None:
            return False
        state.load(found[1])
        self._streams.load(found[1]["streams"])
        self._reporter.line("restored", step=found[0])
        return True

    def if_due(self, state: TrainingState, *, leader: bool) -> None:
        """Between two steps: start to save a checkpoint if one is due."""
        if self.sharding:
            self.sharding.save_if_agreed()
        elif leader:
            self._keeper.save_if_due(state.position.step, partial(self._capture, state))

    def now(self, state: TrainingState) -> None:
        """Save before returning."""
        if self.sharding:
            self.sharding.save_now()
        else:
            self._keeper.save_now(state.position.step, partial(self._capture, state))

    def in_time(self, state: TrainingState, mode: Mode, stable_state: StableState, *, leader: bool) -> bool:
        """From another thread: rank 0 saves the state of the beginning of a step that takes long. Whether that is all.

        With sharded state all workers do, and stay ready to do so in the next step, which others may have reached.
        """
        if self.sharding and self.sharding.keeper.directory:
            self.sharding.save_in_time(mode.rewound, stable_state.use)
            return False
        if self.sharding or not leader:
            return True
        return self._keeper.save_soon(state.position.step, lambda: mode.rewound(self._capture(state)), stable_state.use)

    def settle(self) -> None:
        """Return when nothing is being written any more."""
        self._keeper.settle()
        if self.sharding:
            self.sharding.keeper.settle()

    def _capture(self, state: TrainingState) -> dict[str, Any]:
        return {**state.capture(), "streams": self._streams.capture()}
