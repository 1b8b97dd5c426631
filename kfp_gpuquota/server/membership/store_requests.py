"""A request of a job's rendezvous store over HTTP, within the job's bounds.

A large body is read only when it is the job's turn for one. Values are sent as they are stored, encoded in pieces, so
that an answer costs no copy of them; they are counted once against the job while they are being sent.

The operation is named in the request's path. Requests and answers are bounded.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.server.membership.job_bounds import JobBounds
    from kfp_gpuquota.server.membership.rendezvous_store import Space, Store


MAX_STORE_WAIT_S: Final = 300.0
MAX_REQUEST_KEYS: Final = 10_000
"""As many as a job has workers (`messages.MAX_WORKERS`)."""
MAX_KEY_LENGTH: Final = 4096
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of the values of one answer, a value counted as often as its key was named."""
KEY_OVERHEAD_BYTES: Final = 64


class StoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One store operation; values are bytes in base64. What it does not need is left out."""

    key: str = ""
    keys: tuple[str, ...] = ()
    value: bytes = b""
    values: tuple[bytes, ...] = ()
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0

    @property
    def named(self) -> tuple[str, ...]:
        """Return the keys, or the one key."""
        return self.keys or (self.key,)

    @property
    def held_bytes(self) -> int:
        """Return the memory of the keys while the request waits."""
        return sum(map(len, self.keys)) + KEY_OVERHEAD_BYTES * len(self.keys)


def check_request(asked: StoreRequest) -> None:
    """Raise InvalidFieldError for more keys than a request may have, or longer ones."""
    if len(asked.keys) > MAX_REQUEST_KEYS:
        raise InvalidFieldError("keys", len(asked.keys), f"a request has {MAX_REQUEST_KEYS} keys at most")
    longest = max(map(len, asked.named))
    if longest > MAX_KEY_LENGTH:
        raise InvalidFieldError("key", longest, f"a key has {MAX_KEY_LENGTH} characters at most")


async def wait(space: Space, keys: tuple[str, ...], timeout_s: float) -> None:
    """Return when all keys exist. Raises NotFoundError after the request's time."""
    await space.wait(tuple(dict.fromkeys(keys)), min(timeout_s, MAX_STORE_WAIT_S))


def values(space: Space, asked: StoreRequest) -> list[bytes]:
    """Return the values of the keys, which exist. Raises InvalidFieldError where they are too large together."""
    found = space.values(asked.named)
    size = sum(map(len, found))
    if size > MAX_ANSWER_BYTES:
        raise InvalidFieldError(
            "keys", len(asked.keys), f"the values of a request have {MAX_ANSWER_BYTES} bytes at most"
        )
    return found


def distinct_bytes(found: Iterable[bytes]) -> int:
    """Return the memory of values, each counted once."""
    return sum({id(value): len(value) for value in found}.values())


def _set(space: Space, asked: StoreRequest) -> None:
    for key, value in zip(asked.named, asked.values or (asked.value,), strict=True):
        space.set(key, value)


def _check(space: Space, asked: StoreRequest) -> bool:
    return space.check(asked.keys)


def _add(space: Space, asked: StoreRequest) -> int:
    return space.add(asked.key, asked.amount)


def _append(space: Space, asked: StoreRequest) -> None:
    space.append(asked.key, asked.value)


def _compare_set(space: Space, asked: StoreRequest) -> bytes:
    return space.compare_set(asked.key, asked.expected, asked.value)


def _delete(space: Space, asked: StoreRequest) -> bool:
    return space.delete(asked.key)


def _count(space: Space, _asked: StoreRequest) -> int:
    return len(space)


AT_ONCE: Final[dict[str, Callable[[Space, StoreRequest], object]]] = {
    "set": _set,
    "check": _check,
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "delete": _delete,
    "count": _count,
}
"""Operations that are done without waiting; `get` and `wait` may wait."""
OPERATIONS: Final = frozenset({*AT_ONCE, "get", "wait"})


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
