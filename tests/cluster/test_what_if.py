"""What a user is answered who may see some teams' jobs only: numbers of the others, and none of their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.wire import NewNode, OtherTeams, Outlook, Supposition
from kfp_gpuquota.cluster.whatif import OTHERS, outlook, outlook_for_user
from kfp_gpuquota.errors import InvalidFieldError
from tests.scheduler.test_resources import Cluster
from tests.scheduler.test_victims import world_of

if TYPE_CHECKING:
    from tests.scheduler.world import World

SECRET = "top-secret"
ASKED = Supposition(submit=(JobSpec(name="this-job", project="b", command=("true",), gpus=2),))


@pytest.fixture
def world() -> World:
    """Four GPUs: two jobs of a hold all of them, three are borrowed; b and its guarantee of 2 GPUs are idle."""
    world = world_of(4, a=1, b=2)
    world.submit(f"{SECRET}-elastic", "a", 1, 1, 2)
    world.submit(f"{SECRET}-rigid", "a", 2)
    world.settle()
    return world


def named(answer: Outlook) -> dict[str, set[str]]:
    """The jobs that each kind of effect names."""
    kinds = [name for name in Outlook.__struct_fields__ if name != "others"]
    return {kind: {effect.job for effect in getattr(answer, kind)} for kind in kinds}


def test_jobs_of_other_teams_are_counted_and_not_named(world: World) -> None:
    everything = outlook(world.state, ASKED, world.now)
    assert SECRET in str(everything), "else nothing is hidden here"
    answer = outlook_for_user(world.state, ASKED, world.now, {"b"})
    assert SECRET not in msgspec.json.encode(answer).decode()
    (own,) = answer.starts
    assert own.reason is not None
    assert OTHERS in own.reason.message
    assert answer.others.shrinks + answer.others.stops == len(everything.shrinks) + len(everything.stops) > 0
    assert answer.others.released_gpus >= 2
    assert not answer.shrinks
    assert not answer.stops


def test_a_node_that_is_added_starts_what_fits_on_it_alone() -> None:
    world = world_of(4, a=4, b=0)
    world.submit("wide", "a", 8)
    world.submit("narrow", "a", 2)
    world.settle()
    assert "wide" not in named(outlook(world.state, Supposition(with_nodes=(NewNode(gpus=4),)), world.now))["starts"]
    more = Supposition(projects=(Project(name="a", guaranteed=8),), with_nodes=(NewNode(gpus=8),))
    assert named(outlook(world.state, more, world.now))["starts"] == {"wide"}
    assert "what-if-0" not in world.state.ledger.hosts
    with pytest.raises(InvalidFieldError, match="gpus is 1000"):
        NewNode(gpus=1000)


def test_who_sees_both_teams_is_told_the_names_and_the_same_plan(world: World) -> None:
    everything = outlook(world.state, ASKED, world.now)
    assert outlook_for_user(world.state, ASKED, world.now, None) == everything
    answer = outlook_for_user(world.state, ASKED, world.now, {"a", "b"})
    assert named(answer) == named(everything)
    assert answer.others == OtherTeams()


def test_the_state_keeps_its_names(world: World) -> None:
    before = {uid: job.name for uid, job in world.state.jobs.items()}
    outlook_for_user(world.state, ASKED, world.now, {"b"})
    assert {uid: job.name for uid, job in world.state.jobs.items()} == before


def test_that_another_teams_job_needs_the_gpus_is_no_reason_that_is_shown() -> None:
    world = world_of(2, a=1, b=0)
    world.submit("own", "a", 1, 1, 2)
    world.settle()
    world.session(SECRET, "b")
    larger = Supposition(projects=(Project(name="b", guaranteed=1),))
    (named_,) = outlook(world.state, larger, world.now).shrinks
    assert SECRET in str(named_.reason)
    answer = outlook_for_user(world.state, larger, world.now, {"a"})
    assert [(effect.job, effect.reason) for effect in answer.shrinks] == [("own", None)]
    assert answer.others == OtherTeams(starts=1)


def test_a_node_that_is_added_has_the_labels_that_all_have() -> None:
    cluster = Cluster()
    cluster.project("a", 8)
    for number in range(2):
        cluster.node(f"n{number}", 1, labels={GPU_PRODUCT: "A100", "name": f"n{number}"})
    cluster.node("other", 1, pool="other", labels={GPU_PRODUCT: "L4"})
    cluster.submit("job", "a", gpus=4, gpu_types=("A100",))
    cluster.run()
    for pool, starts in (("", {"job"}), ("other", set())):
        supposed = Supposition(with_nodes=(NewNode(gpus=4, pool=pool),))
        assert named(outlook(cluster.state, supposed, cluster.now))["starts"] == starts
