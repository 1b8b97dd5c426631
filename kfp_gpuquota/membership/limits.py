"""Finds the workers to be killed, because they are silent or leave too slowly.

Invariant: silence counts against a worker only while its peers send messages (`isolated_s` limits the exception).
Workers that are all silent at once are behind a broken network, a failover or a certificate that they do not trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.tables import WorkerState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kfp_gpuquota.membership.roster import Limits, Member


def kills_due(
    members: Iterable[Member], together: Collection[Member], limits: Limits, now: float, finished_at: float | None
) -> Iterator[tuple[str, str]]:
    """Yield (worker, reason) for each worker to be killed now. Members `together` in generations wait for each other.

    Killing a silent worker closes its sockets, which unblocks the peers that wait for it. After `finished_at` workers
    that are still starting are not needed, and the job ends with the last worker.
    """
    members = list(members)
    responsive = _responsive(members, limits, now)
    trained_before = {member.id for member in members if member.trained_before}
    for member in members:
        if member.state is WorkerState.GONE or member.killed or member.finished:
            continue
        peers = responsive - {member.id}
        why = (
            _no_first_message(member, peers & trained_before, limits, now, finished_at)
            if member.last_message_at is None
            else ""
        )
        if why:
            yield member.id, why
        elif silent_s := _too_long_silent_s(member, together, peers, limits, now, finished_at):
            yield member.id, f"it sent no message for more than {silent_s:g} s"
        elif member.leaving_since is not None and now - member.leaving_since > limits.leave_s:
            yield member.id, f"it did not leave within {limits.leave_s:g} s"


def _no_first_message(
    member: Member, peers: Collection[str], limits: Limits, now: float, finished_at: float | None
) -> str:
    """Return why a worker that has sent no message is killed now; "" where it is not.

    `peers` are the responsive workers with the same route to this coordinator as this one: workers that started later
    may have another address or another certificate.
    """
    since = member.wanted_at
    if since is None:
        return ""
    if now - since > limits.starting_s:
        return f"it sent no message within {limits.starting_s:g} s of its start"
    if _silent_since_end(since, finished_at, limits, now):
        return f"it sent no message within {limits.unheard_s:g} s of the training's end"
    if member.returning and peers and now - since > limits.return_s:
        return f"it trained before and has not reconnected within {limits.return_s:g} s, as its peers have"
    return ""


def _silent_since_end(silent_since: float, finished_at: float | None, limits: Limits, now: float) -> bool:
    """Return whether the worker has been silent for `unheard_s` since the training ended."""
    return finished_at is not None and now - max(silent_since, finished_at) > limits.unheard_s


def _too_long_silent_s(
    member: Member,
    together: Collection[Member],
    peers: Collection[str],
    limits: Limits,
    now: float,
    finished_at: float | None,
) -> float:
    """Return the limit in seconds that the member's silence has exceeded; 0: none. `peers` are the responsive ones."""
    if member.last_message_at is None or not member.alive:
        return 0.0
    silent_s = now - member.last_message_at
    if silent_s <= min(limits.silence_s, limits.unheard_s, limits.isolated_s, limits.starting_s):
        return 0.0  # the usual case; the code below compares each worker with all others
    waits_s = max((_responsive_for_s(o, limits, now) for o in together if o is not member), default=0.0)
    silence_s = max(limits.silence_s, limits.return_s) if member.returning else limits.silence_s
    if member in together and silent_s > silence_s and waits_s > limits.silence_s:
        return silence_s
    if member.state is WorkerState.JOINING and not _silent_since_end(member.last_message_at, finished_at, limits, now):
        return limits.starting_s if silent_s > limits.starting_s else 0.0
    limit_s = limits.unheard_s if peers else limits.isolated_s
    return limit_s if silent_s > limit_s else 0.0


def _responsive(members: Iterable[Member], limits: Limits, now: float) -> set[str]:
    """Return the workers that have sent messages without a gap for longer than `silence_s`."""
    return {member.id for member in members if _responsive_for_s(member, limits, now) > limits.silence_s}


def _responsive_for_s(member: Member, limits: Limits, now: float) -> float:
    """Return the seconds for which the member has sent messages up to now without a gap."""
    if not member.alive or member.responsive_since is None or now - (member.last_message_at or 0.0) > limits.gap_s:
        return 0.0
    return now - member.responsive_since
