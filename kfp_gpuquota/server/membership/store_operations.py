"""The operations of the rendezvous store, by the name in the request's path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kfp_gpuquota.server.membership.rendezvous_store import Space

MAX_STORE_WAIT_S: Final = 300.0


class StoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One store operation; values are bytes in base64. What it does not need is left out."""

    key: str = ""
    keys: tuple[str, ...] = ()
    value: bytes = b""
    values: tuple[bytes, ...] = ()
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


async def _set(space: Space, asked: StoreRequest) -> None:
    for key, value in zip(asked.keys or (asked.key,), asked.values or (asked.value,), strict=True):
        space.set(key, value)


async def _get(space: Space, asked: StoreRequest) -> list[bytes]:
    keys = list(asked.keys or (asked.key,))
    await space.wait(keys, min(asked.timeout_s, MAX_STORE_WAIT_S))
    return space.values(keys)


async def _wait(space: Space, asked: StoreRequest) -> None:
    await space.wait(list(asked.keys), min(asked.timeout_s, MAX_STORE_WAIT_S))


async def _check(space: Space, asked: StoreRequest) -> bool:
    return space.check(asked.keys)


async def _add(space: Space, asked: StoreRequest) -> int:
    return space.add(asked.key, asked.amount)


async def _append(space: Space, asked: StoreRequest) -> None:
    space.append(asked.key, asked.value)


async def _compare_set(space: Space, asked: StoreRequest) -> bytes:
    return space.compare_set(asked.key, asked.expected, asked.value)


async def _delete(space: Space, asked: StoreRequest) -> bool:
    return space.delete(asked.key)


async def _count(space: Space, _asked: StoreRequest) -> int:
    return len(space)


OPERATIONS: Final[dict[str, Callable[[Space, StoreRequest], Awaitable[object]]]] = {
    "set": _set,
    "get": _get,
    "wait": _wait,
    "check": _check,
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "delete": _delete,
    "count": _count,
}
