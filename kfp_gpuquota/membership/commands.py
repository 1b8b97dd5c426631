"""The commands that the machine returns, in the imperative.

An *order* is the current instruction for one worker. Orders are level-triggered, not edge-triggered: a worker that
reconnects receives only the current one, so that none can be missed and none has to be acknowledged. Instructions that
are sent once would need sequence numbers and acknowledgements.
"""

from __future__ import annotations

import msgspec


class Stay(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Continue in `generation` (0: wait for one), and drop any proposal beyond it."""

    generation: int


class Propose(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Prepare `generation` in the background; the members of `base` switch when all of them are prepared.

    `members` are in rank order: remaining members keep their relative order, joining ones follow. Empty: all members of
    `base` save their state and leave.
    """

    generation: int
    members: tuple[str, ...]
    base: int


class Recover(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Abort the current step, build `generation` at once and repeat the step there.

    The first generation is formed in the same way, as no step is in progress.
    """

    generation: int
    members: tuple[str, ...]


class Release(msgspec.Struct, frozen=True, tag=True, tag_field="order"):
    """Leave: the worker is in no generation any more."""

    why: str


Order = Stay | Propose | Recover | Release


class SendOrder(msgspec.Struct, frozen=True):
    """Send `order` to `worker`; it replaces every earlier order."""

    worker: str
    order: Order


class Reserve(msgspec.Struct, frozen=True):
    """Store that the number `generation` is used, before a message that contains it is sent."""

    generation: int


class Kill(msgspec.Struct, frozen=True):
    """Kill the worker's process: it no longer responds, did not leave in time, or has outdated state."""

    worker: str
    why: str


class AnnounceCommit(msgspec.Struct, frozen=True):
    """`generation` is in force with these members, in rank order, since the end of `step`.

    Issued when the first member has switched, and again, with `complete`, when all have: `pause_ms` and `lost_steps`
    are the largest of any member.
    """

    generation: int
    members: tuple[str, ...]
    step: int
    pause_ms: float
    lost_steps: int
    complete: bool


class AnnounceRelease(msgspec.Struct, frozen=True):
    """The worker is released, or left by agreement, at the end of `step`; its process is about to exit with 0."""

    worker: str
    step: int


class AnnounceFinish(msgspec.Struct, frozen=True):
    """The worker applied the last step of the training."""

    worker: str
    step: int


Command = SendOrder | Reserve | Kill | AnnounceCommit | AnnounceRelease | AnnounceFinish
