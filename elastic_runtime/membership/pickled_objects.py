"""Objects that only pickle can make, from worker to worker by way of the coordinator.

The bytes of a pickle are a program for their reader. So they are never taken from a peer's connection, only from the
rendezvous store: the coordinator accepts them from workers that present the job's token, and hands them to such.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from elastic_runtime.errors import CollectiveError, StateError

if TYPE_CHECKING:
    from elastic_runtime.torch_internals import Store

PIECE_BYTES = 1 << 18
MAX_BYTES = 16 << 20


class Exchange:
    """One rank's part of it, in the store of one generation."""

    def __init__(self, store: Store | None, rank: int) -> None:
        self._store, self._rank = store, rank
        self._numbers = itertools.count()
        self._for_all: deque[tuple[str, int]] = deque()

    def leave(self, content: bytes, to: int | None) -> str:
        """Store the bytes for one rank, or for all, and return under which name.

        Raises StateError where they are too many, or there is no coordinator; CollectiveError where it is away.
        """
        if self._store is None or len(content) > MAX_BYTES:
            raise StateError(
                f"a state holds {len(content)} bytes of objects that only pickle can make, which travel through a "
                f"coordinator, at most {MAX_BYTES} of them; keep tensors, numbers, text, lists and dictionaries in it"
            )
        name = f"objects/{self._rank}/{'all' if to is None else to}/{next(self._numbers)}"
        pieces = range(0, len(content), PIECE_BYTES)
        try:
            for number, start in enumerate(pieces):
                piece = cast("str", content[start : start + PIECE_BYTES])  # stores take bytes as well
                self._store.set(f"{name}/{number}", piece)
            self._store.set(name, str(len(pieces)))
            if to is None:
                self._forget_oldest(name, len(pieces))
        except dist.DistError as error:
            raise CollectiveError(f"objects of the state could not be left with the coordinator: {error}") from error
        return name

    def fetch(self, name: object) -> bytes:
        """Return what another rank has stored. Raises CollectiveError where it is not there."""
        if self._store is None or not isinstance(name, str) or not name.startswith("objects/"):
            raise CollectiveError(f"a peer named {name!r} as the place of its objects")
        try:
            count = int(self._store.get(name))
            pieces = [self._store.get(f"{name}/{number}") for number in range(count)]
        except (dist.DistError, ValueError) as error:
            raise CollectiveError(f"objects of the state could not be fetched from the coordinator: {error}") from error
        if "/all/" not in name:
            self._delete(name, count)
        return b"".join(pieces)

    def _forget_oldest(self, name: str, count: int) -> None:
        """All ranks have taken part in the gathering after the one before the last, so all have fetched that."""
        self._for_all.append((name, count))
        if len(self._for_all) > 2:
            self._delete(*self._for_all.popleft())

    def _delete(self, name: str, count: int) -> None:
        assert self._store is not None
        for key in (name, *(f"{name}/{number}" for number in range(count))):
            self._store.delete_key(key)
