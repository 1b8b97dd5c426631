"""A cluster's own history as a trace: its jobs as they were submitted, with the work that they turned out to be. Pure.

The work of a job is the time that it ran, so what was computed again after an eviction is part of it. That of an
elastic job is the time that it would have run at its requested size, by the throughput that the simulation assumes. A
job that runs has done what it will do. Jobs that have never run are left out: their work is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.job import USER_LABEL
from kfp_gpuquota.api.time_spent import Activity, time_spent
from kfp_gpuquota.simulator.measures import Result, Spread, spread
from kfp_gpuquota.simulator.trace import WHOLE, TraceJob, TraceNode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from kfp_gpuquota.api import Job, Node
    from kfp_gpuquota.api.job import JobStatus

_IN_QUEUE = (Activity.QUOTA, Activity.ROOM)
_AT_WORK = (Activity.STARTING, Activity.RUNNING, Activity.RESIZING)


@dataclass(frozen=True, slots=True)
class History:
    """The jobs that were queued since a time, the time that each project's were in the queue, and who is left out."""

    jobs: list[TraceJob]
    queued: dict[str, Spread]
    evicted: dict[str, int]
    never_ran: int
    of_deleted_projects: int


class Twin(msgspec.Struct, frozen=True):
    """What was recorded of the jobs, and what the simulation makes of them with today's quotas and with others."""

    queued: dict[str, Spread]
    evicted: dict[str, int]
    results: tuple[Result, ...]
    never_ran: int
    of_deleted_projects: int


def history(
    jobs: Iterable[Job],
    nodes: Sequence[Node],
    projects: Collection[str],
    *,
    since: float,
    now: float,
    throughput: Callable[[int], float],
) -> History:
    """Return the jobs that were queued since `since` (s since the epoch); `throughput` is that of so many workers."""
    of_time = [job for job in jobs if job.status.queued_at >= since]
    known = [job for job in of_time if job.spec.project in projects]
    ran = {job.uid: seconds for job in known if (seconds := _work_s(job, now, throughput)) > 0}
    replayed = sorted((job for job in known if job.uid in ran), key=lambda job: (job.status.queued_at, job.uid))
    names = sorted({job.spec.project for job in replayed})
    of = {name: [job for job in replayed if job.spec.project == name] for name in names}
    memory_mib = max((device.memory_mib for node in nodes for device in node.devices), default=0)
    return History(
        jobs=[_trace_job(job, ran[job.uid], memory_mib) for job in replayed],
        queued={name: spread(_seconds(job.status, now, _IN_QUEUE) for job in of[name]) for name in names},
        evicted={name: sum(job.status.evictions for job in of[name]) for name in names},
        never_ran=len(known) - len(replayed),
        of_deleted_projects=len(of_time) - len(known),
    )


def trace_node(node: Node) -> TraceNode:
    """Return a node as the simulation has it."""
    model = node.devices[0].model if node.devices else ""
    cpu, memory = int(1000 * (node.cpu or 0)), node.memory_mib or 0
    return TraceNode(node.name, len(node.devices), cpu, memory, model, node=node)


def _trace_job(job: Job, work_s: float, device_memory_mib: int) -> TraceJob:
    spec = job.spec
    return TraceJob(
        name=spec.name,
        project=spec.project,
        arrives_at=job.status.queued_at,
        duration_s=work_s,
        gpus=spec.worker_gpus,
        milli=round(WHOLE * min(1.0, spec.share_of(device_memory_mib))) if spec.gpus else 0,
        priority=spec.effective_priority,
        workers=spec.workers_of(spec.gpus),
        fewest=spec.workers_of(spec.smallest),
        most=spec.workers_of(spec.largest),
        spec=spec,
        user=job.owner or spec.labels.get(USER_LABEL, ""),
    )


def _seconds(status: JobStatus, now: float, activities: Collection[Activity]) -> float:
    spent = time_spent(status, now)
    return sum(spent.get(activity, 0.0) for activity in activities)


def _work_s(job: Job, now: float, throughput: Callable[[int], float]) -> float:
    """Return how long the job would have run at its requested size; 0 if it has never run."""
    ran = _seconds(job.status, now, _AT_WORK)
    sizes = list(_sizes(job, now))
    total = sum(seconds for _, seconds in sizes)
    if not job.spec.elastic or not total:
        return ran
    asked = throughput(job.spec.workers_of(job.spec.gpus))
    return ran * sum(seconds * throughput(workers) for workers, seconds in sizes) / (total * asked)


def _sizes(job: Job, now: float) -> Iterator[tuple[int, float]]:
    """Yield (workers, seconds) of the recorded changes of size; without any the size is the one that was asked for."""
    changes = job.status.resizes
    if not changes:
        return
    ends = [*(change.at for change in changes[1:]), now if job.status.finished_at is None else job.status.finished_at]
    if job.status.started_at is not None and job.status.started_at < changes[0].at:
        yield job.spec.workers_of(changes[0].from_gpus), changes[0].at - job.status.started_at
    for change, end in zip(changes, ends, strict=True):
        if change.to_gpus:
            yield job.spec.workers_of(change.to_gpus), max(0.0, end - change.at)
