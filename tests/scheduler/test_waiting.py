"""How long a job of a project waits behind others of it: random clusters in simulated time, naive statements."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler import RunTimeExpected, State
from kfp_gpuquota.scheduler.state.order import MOST_OVERTAKEN_S
from tests.effort import effort
from tests.scheduler.world import World

ROUND_S = 1000.0
AFTER_S = 3000.0
PART = 10
"""Seeds of one test."""


@dataclass
class Waiting:
    """A job that is not larger than the guarantee, from when no shorter one overtakes it any more (`round`).

    It starts before round `by` at the latest.
    """

    round: int
    by: int


@dataclass
class Trial:
    """Jobs of one project, all of one priority, which arrive and end at random."""

    seed: int
    order: Order
    nodes: int = 1
    slow: bool = False
    chance: random.Random = field(init=False)
    world: World = field(init=False)
    round: int = 0
    lasts: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, Waiting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.world = World(State(reserve_after_s=AFTER_S))
        self.gpus = self.chance.randint(2, 8)
        for number in range(self.nodes):
            self.world.node(f"n{number}", self.gpus)
        self.guaranteed = self.chance.choice([self.gpus * self.nodes, self.chance.randint(1, self.gpus * self.nodes)])
        self.world.project("team", self.guaranteed, order=self.order)
        self.world.project("other", self.gpus * self.nodes - self.guaranteed)

    def arrive(self) -> None:
        gpus = self.chance.choice([1, 1, 2, self.chance.randint(1, self.gpus)])
        lasts = self.chance.choice([1, 2, 3, self.chance.randint(1, 20)])
        name = f"j{len(self.lasts):03}"
        ends = self.chance.random() < 0.2
        most_s = lasts * ROUND_S if ends else None
        self.world.submit(name, "team", gpus, max_runtime_s=most_s, grace_period_s=1.0)
        self.lasts[name] = lasts
        self.world.state.apply(RunTimeExpected(name, lasts * ROUND_S))

    def stop_some(self) -> None:
        """Suspend and resume a job, or start or end one of the other project, which takes what is guaranteed to it."""
        running = sorted(self.ends)
        if running and self.chance.random() < 0.2:
            name = self.chance.choice(running)
            self.world.suspend(name)
            self.world.resume(name)
            del self.ends[name]
        if self.chance.random() < 0.2:
            if theirs := [name for name in self.world.specs if name not in self.lasts]:
                self.world.remove(theirs[0])
            else:
                self.world.submit(f"theirs{self.round}", "other", self.chance.randint(1, self.gpus), gpus_per_worker=1)

    def play(self) -> None:
        """End what is due, let jobs arrive, plan until nothing changes, and check each plan and all bounds."""
        self.round += 1
        self.world.now = self.round * ROUND_S
        for name in [name for name, end in self.ends.items() if end <= self.round]:
            self.end(name)
        for _ in range(self.chance.choice([0, 0, 1, 1, 2, 4])):
            self.arrive()
        if self.slow:
            self.stop_some()
        self.release()
        if not self.slow:
            self.bound()
        while not self.plan():
            pass
        for name, one in self.bounds.items():
            assert name not in self.waits() or self.round < one.by, f"{name} waits since {one}: {self}"

    def end(self, name: str) -> None:
        del self.ends[name]
        self.world.remove(name)
        for worker in self.world.of(name):
            self.world.exit(worker)

    def plan(self) -> bool:
        """Carry one plan out, and check it; return whether it changed nothing."""
        world = self.world
        waited = [name for name in world.specs if not world.of(name)]
        stopped = [name for name in world.specs if world.of(name) and not world.size(name)]
        decided = world.step()
        promised, started = {one.job for one in decided.nominate}, [bind.job for bind in decided.bind]
        self.check([name for name in waited if name not in promised], stopped, started)
        self.ends.update({name: self.round + self.lasts[name] for name in started if name in self.lasts})
        for name in [name for name in self.ends if not world.size(name)]:
            del self.ends[name]
        self.release()
        return decided.empty

    def release(self) -> None:
        """Workers exit at once, or with `slow` in one of the next rounds."""
        for worker in [worker for worker, one in self.world.workers.items() if one.leaving]:
            at = self.exits.setdefault(worker, self.round + self.slow * self.chance.choice([0, 1, 3]))
            if at <= self.round:
                self.world.exit(worker)

    def waits(self) -> list[str]:
        """Return the jobs of the project that do not run, the oldest first."""
        return [name for name in self.lasts if name in self.world.specs and not self.world.size(name)]

    def is_overdue(self, name: str) -> bool:
        """Return whether no shorter job overtakes the job any more, and GPUs are kept for it if it is the first."""
        job = self.world.state.jobs[name]
        after_s = 0.0 if self.order is Order.STRICT else AFTER_S
        if self.order is Order.SHORTEST:
            after_s = min(MOST_OVERTAKEN_S, max(after_s, job.length_s))
        return self.size(name) <= self.guaranteed and self.round * ROUND_S >= job.submitted_at + after_s

    def size(self, name: str) -> int:
        return self.world.specs[name].gpus

    def bound(self) -> None:
        """A job that is overdue from now on waits for those that run, then for older ones, one after the other."""
        waiting = self.waits()
        for place, name in enumerate(waiting):
            if name not in self.bounds and self.is_overdue(name):
                run = max((end - self.round for end in self.ends.values()), default=0)
                older = [other for other in waiting[:place] if self.size(other) <= self.gpus]
                self.bounds[name] = Waiting(self.round, self.round + run + 1 + sum(self.lasts[one] for one in older))

    def check(self, waited: list[str], stopped: list[str], started: list[str]) -> None:
        """Check what one plan has started against those that wait on: they waited, or were stopped, and no devices that
        become free are promised to them.
        """
        endless = [name for name in started if name in self.lasts and self.world.specs[name].max_runtime_s is None]
        waiting = sorted(one for one in waited + stopped if one in self.lasts and one not in started)
        able = [name for name in waiting if self.size(name) <= self.gpus]
        late = [name for name in able if name in waited and self.is_overdue(name)]
        if self.order is Order.STRICT:
            assert not (able and endless and able[0] < endless[-1]), f"{endless} pass {able[0]}: {self}"
        if late and (passing := [name for name in endless if name > late[0]]):
            assert self.nodes > 1, f"{passing} pass {late[0]}: {self}"
            room = dict.fromkeys(self.world.nodes, self.gpus)
            for name in passing:
                room[self.world.nodes_of(name).pop()] -= self.size(name)
            assert max(room.values()) >= self.size(late[0]), f"{passing} use every node that {late[0]} fits on: {self}"
            held = self.world.held("team") + self.size(late[0])
            assert held <= self.guaranteed, f"{passing} use the guarantee that {late[0]} needs: {self}"

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.nodes} nodes of {self.gpus}, {self.guaranteed} guaranteed, round {self.round}"


def play(seed: int, order: Order, nodes: int = 1, *, slow: bool = False) -> None:
    trial = Trial(seed, order, nodes, slow)
    for _ in range(40):
        trial.play()


@pytest.mark.parametrize("order", [Order.FAIR, Order.SHORTEST, Order.STRICT])
@pytest.mark.parametrize("part", range(effort(2, 100)))
def test_an_overdue_job_waits_for_what_runs_and_then_for_older_jobs_only(order: Order, part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        play(seed, order)


@pytest.mark.parametrize("order", [Order.FAIR, Order.SHORTEST])
def test_on_several_nodes_what_the_first_overdue_job_needs_is_left_to_it(order: Order) -> None:
    for seed in range(effort(24, 1000)):
        play(seed, order, nodes=3)


@pytest.mark.parametrize("part", range(effort(2, 100)))
def test_no_younger_job_passes_one_in_strict_order_also_while_its_workers_exit(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        play(seed, Order.STRICT, slow=True)
