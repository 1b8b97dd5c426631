"""Whose workers go first when several branches of the tree hold more than their share, at different depths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api import Project, StopPolicy
from kfp_gpuquota.scheduler import Event, JobSubmitted, QuotaChanged, QuotaRemoved
from tests.scheduler.world import World

if TYPE_CHECKING:
    from random import Random


@dataclass
class Team:
    """A project, or a department with children; `jobs` are the priorities of its running jobs of one GPU."""

    guaranteed: int = 0
    children: list[Team] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    name: str = ""

    @property
    def held(self) -> int:
        return len(self.jobs) + sum(child.held for child in self.children)

    @property
    def quota(self) -> int:
        """A department's guarantee is the sum of its children's here."""
        return self.guaranteed + sum(child.quota for child in self.children)


def trees(depth: int) -> st.SearchStrategy[Team]:
    jobs = st.lists(st.sampled_from([10, 50, 90]), max_size=3)
    leaf = st.builds(lambda guaranteed, jobs: Team(guaranteed, [], jobs), st.integers(0, 2), jobs)
    if depth == 1:
        return leaf
    inner = st.builds(lambda children: Team(0, children), st.lists(trees(depth - 1), min_size=1, max_size=3))
    return leaf | inner


@settings(max_examples=300, deadline=None)
@given(st.lists(trees(3), min_size=1, max_size=3))
def test_the_branch_most_above_its_share_gives_first_at_each_level_then_the_lowest_priority_then_the_youngest(
    forest: list[Team],
) -> None:
    """A team that is far above its share was taken from although its department was within its own."""
    total = sum(team.held for team in forest)
    if not any(team.held > team.quota for team in forest):
        return
    world, number = World(), itertools.count()
    for index in range(total):
        world.node(f"n{index:02}", 1)
    order: dict[str, tuple[int, int]] = {}

    def create(team: Team, parent: str | None) -> None:
        team.name = f"t{next(number)}"
        world.project(team.name, team.quota, parent=parent)
        for priority in team.jobs:
            job = f"j{next(number)}"
            world.submit(job, team.name, 1, priority=priority)
            order[job] = (priority, -len(order))
        for child in team.children:
            create(child, team.name)

    for team in forest:
        create(team, None)
    world.settle()
    assert all(world.size(job) for job in order)
    world.project("owner", 1)
    world.submit("needs", "owner")
    victims = [one.job for one in world.plan().evict]
    assert victims == [expected(forest, world, order)]


@pytest.mark.parametrize("first", ["job", "team", "quota"])
def test_a_department_without_a_quota_has_no_limits_and_starts_nothing_itself(first: str) -> None:
    """It depended on the order: a restarted controller let its own jobs start without limits, or kept all out."""
    world = World()
    world.node("n0", 8)
    world.project("other", 0)
    world.submit("lent", "other", 2, 1, 8)
    world.settle()
    if first == "job":
        world.submit("own", "d")
    if first == "quota":
        world.project("above", 1, 1)
        world.project("d", 8, parent="above")
    world.project("team", 4, parent="d")
    if first == "quota":
        world.state.apply(QuotaRemoved("d"))
    if first != "job":
        world.submit("own", "d")
    world.submit("job", "team", 4)
    world.settle()
    assert (world.size("job"), world.size("own")) == (4, 0)
    assert "project d does not exist" in world.plan().waiting["own"].message
    world.project("team", 4)
    world.project("d", 1)
    world.settle()
    assert world.size("own") == 1


NAMES = ("a", "b", "c")
CHANGES = st.tuples(
    st.sampled_from(NAMES), st.sampled_from([None, None, *NAMES]), st.sampled_from(StopPolicy), st.sampled_from("sqqr")
)


@settings(max_examples=150, deadline=None)
@given(st.lists(CHANGES, max_size=12), st.randoms(use_true_random=False))
def test_quotas_in_any_order_give_the_tree_that_a_restart_does(
    changes: list[tuple[str, str | None, StopPolicy, str]], chance: Random
) -> None:
    world, projects = World(), dict[str, Project]()
    for number, (name, parent, policy, kind) in enumerate(changes):
        if kind == "s":
            world.submit(f"j{number}", name, node_pool=("", "pool")[number % 2])
        elif kind == "r":
            projects.pop(name, None)
            world.state.apply(QuotaRemoved(name))
        elif parent is None or parent > name:  # no cycles
            projects[name] = Project(name=name, guaranteed=2, parent=parent, stop_policy=policy)
            world.state.apply(QuotaChanged(projects[name]))
    again = World()
    events: list[Event] = [QuotaChanged(project) for project in projects.values()]
    events += [JobSubmitted(uid, spec, 0.0) for uid, spec in world.specs.items()]
    chance.shuffle(events)
    for event in events:
        again.state.apply(event)
    assert tree_of(world) == tree_of(again)


def tree_of(world: World) -> dict[str, tuple[object, ...]]:
    """Return what decides about each job's start but its age: the path of its queue, and whether it is held."""
    found = world.state.jobs.items()
    return {
        uid: (
            uid in world.state.halted,
            job.filed is None,
            [(q.name, q.deserved, q.limit, q.exists) for q in job.queue.path],
        )
        for uid, job in found
    }


def expected(level: list[Team], world: World, order: dict[str, tuple[int, int]]) -> str:
    """Walk down: at each level to the team that holds most of what it keeps."""
    queues = world.state.ledger.queues

    def ratio(team: Team) -> float:
        keeps = queues[team.name].keeps.gpu
        return float("inf") if not keeps else team.held * 1_000_000 / keeps

    above = [team for team in level if team.held and ratio(team) > 1] or [team for team in level if team.held]
    most = max(ratio(team) for team in above)
    candidates = [team for team in above if ratio(team) == most]
    jobs: list[str] = []
    for team in candidates:
        if team.children:
            jobs.append(expected(team.children, world, order))
        else:
            jobs.extend(job for job in order if world.specs[job].project == team.name)
    return min(jobs, key=order.__getitem__)


def test_a_department_within_its_share_is_not_taken_from_while_another_is_above() -> None:
    """A team of weight 0 was, because it holds more than its own share of nothing."""
    world = World()
    for index in range(11):
        world.node(f"n{index:02}", 1)
    world.project("within", 6)
    world.project("entitled", 6, parent="within")
    world.project("spare", 0, parent="within")
    world.project("above", 1)
    for team, jobs in (("entitled", 6), ("spare", 1), ("above", 4)):
        for number in range(jobs):
            world.submit(f"{team}-{number}", team, priority=90 if team == "above" else 10)
    world.settle()
    world.project("spare", 0, parent="within", over_quota_weight=0)
    world.submit("entitled-waits", "entitled", node_selector={"no": "node"})
    world.project("owner", 1)
    world.submit("needs", "owner")
    queues = world.state.ledger.queues
    victims = [one.job for one in world.plan().evict]
    assert queues["within"].claim(0) == queues["within"].keeps.gpu
    assert [victim.split("-")[0] for victim in victims] == ["above"]
