"""A coordinator that is a list: at which step of the training which workers are its members.

Every worker has the list and gives the orders of it to itself, so that a change happens at its step exactly, without a
connection or a clock. Groups, state transfer, votes and the loop are the real ones. What is not on the list, the end of
a worker by an error of its own, is answered as a coordinator does: a generation of those that are left.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_runtime.membership.orders import Order

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elastic_runtime.torch_internals import Store

_UNFORESEEN = 1000
"""Generations from this number on are of workers that were left by an unforeseen end."""
_WAIT_S = 60.0


@dataclass(frozen=True)
class Change:
    """After `step` (killed: in it) the members are these. `kind`: agreed, killed or stopped."""

    kind: str
    step: int
    members: tuple[str, ...]


class ScriptedCoordinator:
    """Has the methods of `Coordinator`. Generation n + 1 is that of change n."""

    directory: Path
    first: tuple[str, ...]
    changes: tuple[Change, ...]

    def __init__(self, environment: Any, on_order: Callable[[Order], None], *_: object) -> None:
        self.worker, self._on_order = environment.worker_id, on_order

    def members(self, generation: int) -> tuple[str, ...]:
        """Return the members of a generation of the list."""
        return self.first if generation == 1 else self.changes[generation - 2].members

    @property
    def _waits(self) -> Path:
        """The file that says that this worker waits for others."""
        return self.directory / f"waits-{self.worker}"

    def start(self) -> None:
        """Do nothing: there is no connection."""

    def close(self) -> None:
        """Do nothing."""

    def send(self, event: str, **fields: Any) -> None:
        """Give the order that follows from what this worker reports."""
        if event == "WorkerReady":
            generations = range(1, len(self.changes) + 2)
            number = next(n for n in generations if self.worker in self.members(n))
            kind = "Recover" if number == 1 else "Propose"
            if number > 1:  # until the others come to that step, which they may not
                self._waits.touch()
            self._on_order(Order(kind, number, self.members(number), base=number - 1))
        elif event == "GenerationAdopted":
            self._waits.unlink(missing_ok=True)
            if self.worker not in fields["members"]:
                self._on_order(Order("Release"))
        elif event == "CollectiveFailed":
            self._recover(int(fields["generation"]), tuple(fields["members"]))

    def propose(self, generation: int) -> None:
        """Propose the generation that follows the one in force."""
        self._on_order(Order("Propose", generation, self.members(generation), base=generation - 1))

    def propose_end(self, generation: int) -> None:
        """Propose that all leave, after the generation in force, which may be one that is not on the list."""
        self._on_order(Order("Propose", generation + 1, (), base=generation))

    def _recover(self, generation: int, members: tuple[str, ...]) -> None:
        following = self.changes[generation - 1] if generation <= len(self.changes) else None
        if following and following.kind == "killed" and not (self._ended(members) - self._killed(generation)):
            self._on_order(Order("Recover", generation + 1, following.members))
            return
        number, left = self._agreed_on(max(generation, _UNFORESEEN) + 1, members)
        self._on_order(Order("Recover", number, left))

    def _killed(self, generation: int) -> set[str]:
        return set(self.members(generation)) - set(self.members(generation + 1))

    def _ended(self, members: tuple[str, ...]) -> set[str]:
        return {worker for worker in members if (self.directory / f"ended-{worker}").exists()}

    def _agreed_on(self, number: int, members: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Return a generation of the members that have not ended, as the first worker to notice sees them."""
        file = self.directory / f"generation-{number}.json"
        until = time.monotonic() + _WAIT_S
        while not file.exists() and not self._ended(members) and time.monotonic() < until:
            time.sleep(0.002)
        left = tuple(worker for worker in members if worker not in self._ended(members))
        draft = file.with_suffix(f".{self.worker}")
        draft.write_text(json.dumps(left))
        try:
            os.link(draft, file)
        except FileExistsError:
            left = tuple(json.loads(file.read_text()))
        return number, left

    @classmethod
    def store(cls, _environment: object, generation: int) -> Store:
        """Return the rendezvous store of a generation: a file."""
        return PrefixStore(f"generation-{generation}", FileStore(str(cls.directory / "store"), -1))
