"""The operations of the rendezvous store, by the name in the request's path. Requests and answers are bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.server.membership.rendezvous_store import Space

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
