"""The membership service over TLS, for workers on other machines: each has the token of its own job and no other.

Port, key and certificate are in the daemon's directory, so that workers find the next daemon where this one was. The
certificate is for the address of this machine in the Ray cluster; it is issued again when that changes or it grows old.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.certificates import Material, maintained
from kfp_gpuquota.cluster.local.home import write_private
from kfp_gpuquota.cluster.ray.workers import Coordinates
from kfp_gpuquota.errors import ClusterStartError
from kfp_gpuquota.server.transport.accepting import LimitedSite
from kfp_gpuquota.server.transport.connections import WORKER_LIMITS, LimitedRunner
from kfp_gpuquota.server.transport.tls import load_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kfp_gpuquota.server.membership.service import MembershipService

SHUTDOWN_S: Final = 1.0
BACKLOG: Final = 1024


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    here: str
    port: int
    material: Material


@asynccontextmanager
async def serving(service: MembershipService, here: str, port: int, file: Path) -> AsyncIterator[Coordinates]:
    """Serve the workers at `here`, this machine's address ("": that in `file`); on `port`, that in `file`, or any.

    Raises ClusterStartError where the port is taken.
    """
    kept = _load(file)
    here = here or (kept.here if kept else "127.0.0.1")
    material = maintained(kept.material if kept else None, [here], time.time())
    app = web.Application()
    app.add_routes(service.routes())
    runner = LimitedRunner(app, WORKER_LIMITS, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None)
    await runner.setup()
    try:
        wanted = port or (kept.port if kept else 0)
        try:
            listener = socket.create_server((here, wanted), family=_family(here), backlog=BACKLOG)
            await LimitedSite(runner, listener, _context(material)).start()
        except OSError as error:
            raise ClusterStartError(
                f"workers cannot be served at {here}:{wanted} ({error.strerror}); choose another port with --ray-port"
            ) from error
        bound = runner.addresses[0][1]
        write_private(file, msgspec.json.encode(_Kept(here=here, port=bound, material=material)).decode())
        name = f"[{here}]" if ":" in here else here
        yield Coordinates(url=f"https://{name}:{bound}", authority=material.trusted.decode())
    finally:
        await runner.cleanup()


def _load(file: Path) -> _Kept | None:
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(file.read_bytes(), type=_Kept)
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _context(material: Material) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(context, material.serving.certificate, material.serving.key)
    return context
