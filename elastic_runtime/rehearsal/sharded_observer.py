"""The observer of a training whose state is sharded: `prepare(shard=...)`.

Every worker gathers the whole state before each attempt at a step, and records a checksum of each tensor: whatever has
happened meanwhile (a failed step, a resharding for another size, a return to a checkpoint), a step begins with one
state. All workers of a generation call `between_steps` and `summed` equally often, so they may gather there.

Objects beside the state are not compared: a module beside it may gather its shards on one worker only, and wait.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from elastic_runtime.errors import ElasticError
from elastic_runtime.rehearsal.observer import Observer
from elastic_runtime.rehearsal.records import fingerprints_of, flattened
from elastic_runtime.rehearsal.timetable import LAST, SAVED, SHARDS_SAVED
from elastic_runtime.sharded import files
from elastic_runtime.state import checkpoint
from elastic_runtime.state.layouts import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elastic_runtime.rehearsal.orders import RehearsedOrders
    from elastic_runtime.rehearsal.records import Fingerprints
    from elastic_runtime.sharded.sharding import Sharding
    from elastic_runtime.state.training_state import TrainingState

    Whole = dict[str, torch.Tensor]


class ShardedObserver(Observer):
    """One worker. See `Observer`; checkpoints are written into the rehearsal's directory."""

    def __init__(
        self,
        orders: RehearsedOrders,
        state: TrainingState,
        workers: Callable[[], int],
        models: Sequence[torch.nn.Module],
        draws: Callable[[], bool],
        sharding: Sharding,
    ) -> None:
        super().__init__(orders, state, workers, models, draws)
        self._sharding = sharding
        self._last = -1  # the step that began last, which may be repeated
        directory = orders.directory / "checkpoints"
        directory.mkdir(mode=0o700, exist_ok=True)
        sharding.checkpoints.directory = str(directory)
        self._records.write("sharded")

    def between_steps(self) -> None:
        """A step is about to begin, possibly again, with another number of workers or from a checkpoint."""
        step, whole = self._step, self._whole_state()
        sums = {name: _checksum(tensor) for name, tensor in whole.items()}
        recomputed = self._last < step <= self._between  # after a return: another size may have rounded otherwise
        self._last = step
        if not recomputed:
            self._records.write("gathered", step=step, workers=self._workers(), sums=sums)
        if step > self._between:
            self._between = step
            self._records.write(
                "state", step=step, workers=self._workers(), fingerprints=fingerprints_of(whole.items()), objects=[]
            )
            if step == SHARDS_SAVED:
                self._sharding.saves.save_now()
            if step == SAVED:
                self._save_and_read(step, sums)
            if step > LAST:
                self._orders.release()
        self._begin_attempt(step)

    def _gradients(self) -> Fingerprints:
        with torch.no_grad():
            return fingerprints_of((name, _whole(p.grad)) for name, p in self._state.parameters())

    def _whole_state(self) -> Whole:
        """Return all tensors and numbers of the state that all workers share, gathered from all of them."""
        with torch.no_grad():
            return dict(self._gathered())

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in flattened(self._captured()):
            whole = _whole(tensor)
            assert whole is not None
            yield name, whole

    def _save_and_read(self, step: int, before: dict[str, str]) -> None:
        """Write the parts, and compare what is read from them for a job of one worker."""
        self._sharding.saves.save_now()
        try:
            newest = files.load_newest(self._sharding.checkpoints.directory)
        except ElasticError as error:
            self._records.write("unsaved", step=step, message=str(error))
            return
        if newest is None or newest[0] != self._state.position.step:
            self._records.write("unsaved", step=step, message="no whole checkpoint of this step can be read")
            return
        after = {name: _checksum(tensor) for name, tensor in flattened(self._shared(newest[1]))}
        self._records.write("reread", step=step, before=before, after=after)


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor of all its shards, on all workers of the generation."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(checkpoint.bytes_of(flat(tensor.detach().cpu()))).hexdigest()
