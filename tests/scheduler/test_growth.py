"""Lent GPUs go where they pay: the objective against an exhaustive search, and what plans do with it."""

from __future__ import annotations

from itertools import pairwise, product
from math import log
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.scheduler import ProgressReported
from kfp_gpuquota.scheduler.actions.growth import LONGEST_S, Donors, Sizes, allocate, worth
from kfp_gpuquota.scheduler.state.model import GPU, Host, Job, Queue, Request, Task
from kfp_gpuquota.scheduler.state.progress import Scaling
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence


def best(jobs: Sequence[Sizes], gpus: float) -> float:
    """Return the largest sum of values, by trying all sizes."""
    ranges = [range(job.least, job.most + 1) for job in jobs]
    fitting = (
        sizes
        for sizes in product(*ranges)
        if sum((n - job.least) * job.each for job, n in zip(jobs, sizes, strict=True)) <= gpus
    )
    return max(total(jobs, sizes) for sizes in fitting)


def total(jobs: Sequence[Sizes], sizes: Sequence[int]) -> float:
    return sum(job.value(n) for job, n in zip(jobs, sizes, strict=True))


@st.composite
def concave(draw: st.DrawFn) -> Sizes:
    """The sizes of a job by Amdahl's law."""
    least, serial = draw(st.integers(1, 3)), draw(st.floats(0, 1))
    return Sizes(least, least + draw(st.integers(0, 4)), 1.0, lambda n: -log(serial + (1 - serial) / n))


@st.composite
def arbitrary(draw: st.DrawFn) -> Sizes:
    """The sizes of a job with arbitrary values, and workers of one or two GPUs."""
    least, most = draw(st.integers(0, 2)), draw(st.integers(2, 5))
    values = draw(st.lists(st.floats(-3, 3), min_size=6, max_size=6))
    return Sizes(least, most, draw(st.sampled_from([1.0, 2.0])), values.__getitem__)


@given(st.lists(concave(), min_size=1, max_size=4), st.integers(0, 12))
@settings(deadline=None)
def test_the_sum_of_values_is_the_largest_possible_where_gains_diminish(jobs: list[Sizes], gpus: int) -> None:
    assert total(jobs, allocate(jobs, gpus)) == pytest.approx(best(jobs, gpus))


@given(st.lists(arbitrary(), min_size=1, max_size=4), st.integers(0, 8))
@settings(deadline=None)
def test_of_other_values_it_is_less_than_one_step_below_the_largest(jobs: list[Sizes], gpus: int) -> None:
    chosen = allocate(jobs, gpus)
    taken = sum((n - job.least) * job.each for job, n in zip(jobs, chosen, strict=True))
    assert taken <= gpus
    assert all(job.least <= n <= job.most for job, n in zip(jobs, chosen, strict=True))
    rises = [job.value(b) - job.value(a) for job in jobs for a, b in _pairs(job)]
    assert total(jobs, chosen) >= best(jobs, gpus) - max(rises, default=0.0) - 1e-9


def _pairs(job: Sizes) -> list[tuple[int, int]]:
    sizes = [job.least, *(size for _, size in job.steps)]
    return list(pairwise(sizes))


def trained(throughput: dict[int, float], batches: dict[int, int] | None = None, noise: float | None = None) -> Job:
    job = Job("j", "j", Queue("q"), gang=1, wanted=1, most=64, request=Request())
    job.throughput, job.batches, job.noise_scale, job.active = throughput, batches or {}, noise, 1
    return job


@pytest.mark.parametrize(
    ("throughput", "workers", "expected"),
    [
        ({}, 3, 3.0),
        ({2: 50.0}, 2, 2.0),
        ({1: 10.0, 2: 20.0}, 8, 8.0),
        ({1: 10.0, 2: 15.0}, 2, 1.5),
        ({1: 10.0, 2: 9.0}, 2, 0.9),
        ({1: 60.0, 2: 90.0}, 3, 1.8),  # a third of a step is serial
        ({1: 10.0, 2: 20.0, 4: 10.0}, 4, 1.0),  # a network between nodes, for example
    ],
)
def test_a_size_is_as_measured_and_others_follow_amdahl(
    throughput: dict[int, float], workers: int, expected: float
) -> None:
    goodput = Scaling(trained(throughput))
    assert goodput(workers) / goodput(1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batches", "noise", "expected"),
    [
        ({1: 64, 2: 64}, 64.0, 4.0),  # the same batch at each size: each sample counts the same
        ({1: 64, 2: 128}, None, 4.0),  # the training does not report what a larger batch is worth
        ({1: 64, 2: 128}, 64.0, 4.0 * (64 + 64) / (64 + 256)),
        ({1: 64, 2: 128}, 1e9, 4.0),
    ],
)
def test_a_batch_that_grows_counts_by_its_statistical_efficiency(
    batches: dict[int, int], noise: float | None, expected: float
) -> None:
    goodput = Scaling(trained({1: 100.0, 2: 200.0}, batches, noise))
    assert goodput(4) / goodput(1) == pytest.approx(expected, rel=1e-6)


measurements = st.dictionaries(st.integers(1, 64), st.tuples(st.floats(1e-3, 1e6), st.integers(1, 4096)), max_size=5)


@given(measurements, st.none() | st.floats(0, 1e6), st.integers(1, 64))
def test_goodput_is_finite_and_positive(found: dict[int, tuple[float, int]], noise: float | None, workers: int) -> None:
    throughput, batches = {n: rate for n, (rate, _) in found.items()}, {n: batch for n, (_, batch) in found.items()}
    assert 0 < Scaling(trained(throughput, batches, noise))(workers) < float("inf")


def test_a_change_costs_less_the_longer_the_size_has_lasted() -> None:
    job = trained({1: 10.0, 2: 20.0})
    job.tasks, job.started_at, job.pause_s = {"w": None}, 0.0, 30.0  # type: ignore[dict-item]
    costs = [worth(job, now, 1.0, changes=False).cost for now in (1.0, 100.0, 130.0, 700.0, 1e6)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 5 * costs[-1] > 0
    assert worth(job, 1.0, 1.0, changes=True).cost == 0
    assert worth(job, 1.0, 1.0, changes=False).until == 120.0
    assert worth(job, 1e6, 1.0, changes=False).until is None


# Plans


def world_of(gpus: int, nodes: int = 1, **teams: int) -> World:
    world = World()
    for i in range(nodes):
        world.node(f"n{i}", gpus)
    for name, guaranteed in teams.items():
        world.project(name, guaranteed)
    return world


def report(world: World, job: str, workers: int, throughput: float, **more: float) -> None:
    world.state.apply(ProgressReported(job, 0, world.now, throughput=throughput, workers=workers, **more))  # type: ignore[arg-type]


def test_a_job_that_starts_gets_its_part_of_what_is_lent() -> None:
    world = world_of(8, team=8)
    world.submit("first", "team", 1, 1, 8)
    world.settle()
    assert world.size("first") == 8
    report(world, "first", 8, 80.0)
    world.submit("second", "team", 1, 1, 8)
    world.settle()
    assert (world.size("first"), world.size("second")) == (4, 4)


def test_a_job_that_reports_no_progress_loses_no_worker_for_what_another_one_gains() -> None:
    world = world_of(8, team=8)
    world.submit("ray-cluster", "team", 1, 1, 7, cool_down_s=0)
    world.settle()
    world.submit("training", "team", 1, 1, 8, cool_down_s=0)
    world.settle()
    for workers in (1, 2):
        report(world, "training", workers, 10.0 * workers)
    world.settle()
    assert (world.size("ray-cluster"), world.size("training")) == (7, 1)
    world.submit("more", "team", 2, 2, 2)
    world.settle()
    assert (world.size("ray-cluster"), world.size("more")) == (5, 2)


def test_lent_workers_change_jobs_for_what_another_one_gains_by_them() -> None:
    world = world_of(8, team=8)
    for job in ("flat", "steep"):
        world.submit(job, "team", 1, 1, 8, cool_down_s=0)
    world.settle()
    assert (world.size("flat"), world.size("steep")) == (4, 4)
    for workers, flat in ((1, 10.0), (4, 12.0)):
        report(world, "flat", workers, flat)
        report(world, "steep", workers, 10.0 * workers)
    plans = world.settle()
    assert (world.size("flat"), world.size("steep")) == (1, 7)
    reasons = [str(one.reason) for decided in plans for one in decided.resize if one.remove]
    assert reasons == ["shrunk from 4 to 1 GPUs: it was only lent, and steep gains more by it"]


def test_the_noise_scale_decides_between_trainings_of_the_same_throughput() -> None:
    world = world_of(8, team=8)
    for job, noise in (("quiet", 10.0), ("noisy", 1e6)):
        world.submit(job, "team", 1, 1, 8, cool_down_s=0)
        for workers in (1, 4):
            report(world, job, workers, 10.0 * workers, batch_size=64 * workers, noise_scale=noise)
    world.settle()
    assert (world.size("quiet"), world.size("noisy")) == (1, 7)


def test_a_worker_that_makes_a_job_slower_that_changes_at_a_cost_leaves_though_nobody_needs_its_gpu() -> None:
    world = world_of(2, nodes=2, team=4)
    world.submit("job", "team", 1, 1, 4, cool_down_s=0)
    world.settle()
    assert world.size("job") == 4
    for workers, throughput in ((1, 10.0), (2, 19.0), (4, 12.0)):
        report(world, "job", workers, throughput, pause_s=2.0)
    plans = world.settle()
    assert world.size("job") == 2
    assert len(world.nodes_of("job")) == 1
    assert "trains no slower without it" in str(next(one for decided in plans for one in decided.resize).reason)


def test_a_size_that_was_only_measured_in_its_first_steps_is_not_left_at_once() -> None:
    world = world_of(4, team=4)
    world.submit("job", "team", 1, 1, 4, cool_down_s=0)
    world.settle()
    report(world, "job", 1, 10.0, pause_s=2.0)
    report(world, "job", 4, 5.0, pause_s=2.0)
    decided = world.step()
    assert decided.empty
    assert decided.again_at == pytest.approx(62.0, abs=2)
    report(world, "job", 4, 35.0)
    world.settle()
    assert world.size("job") == 4


@pytest.mark.parametrize("pause_s", [0.02, 60.0, 300.0])
def test_a_team_at_its_limit_keeps_no_idle_gpu_from_others(pause_s: float) -> None:
    world = world_of(16, small=2, big=12)
    world.project("small", 2, 2)
    world.submit("hungry", "small", 2, 1, 16, cool_down_s=0)
    world.session("session", "big", 8)
    world.submit("train", "big", 4, 1, 16, cool_down_s=0)
    world.settle()
    for workers in (1, 2, 4, 6):
        report(world, "train", workers, 10.0 * workers, pause_s=pause_s)
    world.settle()
    world.remove("session")
    world.release()
    world.settle()
    assert (world.size("hungry"), world.size("train")) == (2, 14)


def test_a_team_whose_jobs_gain_nothing_keeps_no_idle_gpu_from_others() -> None:
    world = world_of(3, flat=1, steep=1)
    for job, team in (("flat-job", "flat"), ("steep-job", "steep")):
        world.submit(job, team, 1, 1, 4, cool_down_s=0)
        for workers in range(1, 5):
            report(world, job, workers, 10.0 * workers if team == "steep" else 10.0 / workers)
    world.settle()
    assert (world.size("flat-job"), world.size("steep-job")) == (1, 2)


def goodput_with(serial: float, workers: int) -> float:
    """Return the throughput by Amdahl's law, or for more than 1 one that falls."""
    return 10 / (serial + (1 - serial) / workers) if serial <= 1 else 10 / (1 + 0.1 * (workers - 1))


def short_of(world: World, serial: dict[str, float]) -> list[str]:
    """Return the queues in which other sizes, of what is idle and lent there, have a larger sum of log(goodput)."""
    idle = sum(world.nodes.values()) - sum(len(running.devices) for running in world.workers.values())
    by_queue: dict[Queue, list[Job]] = {}
    for job in world.state.jobs.values():
        if job.name in serial and job.active >= job.wanted:
            by_queue.setdefault(job.queue, []).append(job)
    found = []
    for queue, jobs in by_queue.items():
        left = min((one.limit[0] - one.held[0]) / GPU for one in queue.path)
        sizes = [
            Sizes(job.wanted, job.most, 1.0, lambda n, name=job.name: log(goodput_with(serial[name], n)))  # type: ignore[misc]
            for job in jobs
        ]
        gpus = min(idle, left) + sum(job.lent for job in jobs)
        if best(sizes, gpus) - total(sizes, [job.active for job in jobs]) > 2e-3:  # what a change costs
            found.append(queue.name)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_in_no_team_would_other_sizes_achieve_more_once_all_is_measured(seed: int) -> None:
    draw = Random(seed)
    world, teams, serial = World(), list[str](), dict[str, float]()
    for i in range(draw.choice([1, 1, 2, 3])):
        world.node(f"n{i}", draw.randint(1, 4))
    capacity = sum(world.nodes.values())
    world.project("department", capacity, draw.choice([None, capacity]))
    for i in range(draw.randint(1, 3)):
        guaranteed = draw.randint(0, max(1, capacity // 2))
        limit = draw.choice([None, None, max(guaranteed, draw.randint(1, capacity))])
        world.project(f"team-{i}", guaranteed, limit, parent=draw.choice([None, "department"]))
        teams.append(f"team-{i}")
    for round_ in range(draw.randint(3, 6)):
        if round_ < 3 or draw.random() < 0.5:
            wanted = draw.randint(1, 2)
            name, most = f"job-{round_}", draw.randint(wanted, max(2, capacity))
            world.submit(name, draw.choice(teams), wanted, 1, most, cool_down_s=draw.choice([0, 5]))
            serial[name] = draw.choice([0.0, 0.3, 0.9, 1.0, 1.3, 1.3])
        elif (name := draw.choice([*serial])) in world.specs:
            world.remove(name)
            world.release()
        for name in [name for name in serial if name in world.specs]:
            for workers in range(1, capacity + 1):
                report(world, name, workers, goodput_with(serial[name], workers), pause_s=1.01)
        world.settle(60)
    world.now += LONGEST_S
    world.settle(60)
    assert short_of(world, serial) == []


HUGE = (10**400, 2**63, -1, 0, 1, 64)
RATES = (5e-324, 1e-320, 1e-300, 1e-9, 1.0, 1e15, 1e300, 1.7e308)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([-4, -1, 0, 1, 2, 4, 8, 10**9, 10**400]), st.sampled_from(RATES), st.sampled_from(HUGE)
        ),
        max_size=5,
    ),
    st.none() | st.sampled_from([0.0, 1e-320, 1e10, 1e308]),
)
@settings(deadline=None, max_examples=100)
def test_what_a_hostile_training_reports_stops_no_plan(sent: list[tuple[int, float, int]], noise: float | None) -> None:
    world = world_of(8, team=8)
    for job in ("hostile", "good"):
        world.submit(job, "team", 1, 1, 8, cool_down_s=0)
    world.settle()
    for workers, rate, batch in sent:
        report(world, "hostile", workers, rate, batch_size=batch, noise_scale=noise)  # type: ignore[arg-type]
    for workers in (1, 4):
        report(world, "good", workers, 10.0 * workers)
    world.settle()
    found = Scaling(world.state.jobs["hostile"])
    assert all(0 <= found(workers) < float("inf") for workers in range(1, 9))
    assert set(world.state.jobs["hostile"].throughput) <= set(range(1, 9))


def test_a_large_noise_scale_leaves_what_each_worker_adds() -> None:
    goodput = Scaling(trained({1: 0.01, 2: 0.02}, {1: 64, 2: 128}, 1e13))
    assert goodput(4) / goodput(1) == pytest.approx(4.0)
    assert goodput(1) == pytest.approx(0.01)


def test_no_change_is_made_that_costs_more_than_it_gains() -> None:
    world = world_of(8, team=8)
    for job in ("flat", "steep"):
        world.submit(job, "team", 1, 1, 8, cool_down_s=0)
    world.settle()
    for job, at_four in (("flat", 36.0), ("steep", 40.0)):
        report(world, job, 1, 10.0, pause_s=600.0)
        report(world, job, 4, at_four, pause_s=600.0)
    assert world.settle()[-1].again_at is None
    assert (world.size("flat"), world.size("steep")) == (4, 4)


def test_what_a_team_is_lent_does_not_depend_on_what_its_jobs_gain() -> None:
    world = world_of(8, a=1, b=1)
    for job, team in (("flat", "a"), ("steep", "b")):
        world.submit(job, team, 1, 1, 8, cool_down_s=0)
        for workers in (1, 2, 4):
            report(world, job, workers, 10.0 * (workers if job == "steep" else workers**0.5))
    world.settle()
    assert (world.size("flat"), world.size("steep")) == (4, 4)


def test_a_gpu_that_a_limit_or_a_node_keeps_from_one_team_is_lent_to_the_other() -> None:
    world = world_of(3, other=1)
    world.project("limited", 1, limit=1)
    for job, team in (("stays", "limited"), ("grows", "other")):
        world.submit(job, team, 1, 1, 2, cool_down_s=0)
    world.settle()
    assert (world.size("stays"), world.size("grows")) == (1, 2)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_whatever_is_reported_sizes_settle_within_bounds_and_guarantees_are_obtained(data: st.DataObject) -> None:
    world = World()
    nodes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    for i, gpus in enumerate(nodes):
        world.node(f"n{i}", gpus)
    capacity, parent, teams = sum(nodes), None, []
    for depth in range(data.draw(st.integers(0, 2))):
        world.project(f"level-{depth}", capacity, parent=parent)
        parent = f"level-{depth}"
    for i in range(data.draw(st.integers(1, 3))):
        teams.append(f"team-{i}")
        world.project(teams[-1], capacity // 3, parent=parent)
    jobs = [f"job-{i}" for i in range(data.draw(st.integers(1, min(4, capacity))))]
    for job in jobs:
        most = data.draw(st.integers(1, 6))
        world.submit(job, data.draw(st.sampled_from(teams)), 1, 1, most, cool_down_s=data.draw(st.sampled_from([0, 5])))
    for _ in range(data.draw(st.integers(1, 3))):
        for job in jobs:
            size = data.draw(st.integers(1, 6))
            more = data.draw(st.sampled_from([{}, {"batch_size": 8 * size, "noise_scale": 30.0}, {"pause_s": 20.0}]))
            report(world, job, size, data.draw(st.floats(0.1, 100.0)), **more)
        world.settle()
        for job in jobs:
            assert world.specs[job].smallest <= world.size(job) <= world.specs[job].largest
    if capacity >= 3:
        world.submit("needy", teams[0], capacity // 3, capacity // 3, capacity // 3, gpus_per_worker=1)
        held = sum(world.specs[j].smallest for j in jobs if world.specs[j].project == teams[0])
        world.settle()
        if held == 0:
            assert world.size("needy") == capacity // 3


@pytest.mark.parametrize("seed", range(30))
def test_the_hosts_of_workers_that_may_leave_are_those_of_a_search_through_all(seed: int) -> None:
    """`Donors` counts again only where a worker has left, against sorting all workers for each that leaves."""
    random = Random(seed)
    hosts = [Host(name=f"n{i}", devices=()) for i in range(random.randint(1, 6))]
    jobs = [trained({}) for _ in range(random.randint(1, 6))]
    spare = {job: [_worker(job, random.choice(hosts)) for _ in range(random.randint(0, 5))] for job in jobs}
    grower = trained({})
    grower.hosts = {host: random.randint(1, 2) for host in hosts if random.random() < 0.4}
    donors = Donors(jobs, lambda job: [(task,) for task in spare[job]])
    while left := [job for job in jobs if spare[job]]:
        found: dict[Host, list[Task]] = {}
        for task in [task for job in jobs for task in spare[job]]:
            assert task.node is not None
            found.setdefault(task.node, []).append(task)
        ordered = sorted(found, key=lambda host: (-grower.hosts.get(host, 0), -len(found[host]), host.name))
        assert list(donors.hosts_for(grower)) == ordered
        assert [donors.on(host) for host in ordered] == [found[host] for host in ordered]
        loser = random.choice(left)
        spare[loser] = random.sample(spare[loser], random.randint(0, len(spare[loser]) - 1))
        donors.update([loser])


def _worker(job: Job, host: Host) -> Task:
    return Task(job=job, request=job.request, index=0, node=host)
