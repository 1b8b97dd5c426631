"""The events of each step of a rehearsal. Pure: both workers derive the same orders from them.

Steps are counted from the one that the training begins with. A step that "fails" is computed to its end, its gradients
are recorded, and then it is repeated by the members of the next generation, as after the loss of a worker.
"""

from __future__ import annotations

from elastic_runtime.membership.orders import Order

FIRST, SECOND = "first", "second"

REPEATED_ALONE = 1
"""One worker repeats it."""
JOINED = 3
"""Computed by one worker, then by two, of which the second one has just received the state. It fails again, for both
attempts are computed without dropout and batch statistics where gradients are not exact; then it counts.
"""
REPEATED = 5
"""Two workers repeat it. Where an iteration has several backward passes, the failure is in the last one."""
LEADER_LOST = 7
"""Computed by two workers, then by the second one alone, which becomes rank 0."""
SHARDS_SAVED = 6
"""Before it sharded state is written to a checkpoint, to which the loss of rank 0 leads back."""
SAVED = 9
"""Before it the state is written to a checkpoint and read again."""
LAST = 10
"""After it the rehearsal ends."""
FIRST_EPOCH = 1
"""Steps of the first epoch, if there are several: the second worker joins in the middle of the second one, so that what
a script counts by epochs, or does between them, is found where it differs. It joins after two steps of that epoch: one
of them changes the weights, though a script skips every other step.
"""

FAILING = (REPEATED_ALONE, JOINED, JOINED, REPEATED, LEADER_LOST)
"""In order; a step that stands here twice fails twice."""
_MEMBERS = ((FIRST,), (FIRST,), (FIRST, SECOND), (FIRST, SECOND), (FIRST, SECOND), (SECOND,))
"""Of generation 1, and of those after each failure."""


JOINS_IN = 2 + FAILING.index(JOINED)
"""The generation in which the second worker begins."""


def first_order(worker: str) -> Order:
    """The order that lets `worker` begin: alone, or as a joiner."""
    return _recover(1 if worker == FIRST else JOINS_IN)


def order_after_failure(worker: str, generation: int) -> Order:
    """The order for `worker` once a step of `generation` has failed."""
    members = _MEMBERS[generation] if generation < len(_MEMBERS) else ()
    if worker not in members:
        return Order("Release", why="the rehearsal is over for this worker")
    return _recover(generation + 1)


def _recover(generation: int) -> Order:
    return Order("Recover", generation, _MEMBERS[generation - 1])
