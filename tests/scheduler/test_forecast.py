"""An expected start is the actual one where every run time is known, and a forecast changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random
from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import given, settings

from kfp_gpuquota.api import ExpectedStart, Order
from kfp_gpuquota.scheduler import (
    JobRemoved,
    JobResumed,
    JobSuspended,
    WorkerGone,
    WorkerLeaving,
    WorkerStarted,
    plan,
)
from kfp_gpuquota.scheduler.dump import take_dump
from kfp_gpuquota.scheduler.forecast import UNKNOWN, Accuracy, Effort, RunTime, expected_starts
from tests.effort import effort
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler import Placement

EXACT = Effort(plays=4, cycles=1000)
NODES, GPUS = 2, 4


@dataclass
class Reality:
    """The real scheduler in simulated time, an event after the other, with run times that are known to the second.

    It shares nothing with the forecast but the scheduler: workers start and end by events, and each moment is planned
    until a plan is empty. A worker that must leave exits at once.
    """

    world: World
    lasts: dict[str, float]
    ends: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)

    def plan(self) -> float:
        """Plan until there is nothing to do; return when the next plan is due."""
        while True:
            decided = plan(self.world.state, self.world.now)
            for evict in decided.evict:
                self.lasts[evict.job] = self.ends.pop(evict.job) - self.world.now
                self._exit(evict.workers)
            for move in decided.move:
                self._exit((move.worker,))
                self._start(move.job, (move.to,))
            for bind in decided.bind:
                self._start(bind.job, bind.placements)
                self.started.setdefault(bind.job, self.world.now)
                self.ends[bind.job] = self.world.now + self.lasts[bind.job]
            if decided.empty:
                return inf if decided.again_at is None else decided.again_at

    def _exit(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self.world.state.apply(WorkerLeaving(worker, self.world.now))
            self.world.state.apply(WorkerGone(worker, self.world.now))

    def _start(self, job: str, placements: Sequence[Placement]) -> None:
        world = self.world
        for at in placements:
            world.serial += 1
            world.state.apply(WorkerStarted(f"w{world.serial:05}", job, at.node, at.devices, world.now))

    def play(self) -> None:
        """Play until nothing ends any more."""
        again_at = self.plan()
        while self.ends or again_at < inf:
            self.world.now = min([again_at, *self.ends.values()])
            for job in [job for job, end in self.ends.items() if end <= self.world.now]:
                del self.ends[job]
                self.world.state.apply(JobRemoved(job))
                for worker in list(self.world.state.jobs[job].tasks):
                    self.world.state.apply(WorkerGone(worker, self.world.now))
            again_at = self.plan()

    def stop(self, job: str) -> None:
        """Stop the job, which is to start again; its workers do not exit yet."""
        state = self.world.state
        self.lasts[job] = self.ends.pop(job) - self.world.now
        state.apply(JobSuspended(job))
        for worker in list(state.jobs[job].tasks):
            state.apply(WorkerLeaving(worker, self.world.now))
        state.apply(JobResumed(job))

    def exit_stopped(self) -> None:
        """End all workers that were stopped."""
        for worker in [task.id for task in self.world.state.ledger.leaving]:
            self.world.state.apply(WorkerGone(worker, self.world.now))


def reality(
    jobs: list[tuple[str, int, int]], guaranteed: dict[str, int], reserve_after_s: float, order: Order = Order.FAIR
) -> Reality:
    """Return a cluster on which the first job has started, and all others of the list wait or run."""
    world = World()
    world.state.ledger.reserve_after_s, world.state.ledger.moves = reserve_after_s, False
    for number in range(NODES):
        world.node(f"node-{number}", GPUS)
    for name, gpus in guaranteed.items():
        world.project(name, gpus, order=order)
    one = Reality(world, {})
    for number, (team, gpus, lasts) in enumerate(jobs):
        one.lasts[world.submit(f"job-{number}", team, gpus, gpus_per_worker=min(gpus, GPUS))] = lasts
        one.plan()
    return one


def test_a_job_starts_when_those_before_it_have_ended() -> None:
    one = reality([("team", 4, 100), ("team", 4, 50), ("team", 8, 30), ("team", 8, 30)], {"team": 8}, inf)
    found = _forecast(one)
    # job-0 began at 1 and job-1 at 2; job-2 needs both, job-3 waits for job-2
    assert (found["job-2"].earliest, found["job-2"].latest) == (101, 101)
    assert found["job-3"].earliest == 131
    assert found.keys() == {"job-2", "job-3"}


def test_a_forecast_without_time_has_the_jobs_that_start_first() -> None:
    one = reality([("team", 8, 100), *[("team", 8, 30)] * 3], {"team": 8}, inf)
    turns = iter([True, False])

    def run_time(uid: str) -> RunTime:
        return RunTime(left_s=one.lasts[uid])

    found = expected_starts(one.world.state, one.world.now, run_time, EXACT, in_time=lambda: next(turns, False))
    assert found.keys() == {"job-1"}
    assert not expected_starts(one.world.state, one.world.now, run_time, EXACT, in_time=lambda: False)


def test_a_forecast_in_few_cycles_is_near_the_one_of_every_end() -> None:
    chance, world, lasts = Random(2), World(), dict[str, float]()
    world.state.ledger.moves = False
    for number in range(12):
        world.node(f"node-{number}", 8)
    for team in range(6):
        world.project(f"team-{team}", 16)
    for number in range(240):
        uid = world.submit(f"job-{number}", f"team-{chance.randrange(6)}", chance.choice([1, 1, 1, 2, 4, 8]))
        lasts[uid] = chance.lognormvariate(8, 1)
    world.settle()

    def starts(cycles: int) -> dict[str, float]:
        found = expected_starts(
            world.state,
            world.now,
            lambda uid: RunTime(examples=(lasts[uid],), left_s=lasts[uid]),
            Effort(plays=1, cycles=cycles),
        )
        return {uid: one.earliest - world.now for uid, one in found.items()}

    every, few = starts(1000), starts(10)
    assert few.keys() == every.keys()
    assert sum(abs(few[uid] - every[uid]) for uid in every) < 0.27 * sum(every.values())


def test_a_job_that_never_fits_costs_few_cycles_while_usage_decays() -> None:
    one = reality([("team", 8, 100), *[("team", 8, 30)] * 3, ("team", 64, 10)], {"team": 8}, 300.0)
    one.world.state.ledger.half_life_s = 3600.0
    cycles = count()

    def in_time() -> bool:
        return next(cycles) < 500

    known = {uid: RunTime(left_s=lasts) for uid, lasts in one.lasts.items()}
    found = expected_starts(one.world.state, one.world.now, lambda uid: known[uid], EXACT, in_time=in_time)
    assert found.keys() == {"job-1", "job-2", "job-3"}
    assert next(cycles) < 500


def test_a_forecast_leaves_the_order_of_leaving_workers_as_it_was() -> None:
    one = reality([("team", 4, 100), ("team", 4, 50), ("team", 8, 30)], {"team": 8}, inf)
    for worker in list(one.world.state.workers):
        one.world.state.apply(WorkerLeaving(worker, one.world.now))
    before = take_dump(one.world.state, one.world.now, "")
    expected_starts(one.world.state, one.world.now, lambda _: RunTime(left_s=9.0), Effort(plays=1, cycles=1000))
    assert take_dump(one.world.state, one.world.now, "") == before


def test_what_waits_for_a_job_of_unknown_run_time_has_no_expected_start() -> None:
    one = reality([("team", 4, 100), ("team", 4, 50), ("team", 8, 30), ("team", 4, 30)], {"team": 8}, inf)
    found = expected_starts(one.world.state, one.world.now, lambda uid: RunTime((50.0,)) if uid == "job-1" else UNKNOWN)
    assert found.keys() == {"job-3"}  # which fits into what job-1 releases; job-2 needs what job-0 holds


def test_more_examples_of_a_run_time_give_a_range() -> None:
    one = reality([("team", 8, 100), ("team", 8, 50)], {"team": 8}, inf)
    examples = tuple(float(seconds) for seconds in range(10, 110, 10))
    found = expected_starts(one.world.state, 2.0, lambda _: RunTime(examples, ran_s=1.0))["job-1"]
    assert found.earliest <= 2 + 19 + 1
    assert found.latest >= 2 + 79 - 1


def test_the_maximum_and_the_steps_that_are_left_bound_a_run_time() -> None:
    assert RunTime((100.0, 200.0), most_s=150.0, ran_s=120.0).left(0.9) == 30
    assert RunTime((100.0,), left_s=7.0).left(0.1) == 7
    assert RunTime((10.0,), ran_s=60.0).left(0.5) == 60  # longer than all examples
    assert UNKNOWN.left(0.5) == inf


Team = st.sampled_from(["ours", "theirs"])
Jobs = st.lists(st.tuples(Team, st.sampled_from([1, 1, 2, 4, 8]), st.integers(20, 80)), min_size=3, max_size=12)


@settings(max_examples=60, deadline=None)
@given(Jobs, st.integers(0, 8), st.sampled_from([inf, 20.0]))
def test_with_exact_run_times_the_estimate_is_the_actual_start(
    jobs: list[tuple[str, int, int]], ours: int, reserve_after_s: float
) -> None:
    one = reality(jobs, {"ours": ours, "theirs": NODES * GPUS - ours}, reserve_after_s)
    before = take_dump(one.world.state, one.world.now, "")
    found = _forecast(one)
    assert take_dump(one.world.state, one.world.now, "") == before
    waiting = {uid for uid, job in one.world.state.jobs.items() if not job.active}
    one.started.clear()
    one.play()
    assert {uid: each.earliest for uid, each in found.items()} == {uid: one.started[uid] for uid in waiting}


@settings(max_examples=effort(25, 2000), deadline=None)
@given(Jobs, st.integers(0, 8), st.sampled_from(list(Order)), st.sets(st.integers(0, 11), min_size=1))
def test_a_stopped_job_starts_again_when_the_estimate_says_once_its_workers_have_exited(
    jobs: list[tuple[str, int, int]], ours: int, order: Order, stopped: set[int]
) -> None:
    one = reality(jobs, {"ours": ours, "theirs": NODES * GPUS - ours}, inf, order)
    for job in sorted({f"job-{number}" for number in stopped} & one.ends.keys()):
        one.stop(job)
    before = take_dump(one.world.state, one.world.now, "")
    found = _forecast(one)
    assert take_dump(one.world.state, one.world.now, "") == before
    waiting = {uid for uid, job in one.world.state.jobs.items() if not job.active}
    one.started.clear()
    one.exit_stopped()
    one.play()
    assert {uid: each.earliest for uid, each in found.items()} == {uid: one.started[uid] for uid in waiting}


def _forecast(one: Reality) -> dict[str, ExpectedStart]:
    now = one.world.now

    def run_time(uid: str) -> RunTime:
        return RunTime(left_s=one.ends[uid] - now if uid in one.ends else one.lasts[uid])

    return expected_starts(one.world.state, now, run_time, EXACT)


def test_the_width_of_ranges_follows_from_what_became_of_past_ones() -> None:
    accuracy, chance = Accuracy(), Random(7)
    assert accuracy.ranged(ExpectedStart(earliest=1e5, latest=2e5), 0.0).held is None
    for number in range(2000):
        now = 1e6 * number
        shown = accuracy.ranged(ExpectedStart(earliest=now + 1e5, latest=now + 2e5), now)
        accuracy.state(str(number), shown)
        accuracy.keep([str(number)])
        accuracy.started(str(number), now + chance.uniform(1e5, 3e5))
    assert 0.75 <= accuracy.held <= 0.85
    found = accuracy.ranged(ExpectedStart(earliest=1e5, latest=2e5), 0.0)
    assert 1.1e5 < found.earliest < 1.3e5
    assert 2.6e5 < found.latest < 3e5
    assert found.held == round(accuracy.held, 2)


def test_estimates_of_jobs_that_never_started_are_forgotten() -> None:
    accuracy = Accuracy()
    played = ExpectedStart(earliest=1000.0, latest=1200.0)
    accuracy.state("deleted", played)
    accuracy.keep([])
    accuracy.started("deleted", 500.0)
    assert (accuracy.compared, accuracy.held) == (0, 1.0)
