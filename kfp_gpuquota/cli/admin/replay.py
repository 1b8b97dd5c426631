"""`gpuquota simulate --state`: the plan of a dump, in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.cli.arguments.dumps import read_dump
from kfp_gpuquota.cli.display.output import show, table, timestamp
from kfp_gpuquota.scheduler.dump import StateDump, replay
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kfp_gpuquota.scheduler import Plan


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the plan, or what a job waits for; `nodes` are those of workers that start."""

    decision: str
    project: str
    job: str
    nodes: tuple[str, ...] = ()
    reason: str
    code: str


class ReplayedState(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a dump. `same`: it is the one that the cluster made of this state."""

    at: float
    version: str
    same: bool
    decisions: tuple[Decision, ...]


def show_replay(path: Path, output: str) -> None:
    """Plan from the dump in the file, and show the plan."""
    dump = read_dump(path)
    replayed = replay(dump)
    decisions = tuple(_decisions(dump, replayed.plan))
    found = ReplayedState(at=dump.at, version=dump.version, same=replayed.same, decisions=decisions)
    show(found, output, "\n".join(_lines(dump, found)))


def _decisions(dump: StateDump, plan: Plan) -> Iterator[Decision]:
    projects = {queue.key: queue.name for queue in dump.queues}
    names = {job.uid: (projects[job.queue], job.name) for job in dump.jobs}
    starts = [("start", one.job, one.placements, one.reason) for one in plan.bind]
    resized = [("grow" if one.add else "shrink", one.job, one.add, one.reason) for one in plan.resize]
    stops = [("stop", one.job, (), one.reason) for one in plan.evict]
    moves = [("move", one.job, (one.to,), one.reason) for one in plan.move]
    waits = [("wait", uid, (), reason) for uid, reason in plan.waiting.items()]
    for kind, uid, placements, reason in (*starts, *resized, *stops, *moves, *waits):
        project, job = names[uid]
        nodes = tuple(dict.fromkeys(placement.node for placement in placements))
        yield Decision(
            decision=kind, project=project, job=job, nodes=nodes, reason=reason.message, code=reason.code.value
        )


def _lines(dump: StateDump, found: ReplayedState) -> Iterator[str]:
    gpus = sum(len(node.devices) for node in dump.nodes)
    workers = sum(len(job.workers) for job in dump.jobs)
    when = timestamp(dump.at)
    yield (
        f"State of {when}, written by version {dump.version}: {len(dump.projects)} projects, {len(dump.nodes)} nodes "
        f"with {gpus} GPUs, {len(dump.jobs)} jobs, {workers} workers"
    )
    yield ""
    rows = [(one.decision, one.project, one.job, ",".join(one.nodes), one.reason) for one in found.decisions]
    yield table(("DECISION", "PROJECT", "JOB", "NODES", "WHY"), rows) if rows else "The plan changes nothing."
    yield ""
    if found.same:
        yield "The cluster makes the same plan of this state."
    else:
        yield f"The cluster, version {dump.version}, makes another plan of this state than version {__version__}."
