"""Finds workers that wait for each other at different places of the script: one in a step, another one beside it.

A loop that one worker leaves earlier than the others, by a count of its own iterations, brings it to `job.mean` or to
the end of the training while they are in the next step. No sum would be complete; gloo ends the process that gets a
message of another length, and the workers that are left would go on without it.

Outside of steps the workers therefore meet first, on connections that steps do not sum on, and compare where they are.
One that waits for long, there or in a step, leaves with the coordinator what it waits in, and looks whether another one
waits in the other. Invariant: a place is named by the numbers of steps and of meetings that this worker has completed.
Two that wait with equal numbers, one in a step and one in a meeting, wait for each other; what is left from an earlier
wait has other numbers. The worker that finds it raises once all have found it: the end of the first one would be a
lost peer.

Rejected: a collective before each step that shows where all are. It costs a message in each step.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from elastic_runtime.errors import LoopError
from elastic_runtime.membership import background

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from elastic_runtime.torch_internals import Store

LONG_S: Final = 5.0
"""Seconds of waiting after which a worker looks for others."""
_PAUSES_S: Final = (0.25, 10.0)
"""Between two looks: the first one, and the longest; each is twice the one before, for hundreds of workers may wait."""
_FOUND_S: Final = 2 * _PAUSES_S[1]
"""Seconds within which all find it."""
_LENGTH: Final = 128
"""Bytes of a place."""
STEP: Final = "a training step"
_PACKAGES = ("elastic_runtime.", "torch.", "contextlib.", "functools.")
_REMEDY = (
    "every worker must run the same loop: leave it by `break` or islice only where all do, by job.position.index or "
    "job.step and not by a count of the worker's own iterations, and call job.mean, job.repeat and optimizer.step() on "
    "all workers"
)


class Meetings:
    """Of the members of one generation. `kind` and `step`: where this worker is; None: where it waits for none."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.kind: str | None = None
        self.step = self._met = 0
        self._since = 0.0  # the wait that is looked at
        self._found = ""

    def begin(self, kind: str, step: int) -> torch.Tensor:
        """Come to a meeting; return what the others are to receive of it."""
        self.kind, self.step = kind, step
        text = f"{kind} at {_line()}".encode()[:_LENGTH]
        return torch.frombuffer(bytearray(text.ljust(_LENGTH)), dtype=torch.uint8)

    def end(self, rows: Sequence[torch.Tensor]) -> None:
        """Leave a meeting of which these were received. LoopError on all workers if one is at another place."""
        self._met += 1
        places = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        other = [rank for rank, place in enumerate(places) if _kind(place) != _kind(places[0])]
        if other:
            raise LoopError(
                f"the workers are at different places after step {self.step}: rank 0 in {places[0]}, rank {other[0]} "
                f"in {places[other[0]]}; {_REMEDY}"
            )

    def look(self, since: float, waits: Callable[[], bool]) -> None:
        """Raise LoopError once others are found to wait for this worker elsewhere. `since`: it `waits` here."""
        if self.kind is None or time.monotonic() - since < LONG_S:
            return
        if self._since != since:
            self._since, self._found = since, ""
            here, at = (self.kind != STEP, self.step, self._met), f"{self.kind} at {_line()}"
            background.start(lambda: self._search(here, at, waits), "elastic-meetings")
        if self._found:
            raise LoopError(self._found)

    def _search(self, here: tuple[bool, int, int], at: str, waits: Callable[[], bool]) -> None:
        meets, step, met = here
        other = f"at/{not meets}/{step}/{met}"
        with suppress(RuntimeError, OSError):  # the coordinator is away
            self._store.set(f"at/{meets}/{step}/{met}", at)
            self._await([other], lambda: not waits())
            if not waits():
                self._store.delete_key(f"at/{meets}/{step}/{met}")
                return
            there = self._store.get(other).decode()
            self._store.set(f"apart/{self._rank}", "")
            until = time.monotonic() + _FOUND_S
            self._await([f"apart/{rank}" for rank in range(self._size)], lambda: time.monotonic() > until)
            self._found = (
                f"the workers are at different places after step {step}: this one in {at}, another one in {there}; "
                f"{_REMEDY}"
            )

    def _await(self, keys: list[str], ended: Callable[[], bool]) -> None:
        """Return once the keys are there, or `ended()`."""
        pause_s, longest_s = _PAUSES_S
        look_at = 0.0
        while not ended():
            now = time.monotonic()
            if now >= look_at:
                if self._store.check(keys):
                    return
                look_at, pause_s = now + pause_s, min(2 * pause_s, longest_s)
            time.sleep(0.05)


def _kind(place: str) -> str:
    return place.partition(" at ")[0]


def _line() -> str:
    """Return the line of the script that is being run."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_PACKAGES):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
