"""Runs a compiled pipeline on this machine with kfp.local."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp import components, local

from kfp_gpuquota.errors import JobFailedError

if TYPE_CHECKING:
    from types import FrameType

    from kfp_gpuquota.dsl.pipelines.pipeline_file import Package

Json = dict[str, Any]
_COLOUR = re.compile(r"\x1b\[\d+m")


def run_locally(package: Package, arguments: Json, root: str = "") -> Json:
    """Run the pipeline, each step in this Python environment, and return its outputs. Raises JobFailedError.

    SIGTERM interrupts the steps, as Ctrl-C does: their jobs are cancelled.
    """
    local.init(local.SubprocessRunner(use_venv=False), **({"pipeline_root": root} if root else {}))
    pipeline = components.load_component_from_text(package.text())
    stop = _Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.on_signal)
    try:
        outputs: Json = pipeline(**arguments).outputs
    except RuntimeError as error:
        stop.check()
        raise JobFailedError(_COLOUR.sub("", str(error))) from None
    return outputs


class _Stop:
    """The signal that has stopped this run, if any.

    It is stored because kfp.local may swallow an exception of a signal handler and report a failed step instead.
    """

    def __init__(self) -> None:
        self._number = 0

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward SIGTERM to the steps, children of this process, and raise. The terminal sends them Ctrl-C itself."""
        self._number = number
        if number == signal.SIGTERM:
            _interrupt_children()
        self.check()

    def check(self) -> None:
        """Raise the exception of the received signal, if any."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number:
            raise SystemExit(128 + self._number)


def _interrupt_children() -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGINT)
