"""Gangs with parts: a tree of sets of tasks, each with a minimum; a job without a tree is a single set.

A set is *whole* when it has its minimum, an inner group when enough of its children are whole (all, or `fewest`). The
missing tasks of the gang are placed together; above the gang, the part with the lowest ratio to its minimum is next.

The tasks of a set may be in *segments*, so many in one domain of the topology's last level each. No task belongs to a
segment by name: those of a job are in segments if each domain has a multiple of so many of them. So nothing has to be
stored. A domain with another number has lost one, and gets the next tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.state.model import UNLIMITED, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kfp_gpuquota.scheduler.state.model import Group, Host, Job, Task, Topology

_PLACED = (Status.HELD, Status.BOUND, Status.NOMINATED)
Counts = dict[str, int]
SegmentDomain = tuple[str, ...]
"""The values of all levels of a topology with segments."""


def below(job: Job) -> bool:
    """Return whether the job has fewer tasks than its gang."""
    if job.groups is None:
        return job.active < job.gang
    return not _whole(job.groups, active_by_set(job))


def held_back(job: Job) -> bool:
    """Return whether a stop policy of its project keeps the job from getting workers.

    A gang that runs is completed, unless it is drained: it would be stopped as stale else.
    """
    return job.halted and not (job.goes_on and below(job))


def next_tasks(job: Job) -> list[Task]:
    """Return the tasks to place next: the gang's missing tasks together, then one at a time; [] if too few wait."""
    if job.groups is None:
        count = max(1, job.gang - job.active)
        tasks = job.pending[job.placed : job.placed + count]
        if any(
            task.status is not Status.PENDING for task in tasks
        ):  # an earlier one was placed, and has lost its place
            tasks = [task for task in job.pending if task.status is Status.PENDING][:count]
        return tasks if len(tasks) == count else []
    active, waiting = active_by_set(job), _waiting_by_set(job)
    if not _whole(job.groups, active):
        return _lacking(job.groups, active, waiting) or []
    if job.segment > 1:
        return _next_segment(job, waiting.get("", []))
    return _further(job.groups, active, waiting)


def _next_segment(job: Job, waiting: list[Task]) -> list[Task]:
    """Return the tasks that segments have lost, else those of one more segment."""
    if lost := sum(incomplete(job).values()):
        return waiting[:lost]
    return waiting[: job.segment] if len(waiting) >= job.segment else []


def segment_domain(topology: Topology, host: Host) -> SegmentDomain | None:
    """Return the domain of the host in which a segment may be; None where it has no label of that level."""
    if topology.levels[-1] not in host.labels:
        return None
    return tuple([host.labels.get(key, "") for key in topology.levels])


def _by_domain(job: Job) -> dict[SegmentDomain, list[Task]]:
    """Return the placed tasks by the domain that they are in, by host and age: those that run, then the others."""
    found: dict[SegmentDomain, list[Task]] = {}
    if job.segments is not None:
        placed = [(task.node.name, task.index, task.id, task) for task in active_tasks(job) if task.node is not None]
        for *_, task in sorted(placed, key=lambda one: (one[-1].status is not Status.HELD, *one[:-1])):
            assert task.node is not None
            found.setdefault(segment_domain(job.segments, task.node) or (), []).append(task)
    return found


def incomplete(job: Job) -> dict[SegmentDomain, int]:
    """Return the number of tasks that the segments of each domain lack, of those that lack some."""
    if job.segment <= 1:
        return {}
    return {domain: lost for domain, tasks in _by_domain(job).items() if (lost := -len(tasks) % job.segment)}


def loose_units(
    job: Job, tasks: Sequence[Task], may_leave: Callable[[Task], bool] = lambda task: task.status is Status.HELD
) -> list[tuple[Task, ...]]:
    """Return what may be evicted without the rest of the job, in the order of `tasks`: one of them, or a segment.

    A segment has all tasks that `may_leave` in it, also those that are not in `tasks`. One that lacks some is first.
    """
    if job.segment <= 1:
        return [(task,) for task in loose(job, list(tasks))]
    rank = {task: number for number, task in enumerate(tasks)}
    segments = [
        tuple(placed[start : start + job.segment])
        for placed in _by_domain(job).values()
        for start in range(0, len(placed), job.segment)
    ]
    segments = [one for one in segments if any(task in rank for task in one) and all(map(may_leave, one))]
    segments.sort(key=lambda one: (len(one) == job.segment, min(rank[task] for task in one if task in rank)))
    spare = job.active - max(job.gang, job.core)
    running = sum(task.status is Status.HELD for task in job.tasks.values()) - job.core
    units: list[tuple[Task, ...]] = []
    for one in segments:
        held = sum(task.status is Status.HELD for task in one)
        if len(one) <= spare and (not job.core or held <= running):
            spare, running = spare - len(one), running - held
            units.append(one)
    return units


def loose(job: Job, tasks: list[Task]) -> list[Task]:
    """Return those of the tasks, in their order, that may be evicted one by one: none of a gang, or of a core."""
    if job.groups is None or job.core == UNLIMITED:
        return _outside_core(job, tasks)[: int(max(0, job.active - max(job.gang, job.core)))]
    if below(job):
        return []
    active, spare = active_by_set(job), []
    gangs = {leaf.name: leaf.gang for leaf in leaves(job.groups)}
    for task in tasks:
        if active[task.group] > gangs[task.group]:
            active[task.group] -= 1
            spare.append(task)
    return _outside_core(job, spare)


def _outside_core(job: Job, tasks: list[Task]) -> list[Task]:
    """Return those of the tasks that may end now: of those that run already, a core keeps as many as it has tasks."""
    if not job.core:
        return tasks
    running = sum(task.status is Status.HELD for task in job.tasks.values())
    found: list[Task] = []
    for task in tasks:
        if task.status is not Status.HELD or running > job.core:
            running -= task.status is Status.HELD
            found.append(task)
    return found


def leaves(group: Group) -> Iterable[Group]:
    """Yield the sets of tasks below a group, or the group itself if it is one."""
    if not group.children:
        yield group
    for child in group.children:
        yield from leaves(child)


def active_by_set(job: Job) -> Counts:
    """Return the number of placed tasks of each set."""
    counts = {leaf.name: 0 for leaf in leaves(job.groups)} if job.groups is not None else {}
    for task in active_tasks(job):
        counts[task.group] = counts.get(task.group, 0) + 1
    return counts


def active_tasks(job: Job) -> list[Task]:
    """Return the placed tasks: those that run, and those that this plan places."""
    return [task for task in dict.fromkeys([*job.tasks.values(), *job.pending]) if task.status in _PLACED]


def _waiting_by_set(job: Job) -> dict[str, list[Task]]:
    waiting: dict[str, list[Task]] = {}
    for task in job.pending:
        if task.status is Status.PENDING:
            waiting.setdefault(task.group, []).append(task)
    return waiting


def _whole(group: Group, active: Counts) -> bool:
    if not group.children:
        return active[group.name] >= group.gang
    return sum(_whole(child, active) for child in group.children) >= group.needed


def _lacking(group: Group, active: Counts, waiting: dict[str, list[Task]]) -> list[Task] | None:
    """Return the tasks that make the group whole; None where too few wait."""
    if not group.children:
        short = max(0, group.gang - active[group.name])
        tasks = waiting.get(group.name, [])[:short]
        return tasks if len(tasks) == short else None
    short = group.needed - sum(_whole(child, active) for child in group.children)
    found: list[Task] = []
    for child in group.children:
        if short > 0 and not _whole(child, active):
            lacking = _lacking(child, active, waiting)
            if lacking is not None:
                found, short = found + lacking, short - 1
    return found if short <= 0 else None


def _further(group: Group, active: Counts, waiting: dict[str, list[Task]]) -> list[Task]:
    """Return the next tasks above the gang, of the child with the lowest ratio; a set's gang is placed together."""
    if not group.children:
        return waiting.get(group.name, [])[: max(1, group.gang - active[group.name])]
    for child in sorted(group.children, key=lambda child: _ratio(child, active)):
        tasks = _further(child, active, waiting)
        if tasks:
            return tasks
    return []


def _ratio(group: Group, active: Counts) -> float:
    if not group.children:
        return active[group.name] / max(1, group.gang)
    return sum(_whole(child, active) for child in group.children) / max(1, group.needed)
