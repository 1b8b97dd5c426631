"""The exchange of a new generation's members before they train: which of them has the newest state, and that state.

One small all-gather covers all cases: the first generation (rank 0 holds the initial state), a joining worker (it holds
none), a loss (a worker that has applied a step that others have not is one step ahead of them).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CollectiveError, ModelMismatchError
from elastic_runtime.state.kept_gradients import without_cleared
from elastic_runtime.state.training_state import Totals
from elastic_runtime.state.transfer import gather_values, receive_state, send_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.process.timing import Phases
    from elastic_runtime.state.training_state import TrainingState


def exchange(group: Group, state: TrainingState, phases: Phases, *, holds_state: bool) -> bool:
    """Bring all members to the newest state; return whether this one received it.

    The first member with the state sends it, and each receiver forwards it, so n joining workers take the time of
    log2(n + 1) transfers.

    Raises CollectiveError where a member was lost or does not fit; ModelMismatchError in the one that does not fit.
    """
    step = state.position.step if holds_state else -1
    mine = [step, state.fingerprint(), state.agreement_fingerprint(), state.rounds, state.in_round]
    mine += [state.sample_checksum, *dataclasses.astuple(state.totals)]
    with phases("meet"):
        rows = group.all_gather(torch.tensor(mine, dtype=torch.int64))
    steps, models, agreements, rounds, in_rounds, samples = rows[:, :6].T.tolist()
    source = steps.index(max(steps))
    check_same(group, source, models, OTHER_MODEL)
    _check_agreement(group, source, agreements, state)
    _check_totals(group, source, [Totals(*row[6:]) for row in rows.tolist()])
    if all(samples):
        check_same(group, source, samples, OTHER_SAMPLES, what="data")
    state.rounds = max(rounds)
    behind = [rank for rank, step in enumerate(steps) if rank != source and (step < steps[source] or step < 0)]
    with phases("state"):
        received = _passed_on(group, relay(source, behind), state, holds_state=holds_state)
        if received is not None:
            state.load(without_cleared(received))
    state.awaited = received is not None and bool(in_rounds[source])
    return received is not None


def relay(source: int, behind: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return (from, to) of each transfer, in an order in which every sender has received the state before."""
    holders, waiting = [source], list(behind)
    while waiting:
        pairs = list(zip(holders, waiting, strict=False))
        yield from pairs
        holders += [to for _, to in pairs]
        waiting = waiting[len(pairs) :]


def _passed_on(
    group: Group, transfers: Iterable[tuple[int, int]], state: TrainingState, *, holds_state: bool
) -> dict[str, Any] | None:
    """This member's part in the transfers; what it received."""
    received = None
    for sender, to in transfers:
        if group.rank == to:
            received = _received(group, sender, state, holds_state=holds_state)
        elif group.rank == sender:
            send_state(group, to, state.capture() if received is None else received)
    return received


def _received(group: Group, source: int, state: TrainingState, *, holds_state: bool) -> dict[str, Any]:
    """The source's state. A joiner's own memory takes it up, and is given up where the transfer fails."""
    try:
        received: dict[str, Any] = receive_state(group, source, None if holds_state else state.capture())
    except CollectiveError:
        if not holds_state:
            state.leave_memory()
        raise
    return received


def _check_agreement(group: Group, source: int, agreements: list[int], state: TrainingState) -> None:
    """Check as check_same does; the message has both workers' values, which are gathered if they differ."""
    if len(set(agreements)) == 1:
        return
    texts = gather_values(group, state.agreement())
    remedy = f"{texts[group.rank]} here, {texts[source]} there; {_OTHERWISE}"
    check_same(group, source, agreements, remedy, what="way of training")


def _check_totals(group: Group, source: int, totals: list[Totals]) -> None:
    """Raise ModelMismatchError if ranks differ in the length of the training."""
    numbers = [totals.index(each) for each in totals]
    remedy = (
        f"{totals[group.rank]} here, {totals[source]} there; a script that loads a checkpoint of its own asks for all "
        "epochs and passes its start, job.epochs(total, start=...), for a later worker may find a later checkpoint"
    )
    check_same(group, source, numbers, remedy, what="length of the training")


OTHER_SAMPLES = (
    "the same few indices of the dataset give other samples; list files in sorted order, and split or shuffle them by "
    "a fixed seed, so that an index means the same sample on every worker; a cache must not keep what was drawn at "
    "random: keep the sample as it was read, and augment it each time"
)
OTHER_MODEL = (
    "parameters must have the same names, shapes and types, and optimizers the same number, on every worker; do not "
    "build them from the rank"
)
_OTHERWISE = (
    "every worker must have the same dataset length, seed, batch sizes, kinds of optimizers and reduction, the same "
    "Subset (random_split needs generator=torch.Generator().manual_seed(...)) and, for reduction='exact', the same "
    "torch, number of threads and kind of device"
)


def check_same(group: Group, source: int, fingerprints: list[int], remedy: str, *, what: str = "model") -> None:
    """ModelMismatchError in a rank whose number is not the source's, CollectiveError in the others."""
    different = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[source]]
    if group.rank in different:
        raise ModelMismatchError(f"the {what} of rank {group.rank} differs from that of rank {source}: {remedy}")
    if different:
        raise CollectiveError(f"the {what} of ranks {different} differs from that of rank {source}")
