"""Moves preemptible workers to other nodes, only where idle capacity exists for every one of them now.

Used in two ways: to free capacity for a pending job without stopping another one (`consolidate`), and to move the
victims of a reclaim instead of stopping them (`resettle`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import domains, placement
from kfp_gpuquota.scheduler.state.groups import below, loose
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Host, Job, Request, Status, Task

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Queue

Candidate = tuple[tuple[int, float, int, int, float, int, str], Host, list[Task]]

BORROWERS_COST_S: Final = 60.0
"""The work in seconds that a job may lose at most when it is moved for one above its project's guarantee."""

MOST_LOST_PER_GPU_S: Final = 4 * 3600.0
"""The work in GPU-seconds that moves may cost for each GPU that a job gains by them, whatever its guarantee."""

_TRIES: Final = 16
"""How many hosts are tried for one task, the cheapest first; others rarely succeed where these fail."""


@dataclass(slots=True)
class MoveCache:
    """Cache of one cycle: the moves that would free a host, by the host's version, and which requests fit elsewhere.

    That a request fits nowhere else is kept for the rest of the cycle: moves rarely change it. `now` is its time.
    `most_lost_s` is the work that a moved job may lose for the job that is served.
    """

    now: float = 0.0
    most_lost_s: float = UNLIMITED
    candidates: dict[tuple[Host, Request, float], tuple[int, Candidate | None]] = field(default_factory=dict)
    mobile: dict[tuple[Queue, Request], bool] = field(default_factory=dict)
    together: dict[Queue, dict[str, list[Job]]] = field(default_factory=dict)

    def may_move(self, ledger: Ledger, task: Task) -> bool:
        """Return whether a task like this one could start on some host now."""
        key = (task.job.queue, task.request)
        if key not in self.mobile:
            self.mobile[key] = placement.choose_host(ledger, _copy(task), 1, future=False) is not None
        return self.mobile[key]

    def moved_with(self, job: Job) -> list[Job]:
        """Return the running jobs whose workers are moved together with the job's, and the job."""
        if not job.together:
            return [job]
        if job.queue not in self.together:
            by_name = self.together[job.queue] = {}
            for other in job.queue.running:
                by_name.setdefault(other.together, []).append(other)
        return self.together[job.queue].get(job.together, [job])


def consolidate(ledger: Ledger, tasks: Sequence[Task], cache: MoveCache, sheltered: Collection[Job] = ()) -> bool:
    """Nominate all tasks by moving workers of other jobs, except `sheltered` ones, or change nothing."""
    job = tasks[0].job
    return domains.within_required(
        ledger, job, tasks, lambda hosts: _consolidate(ledger, tasks, hosts, cache, sheltered)
    )


def _consolidate(
    ledger: Ledger, tasks: Sequence[Task], hosts: list[Host], cache: MoveCache, sheltered: Collection[Job]
) -> bool:
    mark = ledger.mark()
    if domains.by_segment(ledger, tasks, hosts, lambda part: _placed(ledger, part, cache, sheltered)):
        return True
    ledger.rollback(mark)
    return False


def _placed(ledger: Ledger, tasks: Sequence[Task], cache: MoveCache, sheltered: Collection[Job]) -> bool:
    for done, task in enumerate(tasks):
        host = placement.choose_host(ledger, task, len(tasks) - done, future=True)
        if host is not None:
            placement.put(ledger, task, host, future=True)
        elif not _clear(ledger, task, cache, sheltered):
            return False
    return True


def may_return(job: Job, now: float) -> bool:
    """Return whether a worker of the job that is stopped now can start again elsewhere."""
    return job.movable and not job.completing and job.deferred_until <= now and not job.halted


def lost_work_s(job: Job, now: float) -> float:
    """Return the time since which the job's work is lost if its workers are stopped, in seconds."""
    trains_on = bool(job.throughput) and job.active > job.gang
    return 0.0 if trains_on else max(0.0, now - job.saved_at)


def _lost_gpu_s(moves: Iterable[Task], now: float) -> float:
    """Return the work that the jobs of these workers lose on all their GPUs, in GPU-seconds."""
    jobs = {task.job: (task.request.devices * task.request.share + task.request.other_gpus) / GPU for task in moves}
    return sum(lost_work_s(job, now) * job.active * gpus for job, gpus in jobs.items())


def resettle(ledger: Ledger, evicted: Sequence[Task], now: float) -> None:
    """Move victims to idle capacity on other hosts: all evicted workers of a job, or none of them."""
    by_job: dict[Job, list[Task]] = {}
    if not ledger.any_idle and all(task.request.whole and task.request.devices for task in evicted):
        return
    for task in evicted:
        if may_return(task.job, now):
            by_job.setdefault(task.job, []).append(task)
    for tasks in by_job.values():
        mark = ledger.mark()
        if not all(relocated(ledger, task) for task in tasks):
            ledger.rollback(mark)


def _clear(ledger: Ledger, task: Task, cache: MoveCache, sheltered: Collection[Job]) -> bool:
    for _, host, moves in nsmallest(_TRIES, _candidates(ledger, task, cache, sheltered), key=lambda c: c[0]):
        mark = ledger.mark()
        for moved in moves:
            ledger.set(moved, Status.LEAVING, moved.node, moved.devices)
        placement.put(ledger, task, host, future=True)
        if all(relocated(ledger, moved) for moved in moves):
            return True
        ledger.rollback(mark)
    return False


def _candidates(ledger: Ledger, task: Task, cache: MoveCache, sheltered: Collection[Job]) -> list[Candidate]:
    found: list[Candidate] = []
    if not placement.room_elsewhere(ledger, task):
        return found
    for host in ledger.hosts.values():
        if not (host.ready and host.tasks and placement.could_hold(host, task) and placement.may_use(host, task)):
            continue
        key = (host, task.request, cache.most_lost_s)
        version, candidate = cache.candidates.get(key, (-1, None))
        if version != host.version:
            candidate = _candidate(ledger, host, task, cache, sheltered)
            cache.candidates[key] = (host.version, candidate)
        if candidate is not None:
            found.append(candidate)
    return found


def _candidate(
    ledger: Ledger, host: Host, task: Task, cache: MoveCache, sheltered: Collection[Job]
) -> Candidate | None:
    movable = [t for t in host.tasks if t.status is Status.HELD and not t.job.core and t.job is not task.job]
    movable = [t for t in movable if may_return(t.job, cache.now) and t.job not in sheltered]
    movable = [t for t in movable if not domains.bound_to_domain(t.job)]
    movable = [t for t in movable if lost_work_s(t.job, cache.now) <= cache.most_lost_s]
    capacity = placement.Capacity(host, task)
    if not capacity.suffices(movable):
        return None
    movable = [t for t in movable if cache.may_move(ledger, t)]
    moves = _moves(host, capacity, movable, cache) if capacity.suffices(movable) else []
    if not moves:
        return None
    if _lost_gpu_s(moves, cache.now) > MOST_LOST_PER_GPU_S * task.request.amount(host.gpu_memory_mib).gpu / GPU:
        return None
    last = moves[-1].job
    size = _size(moves, host)
    restarted = sum(not t.job.resumable for t in moves)
    return (restarted, size, len(moves), last.priority, -last.submitted_at, -moves[-1].index, host.name), host, moves


def _units(movable: list[Task], cache: MoveCache) -> list[tuple[Task, ...]]:
    """Return the sets of workers that can be moved together: one above its job's gang, or all of a job.

    Moving a part of a gang would leave the rest waiting, or fail, until the moved workers have started again. Pods of
    other controllers are moved one by one: their controllers replace each as it goes (`overlapping`), unless they count
    that as a failure (`together`). Then all of them are moved, which may be several jobs.
    """
    by_job: dict[Job, list[Task]] = {}
    for task in movable:
        by_job.setdefault(task.job, []).append(task)
    units: list[tuple[Task, ...]] = []
    for job, tasks in by_job.items():
        ordered = sorted(tasks, key=_youngest)
        if not job.together:
            units.extend((task,) for task in (ordered if job.overlapping else loose(job, ordered)))
        jobs = cache.moved_with(job)
        if jobs[0] is not job or any(len(by_job.get(one, ())) != one.active or below(one) for one in jobs):
            continue
        whole = tuple(task for one in jobs for task in by_job[one])
        if units[-1:] != [whole]:
            units.append(whole)
    return units


def _moves(host: Host, capacity: placement.Capacity, movable: list[Task], cache: MoveCache) -> list[Task]:
    """Return the smallest unit whose move suffices, or as few large ones as needed; the youngest of equals first.

    Jobs that resume from a checkpoint come before those that would start from the beginning.
    """
    units = _units(movable, cache)
    units.sort(key=lambda unit: (not unit[0].job.resumable, _size(unit, host), *_youngest(unit[0])))
    for unit in units:
        if capacity.suffices(unit):
            return list(unit)
    units.sort(key=lambda unit: (not unit[0].job.resumable, -_size(unit, host), *_youngest(unit[0])))
    chosen: dict[Task, None] = {}
    for unit in units:
        chosen.update(dict.fromkeys(unit))
        if capacity.suffices(chosen):
            return list(chosen)
    return []


def _youngest(task: Task) -> tuple[int, float, str, int]:
    job = task.job
    return job.priority, -job.submitted_at, job.uid, -task.index


def _size(tasks: Iterable[Task], host: Host) -> float:
    return sum(task.request.amount(host.gpu_memory_mib).gpu for task in tasks)


def relocated(ledger: Ledger, task: Task, within: frozenset[Host] | None = None) -> bool:
    """Bind a copy of the leaving task where it can start now, if its queue's limit permits both at the same time.

    `within`: on one of these hosts. Returns whether there is such a host.
    """
    copy = _copy(task)
    copy.within = within
    if quota.barred_by_limit(task.job, ledger.amount(copy), future=False):
        return False
    host = placement.choose_host(ledger, copy, 1, future=False)
    if host is None:
        return False
    placement.put(ledger, copy, host, future=False)
    return True


def _copy(task: Task) -> Task:
    return Task(job=task.job, request=task.request, index=task.index, priority=task.priority, moved=task)
