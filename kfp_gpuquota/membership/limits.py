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
    """
    for member in members:
        if member.state is WorkerState.GONE or member.killed or member.finished:
            continue
        unheard_since = member.wanted_at if member.heard_at is None else None
        if unheard_since is not None and now - unheard_since > limits.starting_s:
            yield member.id, f"it was not heard within {limits.starting_s:g} s of its start"
        elif unheard_since is not None and _for_nothing(unheard_since, finished_at, limits, now):
            yield member.id, f"it was not heard within {limits.unheard_s:g} s of the training's end"
        elif silent_s := _too_long_silent_s(member, together, limits, now, finished_at):
            yield member.id, f"it was silent for more than {silent_s:g} s"
        elif member.leaving_since is not None and now - member.leaving_since > limits.leave_s:
            yield member.id, f"it did not leave within {limits.leave_s:g} s"


def _for_nothing(silent_since: float, finished_at: float | None, limits: Limits, now: float) -> bool:
    """It has been silent since the training ended."""
    return finished_at is not None and now - max(silent_since, finished_at) > limits.unheard_s


def _too_long_silent_s(
    member: Member, together: Collection[Member], limits: Limits, now: float, finished_at: float | None
) -> float:
    """The limit that its silence has passed; 0: none.

    Silence counts while another one may wait for it that is heard itself: workers that are all silent at once are
    behind a broken network, where killing them would help nobody and lose the job's state.
    """
    if member.heard_at is None or not member.alive:
        return 0.0
    silent_s = now - member.heard_at
    waits_s = max((_heard_for_s(o, limits, now) for o in together if o is not member), default=0.0)
    if member in together and min(silent_s, waits_s) > limits.silence_s:
        return limits.silence_s
    if member.state is WorkerState.JOINING and not _for_nothing(member.heard_at, finished_at, limits, now):
        return limits.starting_s if silent_s > limits.starting_s else 0.0
    return limits.unheard_s if silent_s > limits.unheard_s else 0.0


def _heard_for_s(member: Member, limits: Limits, now: float) -> float:
    """For how long it has been heard, up to now, without a gap."""
    if not member.alive or member.heard_since is None or now - (member.heard_at or 0.0) > limits.gap_s:
        return 0.0
    return now - member.heard_since
