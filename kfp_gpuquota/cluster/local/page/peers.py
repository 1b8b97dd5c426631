"""Which user of this machine is at the other end of a TCP connection over loopback, by the kernel's table.

While no daemon runs, another user may listen on its port, and an open page sends its cookie there. Such a cookie is of
no use to that user, because the daemon serves only connections of its own user's processes, and of root's. A proxy of
the user (JupyterHub's, an SSH server's for a forwarded port) runs as the user.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ROOT: Final = 0


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
            self._found[transport] = user_of(peer[1], own[1]) in {None, _ROOT, os.geteuid()}
        return self._found[transport]


def user_of(port: int, to_port: int) -> int | None:
    """Return the user of the socket on `port` that is connected to `to_port` over loopback.

    -1 if there is none; None if the kernel has no table, as in some sandboxes.
    """
    tables = [table for table in _TABLES if table.exists()]
    if not tables:
        return None
    return next((user for table in tables for user in _users(table, f":{port:04X}", f":{to_port:04X}")), -1)


def _users(table: Path, port: str, to_port: str) -> Iterator[int]:
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(port) and fields[2].endswith(to_port) and _is_loopback(fields[1]):
            yield int(fields[7])


def _is_loopback(address: str) -> bool:
    """Return whether a hexadecimal address, in the machine's byte order, is 127.0.0.1 (or its form in IPv6)."""
    return address.partition(":")[0].endswith("0100007F")
