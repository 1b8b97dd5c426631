"""One socket for both families, so that a port of 0 is one port and not two."""

from __future__ import annotations

import socket


def listen(port: int, backlog: int = 1024) -> socket.socket:
    """Listen on all addresses of this machine; 0 is any free port. `backlog` connections may wait to be accepted."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)
