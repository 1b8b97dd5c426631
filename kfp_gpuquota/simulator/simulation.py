"""A trace in simulated time: arrivals, ends and departures in order, and the scheduler's plan after each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api import Project
from kfp_gpuquota.scheduler import (
    JobRemoved,
    JobSubmitted,
    NodeChanged,
    Placement,
    PlacementsPromised,
    Plan,
    ProgressReported,
    QuotaChanged,
    State,
    WorkerGone,
    WorkerLeaving,
    WorkerStarted,
    changed_promises,
)
from kfp_gpuquota.scheduler.planner import plan
from kfp_gpuquota.scheduler.state.model import GPU, Host, Job, Request, Status, Task, User
from kfp_gpuquota.simulator.backfill import easy_backfill
from kfp_gpuquota.simulator.measures import Fragments, Meter, Result, spread
from kfp_gpuquota.simulator.policies import Policy, Quotas
from kfp_gpuquota.simulator.trace import WHOLE, Pace, TraceJob, TraceNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

EVERYONE = "everyone"
SAMPLES = 200


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The behavior of jobs, the same under every policy; `clock` (s) only measures the duration of planning.

    A worker that must leave holds its GPUs for `leave_s`. A stopped job continues from its last checkpoint, one every
    `checkpoint_s`. Of an elastic job's work, `serial` is done no faster by more workers (Amdahl's law), and it is not
    grown again for `cool_down_s`. `guaranteed` is in GPUs by project; the rest of the cluster is guaranteed to the
    other projects by the GPU time that they ask for, unless the `projects` are given. `declared`: jobs of one size have
    a maximum run time, of so many times their run time; 0: they have none. A start, and a change of size or nodes,
    stops a job for `pause_s`. With `period_s` plans are made at its multiples only.
    """

    clock: Callable[[], float]
    leave_s: float = 10.0
    checkpoint_s: float = 1800.0
    serial: float = 0.05
    cool_down_s: float = 60.0
    declared: float = 0.0
    pause_s: float = 0.0
    period_s: float = 0.0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    projects: tuple[Project, ...] = ()

    def throughput(self, workers: int) -> float:
        """Return the throughput in units of one worker's."""
        return 1 / (self.serial + (1 - self.serial) / workers) if workers else 0.0


def simulate(
    nodes: Sequence[TraceNode], jobs: Sequence[TraceJob], policy: Policy, options: SimulationOptions
) -> Result:
    """Run the whole trace until the last job that can start has ended."""
    began = options.clock()
    simulation = Simulation(nodes, jobs, policy, options)
    simulation.run()
    return simulation.result(options.clock() - began)


def guarantees(nodes: Sequence[TraceNode], jobs: Sequence[TraceJob], given: Mapping[str, int]) -> dict[str, int]:
    """Whole GPUs by project: what is given, and the rest by the GPU time asked for (largest remainder)."""
    asked: dict[str, float] = {}
    for job in jobs:
        asked[job.project] = asked.get(job.project, 0.0) + job.gpu_seconds
    open_to = sorted(asked.keys() - given.keys())
    left = max(0, sum(node.gpus for node in nodes) - sum(given.values()))
    total = sum(asked[name] for name in open_to) or 1.0
    parts = {name: left * asked[name] / total for name in open_to}
    shares = {name: int(part) for name, part in parts.items()}
    for name in sorted(parts, key=lambda name: shares[name] - parts[name])[: left - sum(shares.values())]:
        shares[name] += 1
    return {**shares, **given}


@dataclass(slots=True, eq=False)
class Life:
    """The life of one job. `done` is in seconds of work at the requested size, as of `since`.

    It is done at `rate` from `goes_on_at`. `placement` has the number of workers on each node.
    """

    trace: TraceJob
    job: Job
    done: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    goes_on_at: float = 0.0
    placement: tuple[int, ...] = ()
    workers: int = 0
    saved: float = 0.0
    queued_s: float = 0.0
    gpu_s: float = 0.0
    evictions: int = 0
    began_at: float = 0.0
    epoch: int = 0
    first_started_at: float | None = None
    ends_at: float = inf
    ended_at: float | None = None


class Simulation:
    """The world around the scheduler: carries its plans out, and lets time pass.

    `watch(now)` is called after the plans of each moment; it may look at `state` and `lives`.
    """

    def __init__(
        self,
        nodes: Sequence[TraceNode],
        jobs: Sequence[TraceJob],
        policy: Policy,
        options: SimulationOptions,
        watch: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._policy, self._options = policy, options
        self.state = State(reserve_after_s=policy.reserve_after_s, defragmentation=policy.defragmentation)
        self._gpus = sum(node.gpus for node in nodes)
        self._models = {node.name: node.model for node in nodes}
        for node in nodes:
            if node.node is not None:
                self.state.apply(NodeChanged(node.node))
            else:
                self.state.ledger.put_host(_host(node))
        for project in self._quotas(nodes, jobs):
            self.state.apply(QuotaChanged(project))
        self.lives: dict[str, Life] = {}
        self._watch = watch
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = count()
        self._serial = count()
        self._now = 0.0
        self._resizes = self._plans = self._moves = 0
        self._lost_gpu_s = self._slowest_s = 0.0
        self._first_at = jobs[0].arrives_at if jobs else 0.0
        self._window = _window(jobs)
        self._meter = Meter(
            grid=_grid(*self._window),
            hosts=self.state.ledger.hosts,
            fragments=Fragments(nodes, jobs),
            projects=sorted({job.project for job in jobs}),
        )
        for index, job in enumerate(jobs):
            self._at(job.arrives_at, self._arrive, (index, job))

    def run(self) -> None:
        """Advance the time until no event is left."""
        period_s = self._options.period_s
        while self._events:
            self._now = self._events[0][0]
            self._meter.advance(self._now)
            while self._events and self._events[0][0] == self._now:
                _, _, happen, what = heappop(self._events)
                happen(what)
            if period_s and self._now % period_s:
                self._at((self._now // period_s + 1) * period_s, self._pass, None)
            else:
                while self._plan():
                    pass
                if period_s and self._events:
                    self._at(self._now + period_s, self._pass, None)
            self._watch(self._now)

    def result(self, seconds: float) -> Result:
        """Return the result of the run."""
        lives = list(self.lives.values())
        of: dict[str, list[Life]] = {name: [] for name in self._meter.projects}
        for life in lives:
            of[life.trace.project].append(life)
        started = {name: [life for life in mine if life.first_started_at is not None] for name, mine in of.items()}
        samples = self._meter.series()
        window = max(1.0, self._window[1] - self._window[0])
        return Result(
            policy=self._policy.name,
            title=self._policy.title,
            gpus=self._gpus,
            jobs=len(lives),
            finished=sum(life.ended_at is not None for life in lives),
            utilisation_percent=100 * self._meter.gpu_seconds / (window * max(1, self._gpus)),
            fragmentation_percent=sum(samples.fragmentation_percent) / max(1, len(samples.at)),
            waiting={name: spread(map(self._waited_s, mine)) for name, mine in started.items()},
            queued={name: spread(map(self._queued_s, mine)) for name, mine in started.items()},
            evicted={name: sum(life.evictions for life in mine) for name, mine in of.items()},
            gpu_hours={name: sum(life.gpu_s for life in mine) / 3600 for name, mine in of.items()},
            completion=spread(life.ended_at - life.trace.arrives_at for life in lives if life.ended_at is not None),
            resizes=self._resizes,
            evictions=sum(life.evictions for life in lives),
            moves=self._moves,
            free_nodes_percent=sum(self._meter.free_percent) / max(1, len(self._meter.free_percent)),
            lost_gpu_hours=self._lost_gpu_s / 3600,
            makespan_s=max((life.ended_at or 0.0 for life in lives), default=0.0) - self._first_at,
            plans=self._plans,
            slowest_plan_ms=1e3 * self._slowest_s,
            seconds=seconds,
            series=samples,
        )

    def _waited_s(self, life: Life) -> float:
        return (life.first_started_at or 0.0) - life.trace.arrives_at

    def _queued_s(self, life: Life) -> float:
        waits = not life.workers and life.ended_at is None
        return life.queued_s + waits * (self._now - life.since)

    def _quotas(self, nodes: Sequence[TraceNode], jobs: Sequence[TraceJob]) -> Sequence[Project]:
        if self._policy.quotas is Quotas.NONE:
            return [Project(name=EVERYONE, guaranteed=self._gpus)]
        projects: Sequence[Project] = self._options.projects or [
            Project(name=name, guaranteed=gpus, order=self._policy.order)
            for name, gpus in guarantees(nodes, jobs, self._options.guaranteed).items()
        ]
        if self._policy.quotas is Quotas.STATIC:
            return [msgspec.structs.replace(one, limit=one.guaranteed) for one in projects]
        return projects

    # What happens

    def _at(self, time: float, happen: Callable[..., None], what: object) -> None:
        heappush(self._events, (time, next(self._order), happen, what))

    def _arrive(self, arrival: tuple[int, TraceJob]) -> None:
        index, trace = arrival
        uid = f"{index:06}"
        if trace.spec is not None:
            self.state.apply(JobSubmitted(uid, trace.spec, self._now, user=trace.user))
        else:
            self.state.add_job(self._job(uid, trace))
        self.lives[uid] = Life(trace, self.state.jobs[uid], since=self._now)
        self._meter.waiting_gpus += trace.workers * trace.worker_gpus

    def _job(self, uid: str, trace: TraceJob) -> Job:
        unlimited = self._policy.quotas is Quotas.NONE
        queue = self.state.ledger.queues[EVERYONE if unlimited else trace.project]
        job = Job(
            uid=uid,
            name=trace.name,
            queue=queue,
            gang=trace.fewest,
            wanted=trace.workers,
            most=trace.most,
            request=self._request(trace),
            user=User(trace.user),
            priority=50 if unlimited else trace.priority,
            submitted_at=self._now,
            cool_down_s=self._options.cool_down_s,
            most_s=self._most_s(trace),
            expected_s=trace.duration_s,
        )
        job.pending = [Task(job=job, request=job.request, index=i) for i in range(job.wanted)]
        return job

    def _most_s(self, trace: TraceJob) -> float:
        declared = self._options.declared
        return declared * trace.duration_s if declared and trace.fewest == trace.most else inf

    def _request(self, trace: TraceJob) -> Request:
        nodes = None
        if trace.models is not None:
            nodes = frozenset(name for name, model in self._models.items() if model in trace.models)
        share = trace.milli * GPU // WHOLE if trace.gpus else GPU
        memory = trace.memory_mib * 2**20
        return Request(devices=trace.gpus, share=share, cpu=trace.cpu_milli, memory=memory, nodes=nodes)

    def _finish(self, ending: tuple[Life, int]) -> None:
        life, epoch = ending
        if life.epoch != epoch:
            return
        life.ended_at = self._now
        self.state.apply(JobRemoved(life.job.uid))
        self._sized(life)
        for worker in list(life.job.tasks):
            self._exited(worker)

    def _exited(self, worker: str) -> None:
        if worker in self.state.workers:
            self.state.apply(WorkerGone(worker, self._now))

    def _pass(self, _: object) -> None:
        """Nothing but time."""

    # Plans

    def _plan(self) -> bool:
        """Plan once; whether there was something to do, so that a cluster would plan again."""
        began = self._options.clock()
        decided = self._decided()
        self._slowest_s = max(self._slowest_s, self._options.clock() - began)
        self._plans += 1
        self._carry_out(decided)
        if decided.again_at is not None:
            self._at(decided.again_at, self._pass, None)
        return not decided.empty

    def _decided(self) -> Plan:
        if self._policy.backfill:
            return easy_backfill(self.state, self._ends_at)
        self._report_checkpoints()
        return plan(self.state, self._now, self._policy.actions, strict=self._policy.strict)

    def _report_checkpoints(self) -> None:
        """Let the scheduler know the last checkpoints of running jobs, which decide what moves and stops cost."""
        every_s = self._options.checkpoint_s
        for job in chain.from_iterable(queue.running for queue in self.state.ledger.queues.values()):
            began_at = self.lives[job.uid].began_at
            run_s = self._now - began_at
            if run_s >= every_s:
                job.checkpoint_at = began_at + run_s - run_s % every_s

    def _ends_at(self, uid: str) -> float:
        """Return when the job ends if it runs, else when it would end if it were started now."""
        life = self.lives[uid]
        return life.ends_at if life.workers else self._now + max(0.0, life.trace.duration_s - life.done)

    def _carry_out(self, decided: Plan) -> None:
        if decided.defragmented is not None:
            self.state.apply(decided.defragmented)
            self._moves += len(decided.move)
            self._restart_moved(decided)
        for evict in decided.evict:
            self.lives[evict.job].evictions += 1
            self._leave(evict.workers)
        for move in decided.move:
            self._leave((move.worker,))
            self._start(move.job, (move.to,))
        for resize in decided.resize:
            self._resizes += 1
            self._leave(resize.remove)
            self._start(resize.job, resize.add)
        for bind in decided.bind:
            self._start(bind.job, bind.placements)
        changed = [d.job for group in (decided.evict, decided.move, decided.resize, decided.bind) for d in group]
        for uid in dict.fromkeys(changed):
            self._sized(self.lives[uid])
        for uid, placements in changed_promises(self.state.promises, decided).items():
            self.state.apply(PlacementsPromised(uid, placements, self._now, decided.victims.get(uid, ())))

    def _restart_moved(self, decided: Plan) -> None:
        """Let jobs of which all workers move continue from their checkpoints; others lose nothing."""
        for uid, moved in Counter(move.job for move in decided.move).items():
            life = self.lives[uid]
            if moved == life.workers:
                self._progress(life)
                life.gpu_s += life.workers * life.trace.worker_gpus * (self._now - life.since)
                life.since = self._now
                self._restart_from_checkpoint(life)
                life.began_at, life.saved = self._now, life.done

    def _leave(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self.state.apply(WorkerLeaving(worker, self._now))
            if self._options.leave_s:
                self._at(self._now + self._options.leave_s, self._exited, worker)
            else:
                self._exited(worker)

    def _start(self, uid: str, placements: Sequence[Placement]) -> None:
        for at in placements:
            worker = f"{uid}-{next(self._serial)}"
            self.state.apply(WorkerStarted(worker, uid, at.node, at.devices, self._now))

    def _sized(self, life: Life) -> None:
        """Continue the job at its current size, from the work that it has done."""
        trace, before, workers = life.trace, life.workers, 0 if life.ended_at is not None else life.job.active
        self._progress(life)
        life.gpu_s += before * trace.worker_gpus * (self._now - life.since)
        if not before:
            life.queued_s += self._now - life.since
        if before and not workers and life.ended_at is None:
            self._restart_from_checkpoint(life)
        if not before:
            life.began_at, life.saved = self._now, life.done
        if workers and life.first_started_at is None:
            life.first_started_at = self._now
        self._meter.add(trace.project, (workers - before) * trace.worker_gpus)
        queued = (not workers and life.ended_at is None) - (not before)
        self._meter.waiting_gpus += queued * trace.workers * trace.worker_gpus
        life.workers, life.since = workers, self._now
        life.placement, life.goes_on_at = _placement(life.job), self._now + self._options.pause_s
        self._paced(life)

    def _progress(self, life: Life) -> None:
        """Count the work that was done since the last change of the job's rate."""
        life.done += life.rate * max(0.0, self._now - max(life.since, life.goes_on_at))

    def _paced(self, life: Life) -> None:
        """Set the rate of the job at its size, until its end or the next change of its rate."""
        life.epoch += 1
        pace = self._pace(life)
        life.rate = pace.rate
        if not life.workers:
            return
        until = min(life.trace.duration_s, pace.until)
        at = max(self._now, life.goes_on_at) + max(0.0, until - life.done) / life.rate
        ends = until >= life.trace.duration_s
        life.ends_at = at if ends else inf
        self._at(at, self._finish if ends else self._advance, (life, life.epoch))
        self._report(life, pace)

    def _pace(self, life: Life) -> Pace:
        trace = life.trace
        if trace.training is not None and life.workers:
            return trace.training.pace(life.placement, life.done)
        throughput = self._options.throughput
        rate = throughput(life.workers) / throughput(trace.workers)
        return Pace(rate, inf, throughput(life.workers) if trace.fewest < trace.most else None)

    def _advance(self, change: tuple[Life, int]) -> None:
        """Go on at another rate, after part of the job's work."""
        life, epoch = change
        if life.epoch == epoch:
            self._progress(life)
            life.gpu_s += life.workers * life.trace.worker_gpus * (self._now - life.since)
            life.since = self._now
            self._paced(life)

    def _restart_from_checkpoint(self, life: Life) -> None:
        """Work since the last checkpoint of this run is done again; those were taken every so many seconds."""
        run = self._now - life.began_at
        kept = life.saved
        if run >= self._options.checkpoint_s:
            kept += (life.done - life.saved) * (run - run % self._options.checkpoint_s) / run
        trace = life.trace
        self._lost_gpu_s += (life.done - kept) * trace.workers * trace.worker_gpus
        life.done = kept

    def _report(self, life: Life, pace: Pace) -> None:
        """An elastic job measures its throughput at each size."""
        if pace.throughput is None:
            return
        report = ProgressReported(
            life.job.uid,
            0,
            self._now,
            throughput=pace.throughput,
            workers=life.workers,
            batch_size=pace.batch_size,
            noise_scale=pace.noise_scale,
            pause_s=self._options.pause_s or None,
        )
        self.state.apply(report)


def _placement(job: Job) -> tuple[int, ...]:
    """Return the number of the job's workers on each of its nodes, without those that leave."""
    counts: dict[str, int] = {}
    for task in job.tasks.values():
        if task.status is Status.HELD and task.node is not None:
            counts[task.node.name] = counts.get(task.node.name, 0) + 1
    return tuple(counts.values())


def _host(node: TraceNode) -> Host:
    memory = node.memory_mib * 2**20
    return Host(name=node.name, devices=tuple(range(node.gpus)), cpu=node.cpu_milli, memory=memory)


def _window(jobs: Sequence[TraceJob]) -> tuple[float, float]:
    """From the first arrival, but for the earliest 1 % (which may be months ahead of all others), to the last."""
    arrivals = [job.arrives_at for job in jobs] or [0.0]
    return arrivals[len(arrivals) // 100], arrivals[-1]


def _grid(first: float, last: float) -> list[float]:
    step = (last - first) / (SAMPLES - 1)
    return [first + i * step for i in range(SAMPLES)]
