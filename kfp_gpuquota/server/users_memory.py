"""How much memory the requests of one source hold: of one user of a shared cluster, of one address at the webhook.

The body of a request is in memory until it was answered, and an answer until its client has read it: a user with a
thousand connections that send or read slowly would end the process of all.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.server.audit import WORKERS
from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from aiohttp.typedefs import Handler, Middleware

MOST_BYTES: Final = 64 << 20
"""Of one source together; a single answer may be larger."""
_SMALL_BYTES: Final = 64 << 10
"""What is not counted: a connection's own buffer holds as much."""
_BUSY: Final = "requests of {} that are incomplete or not answered hold the memory that there is for them; try later"


def user_of(request: web.Request) -> Hashable | None:
    """Return the user at the other end of the Unix socket; None where other limits hold."""
    connected = request.transport.get_extra_info("socket") if request.transport else None
    return None if connected is None or request.path.startswith(WORKERS) else f"user {peer(connected)[1]}"


def bounded(
    refusal: Callable[[ClusterUnavailableError], web.StreamResponse],
    most_of_body: int,
    source_of: Callable[[web.Request], Hashable | None] = user_of,
    most_in_all: float = math.inf,
) -> Middleware:
    """Return the outermost middleware, which sends large answers itself, or a refusal instead."""
    held: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def holding(source: Hashable, size: int) -> Iterator[bool]:
        """Count the bytes meanwhile; False where they are too many."""
        if size <= _SMALL_BYTES:
            yield True
        elif (held[source] and held[source] + size > MOST_BYTES) or held.total() + size > most_in_all:
            yield False
        else:
            held[source] += size
            try:
                yield True
            finally:
                held[source] -= size
                if not held[source]:
                    del held[source]

    @web.middleware
    async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
        source = source_of(request)
        if source is None:
            return await handler(request)
        busy = ClusterUnavailableError(_BUSY.format(source))
        with holding(source, _body_size(request, most_of_body)) as allowed:
            answer = await handler(request) if allowed else refusal(busy)
        size = len(answer.body) if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else 0
        with holding(source, size) as allowed:
            if not allowed:
                return refusal(busy)
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
