"""Plays a state forward: jobs end after their run times, and the scheduler's own cycles start others in their place.

The cycles run on the state's own ledger and are undone at the end, as a plan's are. So quotas, order, gangs, topology,
fractions, reservations, reclaim and preemption are those of the planner, and there is no second model of them to keep
in agreement. Rejected: a copy of the state for each play (it takes as long as the play of 1,000 jobs), and a model of
its own with counts of GPUs (ten times as fast, but wrong wherever a rule was forgotten).

Where many jobs run, a tenth of them ends before the next cycle, and later up to a fifth. What starts in it starts when
its devices became free: the order of starts is then that of a moment a little later, the rules stay. Two things are
left out: jobs are not moved together (consolidation), and no GPUs are lent, for these come back as soon as a waiting
job needs them. A stopped job continues where it was stopped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.gc_pause import collector_paused
from kfp_gpuquota.scheduler.actions.cycle import Cycle
from kfp_gpuquota.scheduler.actions.reservations import MOST
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.state.groups import next_tasks
from kfp_gpuquota.scheduler.state.model import Job, Status, Task
from kfp_gpuquota.scheduler.state.order import job_key, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kfp_gpuquota.scheduler.state.model import Host, OrderKey, Queue, Shape
    from kfp_gpuquota.scheduler.state.state import State

ACTIONS: Final = ("allocate", "reclaim", "preempt")
COARSE_ACTIONS: Final = ("allocate",)
"""Where ends share cycles: who may reclaim comes first in the order, and most often gets what the others release."""
COARSE_RESERVED: Final = 8
"""Where ends share cycles GPUs are kept for so many projects: each costs a search through nodes."""
FEW: Final = 50
"""Of so many jobs no two ends share a cycle."""
LOOKS: Final = 16
"""Between two changes so many cycles wait for time to pass: usage decays without end, and a job may never fit."""
GROWS: Final = 1.15
"""By which factor more ends share each further cycle: what is further away is less certain anyway."""
FEWEST_CYCLES: Final = 5
"""In which as many jobs end as run, at the most ends of a cycle."""
HORIZON_S: Final = 30 * 86_400.0
"""What would start later than this is unknown."""


class Effort(NamedTuple):
    """How much work a forecast is: the number of plays, and the cycles of each in which as many jobs end as run."""

    plays: int
    cycles: int


def usual_effort(jobs: int) -> Effort:
    """Return the effort for so many jobs that run or wait. It bounds no time: jobs of many shapes are more work."""
    plays = max(1, min(8, 400 // max(1, jobs)))
    return Effort(plays, FEW if jobs <= FEW else 10)


class _Filed(NamedTuple):
    """What a queue has before the play."""

    waiting: dict[Shape, list[tuple[OrderKey, Job]]]
    running: dict[Job, None]
    requested: list[float]


@dataclass(slots=True, eq=False)
class _Run:
    """One run of a job; `ends_at` is `-inf` once it is stopped."""

    job: Job
    ends_at: float
    tasks: dict[Task, None] = field(default_factory=dict)


def play(
    state: State, now: float, left_s: Callable[[str], float], cycles: int, in_time: Callable[[], bool]
) -> dict[str, float]:
    """Return when each waiting job that starts in this play starts, by uid (seconds since the epoch).

    `left_s(uid)` is the run time that a job has left. After the first cycle the play ends once `in_time()` is false:
    then it has those that start first. The state is the same afterwards.
    """
    state.ledger.settle()
    with collector_paused():
        one = _Play(state, now, left_s, cycles, in_time)
        try:
            one.run()
        finally:
            one.undo()
    return one.starts


class _Play:
    def __init__(
        self, state: State, now: float, left_s: Callable[[str], float], cycles: int, in_time: Callable[[], bool]
    ) -> None:
        self._ledger, self._left_s, self._now, self._in_time = state.ledger, left_s, now, in_time
        self.starts: dict[str, float] = {}
        self._mark = self._ledger.mark()
        self._serial = 0
        self._again_at, self._looks = inf, 0
        self._ends: list[tuple[float, int, _Run | None]] = []
        self._runs: dict[Job, _Run] = {}
        self._left: dict[str, float] = {}
        self._freed: dict[tuple[Host, int], float] = {}  # in this cycle, where ends share it
        self._began: dict[Job, float] = {}
        self._tasks_began: dict[Task, float] = {}
        self._promised = [job for job in state.promised.values() if not job.active]
        emptying = (job for job in state.emptying.values() if job.stopped and not job.promised)
        self._stopped = [job for job in emptying if not self._is_deferred(job)]
        self._filed: dict[Queue, _Filed] = {}
        self._held_by = {host: dict(host.tasks) for host in self._ledger.hosts.values()}
        self._leaving = dict(self._ledger.leaving)
        self._on_hosts = {job: dict(job.hosts) for job in state.jobs.values() if job.hosts}
        self._cycles, self._waiting = cycles, 0
        self._batch: float = 1
        self._largest: float = 1

    def _copied(self, queue: Queue) -> dict[Shape, list[tuple[OrderKey, Job]]]:
        """Return the jobs of the queue that wait for their start, to be changed in the play."""
        found = {}
        for shape, entries in queue.waiting.items():
            if shape.starts:
                found[shape] = [entry for entry in entries if not entry[1].active and not self._is_deferred(entry[1])]
                self._waiting += len(found[shape])
        return {shape: entries for shape, entries in found.items() if entries}

    def _is_deferred(self, job: Job) -> bool:
        return job.deferred_until > self._now

    def run(self) -> None:
        """Play until every waiting job has started, nothing ends any more, or there is no time left."""
        self._begin_all()
        last, at = self._now + HORIZON_S, self._now
        self._start(at, at)
        while self._waiting and self._ends and self._ends[0][0] <= last and self._in_time():
            times: list[float] = []
            self._freed.clear()
            while self._ends and (len(times) < self._batch or self._shares(at)) and self._ends[0][0] <= last:
                end, _, run = heappop(self._ends)
                if self._end(run, end):
                    times.append(end)
                    at = max(at, end)
            if times:
                self._start(at, at if self._batch == 1 else (times[0] + times[-1]) / 2)
                if self._batch > 1:
                    self._batch = min(self._largest, self._batch * GROWS)

    def _shares(self, at: float) -> bool:
        """Return whether the next end is at that time, too; where ends share cycles anyway it does not matter."""
        return self._batch == 1 and self._ends[0][0] <= at

    def _begin_all(self) -> None:
        """Begin with the jobs that run. What leaves has left at once, so stopped jobs wait for their next start."""
        for queue in self._ledger.queues.values():
            self._filed[queue] = _Filed(queue.waiting, dict(queue.running), list(queue.requested))
            queue.waiting = self._copied(queue)
        running = [job for queue in self._ledger.queues.values() for job in queue.running]
        self._batch = max(1, len(running) // self._cycles)
        self._largest = max(1, len(running) // min(FEWEST_CYCLES, self._cycles))
        for task in list(self._ledger.leaving):
            self._ledger.set(task, Status.PENDING, None)
        for job in self._stopped:
            self._submit(again := _resubmitted(job))
            again.requested = quota.total(self._ledger, again.pending)
            self._request(again, [amount - part for amount, part in zip(again.requested, job.requested, strict=True)])
        for job in running:
            self._begin(job, [task for task in job.tasks.values() if task.status is Status.HELD], self._now)

    def undo(self) -> None:
        """Leave everything as it was, also the order of records that are listed."""
        self._ledger.rollback(self._mark)
        self._ledger.leaving = self._leaving
        for host, tasks in self._held_by.items():
            host.tasks = tasks
        for job, hosts in self._on_hosts.items():
            job.hosts = hosts
        for queue, filed in self._filed.items():
            queue.waiting, queue.running, queue.requested = filed
        for job, began in self._began.items():
            job.started_at = began
        for task, began in self._tasks_began.items():
            task.started_at = began
        self._ledger.settle()

    def _end(self, run: _Run | None, at: float) -> bool:
        """Release what the run holds; return whether there was something to do."""
        if run is None:
            self._looks += at == self._again_at
            return at == self._again_at  # as for drivers, only the newest cycle's time counts
        if run.ends_at != at:
            return False
        self._looks = 0
        for task in run.tasks:
            if task.node is not None and self._batch > 1:
                self._freed.update(((task.node, device), at) for device in task.devices)
            self._ledger.set(task, Status.PENDING, None)
        self._request(run.job, [-amount for amount in run.job.requested])
        del self._runs[run.job]
        return True

    def _request(self, job: Job, more: Sequence[float]) -> None:
        """Add to what the job's queue and its departments request."""
        for queue in job.queue.path:
            for r, amount in enumerate(more):
                queue.requested[r] += amount

    def _start(self, now: float, at: float) -> None:
        """Start what can start, in one cycle where ends share cycles, else as plans do: until there is no more."""
        while self._cycle(now, at) and self._waiting and self._batch == 1 and self._in_time():
            pass

    def _cycle(self, now: float, at: float) -> bool:
        """Carry one cycle out; return whether it changed anything."""
        most = MOST if self._batch == 1 else COARSE_RESERVED
        cycle = Cycle(self._ledger, promised=self._promised, now=now, most_reserved=most)
        self._promised = []
        cycle.run(ACTIONS if self._batch == 1 else COARSE_ACTIONS)
        changed = cycle.changed()
        stopped = [task for task in changed if task.status is Status.LEAVING]
        started: dict[Job, list[Task]] = {}
        for task in changed:
            if task.status in (Status.BOUND, Status.NOMINATED):
                started.setdefault(task.job, []).append(task)
        for job in [job for job in started if job in self._runs]:  # moved, before its old tasks are stopped
            self._runs[job].tasks.update(dict.fromkeys(started[job]))
        for task in stopped:
            self._stop(task, at)
        for job, tasks in started.items():
            begin = self._began_at(tasks, at)
            self._hold(tasks, begin)
            self._begin(job, tasks, begin)
        if started or stopped:
            self._looks = 0
        self._again_at = inf if cycle.again_at is None else cycle.again_at
        if self._again_at < inf and self._batch == 1 and self._looks < LOOKS:
            self._at(self._again_at, None)
        return bool(started or stopped)

    def _began_at(self, tasks: Iterable[Task], at: float) -> float:
        """Return when the last of the devices became free that this cycle's ends released; `at` if there is none."""
        devices = ((task.node, device) for task in tasks if task.node is not None for device in task.devices)
        return max((self._freed[one] for one in devices if one in self._freed), default=at)

    def _hold(self, tasks: Iterable[Task], at: float) -> None:
        """Let the tasks run, so that later cycles can take them for others.

        Where ends share cycles those on idle devices stay bound, which costs less, and are not taken.
        """
        for task in tasks:
            if self._batch == 1 or task.status is Status.NOMINATED:
                self._ledger.set(task, Status.HELD, task.node, task.devices)
            self._tasks_began.setdefault(task, task.started_at)
            task.started_at = at

    def _begin(self, job: Job, tasks: Iterable[Task], at: float) -> None:
        """Record that these tasks of the job run."""
        run = self._runs.get(job)
        if run is None:
            if at > self._now or not job.tasks:
                self._started(job, at)
            left = self._left.pop(job.uid, None)
            run = self._runs[job] = _Run(job, at + (self._left_s(job.uid) if left is None else left))
            if run.ends_at < inf:
                self._at(run.ends_at, run)
        run.tasks.update(dict.fromkeys(tasks))

    def _started(self, job: Job, at: float) -> None:
        self.starts.setdefault(job.uid, at)
        self._began.setdefault(job, job.started_at)
        job.started_at = at
        assert job.filed is not None
        shape, key = job.filed
        entries = job.queue.waiting[shape]
        del entries[bisect_left(entries, key, key=_key_of)]
        if not entries:
            del job.queue.waiting[shape]
        self._waiting -= 1

    def _stop(self, task: Task, at: float) -> None:
        """The task was stopped for another job. A job that has lost all of them waits again, as a new record."""
        self._ledger.set(task, Status.PENDING, None)
        run = self._runs[task.job]
        run.tasks.pop(task, None)
        if run.tasks:
            return
        job = run.job
        del self._runs[job]
        self._left[job.uid] = run.ends_at - at
        run.ends_at = -inf
        self._submit(_resubmitted(job))

    def _submit(self, again: Job) -> None:
        again.filed = (shape_of(again, next_tasks(again)), job_key(again))
        entries = again.queue.waiting.setdefault(again.filed[0], [])
        insort(entries, (again.filed[1], again), key=_key_of)
        self._waiting += 1

    def _at(self, at: float, run: _Run | None) -> None:
        self._serial += 1
        heappush(self._ends, (at, self._serial, run))


def _key_of(entry: tuple[OrderKey, Job]) -> OrderKey:
    return entry[0]


def _resubmitted(job: Job) -> Job:
    """Return a job like this one that waits."""
    again = Job(
        uid=job.uid,
        name=job.name,
        queue=job.queue,
        gang=job.gang,
        wanted=job.wanted,
        most=job.most,
        request=job.request,
        groups=job.groups,
        spread=job.spread,
        user=job.user,
        priority=job.priority,
        preemptible=job.preemptible,
        submitted_at=job.submitted_at,
        requested=job.requested,
        min_run_time_s=job.min_run_time_s,
        most_s=job.most_s,
        expected_s=job.expected_s,
    )
    parts = [*job.tasks.values(), *job.pending][: job.wanted]
    again.pending = [Task(job=again, request=task.request, index=task.index, group=task.group) for task in parts]
    return again
