"""A request of a job's rendezvous store over HTTP, within the job's bounds.

A large body is read only when it is the job's turn for one. Values are sent as they are stored, encoded in pieces, so
that an answer costs no copy of them; they are counted once against the job while they are being sent.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.errors import InvalidFieldError, NotFoundError
from kfp_gpuquota.server.membership.job_bounds import SMALL_BODY_BYTES
from kfp_gpuquota.server.membership.messages import decoded
from kfp_gpuquota.server.membership.store_operations import (
    AT_ONCE,
    OPERATIONS,
    StoreRequest,
    check_request,
    distinct_bytes,
    values,
    wait,
)

if TYPE_CHECKING:
    from kfp_gpuquota.server.membership.job_bounds import JobBounds
    from kfp_gpuquota.server.membership.rendezvous_store import Space, Store

MAX_BODY_BYTES: Final = 1 << 20
BODY_S: Final = 30.0
PIECE_BYTES: Final = 48 << 10
"""A multiple of three: base64 has no padding within a value."""
SMALL_ANSWER_BYTES: Final = 64 << 10
_REQUEST: Final = msgspec.json.Decoder(StoreRequest)


async def answer_store_request(
    request: web.Request, store: Store, bounds: JobBounds, newest: int
) -> web.StreamResponse:
    """Return the answer. `newest`: the last generation that was announced."""
    operation = request.match_info["operation"]
    if operation not in OPERATIONS:
        raise NotFoundError(f"the store cannot {operation!r}; it can {sorted(OPERATIONS)}")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidFieldError("Content-Encoding", request.headers["Content-Encoding"], "bodies are not compressed")
    body = await _body(request, bounds)
    async with bounds.turn:
        asked = decoded(_REQUEST, body)
        del body
        check_request(asked)
        space = store.space(int(request.match_info["generation"]), newest)
        if operation in AT_ONCE:
            return _json(msgspec.json.encode(AT_ONCE[operation](space, asked)))
    with bounds.holding(asked.held_bytes):
        keys = asked.keys if operation == "wait" else asked.named
        await wait(space, keys, asked.timeout_s)
        return _json(b"null") if operation == "wait" else await _send(request, space, asked, bounds)


async def _send(request: web.Request, space: Space, asked: StoreRequest, bounds: JobBounds) -> web.StreamResponse:
    async with bounds.turn:
        found = values(space, asked)
        size = sum(map(len, found))
        if size <= SMALL_ANSWER_BYTES:
            return _json(msgspec.json.encode(found))
        held = distinct_bytes(found)
    with bounds.holding(held):
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = sum(4 * -(-len(value) // 3) + 3 for value in found) + 1
        await response.prepare(request)
        for number, value in enumerate(found):
            await response.write(b'["' if number == 0 else b',"')
            for start in range(0, len(value), PIECE_BYTES):
                async with bounds.turn:
                    piece = base64.b64encode(memoryview(value)[start : start + PIECE_BYTES])
                await response.write(piece)
            await response.write(b'"')
        await response.write(b"]")
        await response.write_eof()
    return response


async def _body(request: web.Request, bounds: JobBounds) -> bytes:
    """Return the request's body. Raises web.HTTPRequestEntityTooLarge, web.HTTPRequestTimeout."""
    length = request.content_length
    if length is not None and length > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(max_size=MAX_BODY_BYTES, actual_size=length)
    if length is not None and length <= SMALL_BODY_BYTES:
        return await _read(request)
    async with bounds.large_bodies:
        return await _read(request)


async def _read(request: web.Request) -> bytes:
    """Read the body; `request.read` would keep it for as long as the request waits."""
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while piece := await request.content.readany():
                size += len(piece)
                if size > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(max_size=MAX_BODY_BYTES, actual_size=size)
                pieces.append(piece)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return b"".join(pieces)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
