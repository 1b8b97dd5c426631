"""What the bridge's process printed, and how it ended, as the daemon's log and its messages have it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

_NATIVE_STACK: Final = b"StackTrace Information"
"""Ray's C++ part prints this, and then its stack, before it ends its process with SIGABRT."""


class Output(Protocol):
    """A binary file."""

    def write(self, text: bytes, /) -> object:
        """Write the bytes."""

    def flush(self) -> object:
        """Write what is buffered."""


async def copy_without_native_stacks(source: asyncio.StreamReader, target: Output) -> None:
    """Copy lines until the end; after the heading of a stack of Ray's C++ part nothing is copied."""
    native = False
    while line := await _line(source):
        native = native or _NATIVE_STACK in line
        if not native:
            target.write(line)
            target.flush()


async def _line(source: asyncio.StreamReader) -> bytes:
    try:
        return await source.readline()
    except ValueError:  # a line longer than the reader's limit, which has dropped it
        return b"...\n"


def ended_by(code: int) -> str:
    """Return why Ray is not connected, by the exit code of the bridge's process."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    if code == -signal.SIGABRT:
        return "Ray ended the connection's process (SIGABRT): its head did not answer, or was restarted"
    return f"its process ended by {name}"
