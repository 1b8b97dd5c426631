"""The daemon's log: one file that is rotated, and no message repeated without limit.

What a caller can provoke must not fill the disk: of one message (its text before arguments are filled in) `BURST` are
written a minute, and the first one of the next minute reports how many were left out.
"""

from __future__ import annotations

import logging
import os
import time
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_BYTES: Final = 10 << 20
KEPT_FILES: Final = 2
BURST: Final = 20
PERIOD_S: Final = 60.0
_MAX_KINDS: Final = 1000
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def write_log_to(path: Path) -> None:
    """Send this process's log, stdout and stderr to `path`; older text is in path.1 and path.2, 10 MiB each."""
    handler = _RotatedLog(path, maxBytes=MAX_BYTES, backupCount=KEPT_FILES)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(RateLimit(time.monotonic))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a full disk must not end in tracebacks of the log itself


class RateLimit(logging.Filter):
    """Passes `BURST` messages of one kind in each period of `PERIOD_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._since = clock()
        self._counts: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if self._clock() - self._since >= PERIOD_S:
            record.msg = f"{self._omitted()}{record.msg}"
            self._since, self._counts = self._clock(), {}
        kind = (record.name, str(record.msg))
        if len(self._counts) >= _MAX_KINDS and kind not in self._counts:
            kind = ("", "")
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return self._counts[kind] <= BURST

    def _omitted(self) -> str:
        count = sum(max(0, number - BURST) for number in self._counts.values())
        return f"({count} repeated messages were left out) " if count else ""


class _RotatedLog(RotatingFileHandler):
    """The interpreter's own last words on stderr follow the file."""

    def _open(self):  # type: ignore[no-untyped-def]  # noqa: ANN202, RUF100
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        return stream
