"""What the machine wants done, in the imperative.

An *order* is what stands for one worker now. Orders are levels, not edges: a worker that reconnects is told the one
that stands and nothing older, so none can be missed and none has to be acknowledged.
"""

from __future__ import annotations

import msgspec


class Stay(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Nothing to do: go on in `generation` (0: wait for one), and drop whatever was proposed beyond it."""

    generation: int


class Propose(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Prepare `generation` in the background; the members of `base` switch when all of them are prepared.

    `members` are in rank order: those who stay keep their relative order, joiners follow. Empty: all of `base` save
    and leave.
    """

    generation: int
    members: tuple[str, ...]
    base: int


class Recover(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Give up what is in flight, build `generation` at once and repeat the step there.

    The first generation is formed in the same way: nobody has a step to finish.
    """

    generation: int
    members: tuple[str, ...]


class Release(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """You are in no generation any more: leave."""

    why: str


Order = Stay | Propose | Recover | Release


class Tell(msgspec.Struct, frozen=True):
    """Send `order` to `worker`: it replaces every earlier one."""

    worker: str
    order: Order


class Reserve(msgspec.Struct, frozen=True):
    """Store that `generation` was used, before anything that names it is sent."""

    generation: int


class Kill(msgspec.Struct, frozen=True):
    """End the worker's process: it no longer answers, did not leave in time, or cannot be merged."""

    worker: str
    why: str


class AnnounceCommit(msgspec.Struct, frozen=True):
    """`generation` is in force with these members, in rank order, since the end of `step`.

    Sent when the first member has switched, and once more, with `complete`, when all of them have: `pause_ms` is then
    that of the member that stood still longest, `lost_steps` the most of any.
    """

    generation: int
    members: tuple[str, ...]
    step: int
    pause_ms: float
    lost_steps: int
    complete: bool


class AnnounceRelease(msgspec.Struct, frozen=True):
    """The worker is let go, or left by agreement, at the end of `step`; its process is about to end with 0."""

    worker: str
    step: int


class AnnounceFinish(msgspec.Struct, frozen=True):
    """The worker applied the last step of the training."""

    worker: str
    step: int


Command = Tell | Reserve | Kill | AnnounceCommit | AnnounceRelease | AnnounceFinish
