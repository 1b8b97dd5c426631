"""When a sharded job's checkpoints are written: rank 0 says so in the sum at a step's end, and all write their parts.

The loop stands still only while this rank's parts are copied; a thread writes the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_runtime.errors import CheckpointError
from elastic_runtime.sharded import files

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.reporting import Reporter
    from elastic_runtime.sharded.files import Saved
    from elastic_runtime.sharded.state import Parts

_log = logging.getLogger("elastic_runtime")


class ShardKeeper:
    """Writes one rank's parts into `directory` ("": none); rank 0 leaves `keep` checkpoints there."""

    def __init__(self, directory: str, reporter: Reporter, *, every_s: float, keep: int) -> None:
        self.directory = directory
        self._reporter, self._every_s, self._keep = reporter, every_s, keep
        self._saved_at = time.monotonic()
        self._writer: threading.Thread | None = None

    def due(self) -> bool:
        """Whether the time for another one has come, and the last one is written."""
        writing = self._writer is not None and self._writer.is_alive()
        return bool(self.directory) and not writing and time.monotonic() - self._saved_at >= self._every_s

    def save_soon(self, saved: Saved, rank: int, capture: Callable[[], Parts]) -> None:
        """Copy the parts and have them written."""
        self.settle()
        began = time.monotonic()
        parts = capture()
        copied = [[tensor.to("cpu", copy=True) for tensor in tensors] for tensors in (parts.shards, parts.replicated)]
        parts = replace(parts, shards=copied[0], replicated=copied[1])
        self._saved_at = time.monotonic()
        stall_ms = (self._saved_at - began) * 1e3
        self._writer = threading.Thread(
            target=self._write, args=(saved, rank, parts, stall_ms), name="elastic-checkpoint", daemon=True
        )
        self._writer.start()

    def save_now(self, saved: Saved, rank: int, capture: Callable[[], Parts]) -> None:
        """Write the parts before returning."""
        if not self.directory:
            _log.warning("ELASTIC_CHECKPOINT_DIR is not set: the %d steps trained so far are lost", saved.step)
            return
        self.settle()
        self._write(saved, rank, capture(), 0.0)

    def settle(self) -> None:
        """Return when nothing is being written any more."""
        if self._writer is not None:
            self._writer.join()

    def note_restored(self, step: int) -> None:
        """The training goes on from a checkpoint of this step."""
        self._saved_at = time.monotonic()
        self._reporter.line("restored", step=step)

    def _write(self, saved: Saved, rank: int, parts: Parts, stall_ms: float) -> None:
        began, captured_at = time.monotonic(), time.time()
        try:
            path = files.write_part(self.directory, saved, rank, parts)
        except CheckpointError as error:
            _log.warning("%s; training goes on without it", error)
            self._reporter.line("checkpoint_failed", step=saved.step, why=str(error))
            return
        if rank == 0:
            files.prune(self.directory, self._keep, saved.step)
        took_ms = (time.monotonic() - began) * 1e3
        self._reporter.checkpoint_at = captured_at
        self._reporter.line("checkpoint", step=saved.step, path=str(path), stall_ms=stall_ms, write_ms=took_ms)
