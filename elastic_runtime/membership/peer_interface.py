"""The network interface on which gloo listens for this worker's peers.

gloo listens on the address of the host's name. Debian and many cloud images resolve that to a loopback address, where
peers on other machines cannot connect. NCCL chooses an interface that is not loopback by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
from typing import Final

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR: Final = 0x8915
_IN6: Final = "/proc/net/if_inet6"

_log = logging.getLogger("elastic_runtime")


def choose_interface(connected: socket.socket) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface of this connection to the coordinator, where gloo would listen elsewhere.

    Nothing changes if the variable is set, if the coordinator is reached on a loopback address, or if peers can use the
    address that the host's name resolves to.
    """
    if os.environ.get(VARIABLE) or connected.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    own = connected.getsockname()[0]
    if _is_loopback(own) or _is_reachable(socket.gethostname()):
        return
    if interface := interface_of(own):
        os.environ[VARIABLE] = interface
        _log.info("%s=%s, since peers cannot connect to the address of this host's name", VARIABLE, interface)


def interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 or IPv6 address; "" if there is none."""
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _interface_of_ipv6(address: str) -> str:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError), open(_IN6, encoding="ascii") as table:  # noqa: PTH123 (a line at a time)
        return next((line.split()[-1] for line in table if line.startswith(packed)), "")
    return ""


def _is_reachable(host: str) -> bool:
    """Return whether gloo, which takes the first address that it can listen on, takes one that is not loopback."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as listening:
            listening.bind(address)
            return not _is_loopback(str(address[0]))
    return False


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"
