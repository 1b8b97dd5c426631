"""What this worker tells: JSON lines to its own file, progress to the coordinator."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper

    from elastic_runtime.progress import Progress

PROGRESS_EVERY_S = 1.0


class Reporter:
    """Appends lines {"event", "at" (seconds since the epoch), "worker", ...} and passes progress on, once a second."""

    def __init__(
        self, path: str, worker: str, send_progress: Callable[[dict[str, Any]], None], shown: Progress
    ) -> None:
        self._file: TextIOWrapper | None = open(path, "a", buffering=1, encoding="utf-8") if path else None  # noqa: PTH123, SIM115
        self._worker, self._send = worker, send_progress
        self._sent_at = float("-inf")
        self._metrics: dict[str, float] = {}
        self._listeners: dict[str, list[Callable[[dict[str, Any]], None]]] = {}
        self._workers, self._samples, self._since = 0, 0, 0.0  # since the last change of the size
        self.checkpoint_at: float | None = None
        self._shown = shown
        self.listen("resize", shown.resized)

    def close(self) -> None:
        """Nothing is shown any more."""
        self._shown.close()

    def line(self, event: str, **fields: object) -> None:
        """Append one line."""
        if self._file:
            row = {"event": event, "at": time.time(), "worker": self._worker, **fields}
            self._file.write(json.dumps(row) + "\n")
        for callback in self._listeners.get(event, []):
            callback({"event": event, **fields})

    def listen(self, event: str, callback: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Call it with each line of this event, where and when it is written; returned, to be used as a decorator."""
        self._listeners.setdefault(event, []).append(callback)
        return callback

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append the script's own figures; the newest go with the next progress."""
        self._metrics.update(metrics)
        self.line("metrics", step=step, **metrics)

    def note_step(self, samples: int, workers: int) -> None:
        """So many workers are about to apply a step of so many samples. The first one at a size starts the clock."""
        if workers != self._workers:
            self._workers, self._samples, self._since = workers, 0, time.monotonic()
        else:
            self._samples += samples

    def progress(self, step: int, epoch: int, total_steps: int | None, *, force: bool = False) -> None:
        """Tell how far the training is, if the last time is a second ago, or `force`."""
        self._shown.show(step, total_steps, epoch, self._workers or 1, self._metrics)
        now = time.monotonic()
        if not force and now - self._sent_at < PROGRESS_EVERY_S:
            return
        self._sent_at = now
        self._send(
            {
                "step": step,
                "epoch": epoch,
                "total_steps": total_steps,
                "metrics": dict(self._metrics),
                "checkpoint_at": self.checkpoint_at,
                "throughput": self._samples / (now - self._since) if self._samples else None,
                "workers": self._workers or None,
            }
        )
