"""Moves workers off nodes that they fill partly, so that whole nodes are free before a job needs one.

A round empties nodes one by one: all that runs on a node moves to idle GPUs of nodes that stay in use. So the free
nodes afterwards are those before and more, and no move takes a free node from a larger job. Which nodes: each of
`_ORDERS` is tried to its end, and the one that frees most GPUs is kept, of equal ones the cheapest. A node that other
workers have moved to is not emptied, and a worker is not moved again for `min_age_s`, so a second round finds nothing
to do.

A node that has only lent workers counts as free: they leave for any job. Rejected: exchanging workers between nodes,
or by way of free ones, which frees more where all nodes are nearly full and costs two restarts for a GPU; and moving
gangs that run on several nodes, whose other nodes would not become free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.actions.consolidation import lost_work_s, may_return, relocated
from kfp_gpuquota.scheduler.placement import domains, placement
from kfp_gpuquota.scheduler.state.groups import below, loose
from kfp_gpuquota.scheduler.state.model import GPU, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kfp_gpuquota.api.defragmentation import Defragmentation
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Host, Job, Queue, Request, Task

RESTART_S: Final = 60.0
"""What the restart of a job counts as, in seconds of its work, besides what it repeats."""

_MOST_MOVES: Final = 256
"""How many workers one round moves at most; the next one continues."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A node that could become free: its workers, the GPUs that they hold, and the work that is lost by moving them."""

    host: Host
    tasks: tuple[Task, ...]
    held: float
    lost_gpu_s: float

    @property
    def gpus(self) -> int:
        """The GPUs of the node."""
        return len(self.host.devices)


@dataclass(slots=True)
class Round:
    """What one order of the nodes has achieved. `moved` has the workers of jobs that run on with the others."""

    ledger: Ledger
    targets: set[Host]
    left_gpu_s: float
    lost_gpu_s: float = 0.0
    gpus: int = 0
    moves: int = 0
    filled: set[Host] = field(default_factory=set)
    moved: Counter[Job] = field(default_factory=Counter)
    stuck: set[tuple[Queue, Request]] = field(default_factory=set)  # requests that fit nowhere any more

    def run(self, sources: Iterable[Source]) -> None:
        """Empty nodes until none can be emptied."""
        left = list(sources)
        while left:
            before = len(left)
            left = [source for source in left if not self._empty(source)]
            if len(left) == before:
                return

    def _empty(self, source: Source) -> bool:
        if source.host in self.filled or self.moves + len(source.tasks) > _MOST_MOVES:
            return False
        if source.lost_gpu_s > self.left_gpu_s - self.lost_gpu_s or not self._spares(source):
            return False
        mark, within = self.ledger.mark(), frozenset(self.targets - {source.host})
        for task in source.tasks:
            self.ledger.set(task, Status.LEAVING, task.node, task.devices)
        if not all(self._relocate(source, task, within) for task in source.tasks):
            self.ledger.rollback(mark)
            return False
        self.filled.update(task.node for task, *_ in self.ledger.since(mark) if task.moved is not None and task.node)
        self.targets.discard(source.host)
        self.gpus, self.lost_gpu_s = self.gpus + source.gpus, self.lost_gpu_s + source.lost_gpu_s
        self.moves += len(source.tasks)
        self.moved.update(_in_place(source.tasks))
        return True

    def _spares(self, source: Source) -> bool:
        """Return whether jobs that move in part keep their minimum, with all that moves in this round."""
        parts = _in_place(source.tasks)
        return all(count + self.moved[job] <= _may_spare(job) for job, count in parts.items())

    def _relocate(self, source: Source, task: Task, within: frozenset[Host]) -> bool:
        kind = task.job.queue, task.request
        if kind in self.stuck:
            return False
        if relocated(self.ledger, task, within):
            return True
        if task is source.tasks[0] and not placement.fits(source.host, task, future=False):
            self.stuck.add(kind)
        return False


def defragment(
    ledger: Ledger, rule: Defragmentation, now: float, spent_gpu_s: float, sheltered: Collection[Job]
) -> tuple[list[Task], float]:
    """Move workers so that nodes become free; return those workers, and the work that is lost, in GPU-seconds.

    `spent_gpu_s` is what earlier moves of the window have lost. Jobs in `sheltered` are not moved.
    """
    if not ledger.any_idle and not ledger.shared_hosts:
        return [], 0.0
    occupied, left_gpu_s = _occupied(ledger), max(0.0, 60 * rule.budget_gpu_minutes - spent_gpu_s)
    found = (_source(host, now, rule.min_age_s, sheltered) for host in occupied)
    most_gpu_s = 60 * rule.max_gpu_minutes_per_gpu
    sources = [one for one in found if one is not None and one.lost_gpu_s <= most_gpu_s * one.gpus]
    best: tuple[tuple[float, ...], Callable[[Source], tuple[float, ...]]] | None = None
    mark = ledger.mark()
    for order in _ORDERS:
        one = _round(ledger, occupied, sources, left_gpu_s, order)
        ledger.rollback(mark)
        value = (float(one.gpus), -one.lost_gpu_s, float(-one.moves))
        if one.gpus and (best is None or value > best[0]):
            best = value, order
    if best is None:
        return [], 0.0
    one = _round(ledger, occupied, sources, left_gpu_s, best[1])
    moved = [task.moved for task, *_ in ledger.since(mark) if task.moved is not None]
    return moved, one.lost_gpu_s


_ORDERS: Final[tuple[Callable[[Source], tuple[float, ...]], ...]] = (
    lambda source: (source.held / source.gpus, source.lost_gpu_s),
    lambda source: (source.lost_gpu_s / source.gpus, source.held),
    lambda source: ((source.lost_gpu_s + RESTART_S * source.held / GPU) / source.gpus, source.held),
    lambda source: (-source.gpus, source.held, source.lost_gpu_s),
)
"""By what moves for each GPU that becomes free, by the work that is lost for it, by both, the largest nodes first."""


def _round(
    ledger: Ledger,
    occupied: Iterable[Host],
    sources: Iterable[Source],
    left_gpu_s: float,
    order: Callable[[Source], tuple[float, ...]],
) -> Round:
    one = Round(ledger, set(occupied), left_gpu_s)
    one.run(sorted(sources, key=lambda source: (*order(source), source.host.name)))
    return one


def _occupied(ledger: Ledger) -> list[Host]:
    """Return the ready nodes with workers that are not only lent, and do not leave."""
    found: list[Host] = []
    lent: dict[Job, int] = {}
    for _, host in sorted(ledger.hosts.items()):
        counts = Counter(task.job for task in host.tasks if task.devices and task.status is not Status.LEAVING)
        if not host.ready or not counts:
            continue
        if all(count <= lent.setdefault(job, job.lent) for job, count in counts.items()):
            for job, count in counts.items():
                lent[job] -= count
        else:
            found.append(host)
    return found


def _source(host: Host, now: float, min_age_s: float, sheltered: Collection[Job]) -> Source | None:
    """Return what it takes to empty the node; None if one of its workers stays, or all its GPUs are unavailable."""
    if not host.devices:
        return None
    by_job: dict[Job, list[Task]] = {}
    for task in host.tasks:
        if task.devices:
            if task.status is not Status.HELD or now - task.started_at < min_age_s:
                return None
            by_job.setdefault(task.job, []).append(task)
    lost = 0.0
    for job, tasks in by_job.items():
        if job in sheltered or not _movable(job, now):
            return None
        cost = _lost_gpu_s(job, tasks, now, min_age_s)
        if cost is None:
            return None
        lost += cost
    tasks = [task for tasks in by_job.values() for task in tasks]
    sizes = {task: task.request.amount(host.gpu_memory_mib).gpu for task in tasks}
    tasks.sort(key=lambda task: (-sizes[task], task.job.uid, task.index, task.id))
    return Source(host, tuple(tasks), sum(sizes.values()), lost)


def _movable(job: Job, now: float) -> bool:
    """Return whether workers of the job may be moved without a job that needs their GPUs."""
    leaving = len(job.tasks) > job.active
    return not (job.core or job.promised or leaving or below(job) or domains.bound_to_domain(job)) and may_return(
        job, now
    )


def _lost_gpu_s(job: Job, tasks: list[Task], now: float, min_age_s: float) -> float | None:
    """Return the GPU-seconds of work that the job loses if these workers move; None if they cannot without others."""
    host = tasks[0].node
    assert host is not None
    gpus = tasks[0].request.amount(host.gpu_memory_mib).gpu / GPU
    if len(tasks) == job.active and all(_runs_here(one, host) for one in _together(job)):
        return (max(0.0, now - job.saved_at) + RESTART_S) * len(tasks) * gpus
    if job.together:
        return None
    if job.overlapping:
        return (lost_work_s(job, now) + RESTART_S) * job.active * gpus
    young = sum(now - task.started_at < min_age_s for task in job.tasks.values())
    if len(tasks) + young > _may_spare(job) or len(loose(job, tasks)) < len(tasks):
        return None
    return lost_work_s(job, now) * job.active * gpus


def _together(job: Job) -> list[Job]:
    """Return the running jobs of which all workers must move at the same time."""
    if not job.together:
        return [job]
    return [other for other in job.queue.running if other.together == job.together]


def _runs_here(job: Job, host: Host) -> bool:
    return job.hosts.get(host, 0) == job.active


def _may_spare(job: Job) -> float:
    """Return how many workers of the job may move while the others continue."""
    return job.active if job.overlapping else job.active - job.gang


def _in_place(tasks: Iterable[Task]) -> dict[Job, int]:
    """Return the number of workers of each job that moves in part."""
    counts = Counter(task.job for task in tasks)
    return {job: count for job, count in counts.items() if count < job.active}
