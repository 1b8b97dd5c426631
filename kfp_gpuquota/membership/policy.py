"""Who should be in the next generation, as pure functions. The order of the result gives the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.tables import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.membership.roster import Generation, Member


def first_members(wanted: Sequence[Member], min_workers: int, forming_s: float, now: float) -> tuple[str, ...]:
    """The first generation: all wanted workers, or after `forming_s` those that are ready. Empty: not yet."""
    ready = [member for member in wanted if member.state is WorkerState.READY]
    if not ready:
        return ()
    if len(ready) < len(wanted):
        waited = now - min(member.ready_at or 0.0 for member in ready)
        if len(ready) < min_workers or waited < forming_s:
            return ()
    return tuple(member.id for member in ready)


def cut_off(alive: Sequence[Member], failed_at: float, failure_s: float, now: float) -> list[str] | None:
    """Of the members of a generation in which a collective failed, those who are taken for dead; None: not known yet.

    At once, where one connection broke and all others had stood for a while: so it looks when a process dies. Where
    others broke as well, and perhaps came back, it may be the network's doing: each has `failure_s` to come back, from
    its own loss and from when another one was there to show that it can be done. One that was never connected (after a
    restart) is waited for until its silence is too long.
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
    """The recovery generation: the members of `base` still alive; those told to go only if nobody else is left."""
    alive, kept = tuple(member.id for member in base if member.alive), set(wanted)
    return tuple(worker for worker in alive if worker in kept) or alive


def next_members(base: Sequence[str], wanted: Sequence[str], members: Mapping[str, Member]) -> tuple[str, ...]:
    """The planned generation after `base`: who stays in its order, then ready joiners in the order wanted.

    State passes from member to member, so one of `base` stays until a joiner has it, even if none is wanted.
    """
    before, after = set(base), set(wanted)
    stay = tuple(worker for worker in base if worker in after)
    join = tuple(w for w in wanted if w not in before and members[w].state is WorkerState.READY)
    if stay or not wanted:
        return stay + join
    return (*base[:1], *join) if join else tuple(base)


def still_fits(proposed: Sequence[str], base: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether nobody is in a proposal who is not to be there: more joiners come with the next.

    Replacing it for each joiner would interrupt those that may be entering it.
    """
    known = {*base, *proposed}
    without_newcomers = [worker for worker in wanted if worker in known]
    return list(proposed) == without_newcomers and bool(proposed) == bool(wanted)


def concerned(generations: Iterable[Generation]) -> set[str]:
    """Their members, and those who leave with one of them while not everybody has switched."""
    return {worker for g in generations for worker in (*g.members, *(() if g.complete else g.leavers))}
