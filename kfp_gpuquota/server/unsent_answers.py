"""How much of answers that are not sent yet the server keeps for each user, on a cluster that several share.

An answer is in memory until its client has read it, and one that lists large jobs has many megabytes: a user with a
thousand connections that read nothing would end the process of all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.server.audit import WORKERS
from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Handler, Middleware

MOST_UNSENT_BYTES: Final = 64 << 20
"""Of one user together; a single answer may be larger."""
_SMALL_BYTES: Final = 64 << 10
"""What the connection's own buffer holds."""


def bounded(refusal: Callable[[ClusterUnavailableError], web.StreamResponse]) -> Middleware:
    """Return the outermost middleware, which sends large answers itself, or a refusal instead."""
    unsent: Counter[int] = Counter()

    @web.middleware
    async def send(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        size = len(answer.body) if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else 0
        connected = request.transport.get_extra_info("socket") if request.transport else None
        if size <= _SMALL_BYTES or connected is None or request.path.startswith(WORKERS):  # that has limits of its own
            return answer
        _, uid = peer(connected)
        if unsent[uid] and unsent[uid] + size > MOST_UNSENT_BYTES:
            return refusal(ClusterUnavailableError("this user has not read earlier answers; read these first"))
        unsent[uid] += size
        try:
            with contextlib.suppress(ConnectionError):  # the client has gone
                await answer.prepare(request)
                await answer.write_eof()
        finally:
            unsent[uid] -= size
            if not unsent[uid]:
                del unsent[uid]
        return answer

    return send
