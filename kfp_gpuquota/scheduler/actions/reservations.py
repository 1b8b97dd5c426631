"""Reservations: what an entitled job that has waited too long needs is kept for it as it becomes idle.

Without them a stream of small jobs overtakes a large one permanently: each fits at once into what the one before it
released, and nothing is released that is large enough. So the jobs of a queue, by priority and age, that are not
larger than the guaranteed quota and have waited for `after_s` come first in each plan, one after the other, unless the
queue uses that quota for other jobs now. For the first that cannot start a set of hosts is chosen on which it fits once
their preemptible workers have ended, also those that this plan has just started: those hosts that lack the least. What
is idle there is held until the other actions of the plan are done. After them the idle devices are open to jobs that
give way within a step or by reclaim (see `Cycle`): a reservation costs no utilization where such jobs wait.

Borrowers are started there only as far as they can all be reclaimed for this job: a queue that refilled what ends up to
its own guarantee and some more would never give it back, and neither would one whose jobs have a minimum run time.

Two rules keep it from costing other queues their guarantee. No more is held than the queue's own guarantee leaves
beside what it holds; so at first, where the queue's own small jobs use all of it, nothing is. And meanwhile no other
job of the queue starts that would use the part of the guarantee that the reserved job is going to need, unless its
priority is higher. What the queue's own sessions hold is not waited for, so it is no part of that guarantee.

A host is free at the latest when the maximum run times of its jobs are over: these ends are enforced. If all of them
are of the queue itself, its guarantee is free by then, too, and no other queue's guarantee takes what they leave. Then
the hosts with the earliest ends are chosen, and until then the idle devices are open to its jobs whose own maximum is
over by then (EASY backfill; Lifka, 1995), and to no others. The start can only become earlier: what was started in
between has ended by then, and an end that comes sooner frees the host sooner. Only a job of a higher priority, a lost
node or a lower quota makes it later.

The choice is a function of the state alone, so nothing has to be stored and a restarted scheduler decides alike. It
does not wander: while a host is held only the reserved job and such jobs start there, so another one is chosen only
when it is free earlier, or, where no end is known, when it lacks less.

Without known ends what is kept is idle until the rest is free. Where jobs wait for hours anyway, keeping it after 5
minutes makes all of them wait longer: on Pollux' trace it costs 6 points of utilization (`benchmarks/queueing.py`).

Rejected: run times that are estimated from other jobs, as ends. A job of the same queue and priority that runs for
longer than its estimate would keep the reserved job waiting, and nothing may stop it. Rejected: waiting for workers of
jobs that cannot be preempted: sessions have no end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler.actions.candidates import Candidate, Known, candidates_for, free_at_of, lent_on
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Amount, Host, Job, Status, Task
from kfp_gpuquota.scheduler.state.order import overtaken_until, position, shape_amount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kfp_gpuquota.scheduler.actions.cycle import Cycle
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Queue, Request, Shape
    from kfp_gpuquota.scheduler.state.order import Position, RankOf


MOST: Final = 64
"""Reservations of one plan, those of the queues that have waited longest: each one costs a search through nodes."""
MOST_TRIES: Final = 4
"""Jobs of one queue that a plan tries in vain to serve first: it may begin with some for which nothing can be kept."""
MOST_FILLED: Final = 64
"""Jobs of one plan that are tried on what is reserved."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is held for a job on some hosts, by placeholders, and the amount that it will need besides (`lacks`).

    `hosts` are all those on which it will start, `starts_by` is when they and its quota are free at the latest, from
    the ends that are enforced; `inf` where one of them is unknown or of another queue. The placeholders belong to a
    job of their own in the same queue, so that they count against its quota.
    """

    job: Job
    placeholders: tuple[tuple[Task, Host, tuple[int, ...]], ...]
    lacks: Amount
    hosts: frozenset[Host]
    starts_by: float = UNLIMITED

    @property
    def nodes(self) -> list[str]:
        """The names of the hosts that are kept for the job."""
        return [host.name for _, host, _ in self.placeholders]

    @property
    def held(self) -> list[Task]:
        """The placeholders of what is held now."""
        return [task for task, _, _ in self.placeholders if task.status is Status.NOMINATED]

    def hold(self, ledger: Ledger) -> None:
        """Take what is reserved, where nobody has taken it."""
        for task, host, devices in self.placeholders:
            if all(host.idle(device) >= task.request.share for device in devices):
                ledger.set(task, Status.NOMINATED, host, devices)

    def drop(self, ledger: Ledger) -> None:
        """Leave it to others."""
        for task in self.held:
            ledger.set(task, Status.PENDING, None)

    def is_over(self, job: Job, tasks: Sequence[Task], now: float) -> bool:
        """Return whether these tasks, which start now, have ended when the hosts are needed, or are not on them."""
        if job.queue is self.job.queue and now + job.most_s <= self.starts_by < UNLIMITED:
            return True
        return not any(task.node in self.hosts for task in tasks)

    def comes_back(self, ledger: Ledger, job: Job, tasks: Sequence[Task]) -> bool:
        """Return whether the job can have back what these tasks of another one have just been given, or comes after it.

        Where the start is known, those that have ended by then are used instead (`is_over`). Else all that the other
        queue holds on the reserved hosts must be above its guarantee, and not be sheltered.
        """
        if job is self.job or not any(task.node in self.hosts for task in tasks):
            return True
        if self.starts_by < UNLIMITED:
            return job.priority > self.job.priority and quota.rivals(self.job.queue, job.queue) is None
        rivals = quota.rivals(self.job.queue, job.queue)
        if rivals is None or job.active <= job.core:
            return job.priority > self.job.priority
        if min(job.least_s, ledger.reclaim_shelter_s) > 0:
            return False
        other = rivals[1]
        there = [task for host in self.hosts for task in host.tasks if task.status is not Status.LEAVING]
        held = quota.total(ledger, [task for task in there if other in task.job.queue.path and not task.job.core])
        return other.claim(0) - other.guarantee[0] >= held.gpu


class Overdue:
    """The jobs of one queue that have waited for its time, in their order and before any other.

    The order is that of `Cycle.rank` before age: a user who has much gets no more because its jobs have waited long,
    and shorter jobs are first until they have overtaken one for long. The next job of a shape follows once the one
    before it is served, or does not wait now. Larger ones than the guarantee are left out. In strict order nothing
    follows those, nor a stopped job until its workers have exited. `soonest` is when the next job is due.
    """

    def __init__(self, queue: Queue, cycle: Cycle) -> None:
        self._queue, self._cycle = queue, cycle
        self._strict = queue.order is Order.STRICT
        shapes = (shape for shape in cycle.shapes.get(queue, queue.waiting) if shape in queue.waiting and shape.starts)
        self._shapes = [shape for shape in shapes if self._strict or _is_entitled(cycle.ledger, queue, shape)]
        self._heap = [self._entry(number, 0) for number in range(len(self._shapes))]
        heapify(self._heap)
        self._tries = MOST_TRIES
        self.soonest = self._find_soonest()

    def first(self) -> Job | None:
        """Return the first job that is not served yet; None if there is none, or too many were tried in vain."""
        while self._heap and self._tries:
            key, number, at = self._heap[0]
            job = self._job(number, at)
            if self._queue.order is Order.FAIR_USERS and (entry := self._entry(number, at))[0] > key:
                heapreplace(self._heap, entry)  # its user has received something since
            elif not self._cycle.is_served(job):
                if not (self._strict and self._cycle.can_never_start(job)):
                    return None if self._ends_at(job, number) else job
                heappop(self._heap)
            elif at + 1 < len(self._queue.waiting[self._shapes[number]]):
                heapreplace(self._heap, self._entry(number, at + 1))
            else:
                heappop(self._heap)
        return None

    def leave_out(self) -> None:
        """Leave out the first job, which was tried in vain, and with it all others of its shape."""
        heappop(self._heap)
        self._tries -= 1

    def _ends_at(self, job: Job, number: int) -> bool:
        """Return whether neither this job nor any behind it is served first."""
        if _due(self._cycle.ledger, job) > self._cycle.now:
            return True
        entitled = not self._strict or _is_entitled(self._cycle.ledger, self._queue, self._shapes[number])
        return not entitled or (self._strict and self._cycle.is_behind(job))

    def _find_soonest(self) -> float | None:
        """Return when the first job that is not due will be; a longer one can come before shorter ones from then on."""
        due = ((key, _due(self._cycle.ledger, self._job(number, at))) for key, number, at in self._heap)
        later = [(key, time) for key, time in due if time > self._cycle.now]
        if self._queue.order is Order.SHORTEST:
            return min((time for _, time in later), default=None)
        return min(later)[1] if later else None

    def _job(self, number: int, at: int) -> Job:
        return self._queue.waiting[self._shapes[number]][at][1]

    def _entry(self, number: int, at: int) -> tuple[Position, int, int]:
        return position(self._queue.waiting[self._shapes[number]][at], self._cycle.rank), number, at


def reserve_after(ledger: Ledger, queue: Queue) -> float:
    """Return after how long the queue's first job within the guarantee is served first, in seconds."""
    if queue.reserve_after_s is not None:
        return queue.reserve_after_s
    return 0.0 if queue.order is Order.STRICT else ledger.reserve_after_s


def _due(ledger: Ledger, job: Job) -> float:
    """Return when the job is served first (seconds since the epoch): not before shorter ones overtake it no longer."""
    after_s = reserve_after(ledger, job.queue)
    due = job.submitted_at + after_s
    return max(due, overtaken_until(job, after_s)) if job.queue.order is Order.SHORTEST else due


def _is_entitled(ledger: Ledger, queue: Queue, shape: Shape) -> bool:
    """Return whether such a job fits into the guaranteed quota, and all limits, beside what cannot be preempted."""
    amount = shape_amount(shape, ledger.gpu_memory_mib)
    return all(
        value + queue.fixed[r] <= queue.guarantee[r]
        and all(value + above.fixed[r] <= above.limit[r] for above in queue.path)
        for r, value in enumerate(amount)
        if value
    )


def overtaking(queue: Queue, shapes: Collection[Shape], within_s: float, rank_of: RankOf) -> list[Job]:
    """Return waiting jobs of the queue that would end within this time, in their order."""
    order = partial(position, rank_of=rank_of)
    entries = (entry for shape in shapes if shape.starts for entry in queue.waiting.get(shape, ()))
    found = sorted((entry for entry in entries if entry[1].most_s <= within_s), key=order)
    return [job for _, job in found[:MOST_FILLED] if not job.active]


def reserve(ledger: Ledger, job: Job, tasks: Sequence[Task], now: float, known: Known) -> Reservation | None:
    """Hold what is idle on the hosts that can be free for the job soonest; None where no hosts can be."""
    request = tasks[0].request
    if job.groups is not None or any(task.request != request for task in tasks):
        return None
    alike = known.setdefault((request, job.queue.pool, tasks[0].within, len(tasks)), {})
    candidates = candidates_for(ledger, tasks, now, alike)
    soonest = [one for one in candidates if one.free_at < UNLIMITED and _is_timed(job, one)]
    found = _of(ledger, job, tasks, _chosen(sorted(soonest, key=lambda one: (one.free_at, *one.key)), len(tasks)), now)
    if found is None or found.starts_by == UNLIMITED:
        found = _of(ledger, job, tasks, _chosen(sorted(candidates, key=lambda one: one.key), len(tasks)), now)
    if found is not None:
        found.hold(ledger)
    return found


def _is_timed(job: Job, candidate: Candidate) -> bool:
    """Return whether all workers on the host are of the queue, and it is known when enough of them have ended."""
    return candidate.free_at < UNLIMITED and all(task.job.queue is job.queue for task in candidate.host.tasks)


def _chosen(candidates: Iterable[Candidate], workers: int) -> list[Candidate]:
    """Return the first hosts on which so many workers fit, each with those that it gets; none if they do not fit."""
    chosen, missing = [], workers
    for candidate in candidates:
        if missing > 0:
            chosen.append(candidate._replace(workers=min(candidate.workers, missing)))
            missing -= candidate.workers
    return chosen if missing <= 0 else []


def _of(ledger: Ledger, job: Job, tasks: Sequence[Task], chosen: Sequence[Candidate], now: float) -> Reservation | None:
    """Return the reservation of these hosts; None of none."""
    if not chosen:
        return None
    placeholders = tuple(_placeholders(job, tasks[0].request, chosen))
    held = quota.total(ledger, [task for task, _, _ in placeholders])
    wanted = quota.total(ledger, tasks)
    lacks = Amount(*(max(0.0, all_of_it - part) for all_of_it, part in zip(wanted, held, strict=True)))
    starts_by = UNLIMITED
    if all(_is_timed(job, one) for one in chosen) and _holds_all(job, held, chosen):
        starts_by = max(
            free_at_of(one.host, job.request, one.workers, now, lent_on(ledger, one.host)) for one in chosen
        )
    return Reservation(job, placeholders, lacks, frozenset(one.host for one in chosen), starts_by)


def _holds_all(job: Job, held: Amount, chosen: Sequence[Candidate]) -> bool:
    """Return whether the guarantee allows to hold all that is idle there and needed.

    Then it has room for the job when the queue's own workers there have ended, and no other guarantee comes before it.
    """
    idle = sum(min(one.host.idle_whole, one.workers * job.request.devices) for one in chosen)
    return job.request.whole and held.gpu >= GPU * idle


def _placeholders(
    job: Job, request: Request, chosen: Sequence[Candidate]
) -> Iterator[tuple[Task, Host, tuple[int, ...]]]:
    """Yield what is idle on the chosen hosts, as far as the queue's guarantee allows to hold it."""
    queue, most = job.queue, len(chosen)
    keeper = Job(
        uid=job.uid, name=job.name, queue=queue, gang=1, wanted=most, most=most, request=request, priority=job.priority
    )
    left = [guarantee - queue.claim(r) for r, guarantee in enumerate(queue.guarantee)]
    for candidate in chosen:
        part, devices = _idle_part(candidate.host, request, candidate.workers, left)
        if devices:
            left = [free - taken for free, taken in zip(left, part.amount(0), strict=True)]
            yield Task(keeper, part, 0), candidate.host, devices


def _idle_part(host: Host, request: Request, workers: int, most: Sequence[float]) -> tuple[Request, tuple[int, ...]]:
    """Return what of the workers' request is idle on the host, up to the amounts `most`, and on which devices."""
    share = request.share_of(host.gpu_memory_mib)
    if share < GPU:
        emptiest = max(host.devices, key=lambda device: (host.idle(device), -device))
        share = int(min(share, host.idle(emptiest), most[0]))
        devices: tuple[int, ...] = (emptiest,) if share > 0 else ()
    else:
        count = int(min(workers * request.devices, most[0] // GPU))
        devices = tuple(device for device in host.devices if host.idle(device) == GPU)[: max(0, count)]
    part = replace(
        request,
        devices=len(devices),
        share=share,
        memory_mib=0,
        compute=0,
        cpu=int(max(0, min(workers * request.cpu, host.other_idle(0), most[1]))),
        memory=int(max(0, min(workers * request.memory, host.other_idle(1), most[2]))),
        resources=(),
    )
    return part, devices
