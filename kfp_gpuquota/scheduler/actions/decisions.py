"""The decisions in a `Plan`, the scheduler's result for one state."""

from __future__ import annotations

import msgspec

from kfp_gpuquota.api import Reason
from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.scheduler.state.events import Defragmented


class Bind(msgspec.Struct, frozen=True):
    """Start a waiting job, one worker per placement."""

    job: str
    placements: tuple[Placement, ...]
    reason: Reason


class Resize(msgspec.Struct, frozen=True):
    """Start a worker at each placement of `add`, and ask the workers `remove` to leave."""

    job: str
    add: tuple[Placement, ...]
    remove: tuple[str, ...]
    from_workers: int
    to_workers: int
    reason: Reason


class Evict(msgspec.Struct, frozen=True):
    """Stop the whole job; it returns to the pending queue and keeps its submission time."""

    job: str
    workers: tuple[str, ...]
    reason: Reason


class Move(msgspec.Struct, frozen=True):
    """Stop one worker; when it has exited, a later plan starts it at the other placement, which is promised to it."""

    job: str
    worker: str
    to: Placement
    reason: Reason


class Nominate(msgspec.Struct, frozen=True):
    """The job will start (or expand) there when the workers `waiting_for` have exited."""

    job: str
    placements: tuple[Placement, ...]
    waiting_for: tuple[str, ...]
    reason: Reason


class Plan(msgspec.Struct, frozen=True):
    """All decisions for one state. `waiting` has the reason of each pending job, by uid, also of nominated jobs.

    `promises` are the placements that must be promised from now on, by uid of the job: `PlacementsPromised`. Those of
    other jobs are at an end. `victims` are the workers that leave for a promise, by the same uid.

    `again_at` is when to plan again without an event, in seconds since the epoch, because a decision waits for that
    time (a cool-down, a gang below its minimum). None: only an event can change the plan.

    `defragmented`: the plan has looked for moves that gather free GPUs, and all of its moves are such. It is applied
    with them, and stored before they are carried out: it has what they cost.
    """

    bind: tuple[Bind, ...] = ()
    resize: tuple[Resize, ...] = ()
    evict: tuple[Evict, ...] = ()
    move: tuple[Move, ...] = ()
    nominate: tuple[Nominate, ...] = ()
    waiting: dict[str, Reason] = {}
    promises: dict[str, tuple[Placement, ...]] = {}
    victims: dict[str, tuple[str, ...]] = {}
    again_at: float | None = None
    defragmented: Defragmented | None = None

    @property
    def empty(self) -> bool:
        """Whether the plan starts and stops nothing."""
        return not (self.bind or self.resize or self.evict or self.move)
