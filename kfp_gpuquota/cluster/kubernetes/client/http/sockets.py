"""One listening socket for IPv4 and IPv6, so that port 0 selects one port and not two."""

from __future__ import annotations

import socket


def listen(port: int, backlog: int = 1024) -> socket.socket:
    """Listen on all addresses; port 0 selects a free one. `backlog` connections may wait to be accepted."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)
