"""Reports of this worker: JSON lines to its own file, progress to the coordinator."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import time
import weakref
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import SettingsError
from elastic_runtime.process.timing import Phases, StepClock, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper

    from elastic_runtime.process.progress_bar import Progress

PROGRESS_EVERY_S = 1.0
TIMES_EVERY_S = 5.0
_SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}

_log = logging.getLogger("elastic_runtime")


class Reporter:
    """Appends lines {"event", "at" (seconds since the epoch), "worker", ...} and sends progress once a second.

    `send(event, **fields)` sends to the coordinator. Raises SettingsError if the file cannot be
    opened. Where the machine lacks space, inodes or descriptors, training continues without it.
    """

    def __init__(self, path: str, worker: str, send: Callable[..., None], shown: Progress) -> None:
        self._path, self._file = path, self._opened(path)
        self._worker, self._send = worker, send
        self._sent_at = float("-inf")
        self._timed_at = time.monotonic()
        self._times: StepTimes | None = None  # the newest
        self.clock, self.phases = StepClock(), Phases()
        self._metrics: dict[str, float] = {}
        self._listeners: dict[str, list[Callable[[dict[str, Any]], None]]] = {}
        self._workers, self._samples, self._since = 0, 0, 0.0  # since the last change of the size
        self._batch = 0  # the samples of the largest step since then
        self.noise_scale: Callable[[], float | None] = lambda: None
        self.gain: Callable[[], float | None] = lambda: None
        self.checkpoint_at: float | None = None
        self._shown = shown
        self.listen("resize", shown.resized)

    def close(self) -> None:
        """Close the progress bar, and the file until a line follows."""
        self._shown.close()
        if self._file is not None:
            _close(self._file)

    def line(self, event: str, **fields: object) -> None:
        """Append one line, and call the script's callbacks for it."""
        if self._file is not None and self._file.closed:
            self._file = self._opened(self._path)
        if self._file:
            self._append(self._file, {"event": event, "at": time.time(), "worker": self._worker, **fields})
        for callback in self._listeners.get(event, []):
            try:
                callback({"event": event, **fields})
            except Exception:  # noqa: BLE001  (the script's)
                _log.exception("a callback for %r failed; training continues", event)

    def _opened(self, path: str) -> TextIOWrapper | None:
        if not path:
            return None
        try:
            file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: PTH123, SIM115
        except OSError as error:
            if error.errno in _SHORTAGES:
                _log.warning("ELASTIC_REPORT_FILE cannot be opened (%s); training continues without it", error)
                return None
            raise SettingsError(f"ELASTIC_REPORT_FILE {path!r} cannot be opened ({error}); make its folder") from error
        weakref.finalize(self, _close, file).atexit = False  # a training that was dropped warns of no open file
        return file

    def _append(self, file: TextIOWrapper, row: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(row) + "\n")
        except OSError as error:
            self._file = None
            _log.warning("ELASTIC_REPORT_FILE cannot be written to any more (%s); training continues without it", error)

    def listen(self, event: str, callback: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Call `callback` with each line of this event as it is written; returns it, to be used as a decorator."""
        self._listeners.setdefault(event, []).append(callback)
        return callback

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append the script's own metrics; the newest are sent with the next progress.

        JSON has neither NaN nor infinity: such a value is a string in the file, sent as one, and logged as a warning.
        """
        finite, not_finite = _divided(metrics)
        for name, value in not_finite.items():
            _log.warning("job.report: %s is %s at step %d", name, value, step)
        self._metrics.update(metrics)
        self.line("metrics", step=step, **finite, **not_finite)

    def note_step(self, samples: int, workers: int) -> None:
        """Count a step of `samples` samples with `workers` workers. The first one after a resize starts the clock."""
        if workers != self._workers:
            self._workers, self._samples, self._since, self._batch = workers, 0, time.monotonic(), samples
        else:
            self._samples += samples
            self._batch = max(self._batch, samples)

    def times(self, step: int, workers: int, *, force: bool = False) -> None:
        """Report this worker's step times, at most every TIMES_EVERY_S seconds unless `force`."""
        now = time.monotonic()
        if not force and now - self._timed_at < TIMES_EVERY_S:
            return
        self._timed_at = now
        times = self.clock.take()
        if times is None:
            return
        self._times = times
        measured = {
            "step_ms": round(times.step_ms, 3),
            "wait_ms": round(times.wait_ms, 3),
            "slowness": round(times.slowness, 3),
        }
        self.line("steps", step=step, workers=workers, steps=times.steps, samples_per_s=self._throughput(), **measured)
        self._send("StepsTimed", **measured)

    def _throughput(self) -> float | None:
        return self._samples / (time.monotonic() - self._since) if self._samples else None

    def progress(self, step: int, epoch: int, total_steps: int | None, *, force: bool = False) -> None:
        """Report the training's progress, at most every PROGRESS_EVERY_S seconds unless `force`."""
        self._shown.show(step, total_steps, epoch, self._workers or 1, self._metrics)
        now = time.monotonic()
        if not force and now - self._sent_at < PROGRESS_EVERY_S:
            return
        self._sent_at = now
        gain = self.gain()
        finite, not_finite = _divided(({} if gain is None else {"gain": gain}) | self._metrics)
        self._send(
            "ProgressReported",
            step=step,
            epoch=epoch,
            total_steps=total_steps,
            metrics=finite,
            not_finite=not_finite,
            checkpoint_at=self.checkpoint_at,
            throughput=self._throughput(),
            step_ms=None if self._times is None else self._times.step_ms,
            workers=self._workers or None,
            batch_size=self._batch or None,
            noise_scale=self.noise_scale(),
        )


def _divided(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the finite metrics, and the others as text: "nan", "inf" or "-inf"."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return finite, {name: str(value) for name, value in metrics.items() if name not in finite}


def _close(file: TextIOWrapper) -> None:
    with contextlib.suppress(OSError):  # a full disk
        file.close()


class MetricRows:
    """One row of metrics for each step, from rank 0, whatever happens to the step and to rank 0.

    A step may be computed twice, and its first result dropped; and the worker that is rank 0 may be lost before its
    report of a step has left. So every worker keeps the row of its newest step, and rank 0 emits it once there is one
    of a later step. A worker that becomes rank 0 in between emits the row that the lost one has not.

    `leads()`: whether this worker is rank 0. `emit(metrics, step=...)` is called with each row.
    """

    def __init__(self, leads: Callable[[], bool], emit: Callable[..., object]) -> None:
        self._leads, self._emit = leads, emit
        self._step, self._row = -1, dict[str, float]()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add figures of a step: those of a name replace earlier ones of the same step."""
        if step != self._step:
            self.flush()
            self._step = step
        self._row.update(metrics)

    def flush(self, _line: dict[str, Any] | None = None) -> None:
        """Emit the newest row, on rank 0: no other one of its step follows."""
        row, self._row = self._row, {}
        if row and self._leads():
            self._emit(row, step=self._step)
