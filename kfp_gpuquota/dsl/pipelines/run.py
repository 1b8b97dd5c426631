"""Running a compiled pipeline on this machine, under kfp.local."""

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
    """Run it here, each step in this Python's environment; returns its outputs. Raises JobFailedError.

    Told to stop by SIGTERM, it interrupts its steps, as Ctrl-C does: their jobs are cancelled.
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
    """Whether somebody has told this run to stop.

    Remembered, for an exception out of a signal may be lost in kfp.local, which then takes its interrupted step for one
    that failed.
    """

    def __init__(self) -> None:
        self._number = 0

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Ctrl-C reaches the steps by itself. kfp.local starts each as a child: nobody else tells them of SIGTERM."""
        self._number = number
        if number == signal.SIGTERM:
            _interrupt_children()
        self.check()

    def check(self) -> None:
        """End as the signal says, where there was one."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number:
            raise SystemExit(128 + self._number)


def _interrupt_children() -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGINT)
