"""No entitled job starves: what it needs is kept for it once it has waited too long."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from kfp_gpuquota.scheduler.state.ledger import RESERVE_AFTER_S
from tests.effort import effort
from tests.scheduler.world import World

AFTER_S = 5


def world_of(nodes: int, gpus: int, **guaranteed: float) -> World:
    world = World()
    world.state.ledger.reserve_after_s = AFTER_S
    for number in range(nodes):
        world.node(f"node-{number}", gpus)
    for name, amount in guaranteed.items():
        world.project(name, amount)
    return world


@dataclass
class Stream:
    """Jobs that run for so many rounds each; `ends`: the round in which each running one ends."""

    world: World
    rounds: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    round: int = 0

    def submit(self, name: str, gpus: int, rounds: int, team: str = "team", **more: object) -> None:
        self.world.submit(name, team, gpus, **more)  # type: ignore[arg-type]
        self.world.now -= 1  # several jobs arrive in one second
        self.rounds[name] = rounds

    def play(self) -> None:
        """End what is due, plan, and start what was planned."""
        self.round += 1
        for name in [name for name, end in self.ends.items() if end <= self.round]:
            for worker in self.world.of(name):
                self.world.exit(worker)
            del self.ends[name]
            self.world.remove(name)
        self.world.step()
        self.world.release()
        for name, rounds in self.rounds.items():
            if name not in self.ends and name in self.world.specs and self.world.of(name):
                self.ends[name] = self.round + rounds


def test_a_stream_of_small_jobs_does_not_keep_a_large_one_waiting_for_ever() -> None:
    stream = Stream(world_of(1, 8, team=8))
    for number in range(8):
        stream.submit(f"first-{number}", 1, 1 + number)
    stream.play()
    stream.submit("large", 8, 3)
    for number in range(40):
        stream.submit(f"small-{number}", 1, 8)
        stream.play()
        if "large" in stream.ends:
            assert number <= AFTER_S + 8
            return
    raise AssertionError("the large job was never started")


LONGEST = 6
GRACE_S = 1.0
NODES, GPUS = 3, 4


@settings(max_examples=effort(25, 1000), deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["ours", "theirs"]), st.integers(1, 2), st.integers(1, GPUS), st.integers(1, LONGEST)
            ),
            max_size=4,
        ),
        min_size=10,
        max_size=30,
    ),
    st.integers(0, 2),
)
def test_the_first_job_of_a_queue_starts_within_a_bounded_time(
    rounds: list[list[tuple[str, int, int, int]]], even: int
) -> None:
    """Whatever arrives: from when a job within its team's guarantee is the first, all that it may have to wait for is
    the time until it is served first, its own team's jobs that use the guarantee, and those on the hosts it needs.
    """
    ours = 4 + 2 * even
    stream = Stream(world_of(NODES, GPUS, ours=ours, theirs=NODES * GPUS - ours))
    guaranteed = {"ours": ours, "theirs": NODES * GPUS - ours}
    order: dict[str, list[str]] = {"ours": [], "theirs": []}
    first_since: dict[str, int] = {}
    for number in range(len(rounds) * 3):
        for index, (team, workers, gpus, lasts) in enumerate(rounds[number % len(rounds)]):
            if workers * gpus <= guaranteed[team]:
                name = f"{number:03}-{index}"
                most_s = float(lasts) if index % 2 else None
                size = workers * gpus
                stream.submit(
                    name, size, lasts, team, gpus_per_worker=gpus, max_runtime_s=most_s, grace_period_s=GRACE_S
                )
                order[team].append(name)
        stream.play()
        for waiting in order.values():
            waiting[:] = [name for name in waiting if name in stream.world.specs and name not in stream.ends]
            for name in waiting[:1]:
                since = first_since.setdefault(name, stream.round)
                assert stream.round - since <= AFTER_S + 3 * LONGEST + 3, (
                    f"{name} waits: {stream.world.plan().waiting[name]}"
                )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, GPUS), st.integers(1, LONGEST), st.booleans()),
            max_size=4,
        ),
        min_size=10,
        max_size=20,
    ),
    st.integers(0, 2),
)
def test_a_reserved_start_moves_only_for_the_better_and_is_kept(
    rounds: list[list[tuple[int, int, bool]]], longer: int
) -> None:
    """All have maximum run times, some end sooner. Whatever starts on what is kept has ended when it is needed."""
    stream = Stream(world_of(NODES, GPUS, team=NODES * GPUS))
    stated: dict[str, float] = {}
    for number in range(2 * len(rounds)):
        for index, (gpus, lasts, early) in enumerate(rounds[number % len(rounds)]):
            most_s = float(lasts + longer * early)
            name = f"{number:03}-{index}"
            stream.submit(name, gpus, lasts, gpus_per_worker=gpus, max_runtime_s=most_s, grace_period_s=GRACE_S)
        stream.play()
        stated = {name: at for name, at in stated.items() if name in stream.world.plan().waiting}
        for name, reason in stream.world.plan().waiting.items():
            if "starts_by" in reason.details:
                starts_by = float(reason.details["starts_by"])
                assert starts_by <= stated.get(name, starts_by) or starts_by <= stream.world.now, f"{name} starts later"
                stated[name] = starts_by
        for name, at in stated.items():
            assert stream.world.now <= at + 1, f"{name} was to start by {at}"


def test_a_job_that_has_ended_by_then_starts_on_what_is_kept_and_no_other_does() -> None:
    world = world_of(1, 8, team=8)
    world.submit("runs", "team", 4, max_runtime_s=100.0, grace_period_s=GRACE_S)
    world.settle()
    world.submit("whole", "team", 8)
    world.now += AFTER_S
    for name, most_s in (("long", 100.0), ("unknown", None), ("short", 60.0)):
        world.submit(name, "team", 2, max_runtime_s=most_s, grace_period_s=GRACE_S)
    world.settle()
    assert {name: world.size(name) for name in ("long", "unknown", "short")} == {"long": 0, "unknown": 0, "short": 2}
    assert world.plan().waiting["whole"].details["starts_by"] == world.state.jobs["runs"].started_at + 100 + GRACE_S


def test_only_the_lent_worker_of_a_job_comes_back_before_its_end() -> None:
    """All workers of a job that was lent one counted as free at once, so that the stated time was too early."""
    world = world_of(1, 5, team=5)
    world.submit("elastic", "team", 2, 2, 3, max_runtime_s=1000.0, grace_period_s=GRACE_S)
    world.submit("short", "team", 1, max_runtime_s=100.0, grace_period_s=GRACE_S)
    world.settle()
    assert world.size("elastic") == 3
    world.submit("whole", "team", 5)
    world.now += AFTER_S
    details = world.plan().waiting["whole"].details
    assert details["starts_by"] == world.state.jobs["elastic"].started_at + 1000 + GRACE_S


def test_nothing_that_is_kept_costs_another_team_its_guarantee() -> None:
    world = world_of(1, 4, ours=2, theirs=2)
    for number in range(2):
        world.submit(f"small-{number}", "ours", 1)
    world.settle()
    world.submit("pair", "ours", 2)
    world.now += AFTER_S
    world.submit("needy", "theirs", 2)
    world.settle()
    assert world.size("needy") == 2


def test_the_waiting_job_says_what_is_kept_for_it_and_others_what_is_promised() -> None:
    world = world_of(1, 4, team=4)
    world.submit("small", "team", 2)
    world.settle()
    world.submit("whole", "team", 4)
    world.submit("other", "team", 1)
    world.now += AFTER_S
    waiting = world.plan().waiting
    assert waiting["whole"].message == (
        "needs 4 GPUs; 2 are idle, and project team holds 2 of its fair share of 4, so it starts when 2 more are "
        "released; what is idle on node-0 is kept for it, because it has waited long"
    )
    assert waiting["other"].message.startswith("needs 1 GPU; 0 are idle (2 more are promised to other jobs)")


def test_what_is_kept_is_used_by_jobs_that_give_it_back_at_once() -> None:
    world = world_of(1, 4, team=4)
    world.submit("small", "team", 2)
    world.submit("elastic", "team", 1, 1, 4)
    world.settle()
    world.submit("whole", "team", 4)
    world.now += AFTER_S
    world.settle()
    assert world.size("elastic") == 2
    for name in ("small", "elastic"):
        for worker in world.of(name):
            world.exit(worker)
        world.remove(name)
    world.settle()
    assert world.size("whole") == 4


def test_what_a_session_holds_is_not_waited_for() -> None:
    world = world_of(2, 4, team=8)
    world.session("notebook", "team", 1)
    world.submit("small", "team", 2)
    world.settle()
    assert world.nodes_of("notebook") == world.nodes_of("small")
    world.submit("other", "team", 2)
    world.settle()
    world.submit("whole", "team", 4)
    world.now += AFTER_S
    kept = world.plan().waiting["whole"].details["reserved_nodes"]
    assert {kept} == world.nodes_of("other") != world.nodes_of("notebook")


def test_what_sessions_hold_of_the_guarantee_is_not_kept_for_a_job() -> None:
    """It could not start within the guarantee before they end, and the team's other jobs waited as long."""
    world = world_of(2, 4, team=4, other=4)
    world.session("notebook", "team", 2)
    world.settle()
    world.submit("long", "other", 4)
    world.settle()
    world.submit("whole", "team", 4)
    world.now += AFTER_S
    world.submit("small", "team", 1)
    world.settle()
    assert world.size("small") == 1


def test_a_job_above_the_guarantee_is_not_served_before_another_teams_guarantee() -> None:
    world = world_of(2, 4, ours=4, theirs=4)
    world.session("notebook", "theirs", 4)
    world.submit("first", "ours", 4)
    world.settle()
    world.remove("notebook")
    world.submit("second", "ours", 4)
    world.now += AFTER_S
    world.submit("needy", "theirs", 4)
    world.release()
    world.step()
    assert (world.size("needy"), world.size("first")) == (4, 4)


def test_a_borrower_gets_what_is_kept_only_if_all_that_its_team_has_there_can_be_reclaimed() -> None:
    """Its team refilled what ended, and always held some of it within its guarantee."""
    stream = Stream(world_of(2, 4, ours=4, short=2, long=2))
    for number in range(4):
        stream.submit(f"long-{number}", 1, 1000, "long")
    stream.play()
    assert_starts_beside(stream)


def test_a_borrower_with_a_minimum_run_time_does_not_get_what_is_kept() -> None:
    assert_starts_beside(Stream(world_of(1, 4, ours=4, short=0)), min_run_time_s=30.0)


def assert_starts_beside(stream: Stream, **more: object) -> None:
    """Small jobs of another team arrive without end, and do not keep a job of 4 GPUs from starting."""
    for number in range(4):
        stream.submit(f"first-{number}", 1, 2 + number, "short", **more)
    stream.play()
    stream.submit("whole", 4, 3, "ours", gpus_per_worker=4)
    for number in range(30):
        stream.submit(f"next-{number}", 1, 4, "short", **more)
        stream.play()
        if "whole" in stream.ends:
            return
    raise AssertionError(stream.world.plan().waiting["whole"])


def test_what_is_kept_on_several_nodes_counts_as_held_and_others_say_what_they_wait_for() -> None:
    """On the second node it counted as lent, so that other jobs of the team took the guarantee."""
    world = world_of(3, 4, team=8, other=4)
    for number in range(2):
        world.submit(f"small-{number}", "team", 3, gpus_per_worker=3)
        world.settle()
    world.submit("pair", "team", 8, gpus_per_worker=4)
    world.now += AFTER_S
    world.submit("next", "team", 1)
    world.settle()
    assert world.size("next") == 0
    reason = world.plan().waiting["next"]
    assert reason.message.endswith("; and not before pair, for which the guaranteed quota is kept")
    assert world.plan().waiting["pair"].details["reserved_nodes"]


def test_what_is_kept_is_no_holding_of_the_team_in_its_reasons() -> None:
    world = world_of(1, 4, team=4)
    world.submit("small", "team", 3)
    world.settle()
    world.submit("whole", "team", 4)
    world.submit("other", "team", 2)
    world.now += AFTER_S
    assert "project team holds 3 (and 1 promised) of its fair share of 4" in world.plan().waiting["other"].message


def test_a_job_that_waits_to_grow_may_be_stopped_for_the_one_that_is_served_first() -> None:
    """Each plan failed: the stopped job still waited for its growth, and requested nothing."""
    world = world_of(1, 4, ours=4, theirs=0)
    world.submit("borrower", "theirs", 5, 2, 5)
    world.settle()
    assert world.size("borrower") == 4
    world.submit("whole", "ours", 4)
    world.now += AFTER_S
    world.settle()
    assert (world.size("whole"), world.size("borrower")) == (4, 0)


def test_the_time_is_half_an_hour_unless_another_one_is_set() -> None:
    assert World().state.ledger.reserve_after_s == RESERVE_AFTER_S == 1800


def test_jobs_for_which_nothing_can_be_kept_do_not_hide_that_of_a_later_team() -> None:
    """Sixteen teams were looked at."""
    world = World()
    world.state.ledger.reserve_after_s = AFTER_S
    for number in range(20):
        world.node(f"n{number:02}", 4, labels={"rack": "a"})
        world.project(f"team-{number:02}", 4)
        world.submit(f"small-{number:02}", f"team-{number:02}", 1, node=f"n{number:02}")
    world.settle()
    for number in range(20):
        near = "rack" if number < 19 else None
        world.submit(f"large-{number:02}", f"team-{number:02}", 4, gpus_per_worker=4, preferred_topology=near)
    world.now += AFTER_S
    waiting = world.plan().waiting
    assert [job for job, reason in waiting.items() if "reserved_nodes" in reason.details] == ["large-19"]


def test_that_many_teams_wait_for_long_jobs_does_not_hide_a_later_team() -> None:
    teams = 20
    stream = Stream(world_of(teams, 2, **{f"team-{number}": 2 for number in range(teams)}))

    def submit(number: int, name: str, gpus: int, rounds: int) -> None:
        stream.submit(f"{name}-{number}", gpus, rounds, f"team-{number}", node_selector={"team": f"{number}"})

    for number in range(teams):
        stream.world.node(f"node-{number}", 2, labels={"team": f"{number}"})
        submit(number, "long", 1, 1000 if number < teams - 1 else 2)
    stream.play()
    for number in range(teams):
        submit(number, "large", 2, 1)
        stream.world.now += 1
    for number in range(teams, teams + 20):
        stream.submit(f"small-{number}", 1, 3, f"team-{teams - 1}", node_selector={"team": f"{teams - 1}"})
        stream.play()
    assert f"large-{teams - 1}" not in stream.world.specs, "smaller jobs pass it without end"
