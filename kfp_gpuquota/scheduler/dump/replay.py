"""Takes a dump of a state with its plan, and plans again from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.errors import UsageError
from kfp_gpuquota.scheduler.actions.decisions import Plan
from kfp_gpuquota.scheduler.dump import writing
from kfp_gpuquota.scheduler.dump.reading import read_state
from kfp_gpuquota.scheduler.dump.records import FORMAT, StateDump
from kfp_gpuquota.scheduler.planner import plan

if TYPE_CHECKING:
    from kfp_gpuquota.scheduler.state.state import State


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that this version makes of a dump. `same`: it is the one of the planner that wrote the dump."""

    plan: Plan
    same: bool


class _Header(msgspec.Struct, frozen=True):
    """What every format has."""

    format: int
    version: str


def take_dump(state: State, now: float, version: str) -> StateDump:
    """Return the state as a dump, with the plan for `now` (seconds since the epoch). O(jobs + workers + nodes)."""
    return StateDump(
        format=FORMAT,
        version=version,
        at=now,
        plan=plan(state, now),
        projects=tuple(state.projects.values()),
        nodes=writing.node_records(state),
        queues=writing.queue_records(state),
        jobs=writing.job_records(state),
        usage_half_life_s=state.ledger.half_life_s,
        reclaim_shelter_s=state.ledger.reclaim_shelter_s,
        reserve_after_s=state.ledger.reserve_after_s,
        moves=state.ledger.moves,
        defragmentation=state.ledger.defragmentation,
        defragmented=state.ledger.defragmented,
        last_at=state.last_at,
        orders=writing.orders(state),
    )


def decode_dump(content: bytes) -> StateDump:
    """Return the dump of a file. Raises UsageError for another file, or for a format of a newer version."""
    try:
        header = msgspec.json.decode(content, type=_Header)
        if header.format > FORMAT:
            raise UsageError(
                f"the file is of version {header.version}, whose format {header.format} this version does not read; "
                "update gpuquota"
            )
        return msgspec.json.decode(content, type=StateDump)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the file is not what `gpuquota debug state` writes: {error}") from error


def replay(dump: StateDump) -> Replay:
    """Plan from the dump's state, at its time. Raises UsageError for a dump that contradicts itself."""
    planned = plan(load_state(dump), dump.at)
    return Replay(plan=planned, same=planned == dump.plan)


def load_state(dump: StateDump) -> State:
    """Return the dump's state. Raises UsageError for a dump that contradicts itself."""
    try:
        return read_state(dump)
    except KeyError as error:
        raise UsageError(f"the file is damaged: it names {error}, which it does not describe") from error
