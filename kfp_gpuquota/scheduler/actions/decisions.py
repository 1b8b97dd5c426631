"""What is to be done: the scheduler's answer for one state."""

from __future__ import annotations

import msgspec

from kfp_gpuquota.api import Reason


class Placement(msgspec.Struct, frozen=True):
    """Where one worker goes: device indices on a node. `part`: which of the job's parts it is a worker of."""

    node: str
    devices: tuple[int, ...]
    part: str = ""


class Bind(msgspec.Struct, frozen=True):
    """Start a waiting job, one worker per placement."""

    job: str
    placements: tuple[Placement, ...]
    reason: Reason


class Resize(msgspec.Struct, frozen=True):
    """Start a worker at each placement of `add`, tell the workers `remove` to go."""

    job: str
    add: tuple[Placement, ...]
    remove: tuple[str, ...]
    from_workers: int
    to_workers: int
    reason: Reason


class Evict(msgspec.Struct, frozen=True):
    """Stop the whole job; it returns to the queue with its age."""

    job: str
    workers: tuple[str, ...]
    reason: Reason


class Move(msgspec.Struct, frozen=True):
    """Stop one worker and start it elsewhere."""

    job: str
    worker: str
    to: Placement
    reason: Reason


class Nominate(msgspec.Struct, frozen=True):
    """The job will start (or grow) there when the workers `waiting_for` are gone; nothing to do."""

    job: str
    placements: tuple[Placement, ...]
    waiting_for: tuple[str, ...]
    reason: Reason


class Plan(msgspec.Struct, frozen=True):
    """One answer. `waiting` says of each job that waits (uid) why; a job that is nominated waits, too.

    `again_at`: when to plan again, in seconds since the epoch, though nothing happens until then: a decision waits for
    that time (a cool-down, a gang below its minimum). None: only an event can change the answer.
    """

    bind: tuple[Bind, ...] = ()
    resize: tuple[Resize, ...] = ()
    evict: tuple[Evict, ...] = ()
    move: tuple[Move, ...] = ()
    nominate: tuple[Nominate, ...] = ()
    waiting: dict[str, Reason] = {}
    again_at: float | None = None

    @property
    def empty(self) -> bool:
        """There is nothing to do (nominations and reasons do not count)."""
        return not (self.bind or self.resize or self.evict or self.move)
