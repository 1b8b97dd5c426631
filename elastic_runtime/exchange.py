"""What the members of a new generation tell each other before they train: who holds the newest state, and that state.

One small all-gather, whatever the occasion: the first generation (rank 0 holds what all begin with), a joiner (it holds
nothing), a loss (who has applied a step that others have not is one step ahead of them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CollectiveError, ModelMismatchError
from elastic_runtime.transfer import receive_state, send_state

if TYPE_CHECKING:
    from elastic_runtime.groups import Group
    from elastic_runtime.state import TrainingState


def exchange(group: Group, state: TrainingState, *, holds_state: bool) -> bool:
    """Bring all members to the newest state; whether this one received it.

    Raises CollectiveError where a member was lost or does not fit; ModelMismatchError in the one that does not fit.
    """
    step = state.position.step if holds_state else -1
    mine = [step, state.fingerprint(), state.numerics_fingerprint()]
    steps, models, numerics = group.all_gather(torch.tensor(mine, dtype=torch.int64)).T.tolist()
    source = steps.index(max(steps))
    check_same(group, source, models, OTHER_MODEL)
    check_same(group, source, numerics, f"{_OTHER_NUMERICS} ({state.reduction}; {state.numerics or 'any machine'})")
    behind = [rank for rank, known in enumerate(steps) if rank != source and (known < steps[source] or known < 0)]
    if group.rank == source:
        for rank in behind:
            send_state(group, rank, state.capture())
    if group.rank not in behind:
        return False
    state.load(_received(group, source, state, holds_state=holds_state))
    return True


def _received(group: Group, source: int, state: TrainingState, *, holds_state: bool) -> dict[str, Any]:
    """The source's state. A joiner's own memory takes it up, and is given up where the transfer fails."""
    try:
        received: dict[str, Any] = receive_state(group, source, None if holds_state else state.capture())
    except CollectiveError:
        if not holds_state:
            state.leave_memory()
        raise
    return received


OTHER_MODEL = (
    "parameters must have the same names, shapes and types, and optimizers the same number, on every worker; do not "
    "build them from the rank"
)
_OTHER_NUMERICS = (
    "every worker must ask for the same reduction and, for reduction='exact', have the same torch, number of threads "
    "and kind of device"
)


def check_same(group: Group, source: int, fingerprints: list[int], remedy: str) -> None:
    """ModelMismatchError in a rank whose number is not the source's, CollectiveError in the others."""
    different = [rank for rank, known in enumerate(fingerprints) if known != fingerprints[source]]
    if group.rank in different:
        raise ModelMismatchError(f"the model of rank {group.rank} differs from that of rank {source}: {remedy}")
    if different:
        raise CollectiveError(f"the models of ranks {different} differ from that of rank {source}")
