"""Reports to the cluster which error ended the script: by the exit code, and by one line of a file that it reads.

In a container the file is Kubernetes' termination message, elsewhere ELASTIC_ERROR_FILE names it. The cluster shows the
line as the reason, and does not repeat a job that ended with exit code 2.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_runtime.errors import ElasticError

if TYPE_CHECKING:
    from types import TracebackType

TERMINATION_LOG: Final = "/dev/termination-log"
LONGEST: Final = 1000  # characters


def report_errors(file: str) -> None:
    """Report the error that ends this process, from now on, to `file`; "": to the container's termination message."""
    before, path = sys.excepthook, Path(file or TERMINATION_LOG)
    writes = bool(file) or path.exists()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # the traceback is in the log
            if writes:
                path.write_text(_line(kind, error), encoding="utf-8", errors="replace")
        before(kind, error, trace)
        if isinstance(error, ElasticError):
            raise SystemExit(error.exit_code)

    sys.excepthook = report


def _line(kind: type[BaseException], error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{kind.__name__}: {text}".removesuffix(": ")[:LONGEST]
