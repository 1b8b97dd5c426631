"""Pods and groups as the scheduler's jobs, against a model: any order of sightings, decisions, failed writes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Device, Node, Project, StopPolicy
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import NodeConstraints
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import GateShape
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import QuotaPolicyObject, QuotaPolicySpec
from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from tests.effort import effort

GPUS = 6


def waiting(uid: str, group: str = "", size: int = 0) -> PodView:
    return PodView(
        uid=uid,
        namespace="team",
        name=uid,
        stage=Stage.WAITING,
        gpus=1,
        created=float(len(uid)),
        gate=GateShape(index=0),
        group=group,
        group_size=size,
    )


class World(RuleBasedStateMachine):
    """What the API server holds, what the scheduler believes, and that the two never part."""

    pods = Bundle("pods")

    def __init__(self) -> None:
        super().__init__()
        self.state, self.allocator = scheduler.State(), DeviceAllocator()
        self.state.apply(scheduler.NodeChanged(Node(name="n", devices=tuple(Device(index=i) for i in range(GPUS)))))
        self.state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=GPUS)))
        self.allocator.resize("n", GPUS)
        self.plain = PlainPods(self.state.apply, self.allocator)
        self.plain.settle()
        self.views: dict[str, PodView] = {}
        self.in_flight: dict[str, tuple[int, ...]] = {}
        self.made = 0

    def show(self, view: PodView) -> None:
        if view.stage is Stage.ENDED:
            self.views.pop(view.uid, None)
        else:
            self.views[view.uid] = view
        self.plain.put(view)

    @rule(target=pods, group=st.sampled_from(["", "", "g"]), size=st.integers(1, 3), gpus=st.integers(1, 2))
    def create(self, group: str, size: int, gpus: int) -> str:
        self.made += 1
        uid = f"p{self.made:03}"
        self.show(msgspec.structs.replace(waiting(uid, group, size if group else 0), gpus=gpus))
        return uid

    @rule()
    def plan(self) -> None:
        decided = scheduler.plan(self.state, 1000.0)
        for bind in decided.bind:
            self.send(bind.job, bind.placements)
        for resize in decided.resize:
            self.send(resize.job, resize.add)

    def send(self, job: str, placements: tuple[scheduler.Placement, ...]) -> None:
        found = self.plain.assign(job, placements)
        assert len(found) == len(placements), "every placement has a pod"
        for view, place in found:
            assert len(place.devices) == view.gpus
            self.plain.assume_sent(view.uid, place.node, place.devices)
            self.in_flight[view.uid] = place.devices

    @rule(uid=pods, arrives=st.booleans())
    def write_ends(self, uid: str, arrives: bool) -> None:
        devices = self.in_flight.pop(uid, None)
        if devices is None or uid not in self.views:
            return
        if arrives:
            view = self.views[uid]
            self.show(msgspec.structs.replace(view, stage=Stage.ASSIGNED, node="n", devices=devices, gate=None))
        else:
            self.plain.take_back(uid)

    @rule(uid=pods)
    def evict(self, uid: str) -> None:
        if uid in self.views and self.views[uid].stage is Stage.ASSIGNED:
            self.plain.assume_leaving(uid)

    @rule(uid=pods)
    def eviction_is_given_up(self, uid: str) -> None:
        if uid not in self.in_flight:
            self.plain.take_back(uid)

    @rule(uid=pods)
    def is_told_to_go(self, uid: str) -> None:
        view = self.views.get(uid)
        if view is not None and view.stage is Stage.ASSIGNED:
            self.show(msgspec.structs.replace(view, stage=Stage.TERMINATING))

    @rule(uid=consumes(pods), ends=st.booleans())
    def goes(self, uid: str, ends: bool) -> None:
        view = self.views.get(uid)
        self.in_flight.pop(uid, None)
        if view is None:
            return
        if ends:
            self.show(msgspec.structs.replace(view, stage=Stage.ENDED))
        else:
            del self.views[uid]
            self.plain.drop(uid)

    @invariant()
    def the_scheduler_believes_what_is_so(self) -> None:
        holding = {uid for uid, v in self.views.items() if v.holds} | {u for u in self.in_flight if u in self.views}
        assert set(self.state.workers) == holding
        taken = [d for uid in holding for d in (self.allocator.held(uid) or ("", ()))[1]]
        held = sum(self.views[uid].gpus for uid in holding)
        assert len(taken) == len(set(taken)) == held
        assert {uid: len(task.devices) for uid, task in self.state.workers.items()} == {
            uid: self.views[uid].gpus for uid in holding
        }

    @invariant()
    def everything_that_waits_alone_is_known_to_the_scheduler(self) -> None:
        jobs = {uid for job in self.plain.jobs.values() for uid in job.members}
        alone = {uid for uid, v in self.views.items() if v.stage is Stage.WAITING and not v.group}
        assert alone <= jobs
        assert set(self.plain.jobs) <= set(self.state.jobs)

    @invariant()
    def nothing_is_left_of_what_is_gone(self) -> None:
        assert set(self.plain.members) == set(self.views)
        if not self.views:
            assert not self.state.jobs


World.TestCase.settings = settings(max_examples=effort(60, 2000), stateful_step_count=40, deadline=None)
TestAnyHistory = World.TestCase


def test_after_a_restart_a_half_admitted_group_is_one_job_again() -> None:
    state, allocator = scheduler.State(), DeviceAllocator()
    allocator.resize("n", 4)
    state.apply(scheduler.NodeChanged(Node(name="n", devices=tuple(Device(index=i) for i in range(4)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=4)))
    plain = PlainPods(state.apply, allocator)
    sent = msgspec.structs.replace(waiting("a", "g", 3), stage=Stage.ASSIGNED, node="n", devices=(2,), gate=None)
    for view in (sent, waiting("b", "g", 3), waiting("c", "g", 3)):
        plain.put(view)
    assert not state.jobs
    plain.settle()
    (job,) = state.jobs.values()
    assert (job.gang, job.active) == (3, 1)
    decided = scheduler.plan(state, 10.0)
    assert {p.devices for p in decided.resize[0].add} == {(0,), (1,)}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_held_team_gets_a_pod_in_place_of_one_of_a_gang_that_runs_and_no_more(restarted: bool) -> None:
    """A restarted controller started it, and this one did not: the others of the gang held their GPUs for nothing."""
    state, allocator = scheduler.State(), DeviceAllocator()
    allocator.resize("n", 8)
    state.apply(scheduler.NodeChanged(Node(name="n", devices=tuple(Device(index=i) for i in range(8)))))
    plain = PlainPods(state.apply, allocator)
    running = [waiting(uid, "g", 3) for uid in ("a", "b", "c")]
    running = [
        msgspec.structs.replace(view, stage=Stage.ASSIGNED, node="n", devices=(i,), gate=None)
        for i, view in enumerate(running)
    ]
    ended = msgspec.structs.replace(running.pop(), stage=Stage.ENDED)
    later = [waiting("dd", "g", 3), waiting("eee", "g", 3), waiting("alone")]
    if not restarted:
        for view in (*running, msgspec.structs.replace(ended, stage=Stage.ASSIGNED, node="n")):
            plain.put(view)
        plain.settle()
        later.insert(0, ended)
    for view in (*running, *later):
        plain.put(view)
    if restarted:
        plain.settle()
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=8, stop_policy=StopPolicy.HOLD)))
    decided = scheduler.plan(state, 10.0)
    starting = [bind.job for bind in decided.bind] + [grown.job for grown in decided.resize]
    (job,) = starting
    assert {uid for uid, member in plain.members.items() if member.job is plain.jobs[job]} - {"a", "b"} == {"dd"}
    assert set(decided.waiting) == {"eee", "alone"}


def test_a_group_that_loses_one_pod_while_another_waits_again_leaves_no_job_behind() -> None:
    state, allocator = scheduler.State(), DeviceAllocator()
    allocator.resize("n", 2)
    state.apply(scheduler.NodeChanged(Node(name="n", devices=(Device(index=0), Device(index=1)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=2)))
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    for uid in "ab":
        plain.put(waiting(uid, "g", 2))
    for uid, device in (("a", 0), ("b", 1)):
        plain.assume_sent(uid, "n", (device,))
    plain.take_back("b")
    plain.drop("a")
    assert not state.jobs  # nothing of the group holds GPUs: it starts together again
    assert not plain.jobs
    plain.put(waiting("c", "g", 2))
    (bind,) = scheduler.plan(state, 10.0).bind
    assert {view.uid for view, _ in plain.assign(bind.job, bind.placements)} == {"b", "c"}


def test_a_group_may_form_anew_while_another_one_of_its_first_pod_is_on_its_way_out() -> None:
    state, allocator = scheduler.State(), DeviceAllocator()
    allocator.resize("n", 2)
    state.apply(scheduler.NodeChanged(Node(name="n", devices=(Device(index=0), Device(index=1)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=2)))
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    for uid in "ab":
        plain.put(waiting(uid, "g", 2))
    for uid, device in (("a", 0), ("b", 1)):
        plain.assume_sent(uid, "n", (device,))
    leaving = msgspec.structs.replace(waiting("b", "g", 2), stage=Stage.TERMINATING, node="n", devices=(1,), gate=None)
    plain.put(leaving)
    plain.take_back("a")  # its write has failed, and its group accepts no more pods
    plain.put(waiting("c", "g", 2))
    assert len(plain.jobs) == len(state.jobs) == 2
    plain.drop("b")
    (job,) = state.jobs
    (bind,) = scheduler.plan(state, 10.0).bind
    assert bind.job == job
    assert {view.uid for view, _ in plain.assign(job, bind.placements)} == {"a", "c"}


def test_a_group_whose_pods_differ_starts_whole_and_each_of_them_where_it_fits() -> None:
    state, allocator = scheduler.State(), DeviceAllocator()
    for node, gpus in (("big", 4), ("small", 2)):
        allocator.resize(node, gpus)
        state.apply(scheduler.NodeChanged(Node(name=node, devices=tuple(Device(index=i) for i in range(gpus)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=6)))
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    first = msgspec.structs.replace(
        waiting("a", "g", 3), constraints=NodeConstraints((("kubernetes.io/hostname", "nowhere"),))
    )
    wide = [msgspec.structs.replace(waiting(uid, "g", 3), gpus=2) for uid in "bc"]
    for view in (first, *wide):
        plain.put(view)
    assert not scheduler.plan(state, 10.0).bind
    plain.put(msgspec.structs.replace(first, constraints=NodeConstraints()))
    (bind,) = scheduler.plan(state, 10.0).bind
    for view, place in plain.assign(bind.job, bind.placements):
        assert len(place.devices) == view.gpus
        plain.assume_sent(view.uid, place.node, place.devices)
    assert set(state.workers) == {"a", "b", "c"}
    assert scheduler.plan(state, 11.0).empty
    plain.take_back("b")  # its write has failed: it is the one that is sent again
    (resize,) = scheduler.plan(state, 12.0).resize
    assert [view.uid for view, _ in plain.assign(bind.job, resize.add)] == ["b"]
    assert len(resize.add[0].devices) == 2


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "bare"])
def test_a_pod_is_moved_only_where_somebody_makes_it_anew(owned: bool) -> None:
    state, allocator = scheduler.State(), DeviceAllocator()
    for node in "nm":
        allocator.resize(node, 2)
        state.apply(scheduler.NodeChanged(Node(name=node, devices=(Device(index=0), Device(index=1)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=4)))
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    for uid, node in (("a", "n"), ("b", "m")):
        held = msgspec.structs.replace(
            waiting(uid),
            stage=Stage.ASSIGNED,
            node=node,
            devices=(0,),
            gate=None,
            controller_kind="apps/ReplicaSet" if owned else "",
        )
        plain.put(held)
    plain.put(msgspec.structs.replace(waiting("large"), gpus=2))
    decided = scheduler.plan(state, 10.0)
    assert len(decided.move) == owned
    assert ("large" in decided.waiting) is True


def test_a_bare_pod_that_was_borrowed_is_taken_back_and_given_no_place_elsewhere() -> None:
    state, allocator = scheduler.State(), DeviceAllocator()
    for node in "nm":
        allocator.resize(node, 2)
        state.apply(scheduler.NodeChanged(Node(name=node, devices=(Device(index=0), Device(index=1)))))
    for team, quota in (("team", 0), ("owner", 2)):
        state.apply(scheduler.QuotaChanged(Project(name=team, guaranteed=quota)))
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    for uid, node, device in (("a", "n", 0), ("b", "m", 0), ("c", "m", 1)):
        plain.put(msgspec.structs.replace(waiting(uid), stage=Stage.ASSIGNED, node=node, devices=(device,), gate=None))
    plain.put(msgspec.structs.replace(waiting("mine"), namespace="owner", gpus=2))
    decided = scheduler.plan(state, 10.0)
    assert not decided.move
    (evict,) = decided.evict
    assert evict.job == "a"
    assert "its owner does not create it again" in evict.reason.message


def test_a_pod_that_is_bound_elsewhere_while_it_is_evicted_is_counted_there() -> None:
    allocator, state = DeviceAllocator(), scheduler.State()
    for name in ("n", "m"):
        state.apply(scheduler.NodeChanged(Node(name=name, devices=(Device(index=0),))))
        allocator.resize(name, 1)
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    released = msgspec.structs.replace(waiting("p"), stage=Stage.ASSIGNED, gate=None, node="n", reserved_on="n")
    plain.put(released)
    plain.assume_leaving("p")
    bound = msgspec.structs.replace(released, node="m", bound=True)
    for view in (bound, msgspec.structs.replace(bound, stage=Stage.TERMINATING)):
        plain.put(view)
        task = state.workers["p"]
        assert task.node is not None
        assert (task.node.name, task.status.name) == ("m", "LEAVING")
        assert (allocator.idle("n"), allocator.idle("m")) == ((0,), ())


def test_a_pod_counts_for_the_user_that_its_label_names_now() -> None:
    state, rules = scheduler.State(), CurrentRules()
    plain = PlainPods(state.apply, DeviceAllocator(), rules)
    plain.settle()
    rules._changed = plain.users_changed
    labels = {"gpuquota.dev/user": "ann", "hub.example.org/username": "carla"}
    plain.put(msgspec.structs.replace(waiting("p"), labels=labels))
    plain.put(waiting("q"))

    def users() -> dict[str, str]:
        return {uid: job.user.name for uid, job in state.jobs.items()}

    assert users() == {"p": "ann", "q": ""}
    plain.put(msgspec.structs.replace(waiting("p"), labels={**labels, "gpuquota.dev/user": "bob"}))
    assert users() == {"p": "bob", "q": ""}
    spec = QuotaPolicySpec(user_label="hub.example.org/username")
    rules.put(QuotaPolicyObject(Metadata(name="default"), spec))
    assert users() == {"p": "carla", "q": ""}
