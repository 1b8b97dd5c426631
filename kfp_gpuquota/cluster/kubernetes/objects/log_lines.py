"""A pod's log in parts. The API server has no offsets in logs, but it prefixes lines with their times.

An offset is therefore the time of the last line that was read, in nanoseconds since 2020: fewer digits than a browser's
limit for exact ids of streams. The API server resolves a time to whole seconds, so the lines of the last second are
read again and skipped.

Rejected: byte offsets, for which a log is read from its beginning each time.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Final

EPOCH_S: Final = 1_577_836_800
SHORTEST_LINE: Final = 50
"""A number of last bytes is asked for as a number of lines, which are taken to have so many bytes at least."""
_NS: Final = 1_000_000_000
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class LogLines:
    """The lines behind an offset, about `limit` bytes of them; `last` is the time of the last one.

    An offset below 0 is a number of bytes from the end.
    """

    def __init__(self, offset: int, limit: int = sys.maxsize) -> None:
        self.lines: deque[bytes] = deque()
        self.last = max(0, offset)
        self._limit = limit
        self._after, self._tail = max(0, offset), max(0, -offset)
        self._size, self._rest = 0, b""
        self._shown = 0  # bytes of the next line that were returned before its end had arrived

    def query(self) -> dict[str, str]:
        """Return the parameters that select the lines, and some before them."""
        if self._tail:
            return {"timestamps": "true", "tailLines": str(max(1, self._tail // SHORTEST_LINE))}
        if not self._after:
            return {"timestamps": "true"}
        since = datetime.fromtimestamp(EPOCH_S + self._after // _NS, UTC)
        return {"timestamps": "true", "sinceTime": since.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def take(self, chunk: bytes) -> bool:
        """Take a part of the answer; return False once there are bytes enough."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return all(self._take_line(line + b"\n") for line in lines)

    def finish(self) -> None:
        """Take what came after the last end of a line as a line: the answer has ended."""
        if self._rest:
            self._take_line(self._rest)

    def text(self) -> bytes:
        """Return all lines."""
        return b"".join(self.lines)

    def arrived(self) -> bytes:
        """Return what was taken since the last call, as far as it has arrived, and forget it."""
        text = self.text()
        if text:
            text, self._shown = text[self._shown :], 0
            self.lines.clear()
            self._size = 0
        stamp, space, begun = self._rest.partition(b" ")
        if space and (time_of(stamp) or 0) > self._after:
            text, self._shown = text + begun[self._shown :], len(begun)
        return text

    def reopened(self) -> None:
        """Continue behind the last whole line with another answer."""
        self._after, self._tail, self._rest = self.last, 0, b""

    def _take_line(self, stamped: bytes) -> bool:
        stamp, _, line = stamped.partition(b" ")
        at = time_of(stamp)
        if at is None:
            at, line = self.last, stamped
        elif at <= self._after:
            return True
        if not self._tail and self._size > self._limit and at != self.last:
            return False
        self.lines.append(line)
        self._size += len(line)
        self.last = max(self.last, at)
        while self._tail and self._size - len(self.lines[0]) > self._tail:
            self._size -= len(self.lines.popleft())
        return True


def time_of(stamp: bytes) -> int | None:
    """Return a line's time in nanoseconds since 2020; None for what is no time."""
    found = _STAMP.fullmatch(stamp)
    if found is None:
        return None
    at = datetime.fromisoformat(found[1].decode() + found[3].decode().replace("Z", "+00:00"))
    return (int(at.timestamp()) - EPOCH_S) * _NS + int((found[2] or b"0").ljust(9, b"0"))
