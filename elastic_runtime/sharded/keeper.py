"""The schedule of a sharded job's checkpoints: rank 0 decides in the sum at a step's end, and all write their parts.

The loop stands still only while this rank's parts are copied; a thread writes the copy.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from elastic_runtime.sharded import files
from elastic_runtime.state.checkpoint_schedule import BackgroundWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from elastic_runtime.sharded.files import Saved
    from elastic_runtime.sharded.state import Parts


class ShardKeeper(BackgroundWriter):
    """Writes one rank's parts into `directory` ("": none); rank 0 leaves `keep` checkpoints there."""

    def prepare(self, capture: Callable[[], Parts]) -> None:
        """Allocate the memory of the copy in a thread, once, before the first copy is due."""
        self._prepare(lambda: _tensors(capture()))

    def save_soon(self, saved: Saved, rank: int, capture: Callable[[], Parts]) -> None:
        """Copy the parts and have them written."""
        self.settle()
        began = time.monotonic()
        parts = capture()
        copied, shards = self._copies.take(_tensors(parts)), len(parts.shards)
        parts = replace(parts, shards=copied[:shards], replicated=copied[shards:])
        self._start(began, partial(self._write, saved, rank, parts))

    def save_now(self, saved: Saved, rank: int, capture: Callable[[], Parts]) -> None:
        """Write the parts before returning."""
        if self._says_what_is_lost(saved.step):
            return
        self.settle()
        self._write(saved, rank, capture(), 0.0)

    def note_restored(self, step: int) -> None:
        """Record that the training continues from a checkpoint of this step."""
        self._saved_at = time.monotonic()
        self._reporter.line("restored", step=step)

    def _write(self, saved: Saved, rank: int, parts: Parts, stall_ms: float) -> None:
        def save() -> Path:
            path = files.write_part(self.directory, saved, rank, parts)
            if rank == 0:
                files.prune(self.directory, self._keep, saved.step)
            return path

        self._carry_out(saved.step, stall_ms, save)


def _tensors(parts: Parts) -> list[torch.Tensor]:
    return [*parts.shards, *parts.replicated]
