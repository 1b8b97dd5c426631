"""Which workers have waited, or kept others waiting, for too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.tables import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.membership.roster import Limits, Member


def kills_due(members: Iterable[Member], limits: Limits, now: float) -> Iterator[tuple[str, str]]:
    """(worker, why) for each worker to be killed now.

    Killing a silent worker closes its sockets, and that is what frees the peers which wait for it.
    """
    for member in members:
        if member.state is WorkerState.GONE or member.killed or member.finished:
            continue
        unheard_since = member.wanted_at if member.heard_at is None else None
        if unheard_since is not None and now - unheard_since > limits.starting_s:
            yield member.id, f"it was not heard within {limits.starting_s:g} s of its start"
        elif member.heard_at is not None and member.alive and now - member.heard_at > _patience_s(member, limits):
            yield member.id, f"it was silent for more than {_patience_s(member, limits):g} s"
        elif member.leaving_since is not None and now - member.leaving_since > limits.leave_s:
            yield member.id, f"it did not leave within {limits.leave_s:g} s"


def _patience_s(member: Member, limits: Limits) -> float:
    """Nobody waits for one that still loads its model, which may keep all of its threads from running for long."""
    return limits.starting_s if member.state is WorkerState.JOINING else limits.silence_s
