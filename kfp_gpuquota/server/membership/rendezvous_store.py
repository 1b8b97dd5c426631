"""The rendezvous store of one elastic job: what `torch.distributed.Store` needs, in memory.

It lives with the coordinator, so that no worker hosts what the others need. Each generation has a space of its own,
which is dropped with it; waits in it then end at once. All spaces of a job share one budget.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.errors import ConflictError, InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_BYTES: Final = 64 << 20
MAX_KEYS: Final = 100_000
MAX_SPACES: Final = 1_000
"""Far above the number of generations that can be built at once."""


class Budget:
    """The total of all namespaces of one job: keys, and bytes of keys and values."""

    def __init__(self) -> None:
        self.keys = self.bytes = 0

    def take(self, keys: int, size: int) -> None:
        """Count what is added, or removed where it is negative. Raises InvalidFieldError where that is too much."""
        if (size > 0 and self.bytes + size > MAX_BYTES) or (keys > 0 and self.keys + keys > MAX_KEYS):
            raise InvalidFieldError("value", size, f"a job's store holds {MAX_KEYS} keys and {MAX_BYTES} bytes at most")
        self.keys += keys
        self.bytes += size


class Space:
    """The keys and values (bytes) of one generation."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._values: dict[str, bytes] = {}
        self._budget = budget or Budget()
        self._changed = asyncio.Event()
        self._dropped = False

    def set(self, key: str, value: bytes) -> None:
        """Store `value`; InvalidFieldError where the job's store is full."""
        if self._dropped:
            raise ConflictError(_OVER)
        before = self._values.get(key)
        if before is None:
            self._budget.take(1, len(key) + len(value))
        else:
            self._budget.take(0, len(value) - len(before))
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal number (0 where there is none) and return the sum, as torch's TCPStore does."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def append(self, key: str, value: bytes) -> None:
        """Extend the value."""
        self.set(key, self._values.get(key, b"") + value)

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
        return value is not None

    def values(self, keys: Iterable[str]) -> list[bytes]:
        """The values of keys that exist."""
        return [self._values[key] for key in keys]

    def __len__(self) -> int:
        return len(self._values)

    async def wait(self, keys: list[str], timeout_s: float) -> None:
        """Until all of them exist. NotFoundError after `timeout_s`, ConflictError once the space is dropped."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._dropped and not self.check(keys):
                    await self._changed.wait()
        except TimeoutError:
            missing = [key for key in keys if key not in self._values]
            raise NotFoundError(f"no value for {missing} within {timeout_s:g} s") from None
        if self._dropped:
            raise ConflictError(_OVER)

    def drop(self) -> None:
        """End all waits, and free what it holds."""
        for key in list(self._values):
            self.delete(key)
        self._dropped = True
        self._changed.set()


_OVER: Final = "this generation is over; rendezvous in the newest one"


class Store:
    """The spaces of one job, by generation."""

    def __init__(self) -> None:
        self._spaces: dict[int, Space] = {}
        self._budget = Budget()
        self._oldest = 0

    def space(self, generation: int, newest: int) -> Space:
        """That generation's. ConflictError for one that is over, or was never announced: `newest` is the last one."""
        if not self._oldest <= generation <= newest:
            raise ConflictError(f"generation {generation} is not current; {self._oldest} to {newest} are")
        if generation not in self._spaces and len(self._spaces) >= MAX_SPACES:
            raise ConflictError(f"the job's store holds {MAX_SPACES} generations already")
        return self._spaces.setdefault(generation, Space(self._budget))

    def drop_before(self, generation: int) -> None:
        """Drop the namespaces of all older generations."""
        self._oldest = max(self._oldest, generation)
        for old in [g for g in self._spaces if g < generation]:
            self._spaces.pop(old).drop()

    @property
    def spaces(self) -> Mapping[int, Space]:
        """Return the stored keys by generation."""
        return self._spaces
