"""The rendezvous store of one elastic job: what `torch.distributed.Store` needs, in memory.

It lives with the coordinator, so that no worker hosts what the others need. Each generation has a space of its own,
which is dropped with it; waits in it then end at once. All spaces of a job share one budget, and all jobs a total: when
it is used up, a job above its equal part is refused more.

A wait is registered under the first of its keys that is missing, so that a value wakes only what waits for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.errors import ConflictError, InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_BYTES: Final = 64 << 20
MAX_KEYS: Final = 100_000
MAX_VALUE_BYTES: Final = 16 << 20
"""Of a value that `append` extends; a request sets at most a body's worth."""
MAX_SPACES: Final = 1_000
"""Far above the number of generations that can be built at once."""
TOTAL_BYTES: Final = 192 << 20
"""Of all jobs of a process, which may have 1 GiB. A key counts as `KEY_BYTES` more than it has."""
KEY_BYTES: Final = 250
_SHOWN: Final = 5


class Total:
    """What all jobs' stores hold."""

    def __init__(self, most: int = TOTAL_BYTES) -> None:
        self.most = most
        self.bytes = self.jobs = 0

    def take(self, before: int, size: int) -> None:
        """Count `size` more bytes of a job that holds `before`. Raises InvalidFieldError."""
        if size > 0 and self.bytes + size > self.most and before + size > self.most // max(1, self.jobs):
            rule = f"the stores of all {self.jobs} jobs hold {self.most} bytes at most, and this job has its equal part"
            raise InvalidFieldError("value", size, rule)
        self.bytes += size


class Budget:
    """The total of all namespaces of one job: keys, and bytes of keys and values."""

    def __init__(self, total: Total | None = None) -> None:
        self.keys = self.bytes = 0
        self._total = total or Total()
        self._total.jobs += 1

    def take(self, keys: int, size: int) -> None:
        """Count what is added, or removed where it is negative. Raises InvalidFieldError where that is too much."""
        if (size > 0 and self.bytes + size > MAX_BYTES) or (keys > 0 and self.keys + keys > MAX_KEYS):
            raise InvalidFieldError("value", size, f"a job's store holds {MAX_KEYS} keys and {MAX_BYTES} bytes at most")
        self._total.take(self.bytes + KEY_BYTES * self.keys, size + KEY_BYTES * keys)
        self.keys += keys
        self.bytes += size

    def close(self) -> None:
        """Count the job no more."""
        self._total.take(0, -self.bytes - KEY_BYTES * self.keys)
        self._total.jobs -= 1
        self.keys = self.bytes = 0


class Space:
    """The keys and values (bytes) of one generation."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._budget = budget or Budget()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by the missing key
        self._dropped = False

    def set(self, key: str, value: bytes) -> None:
        """Store `value`; InvalidFieldError where the job's store is full."""
        if self._dropped:
            raise ConflictError(_OVER)
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else len(key) + len(value)
        self._budget.take(int(before is None), more)
        self._bytes += more
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            _wake(waiting)

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal number (0 where there is none) and return the sum, as torch's TCPStore does."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def append(self, key: str, value: bytes) -> None:
        """Extend the value."""
        before = self._values.get(key, b"")
        if len(before) + len(value) > MAX_VALUE_BYTES:
            raise InvalidFieldError("value", len(before) + len(value), f"a value has {MAX_VALUE_BYTES} bytes at most")
        self.set(key, before + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` where the value is `expected`, or where there is none and `expected` is empty.

        Returns the value afterwards; of a key that does not exist, `expected`.
        """
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, desired)
            return desired
        return expected if current is None else current

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all keys exist."""
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        value = self._values.pop(key, None)
        if value is not None:
            self._budget.take(-1, -len(key) - len(value))
            self._bytes -= len(key) + len(value)
        return value is not None

    def values(self, keys: Iterable[str]) -> list[bytes]:
        """The values of keys that exist."""
        return [self._values[key] for key in keys]

    def __len__(self) -> int:
        return len(self._values)

    async def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Until all of them exist. NotFoundError after `timeout_s`, ConflictError once the space is dropped."""
        position = 0
        try:
            async with asyncio.timeout(timeout_s):
                while not self._dropped:
                    while position < len(keys) and keys[position] in self._values:
                        position += 1
                    if position < len(keys):
                        await self._set(keys[position])
                    elif self.check(keys):
                        return
                    else:
                        position = 0  # one of them was deleted meanwhile
        except TimeoutError:
            missing = [key[:100] for key in keys if key not in self._values]
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise NotFoundError(f"no value for {missing[:_SHOWN]}{more} within {timeout_s:g} s") from None
        raise ConflictError(_OVER)

    async def _set(self, key: str) -> None:
        """Return when the key was set, or the space dropped."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiting)
        try:
            await waiting
        finally:
            if others := self._waiting.get(key):
                if waiting in others:
                    others.remove(waiting)
                if not others:
                    del self._waiting[key]

    def drop(self) -> None:
        """End all waits, and free what it holds."""
        self._budget.take(-len(self._values), -self._bytes)
        self._values, self._bytes = {}, 0
        self._dropped = True
        for waiting in [one for group in self._waiting.values() for one in group]:
            _wake(waiting)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


_OVER: Final = "this generation is over; rendezvous in the newest one"


class Store:
    """The spaces of one job, by generation."""

    def __init__(self, total: Total | None = None) -> None:
        self._spaces: dict[int, Space] = {}
        self._budget = Budget(total)
        self._oldest = 0

    def space(self, generation: int, newest: int) -> Space:
        """That generation's. ConflictError for one that is over, or was never announced: `newest` is the last one."""
        if not self._oldest <= generation <= newest:
            raise ConflictError(f"generation {generation} is not current; {self._oldest} to {newest} are")
        if generation not in self._spaces:
            if len(self._spaces) >= MAX_SPACES:
                raise ConflictError(f"the job's store holds {MAX_SPACES} generations already")
            self._spaces[generation] = Space(self._budget)
        return self._spaces[generation]

    def drop_before(self, generation: int) -> None:
        """Drop the namespaces of all older generations."""
        self._oldest = max(self._oldest, generation)
        for old in [g for g in self._spaces if g < generation]:
            self._spaces.pop(old).drop()

    def close(self) -> None:
        """Drop all spaces; the job holds nothing any more."""
        for space in self._spaces.values():
            space.drop()
        self._spaces = {}
        self._budget.close()
