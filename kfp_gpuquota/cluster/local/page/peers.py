"""Which user of this machine is at the other end of a TCP connection over loopback, by the kernel's table.

While no daemon runs, another user may listen on its port, and an open page sends its cookie there. Such a cookie is of
no use to that user, because the daemon serves only connections of its own user's processes, and of root's. A proxy of
the user (JupyterHub's, an SSH server's for a forwarded port) runs as the user.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from aiohttp import web

_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ROOT: Final = 0
_MAPPED: Final = f"{0:016X}{int.from_bytes(bytes((0, 0, 255, 255)), sys.byteorder):08X}"
"""Begins an IPv4 address in the table of IPv6."""


class OwnUser:
    """Says whether a request comes from a process of this user; the answer is kept for its connection."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[object, bool] = WeakKeyDictionary()

    def sent(self, request: web.Request) -> bool:
        """Return whether this user's process, or root's, has sent the request; also where the kernel does not say."""
        transport = request.transport
        if transport is None:
            return False
        if transport not in self._found:
            peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            self._found[transport] = user_of(peer[:2], own[:2]) in {None, _ROOT, os.geteuid()}
        return self._found[transport]


def user_of(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """Return the user of the socket at `peer` (an IPv4 address and a port) that is connected to `own`.

    The addresses count, too: another user may take the same port of 127.0.0.2. -1 if there is no such socket; None if
    the kernel has no table, as in some sandboxes.
    """
    tables = [table for table in _TABLES if table.exists()]
    if not tables:
        return None
    ends = tuple({prefix + _hexadecimal(*end) for prefix in ("", _MAPPED)} for end in (peer, own))
    return next((user for table in tables for user in _users(table, *ends)), -1)


def _users(table: Path, peers: Container[str], owns: Container[str]) -> Iterator[int]:
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] in peers and fields[2] in owns:
            yield int(fields[7])


def _hexadecimal(address: str, port: int) -> str:
    """Return an IPv4 address and a port as the table has them: the address in the machine's byte order."""
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"
