"""Which workers have waited, or kept others waiting, for too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.tables import WorkerState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kfp_gpuquota.membership.roster import Limits, Member


def kills_due(
    members: Iterable[Member], together: Collection[Member], limits: Limits, now: float, finished_at: float | None
) -> Iterator[tuple[str, str]]:
    """(worker, why) for each worker to be killed now. Those `together` in generations may wait for each other.

    Killing a silent worker closes its sockets, and that is what frees the peers which wait for it. Since `finished_at`
    nobody needs those that are still starting, and the job ends with the last one.

    Invariant: silence counts against a worker only while its peers are heard (`isolated_s` says what else).
    Workers that are all silent at once are behind a broken network, a failover or a certificate that they do not trust.
    """
    members = list(members)
    heard = _heard(members, limits, now)
    trained_before = {member.id for member in members if member.trained_before}
    for member in members:
        if member.state is WorkerState.GONE or member.killed or member.finished:
            continue
        peers = heard - {member.id}
        why = _never_heard(member, peers & trained_before, limits, now, finished_at) if member.heard_at is None else ""
        if why:
            yield member.id, why
        elif silent_s := _too_long_silent_s(member, together, peers, limits, now, finished_at):
            yield member.id, f"it was silent for more than {silent_s:g} s"
        elif member.leaving_since is not None and now - member.leaving_since > limits.leave_s:
            yield member.id, f"it did not leave within {limits.leave_s:g} s"


def _never_heard(member: Member, peers: Collection[str], limits: Limits, now: float, finished_at: float | None) -> str:
    """Return why a worker that was never heard is killed now; "" where it is not.

    `peers` are those heard that would be lost to it as well if the way to this coordinator was: newcomers may have
    another address or another certificate.
    """
    since = member.wanted_at
    if since is None:
        return ""
    if now - since > limits.starting_s:
        return f"it was not heard within {limits.starting_s:g} s of its start"
    if _for_nothing(since, finished_at, limits, now):
        return f"it was not heard within {limits.unheard_s:g} s of the training's end"
    if member.returning and peers and now - since > limits.return_s:
        return f"it trained before and has not come back within {limits.return_s:g} s, as its peers have"
    return ""


def _for_nothing(silent_since: float, finished_at: float | None, limits: Limits, now: float) -> bool:
    """It has been silent since the training ended."""
    return finished_at is not None and now - max(silent_since, finished_at) > limits.unheard_s


def _too_long_silent_s(
    member: Member,
    together: Collection[Member],
    peers: Collection[str],
    limits: Limits,
    now: float,
    finished_at: float | None,
) -> float:
    """Return the limit in seconds that the member's silence has passed; 0: none. `peers` are those heard."""
    if member.heard_at is None or not member.alive:
        return 0.0
    silent_s = now - member.heard_at
    if silent_s <= min(limits.silence_s, limits.unheard_s, limits.isolated_s, limits.starting_s):
        return 0.0  # most are heard all the time: what follows compares each with all
    waits_s = max((_heard_for_s(o, limits, now) for o in together if o is not member), default=0.0)
    silence_s = max(limits.silence_s, limits.return_s) if member.returning else limits.silence_s
    if member in together and silent_s > silence_s and waits_s > limits.silence_s:
        return silence_s
    if member.state is WorkerState.JOINING and not _for_nothing(member.heard_at, finished_at, limits, now):
        return limits.starting_s if silent_s > limits.starting_s else 0.0
    limit_s = limits.unheard_s if peers else limits.isolated_s
    return limit_s if silent_s > limit_s else 0.0


def _heard(members: Iterable[Member], limits: Limits, now: float) -> set[str]:
    """Return the workers that have been heard without a gap for longer than a silence counts."""
    return {member.id for member in members if _heard_for_s(member, limits, now) > limits.silence_s}


def _heard_for_s(member: Member, limits: Limits, now: float) -> float:
    """For how long it has been heard, up to now, without a gap."""
    if not member.alive or member.heard_since is None or now - (member.heard_at or 0.0) > limits.gap_s:
        return 0.0
    return now - member.heard_since
