"""How much memory the requests of one user hold, on a cluster that several share.

The body of a request is in memory until it was answered, and an answer until its client has read it: a user with a
thousand connections that send or read slowly would end the process of all.
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
    from collections.abc import Callable, Iterator

    from aiohttp.typedefs import Handler, Middleware

MOST_BYTES: Final = 64 << 20
"""Of one user together; a single answer may be larger."""
_SMALL_BYTES: Final = 64 << 10
"""What is not counted: a connection's own buffer holds as much."""
_BUSY: Final = "requests of this user that are incomplete or not answered hold the memory that one user has; try later"


def bounded(refusal: Callable[[ClusterUnavailableError], web.StreamResponse], most_of_body: int) -> Middleware:
    """Return the outermost middleware, which sends large answers itself, or a refusal instead."""
    held: Counter[int] = Counter()

    @contextlib.contextmanager
    def holding(uid: int, size: int) -> Iterator[bool]:
        """Count the bytes meanwhile; False where they are too many."""
        if size <= _SMALL_BYTES:
            yield True
        elif held[uid] and held[uid] + size > MOST_BYTES:
            yield False
        else:
            held[uid] += size
            try:
                yield True
            finally:
                held[uid] -= size
                if not held[uid]:
                    del held[uid]

    @web.middleware
    async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
        connected = request.transport.get_extra_info("socket") if request.transport else None
        if connected is None or request.path.startswith(WORKERS):  # that has limits of its own
            return await handler(request)
        _, uid = peer(connected)
        with holding(uid, _body_size(request, most_of_body)) as allowed:
            answer = await handler(request) if allowed else refusal(ClusterUnavailableError(_BUSY))
        size = len(answer.body) if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else 0
        with holding(uid, size) as allowed:
            if not allowed:
                return refusal(ClusterUnavailableError(_BUSY))
            if size > _SMALL_BYTES:
                with contextlib.suppress(ConnectionError):  # the client has gone
                    await answer.prepare(request)
                    await answer.write_eof()
        return answer

    return serve


def _body_size(request: web.Request, most: int) -> int:
    """Return the size of the body, which is at most that large where the request does not say it."""
    if request.content_length is not None:
        return min(request.content_length, most)
    return most if request.can_read_body else 0
