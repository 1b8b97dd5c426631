"""Selects the members of the next generation, as pure functions. The order of the result gives the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.tables import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.membership.roster import Generation, Member


def first_members(wanted: Sequence[Member], min_workers: int, forming_s: float, now: float) -> tuple[str, ...]:
    """Return the first generation: all wanted workers, or after `forming_s` those that are ready. Empty: not yet."""
    ready = [member for member in wanted if member.state is WorkerState.READY]
    if not ready:
        return ()
    if len(ready) < len(wanted):
        waited = now - min(member.ready_at or 0.0 for member in ready)
        if len(ready) < min_workers or waited < forming_s:
            return ()
    return tuple(member.id for member in ready)


def disconnected_members(alive: Sequence[Member], failed_at: float, failure_s: float, now: float) -> list[str] | None:
    """Return the members that are regarded as dead after a failed collective; None while that is undecided.

    If only one connection broke and all others had been stable for `failure_s`, that process has died. If several
    broke, and perhaps came back, the network may be the cause: each member has `failure_s` to reconnect, counted from
    its own loss and from the first connection of another member. A member that has never connected (after a restart) is
    subject to the limits on silence instead.
    """
    lost = {member.id: member.lost_at for member in alive if member.lost_at is not None}
    there = [member.connected_at for member in alive if member.connected_at is not None]
    one_alone = len(lost) == 1 == len(alive) - len(there)
    if there and one_alone and max(there) + failure_s <= min(lost.values()):
        return list(lost)
    if now - max([failed_at, *lost.values(), *sorted(there)[:1]]) < failure_s:
        return None
    return list(lost) if there else []


def survivors(base: Sequence[Member], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the recovery generation: the members of `base` still alive, without unwanted ones unless all are."""
    alive, kept = tuple(member.id for member in base if member.alive), set(wanted)
    return tuple(worker for worker in alive if worker in kept) or alive


def next_members(base: Sequence[str], wanted: Sequence[str], members: Mapping[str, Member]) -> tuple[str, ...]:
    """Return the planned generation after `base`: remaining members in their order, then ready workers in target order.

    State is copied from member to member, so one member of `base` stays until a joining worker has it, even if no
    member of `base` is wanted.
    """
    before, after = set(base), set(wanted)
    stay = tuple(worker for worker in base if worker in after)
    join = tuple(w for w in wanted if w not in before and members[w].state is WorkerState.READY)
    if stay or not wanted:
        return stay + join
    return (*base[:1], *join) if join else tuple(base)


def still_fits(proposed: Sequence[str], base: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether the proposal has only wanted members. Workers that became ready later join the next generation.

    Replacing a proposal for each of them would interrupt workers that may be entering it.
    """
    considered = {*base, *proposed}
    without_newcomers = [worker for worker in wanted if worker in considered]
    return list(proposed) == without_newcomers and bool(proposed) == bool(wanted)


def participants(generations: Iterable[Generation]) -> set[str]:
    """Return the generations' members, and their leavers while the switch is not complete."""
    return {worker for g in generations for worker in (*g.members, *(() if g.complete else g.leavers))}
