"""Ports of this machine that lead to other ones of it: what `port-forward` does for the embedded cluster."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

LOOPBACK: Final = "127.0.0.1"
_PIECE: Final = 1 << 16


def port_pair(text: str) -> tuple[int, int]:
    """(local, remote) of "8888" and "9000:8888". Raises UsageError."""
    local, colon, remote = text.partition(":")
    ports = (local, remote if colon else local)
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 65_536 for part in ports):
        raise UsageError(f"the port is {text!r}, but it must be PORT or LOCAL:REMOTE, each from 1 to 65535")
    return int(ports[0]), int(ports[1])


def forward(pairs: Sequence[tuple[int, int]]) -> None:
    """Forward connections until interrupted. Raises RunError for a port that is in use."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_forward(pairs))


async def _forward(pairs: Sequence[tuple[int, int]]) -> None:
    for local, remote in pairs:
        if local == remote:
            echo(f"the job runs on this machine: its port {remote} is at {LOOPBACK}:{remote}")
            continue
        try:
            await asyncio.start_server(_connector(remote), LOOPBACK, local)
        except OSError as error:
            raise RunError(f"port {local} of this machine cannot be used ({error.strerror}); choose another") from error
        echo(f"forwarding {LOOPBACK}:{local} -> {remote}")
    await asyncio.Event().wait()


def _connector(
    remote: int,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None]]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            its_reader, its_writer = await asyncio.open_connection(LOOPBACK, remote)
        except OSError as error:
            echo(f"nothing of the job listens on port {remote} ({error.strerror})", err=True)
            writer.close()
            return
        await asyncio.gather(_copy(reader, its_writer), _copy(its_reader, writer))

    return connected


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on all that comes, then the end of it."""
    with contextlib.suppress(OSError):
        while piece := await source.read(_PIECE):
            target.write(piece)
            await target.drain()
    target.close()
