"""Rank 0's progress on the terminal: tqdm's bar if tqdm is installed, else one line that is rewritten."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

REDRAW_S = 0.1


class Bar(Protocol):
    """A progress bar of one training."""

    def draw(self, step: int, text: str) -> None:
        """Show the newest step, with `text` beside it."""

    def show_message(self, text: str) -> None:
        """Print a line above the bar."""

    def close(self) -> None:
        """Stop drawing."""


class Progress:
    """The training's progress on `stream`, if there is one. `wanted` None: only if that is a terminal."""

    def __init__(self, stream: TextIO | None, *, wanted: bool | None = None) -> None:
        self._stream = stream
        self._on = _is_terminal(stream) if wanted is None else wanted
        self._bar: Bar | None = None
        self._drawn_at = 0.0

    def show(self, step: int, total: int | None, epoch: int, workers: int, metrics: Mapping[str, float]) -> None:
        """Show that the training is at `step`; draws at most ten times a second, and at the end."""
        now = time.monotonic()
        if self._stream is None or not self._on or (now - self._drawn_at < REDRAW_S and step != total):
            return
        if self._bar is None:
            self._bar = _make_bar(self._stream, step, total)
        self._drawn_at = now
        figures = "".join(f", {name} {value:.4g}" for name, value in metrics.items())
        self._bar.draw(step, f"epoch {epoch}, {workers} {'worker' if workers == 1 else 'workers'}{figures}")

    def resized(self, line: Mapping[str, Any]) -> None:
        """The membership changed: the report file's line."""
        if self._bar is not None and line["rank"] == 0:
            size = len(line["members"])
            self._bar.show_message(
                f"step {line['step']}: {size} {'worker' if size == 1 else 'workers'} from here on "
                f"({line['cause']}, {line['pause_ms']:.0f} ms)"
            )
        elif self._bar is not None:
            self.close()

    def close(self) -> None:
        """Stop; what was drawn last stays on the terminal."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


class PlainLine:
    """A bar without tqdm: one line with step, rate and metrics."""

    def __init__(self, stream: TextIO, step: int, total: int | None) -> None:
        self._stream, self._total = stream, total
        self._first, self._began = step, time.monotonic()
        self._width = 0

    def draw(self, step: int, text: str) -> None:
        """Rewrite the line."""
        pace = (step - self._first) / max(time.monotonic() - self._began, 1e-9)
        of = f"/{self._total}" if self._total is not None else ""
        self._write(f"step {step}{of}, {pace:.1f}/s, {text}", "")

    def show_message(self, text: str) -> None:
        """Print the text, and begin a new line."""
        self._write(text, "\n")
        self._width = 0

    def close(self) -> None:
        """End the current line."""
        if self._width:
            self._stream.write("\n")

    def _write(self, line: str, end: str) -> None:
        self._stream.write(f"\r{line:<{self._width}}{end}")
        self._stream.flush()
        self._width = len(line)


class TqdmBar:
    """A bar drawn by tqdm."""

    def __init__(self, tqdm: Any, stream: TextIO, step: int, total: int | None) -> None:
        self._tqdm, self._stream = tqdm, stream
        self._bar = tqdm(total=total, initial=step, file=stream, unit="step", dynamic_ncols=True)

    def draw(self, step: int, text: str) -> None:
        """Update tqdm's bar."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def show_message(self, text: str) -> None:
        """Print the text by tqdm, above its bar."""
        self._tqdm.write(text, file=self._stream)

    def close(self) -> None:
        """Close tqdm's bar."""
        self._bar.close()


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _make_bar(stream: TextIO, step: int, total: int | None) -> Bar:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return PlainLine(stream, step, total)
    return TqdmBar(tqdm, stream, step, total)
