"""Lends what nobody requests: to the queue with the least lent, and in each queue where it pays.

Among the elastic jobs of a queue, sizes n are chosen that maximize

    sum over jobs of  log(goodput(n)) + (-log(1 + pause / H) if n is not its size, else 0)

where goodput is throughput times statistical efficiency (`state/progress.py`), `pause` how long a change of size stops
the job, and H how long the change is expected to last: as long as the size before it has, 1 to 10 minutes. This is
proportional fairness: a GPU goes where it raises the goodput by the largest part, jobs without measurements share
equally, no job starves, and the unit of a goodput does not matter. docs/decisions/growth.md has what was rejected.

In a project that is fair to its users, what the queue has to lend is divided between them first, one GPU after the
other to the user who has least with it: what counts in the order of waiting jobs, and what is lent. Each user's jobs
then choose sizes for that part. A user who has more than that releases it to those who have less, as far as workers may
leave for other jobs at all.

Invariant: workers are taken from one job for another only if the sum grows by it, and only those that are lent. So with
the same measurements the sizes reach a fixed point. A queue's part of what is idle depends on goodput only in that it
is no more than its jobs gain by; what no job gains by is lent last, to jobs whose changes are cheap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from math import frexp, log, log1p
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeVar

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.groups import incomplete, loose_units
from kfp_gpuquota.scheduler.state.model import GPU, PAUSE_S, Host, Job, Status, Task
from kfp_gpuquota.scheduler.state.progress import Scaling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.scheduler.actions.cycle import Cycle
    from kfp_gpuquota.scheduler.state.model import Queue, User

One = TypeVar("One")

SHORTEST_S: Final = 60.0
LONGEST_S: Final = 600.0
"""The least and the most that a size is expected to last: other jobs arrive and end."""

MOST_MORE: Final = 1024
"""The workers more than requested that are considered for one job."""

CHEAP_S: Final = PAUSE_S
"""A job whose changes of size stop it no longer than this is lent what no other job gains by."""

KEPT_GPUS: Final = 0.75
"""A user keeps a GPU that it is lent until it uses so much more than another user would with it. Past use that counts
would move a worker to and fro with every plan. It is less than 1, so that without past use it changes nothing."""

_EPSILON: Final = 1e-9
_BY_COUNT: Final = itemgetter(0, 1)
_SMALLEST: Final = 1e-300


@dataclass(frozen=True)
class Sizes:
    """The sizes that a job may have, and the value of each.

    They are `least` workers and as many times `step` more as are at most `most`; each has `each` GPUs.
    """

    least: int
    most: int
    each: float
    value: Callable[[int], float]
    step: int = 1

    @cached_property
    def steps(self) -> list[tuple[float, int]]:
        """Return the sizes on the upper hull of the values that raise it, each with the value gained per GPU."""
        hull = [(self.least, self.value(self.least))]
        for size in range(self.least + self.step, self.most + 1, self.step):
            point = (size, self.value(size))
            while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        rising = ((_slope(a, b) / self.each, b[0]) for a, b in pairwise(hull))
        return [(slope, size) for slope, size in rising if slope > 0]


def allocate(jobs: Sequence[Sizes], gpus: float) -> list[int]:
    """Return a size for each job, of which all together take at most `gpus` above the least ones.

    Steps along the hulls are taken in the order of their value per GPU: the sum of values is the largest possible if
    each job's values are concave, else less than one step below it. What is left is used as far as a job gains by it.
    """
    chosen = [job.least for job in jobs]
    steps = [job.steps[::-1] for job in jobs]
    heap = [(-found[-1][0], index) for index, found in enumerate(steps) if found]
    heapify(heap)
    while heap:
        index = heap[0][1]
        job, (_, size) = jobs[index], steps[index].pop()
        if (size - chosen[index]) * job.each > gpus:
            last = range(chosen[index], chosen[index] + int(gpus // job.each) + 1, job.step)
            size, steps[index] = max(last, key=lambda n: (job.value(n), -n)), []
        gpus -= (size - chosen[index]) * job.each
        chosen[index] = size
        if steps[index]:
            heapreplace(heap, (-steps[index][-1][0], index))
        else:
            heappop(heap)
    return chosen


def _sum(gains: Iterable[float]) -> float:
    """Return the sum, 0.0 if it is no more than an error of rounding."""
    total = sum(gains)
    return total if total > _EPSILON else 0.0


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def divide(
    hunger: Mapping[One, float],
    gpus: Mapping[str, float],
    source: Callable[[One], str],
    key: Callable[[One, float], tuple[float, float, str]],
) -> dict[One, float]:
    """Divide the GPUs of each source: one after the other to whom the key of its part so far puts first.

    None gets more than its `hunger`, in whole GPUs.
    """
    left, parts = dict(gpus), dict.fromkeys(hunger, 0.0)
    heap = [(key(one, 0.0), one) for one in hunger if hunger[one] > 0]
    heapify(heap)
    while heap:
        one = heap[0][1]
        if left.get(source(one), 0) < 1:
            heappop(heap)
            continue
        left[source(one)] -= 1
        parts[one] += 1
        if parts[one] < hunger[one]:
            heapreplace(heap, (key(one, parts[one]), one))
        else:
            heappop(heap)
    return parts


class Worth:
    """The value of each size of a job, less the cost of a change; it is kept with the job until `key` is another one.

    `until`: the cost is less from then on, None: never.
    """

    def __init__(self, job: Job, key: tuple[float, ...], each: float, cost: float, least: int) -> None:
        goodput = Scaling(job)
        self.key, self.cost, self.until, self._current = key, cost, None, job.active
        self._least, most = least, max(job.active + job.segment, min(job.most, least + MOST_MORE))
        self._values = [log(max(goodput(size), _SMALLEST)) for size in range(self._least, most + 1)]
        self.sizes = Sizes(self._least, min(job.most, most), each, self, job.segment)
        self.free_sizes = Sizes(self._least, min(job.most, most), each, self.free, job.segment)

    until: float | None

    def __call__(self, size: int) -> float:
        """Return the value of the size, less the cost if the job has another one."""
        return self._values[size - self._least] - (self.cost if size != self._current else 0.0)

    def free(self, size: int) -> float:
        """Return the value of the size without the cost."""
        return self._values[size - self._least]


def worth(job: Job, now: float, each: float, *, changes: bool) -> Worth:
    """Return what each size of the job is worth now; with `changes` it changes its size in this plan in any case."""
    since = _since(job)
    kept_s = min(max(SHORTEST_S, now - since), LONGEST_S)
    doubled = SHORTEST_S * 2.0 ** (frexp(kept_s / SHORTEST_S)[1] - 1)  # in steps, so that values rarely change
    horizon = doubled if kept_s < LONGEST_S else LONGEST_S
    cost = 0.0 if changes or not job.tasks else log1p(job.pause_s / horizon)
    # A size that is left before it was measured is not measured again. What a worker that leaves costs a job that
    # reports nothing, as a Ray cluster, is not known: it may lose work.
    young = bool(job.tasks) and now < job.started_at + job.cool_down_s
    keeps = young or not job.reports_progress
    least = max(job.wanted, min(job.active, job.most)) if keeps else job.wanted
    key = (job.active, cost, job.reports, least, job.most, each)
    found = job.worth if isinstance(job.worth, Worth) and job.worth.key == key else Worth(job, key, each, cost, least)
    found.until = since + min(2 * doubled, LONGEST_S) if kept_s < LONGEST_S else None
    job.worth = found
    return found


def _allocated(queue: Queue, values: list[Worth], gpus: float, *, free: bool) -> Sequence[int]:
    """Return the sizes for jobs of the queue, with `free` as if changes cost nothing; those of the last plan if nothing
    has changed since: what a job is worth is the same object then.
    """
    known = queue.allocated[free]
    if known is None or known[0] != gpus or known[1] != values:
        chosen = allocate([found.free_sizes if free else found.sizes for found in values], gpus)
        known = queue.allocated[free] = (gpus, values, chosen)
    return known[2]


def _since(job: Job) -> float:
    """Return the time since which the job has had its size."""
    return max(job.started_at, job.grown_at, job.shrunk_at)


def gains(job: Job, value: Worth) -> bool:
    """Return whether the job is lent one worker, or segment, more that is idle."""
    return job.pause_s <= CHEAP_S or value(job.active + job.segment) > value(job.active) + _EPSILON


class Donors:
    """The jobs of a queue that are to shrink, by the hosts of the workers that may leave.

    Only the hosts of a job that has lost a worker are counted again. Rejected: collecting all for each worker that
    another job gets, in quadratic time.
    """

    def __init__(self, jobs: list[Job], may_leave: Callable[[Job], list[tuple[Task, ...]]]) -> None:
        self._may_leave = may_leave
        self._units: dict[Task, tuple[Task, ...]] = {}
        self._rank = {job: rank for rank, job in enumerate(jobs)}
        self._spare: dict[Job, list[Task]] = {}
        self._on: dict[Host, dict[Job, list[Task]]] = {}
        self._count: dict[Host, int] = {}
        self._order: list[tuple[int, str, Host]] = []
        self.update(jobs)

    def update(self, jobs: Iterable[Job]) -> None:
        """Count the workers of these jobs again."""
        for job in dict.fromkeys(jobs):
            changed: dict[Host, None] = {}
            for task in self._spare.pop(job, ()):
                host = task.node
                if host is not None and self._on[host].pop(job, None) is not None:
                    changed[host] = None
            units = self._may_leave(job)
            self._spare[job] = [task for unit in units for task in unit]
            self._units.update((task, unit) for unit in units for task in unit)
            for task in self._spare[job]:
                if (host := task.node) is not None:
                    self._on.setdefault(host, {}).setdefault(job, []).append(task)
                    changed[host] = None
            for host in changed:
                self._count_again(host)

    def _count_again(self, host: Host) -> None:
        before, now = self._count.get(host, 0), sum(map(len, self._on[host].values()))
        if before:
            del self._order[bisect_left(self._order, (-before, host.name), key=_BY_COUNT)]
        if now:
            insort(self._order, (-now, host.name, host), key=_BY_COUNT)
        self._count[host] = now

    def on(self, host: Host) -> list[Task]:
        """Return the workers on the host that may leave, by job."""
        found = self._on[host]
        return [task for job in sorted(found, key=self._rank.__getitem__) for task in found[job]]

    def unit_of(self, task: Task) -> tuple[Task, ...]:
        """Return the workers that leave with this one: those of its segment."""
        return self._units[task]

    def hosts_for(self, job: Job) -> Iterator[Host]:
        """Yield the hosts of such workers, first those where the job has most, then where most may leave."""
        near = {host: count for host, count in job.hosts.items() if self._count.get(host)}
        yield from sorted(near, key=lambda host: (-near[host], -self._count[host], host.name))
        yield from (host for _, _, host in self._order if host not in near)


class Growth:
    """The lending of one plan, on its cycle's ledger."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle, self._ledger = cycle, cycle.ledger
        self._values: dict[Job, Worth] = {}
        self._targets: dict[Job, int] = {}
        self._donors: dict[Queue, Donors] = {}

    def run(self, jobs: Iterable[Job]) -> None:
        """Choose sizes in each queue for what is idle and what is lent there, and place or release workers."""
        by_queue: dict[Queue, list[Job]] = {}
        for job in jobs:
            if self._may_change(job) and self._is_complete(job):
                by_queue.setdefault(job.queue, []).append(job)
                self._values[job] = worth(job, self._cycle.now, self._each(job), changes=job in self._cycle.touched)
        if not by_queue:
            return
        idle = self._shares_of_idle(by_queue)
        for queue in sorted(by_queue, key=_lent_key):
            if self._ledger.any_idle or any(job.lent for job in by_queue[queue]):
                self._choose_fairly(by_queue[queue], idle[queue])
        for job in [job for job in self._targets if self._targets[job] > job.active]:
            self._grow(job)
        self._release()
        self._fill()

    def _may_change(self, job: Job) -> bool:
        cycle = self._cycle
        return (
            job.wanted <= job.active
            and job.wanted < job.most
            and job not in cycle.victims
            and job not in cycle.pledged
            and not job.halted
            and cycle.is_settled(job)
        )

    def _is_complete(self, job: Job) -> bool:
        """Return whether the job's segments have all their workers, after placing those of lent ones that are lost."""
        lost = min(sum(incomplete(job).values()), job.most - job.active)
        return not lost or (self._place(job, [self._task(job, i) for i in range(lost)]) and not incomplete(job))

    def _shares_of_idle(self, by_queue: dict[Queue, list[Job]]) -> dict[Queue, float]:
        """Divide the idle GPUs: one after the other to the queue with the least lent that can use it."""
        idle = self._ledger.idle_gpus()
        if not idle:
            return dict.fromkeys(by_queue, 0.0)
        hunger = {queue: self._hunger(queue, jobs) for queue, jobs in by_queue.items()}
        return divide(hunger, idle, lambda queue: queue.pool, _lent_key)

    def _hunger(self, queue: Queue, jobs: list[Job]) -> float:
        """Return the GPUs that the jobs of a queue gain by, within the limits above them."""
        left = min((above.limit[0] - above.held[0] - above.leaving[0]) / GPU for above in queue.path)
        return min(left, sum(map(self._useful, jobs)))

    def _useful(self, job: Job) -> float:
        """Return the GPUs more that would raise the job's goodput."""
        steps = self._values[job].free_sizes.steps
        return max(0, steps[-1][1] - job.active) * self._each(job) if steps else 0.0

    def _each(self, job: Job) -> float:
        return max(_EPSILON, job.request.amount(self._ledger.gpu_memory_mib).gpu / GPU)

    def _choose_fairly(self, jobs: list[Job], idle: float) -> None:
        """Choose the sizes of the jobs of one queue, of each user by itself where the queue is fair to its users."""
        by_user: dict[User, list[Job]] = {}
        for job in jobs:
            by_user.setdefault(job.user, []).append(job)
        if len(by_user) == 1 or jobs[0].queue.order is not Order.FAIR_USERS:
            self._choose(jobs, idle)
            return
        parts = self._parts(by_user, idle)
        for user, own in by_user.items():
            self._choose(own, parts[user] - self._movable(own))

    def _parts(self, by_user: Mapping[User, list[Job]], idle: float) -> dict[User, float]:
        """Divide the idle GPUs and those that may change jobs: one after the other to the user who has least."""
        movable = {user: self._movable(jobs) for user, jobs in by_user.items()}
        hunger = {user: movable[user] + sum(map(self._useful, jobs)) for user, jobs in by_user.items()}
        fixed = {user: self._uses(user, jobs) - movable[user] for user, jobs in by_user.items()}

        def key(user: User, part: float) -> tuple[float, float, str]:
            kept = KEPT_GPUS if part < movable[user] else 0.0
            return fixed[user] + part - kept, -user.occupied, user.name

        return divide(hunger, {"": idle + sum(movable.values())}, lambda _: "", key)

    def _uses(self, user: User, jobs: Iterable[Job]) -> float:
        """Return the GPUs that count as the user's, with those that are lent to these jobs."""
        return self._cycle.use_of(user) + sum(job.lent * self._each(job) for job in jobs)

    def _movable(self, jobs: Iterable[Job]) -> float:
        """Return the GPUs of these jobs that other jobs may get."""
        return sum((job.active - self._values[job].sizes.least) * self._each(job) for job in jobs)

    def _choose(self, jobs: list[Job], idle: float) -> None:
        """Choose the sizes of the jobs of one queue or user; they keep theirs unless that is worth more.

        `idle` are the GPUs that they may have more; if it is negative, they have more than their part.
        """
        jobs.sort(key=lambda job: (job.lent, -job.priority, job.submitted_at, job.uid))
        for job in jobs:
            if job.lent and self._values[job].sizes.least > job.wanted:
                self._cycle.review_at(job.started_at + job.cool_down_s)
        values = [self._values[job] for job in jobs]
        gpus = idle + self._movable(jobs)
        chosen = _allocated(jobs[0].queue, values, gpus, free=False)
        gained = _sum(self._values[j](n) - self._values[j](j.active) for j, n in zip(jobs, chosen, strict=True))
        if gained or idle < 0:
            self._targets.update(zip(jobs, chosen, strict=True))
        elif any(found.cost for found in values):
            self._look_again(jobs, _allocated(jobs[0].queue, values, gpus, free=True))

    def _look_again(self, jobs: list[Job], chosen: Sequence[int]) -> None:
        """Request a plan when the cost of a change counts less, if nothing else keeps the jobs from these sizes."""
        if _sum(self._values[j].free(n) - self._values[j].free(j.active) for j, n in zip(jobs, chosen, strict=True)):
            changed = [self._values[job] for job, size in zip(jobs, chosen, strict=True) if size != job.active]
            for until in [found.until for found in changed if found.until is not None]:
                self._cycle.review_at(until)

    def _grow(self, job: Job) -> None:
        """Place the workers that the job lacks on idle devices, close to the others; else where lent workers leave."""
        while (short := self._targets[job] - job.active) > 0:
            near = any(host.idle_whole >= job.request.devices for host in job.hosts) and job.groups is None
            tasks = [self._task(job, i) for i in range(1 if near else short)]
            one = job.segment
            if not self._place(job, tasks) and not (short > one and self._place(job, tasks[:one])):
                break
        while self._targets[job] > job.active and self._exchange(job):
            pass

    def _task(self, job: Job, number: int = 0) -> Task:
        return Task(job=job, request=job.request, index=job.next_index + job.active + number)

    def _place(self, job: Job, tasks: list[Task]) -> bool:
        if quota.barred_by_limit(job, quota.total(self._ledger, tasks), future=False):
            return False
        return placement.place_all(self._ledger, tasks, future=False)

    def _exchange(self, job: Job) -> bool:
        """Let lent workers of jobs that are to shrink leave for one worker of this job, on one node."""
        if job.groups is not None:
            return False
        donors = self._donors_in(job.queue)
        for host in donors.hosts_for(job):
            mark, new, taken = self._ledger.mark(), self._task(job), []
            for task in donors.on(host):
                if task.status is Status.HELD and task.job.active > self._targets[task.job]:
                    for leaving in donors.unit_of(task):
                        self._take(leaving, job, "grow")
                    taken.append(task.job)
                if self._nominate(job, new, host):
                    donors.update(taken)
                    return True
            self._undo(mark)
        return False

    def _donors_in(self, queue: Queue) -> Donors:
        if queue not in self._donors:
            self._donors[queue] = Donors([job for job in self._targets if job.queue is queue], self._may_leave)
        return self._donors[queue]

    def _may_leave(self, job: Job) -> list[tuple[Task, ...]]:
        """Return the workers or segments of which some leave for others, in the order in which they do."""
        return self._spare(job) if job.active > self._targets[job] else []

    def _nominate(self, job: Job, task: Task, host: Host) -> bool:
        if quota.barred_by_limit(job, self._ledger.amount(task), future=True):
            return False
        if not placement.fits(host, task, future=True):
            return False
        placement.put(self._ledger, task, host, future=True)
        self._cycle.pledged[job] = None
        return True

    def _spare(self, job: Job) -> list[tuple[Task, ...]]:
        """Return the workers or segments that may leave, first those on nodes where it has few, then the newest."""
        held = [task for task in job.tasks.values() if task.status is Status.HELD]
        counts = Counter(task.node for task in held)
        return loose_units(job, sorted(held, key=lambda task: (counts[task.node], -task.index)))

    def _take(self, task: Task, beneficiary: Job, action: str) -> None:
        self._ledger.set(task, Status.LEAVING, task.node, task.devices)
        self._cycle.causes[task] = (beneficiary, action)
        self._cycle.victims[task.job] = None

    def _undo(self, mark: int) -> None:
        for task, *_ in self._ledger.since(mark):
            self._cycle.causes.pop(task, None)
        self._ledger.rollback(mark)
        for job in [job for job in self._targets if job in self._cycle.victims]:
            if not any(task in self._cycle.causes for task in job.tasks.values()):
                del self._cycle.victims[job]

    def _release(self) -> None:
        """Let workers leave without which their job achieves more, such as those on another node.

        Not before its size has lasted for a while: what was measured in the first steps at a size may be wrong, and is
        not measured again once the job has left it.
        """
        for job, target in self._targets.items():
            value = self._values[job]
            if job.pause_s <= CHEAP_S or job in self._cycle.touched:
                continue
            if target < job.active and value(target) > value(job.active) + _EPSILON:
                if self._cycle.now < (lasted := _since(job) + SHORTEST_S):
                    self._cycle.review_at(lasted)
                    continue
                while job.active > target and (spare := self._spare(job)):
                    for task in spare[0]:
                        self._take(task, job, "release")

    def _fill(self) -> None:
        """Lend what the chosen sizes leave idle, one worker at a time, first where it is of use.

        Nodes, limits or the size of workers may keep a job from what was meant for it. What no job gains by goes to
        those whose changes are cheap: their users allow the size, and what was measured may be wrong.
        """
        if not self._ledger.any_idle:
            return
        jobs = [job for job in self._values if job not in self._cycle.victims]
        heap = [(self._fill_key(job), job) for job in jobs if self._gains(job)]
        heapify(heap)
        while heap and self._ledger.any_idle:
            key, job = heappop(heap)
            outdated = key != self._fill_key(job)
            tasks = [self._task(job, number) for number in range(job.segment)]
            if outdated or (self._place(job, tasks) and self._gains(job)):
                heappush(heap, (self._fill_key(job), job))

    def _gains(self, job: Job) -> bool:
        return job.active + job.segment <= job.most and gains(job, self._values[job])

    def _fill_key(self, job: Job) -> tuple[float, float, float, int, int, float, str]:
        value = self._values[job]
        more = value.free(job.active + job.segment) - value.free(job.active)
        gained = round(more / (self._each(job) * job.segment), 6)
        user, fair = job.user, job.queue.order is Order.FAIR_USERS
        uses = self._cycle.use_of(user) + (user.occupied - user.held) / GPU if fair else 0.0
        return (_lent_key(job.queue)[0], uses, -gained, job.lent, -job.priority, job.submitted_at, job.uid)


def _lent_key(queue: Queue, more_gpus: float = 0.0) -> tuple[float, float, str]:
    return ((queue.lent[0] + more_gpus * GPU) / max(queue.weights[0], 1e-9), queue.created, queue.label)
