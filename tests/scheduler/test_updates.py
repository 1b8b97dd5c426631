"""Other size bounds and priorities for jobs that wait or run, and which jobs are moved."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.scheduler import JobSubmitted, JobUpdated, ProgressReported, WorkerGone, WorkerStarted
from tests.scheduler.world import World


def updated(world: World, name: str, **fields: object) -> None:
    spec = JobSpec(name=name, project="a", command=("true",), **fields)  # type: ignore[arg-type]
    world.specs[name] = spec
    world.state.apply(JobUpdated(name, spec))
    world.check_indexes()


def test_a_running_job_grows_to_its_new_maximum_and_what_it_is_lent_is_counted_anew() -> None:
    world = World()
    world.node("n0", 4)
    world.project("a", 4)
    world.submit("job", "a", 1, 1, 2, cool_down_s=0)
    world.settle()
    assert world.size("job") == 2
    updated(world, "job", gpus=1, min_gpus=1, max_gpus=4, cool_down_s=0)
    world.settle()
    assert world.size("job") == 4
    updated(world, "job", gpus=3, min_gpus=1, max_gpus=4)
    (queue,) = world.state.queues_of("a")
    assert queue.lent[0] == 1_000_000, "4 held, 3 requested"


def test_a_waiting_job_with_a_higher_priority_comes_first() -> None:
    world = World()
    world.node("n0", 1)
    world.project("a", 1)
    world.submit("holder", "a")
    world.settle()
    for name in ("older", "younger"):
        world.submit(name, "a")
    updated(world, "younger", priority=60)
    world.remove("holder")
    world.settle()
    assert (world.size("older"), world.size("younger")) == (0, 1)


def test_a_waiting_job_that_needs_fewer_gpus_starts() -> None:
    world = World()
    world.node("n0", 1)
    world.project("a", 1)
    world.submit("job", "a", 2, 2, 4)
    world.settle()
    assert world.size("job") == 0
    updated(world, "job", gpus=2, min_gpus=1, max_gpus=4)
    world.settle()
    assert world.size("job") == 1


@pytest.mark.parametrize("saved", ["older", "younger"])
def test_a_job_that_resumes_from_a_checkpoint_is_moved_before_one_that_starts_anew(saved: str) -> None:
    world = World()
    world.node("n0", 2)
    world.node("n1", 2)
    world.project("a", 4)
    for name in ("older", "filler", "younger", "other"):
        world.submit(name, "a")
        world.settle()
    world.remove("filler")
    world.remove("other")
    world.settle()
    assert world.nodes_of("older") != world.nodes_of("younger")
    world.state.apply(ProgressReported(saved, 10, world.now, world.now))
    world.submit("pair", "a", 2)
    (move,) = world.step().move
    assert move.job == saved


def test_a_job_is_below_its_minimum_since_that_was_raised_also_for_a_restarted_scheduler() -> None:
    """The same workers and the same update, in the order of their times: one of two scheduler states is the older."""
    spec = {"project": "a", "command": ("true",), "gpus_per_worker": 1}
    before = JobSpec(name="job", gpus=2, min_gpus=1, max_gpus=2, **spec)  # type: ignore[arg-type]
    after = JobSpec(name="job", gpus=3, min_gpus=2, max_gpus=3, **spec)  # type: ignore[arg-type]
    since = []
    for submitted in (before, after):
        world = World()
        world.node("n0", 2)
        world.project("a", 3)
        state = world.state
        state.apply(JobSubmitted("job", submitted, 1.0))
        for index in range(2):
            state.apply(WorkerStarted(f"w{index}", "job", "n0", (index,), 2.0))
        state.apply(WorkerGone("w1", 5.0))
        state.apply(JobUpdated("job", after, 9.0))
        since.append(state.jobs["job"].below_since)
    assert since == [9.0, 9.0]
