"""A deferred job: nothing is started for it before its time, and the plan states when to plan again."""

from __future__ import annotations

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.scheduler import JobDeferred
from tests.scheduler.test_victims import world_of

PULL = Reason(code=ReasonCode.PODS_NOT_READY, message="no such image")


def test_a_deferred_job_waits_for_its_time_and_others_do_not_wait_for_it() -> None:
    world = world_of(2, a=2)
    world.submit("bad", "a", 2)
    world.state.apply(JobDeferred("bad", world.now + 60, PULL))
    decided = world.plan()
    assert (decided.empty, decided.again_at, decided.waiting["bad"]) == (True, world.now + 60, PULL)
    world.submit("good", "a", 2)
    world.settle()
    assert (world.size("bad"), world.size("good")) == (0, 2)
    world.remove("good")
    world.now += 60
    world.settle()
    assert world.size("bad") == 2
    world.check_indexes()


def test_a_deferred_job_takes_nothing_from_others_before_its_time() -> None:
    world = world_of(2, owner=2, greedy=0)
    world.submit("borrower", "greedy", 2)
    world.settle()
    world.submit("bad", "owner", 2)
    world.state.apply(JobDeferred("bad", world.now + 60, PULL))
    assert world.plan().empty
    world.now += 60
    assert [e.job for e in world.plan().evict] == ["borrower"]


def test_a_deferred_job_that_runs_does_not_grow_but_gives_back_and_its_gang_is_made_whole() -> None:
    world = world_of(4, a=2)
    world.submit("train", "a", 2, 2, 4, gpus_per_worker=1, cool_down_s=0)
    world.submit("other", "a", 1)
    world.settle()
    assert world.size("train") == 3
    world.crash(world.of("train")[0])
    until = world.now + 60
    world.state.apply(JobDeferred("train", until, PULL))
    decided = world.step()
    assert (decided.empty, decided.again_at) == (True, until)
    world.crash(world.of("train")[0])
    world.step()
    assert world.size("train") == 2, "below its minimum it is made whole at once"
    world.state.apply(JobDeferred("train", 0.0, PULL))
    world.settle()
    assert world.size("train") == 3, "a time that is past defers nothing"


def test_a_job_that_its_user_suspended_says_so_though_it_was_deferred() -> None:
    world = world_of(2, a=2)
    world.submit("bad", "a", 2)
    world.state.apply(JobDeferred("bad", world.now + 60, PULL))
    world.suspend("bad")
    assert world.plan().waiting["bad"].code is ReasonCode.SUSPENDED
