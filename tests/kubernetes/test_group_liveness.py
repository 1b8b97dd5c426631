"""No pod of a group waits beside idle GPUs, whatever controllers create, lose and replace the pods of groups.

The controllers are a model of Kubernetes' own: of a Job (all pods at once), a StatefulSet or JobSet with a start order
(the next pod after the previous one runs), and of pods without an owner. There are more GPUs than all pods request, so
whenever writes have arrived and controllers have created what they can, no pod may wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Device, Node, Project
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.convert.owners import Rest
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import GateShape
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.pods import group_stages
from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
from tests.effort import effort

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.gang_notes import GangNote

GPUS = 200


@dataclass
class Controller:
    """A controller that keeps `size` pods of a group; if `ordered`, each is created when all before it run."""

    group: str
    size: int
    gpus: int
    ordered: bool
    pods: dict[int, str] = field(default_factory=dict)  # uids by index
    succeeded: set[int] = field(default_factory=set)
    suspended: bool = False

    @property
    def left(self) -> list[int]:
        """Return the indexes of the pods that have not succeeded."""
        return [index for index in range(self.size) if index not in self.succeeded]


class World(RuleBasedStateMachine):
    """What the API server holds, the controllers, and the controller under test."""

    controllers = Bundle("controllers")

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, PodView] = {}
        self.in_flight: dict[str, tuple[tuple[int, ...], GangNote]] = {}
        self.owners: list[Controller] = []
        self.made = 0
        self.start()

    def start(self) -> None:
        """Start the controller under test with what the API server holds."""
        self.state, self.allocator = scheduler.State(), DeviceAllocator()
        self.state.apply(scheduler.NodeChanged(Node(name="n", devices=tuple(Device(index=i) for i in range(GPUS)))))
        self.state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=GPUS)))
        self.allocator.resize("n", GPUS)
        self.plain = PlainPods(self.state.apply, self.allocator)
        for view in self.views.values():
            self.plain.put(view)
        self.plain.settle()

    def show(self, view: PodView) -> None:
        if view.stage is Stage.ENDED:
            self.views.pop(view.uid, None)
        else:
            self.views[view.uid] = view
        self.plain.put(view)

    # The controllers of others

    @rule(
        target=controllers,
        size=st.integers(1, 4),
        gpus=st.integers(1, 2),
        ordered=st.booleans(),
    )
    def create(self, size: int, gpus: int, ordered: bool) -> Controller:
        owner = Controller(f"g{len(self.owners)}", size, gpus, ordered)
        self.owners.append(owner)
        return owner

    def sized(self, owner: Controller, index: int) -> dict[str, object]:
        """Return the gang size as it is read from the owner when a pod waits."""
        if not owner.ordered:
            return {"group_size": len(owner.left)}
        later = len([one for one in owner.left if one > index])
        return {"group_size": 1, "rest": (Rest(later, owner.gpus),) if later else ()}

    def reconcile(self, owner: Controller) -> None:
        """Create the pods that the controller can create now."""
        if owner.suspended:
            return
        for index in owner.left:
            if index not in owner.pods:
                self.create_pod(owner, index)
            if owner.ordered and self.views[owner.pods[index]].stage is not Stage.ASSIGNED:
                return

    def create_pod(self, owner: Controller, index: int) -> None:
        self.made += 1
        uid = owner.pods[index] = f"{owner.group}-{index}-{self.made:03}"
        view = PodView(
            uid=uid,
            namespace="team",
            name=uid,
            stage=Stage.WAITING,
            gpus=owner.gpus,
            created=float(self.made),
            gate=GateShape(index=0),
            group=owner.group if owner.size > 1 else "",
        )
        self.show(msgspec.structs.replace(view, **self.sized(owner, index)))

    @rule(owner=controllers)
    def the_controller_reconciles(self, owner: Controller) -> None:
        self.reconcile(owner)

    @rule(owner=controllers, index=st.integers(0, 3), succeeds=st.booleans())
    def a_pod_ends(self, owner: Controller, index: int, succeeds: bool) -> None:
        view = self.views.get(owner.pods.get(index, ""))
        if view is None or view.stage is Stage.WAITING:
            return
        if succeeds:
            owner.succeeded.add(index)
        self.remove(owner, index, ended=True)

    @rule(owner=controllers, index=st.integers(0, 3))
    def a_pod_is_deleted(self, owner: Controller, index: int) -> None:
        view = self.views.get(owner.pods.get(index, ""))
        if view is None:
            return
        if view.stage is Stage.ASSIGNED:
            self.show(msgspec.structs.replace(view, stage=Stage.TERMINATING))
        elif view.stage is Stage.WAITING:
            self.remove(owner, index, ended=False)

    @rule(owner=controllers)
    def the_job_is_suspended(self, owner: Controller) -> None:
        owner.suspended = True
        for index in list(owner.pods):
            self.a_pod_is_deleted(owner, index)

    @rule(owner=controllers)
    def the_job_is_resumed(self, owner: Controller) -> None:
        owner.suspended = False
        self.reconcile(owner)

    def remove(self, owner: Controller, index: int, *, ended: bool) -> None:
        uid = owner.pods.pop(index)
        self.in_flight.pop(uid, None)
        if ended:
            self.show(msgspec.structs.replace(self.views[uid], stage=Stage.ENDED))
        else:
            del self.views[uid]
            self.plain.drop(uid)

    # The controller under test

    @rule()
    def plan(self) -> None:
        """Plan, and send the decisions; of a group without GPUs all pods start, or none."""
        idle = [owner for owner in self.owners if not owner.ordered and not self.holding(owner)]
        self.plan_once()
        for owner in idle:
            assert len(self.holding(owner)) in {0, len(owner.left)}

    def holding(self, owner: Controller) -> list[str]:
        """Return the pods of the group that hold GPUs, and are not being deleted."""
        uids = owner.pods.values()
        return [uid for uid in uids if uid in self.in_flight or self.views[uid].stage is Stage.ASSIGNED]

    def plan_once(self) -> None:
        decided = scheduler.plan(self.state, 1000.0)
        for bind in decided.bind:
            self.send(bind.job, bind.placements)
        for resize in decided.resize:
            self.send(resize.job, resize.add)

    def send(self, job: str, placements: tuple[scheduler.Placement, ...]) -> None:
        for view, place in self.plain.assign(job, placements):
            self.plain.assume_sent(view.uid, place.node, place.devices)
            self.in_flight[view.uid] = place.devices, self.plain.gang_of(view.uid)

    @rule(arrives=st.booleans())
    def a_write_ends(self, arrives: bool) -> None:
        if self.in_flight:
            self.write_ended(next(iter(self.in_flight)), arrives=arrives)

    def write_ended(self, uid: str, *, arrives: bool) -> None:
        devices, gang = self.in_flight.pop(uid)
        if uid not in self.views:
            return
        if arrives:
            view = self.views[uid]
            admitted = {"stage": Stage.ASSIGNED, "node": "n", "devices": devices, "gate": None}
            self.show(msgspec.structs.replace(view, **admitted, group_size=gang.size, rest=gang.rest))
        else:
            self.plain.take_back(uid)

    @rule()
    def the_controller_restarts(self) -> None:
        for uid in list(self.in_flight):
            self.write_ended(uid, arrives=True)
        self.start()

    @rule()
    def everything_comes_to_rest(self) -> None:
        """Let controllers, writes and plans go on until nothing changes: no pod waits, no quota is kept for none."""
        for _ in range(8 * len(self.owners) + 8):
            self.step()
        for job in list(self.plain.jobs):
            self.plain.give_up_rest(job)  # as after a while
        self.step()
        waiting = [view.uid for view in self.views.values() if view.stage is Stage.WAITING]
        assert not waiting, (waiting, scheduler.plan(self.state, 1000.0).waiting)
        missing = [owner for owner in self.owners if not owner.suspended and len(owner.pods) < len(owner.left)]
        assert not missing
        assert set(self.state.workers) == set(self.views), "quota is reserved for pods that exist"

    def step(self) -> None:
        for owner in self.owners:
            for index, uid in list(owner.pods.items()):
                if self.views[uid].stage is Stage.TERMINATING:
                    self.remove(owner, index, ended=False)
            self.reconcile(owner)
            self.reread(owner)
        self.plan()
        for uid in list(self.in_flight):
            self.write_ended(uid, arrives=True)

    def reread(self, owner: Controller) -> None:
        """Give waiting pods the size that their owner has now, as the look-ups of incomplete groups do."""
        for index, uid in owner.pods.items():
            view = self.views[uid]
            if view.stage is Stage.WAITING:
                self.show(msgspec.structs.replace(view, **self.sized(owner, index)))

    @invariant()
    def the_scheduler_believes_what_is_so(self) -> None:
        holding = {uid for uid, v in self.views.items() if v.holds} | {u for u in self.in_flight if u in self.views}
        assert {worker for worker in self.state.workers if "/rest/" not in worker} == holding
        assert set(self.plain.members) == set(self.views)


class LongHistories(World):
    """The same with more and longer histories."""


World.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
LongHistories.TestCase.settings = settings(max_examples=effort(50, 5000), stateful_step_count=40, deadline=None)
TestAnyHistory = World.TestCase
TestAnyLongHistory = pytest.mark.slow(LongHistories.TestCase)


def test_the_table_of_stages_is_that_of_the_transitions() -> None:
    rows = [line.split("|")[1:3] for line in (group_stages.__doc__ or "").splitlines() if line.startswith("| ")]
    table = {(before.strip(), now.strip()) for before, now in rows[1:]}
    assert table == {(before.name, now.name) for before, now in group_stages.TRANSITIONS}
