"""What the page keeps in memory: of each of its users, and of nodes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from msgspec import convert
from msgspec.structs import replace
from multidict import CIMultiDict

from kfp_gpuquota.api import Reason, ReasonCode, Resize
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node, Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import QuotaPolicyObject
from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
    CLASS_PREFIX,
    DeviceClass,
    ResourceClaim,
    ResourceSlice,
)
from kfp_gpuquota.cluster.kubernetes.web import proxy_door
from kfp_gpuquota.cluster.kubernetes.web.objects import Objects
from kfp_gpuquota.cluster.kubernetes.web.options import parsed
from kfp_gpuquota.cluster.kubernetes.web.proxy_door import KEPT_S, ProxyDoor
from kfp_gpuquota.cluster.kubernetes.web.rights import Identity
from kfp_gpuquota.cluster.kubernetes.web.user_source import UserSource
from kfp_gpuquota.web.site_config import SiteConfig
from tests.web.listed import job

if TYPE_CHECKING:
    from kfp_gpuquota.api.wire import NodeView


def test_what_was_rendered_for_a_user_is_kept_while_the_user_looks(monkeypatch: Any) -> None:
    now = 0.0
    made: list[str] = []
    options = parsed(["--trusted-proxy=127.0.0.0/8"])
    door = ProxyDoor(
        SiteConfig("", frozenset()), lambda user: cast("Any", made.append(user.name)), options, lambda: now
    )

    def shown_to(user: str) -> object:
        return door.site_for(
            cast("Any", SimpleNamespace(remote="127.0.0.1", headers=CIMultiDict({"kubeflow-userid": user})))
        )

    first = shown_to("ann")
    shown_to("bob")
    now = KEPT_S - 1
    assert shown_to("ann") is first
    now = KEPT_S
    shown_to("carl")
    assert made == ["ann", "bob", "carl"]
    assert shown_to("ann") is first
    shown_to("bob")
    assert made == ["ann", "bob", "carl", "bob"], "what he saw was forgotten"
    monkeypatch.setattr(proxy_door, "MAX_USERS", 2)
    shown_to("ann")
    shown_to("dora")
    assert [user.name for user in door._sites] == ["ann", "dora"]


def test_an_ended_job_whose_size_never_changed_held_what_it_asked_for() -> None:
    """Its status says 0 GPUs, which is what it holds now."""
    nothing = cast("Any", None)
    pages = UserSource(Identity("ann"), *[nothing] * 7)
    assert pages.sizes_of(job("ended", gpus=4, started_at=10.0, finished_at=20.0)) == [(10.0, 4), (20.0, 0.0)]
    assert pages.sizes_of(job("part", gpus=1, gpu_fraction=0.25, started_at=10.0, finished_at=20.0))[0] == (10.0, 0.25)
    assert pages.sizes_of(job("memory", gpus=1, gpu_memory_mib=9, started_at=10.0, finished_at=20.0)) == [(20.0, 0.0)]
    assert pages.sizes_of(job("never", gpus=4, finished_at=20.0)) == []
    assert pages.sizes_of(job("suspended", gpus=4, started_at=10.0)) == []
    change = Resize(
        at=15.0, from_gpus=2, to_gpus=3, generation=1, step=1, reason=Reason(code=ReasonCode.FITS, message="")
    )
    grown = job("grown", gpus=4, started_at=10.0, finished_at=20.0, resizes=(change,))
    assert pages.sizes_of(grown) == [(10.0, 2), (15.0, 3), (20.0, 0.0)]


AMD, GOLD = "amd.com/gpu", f"{CLASS_PREFIX}gold"


def node(name: str, gpus: int) -> Node:
    amounts = {labels.GPU_RESOURCE: str(gpus), AMD: "2"}
    return convert({"metadata": {"name": name, "uid": name}, "status": {"allocatable": amounts}}, Node)


def pod(chance: random.Random) -> Pod:
    name = f"p-{chance.randrange(12)}"
    asked = {chance.choice([labels.GPU_RESOURCE, AMD, "cpu"]): "1"}
    where = chance.choice(["", "n-0", "n-1", "n-2"])
    return convert(
        {
            "metadata": {"name": name, "namespace": "team", "uid": name},
            "spec": {"nodeName": where, "containers": [{"name": "main", "resources": {"limits": asked}}]},
            "status": {"phase": chance.choice(["Pending", "Running", "Succeeded"])},
        },
        Pod,
    )


def published(chance: random.Random) -> ResourceSlice:
    """The slice of a node, in one of two pools."""
    name, pool = f"n-{chance.randrange(3)}", f"pool-{chance.randrange(2)}"
    devices = [{"name": f"{name}-{number}"} for number in range(chance.randrange(3))]
    spec = {"driver": "gold", "nodeName": name, "pool": {"name": pool, "generation": 1}, "devices": devices}
    return convert({"metadata": {"name": name, "uid": name}, "spec": spec}, ResourceSlice)


def claim(chance: random.Random) -> ResourceClaim:
    """A claim of a pod, which has a device or none; several may have the same one."""
    name, pod_ = f"c-{chance.randrange(6)}", f"p-{chance.randrange(12)}"
    device = {
        "request": "r",
        "driver": "gold",
        "pool": f"pool-{chance.randrange(2)}",
        "device": f"n-{chance.randrange(3)}-0",
    }
    results = chance.choice([[], [device]])
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": [{"resource": "pods", "name": pod_}]}
    return convert({"metadata": {"name": name, "namespace": "team", "uid": name}, "status": status}, ResourceClaim)


class Devices:
    """What a DRA driver publishes, and claims for it."""

    def __init__(self) -> None:
        self._slices: dict[str, ResourceSlice] = {}
        self._claims: dict[str, ResourceClaim] = {}

    def change(self, chance: random.Random, objects: Objects) -> None:
        """Add, change or delete one object."""
        match chance.randrange(5):
            case 0:
                name = f"n-{chance.randrange(3)}"
                objects.devices.drop_slice(name)
                self._slices.pop(name, None)
            case 1:
                name = f"c-{chance.randrange(6)}"
                objects.drop_claim(name)
                self._claims.pop(name, None)
            case 2:
                fresh = published(chance)
                objects.devices.put_slice(fresh)
                self._slices[fresh.metadata.uid] = fresh
            case _:
                asked = claim(chance)
                objects.put_claim(asked)
                self._claims[asked.metadata.uid] = asked

    def put_all(self, objects: Objects) -> None:
        """Add all of them."""
        selectors = [{"cel": {"expression": "device.driver == 'gold'"}}]
        body = {"metadata": {"name": "gold", "uid": "gold"}, "spec": {"selectors": selectors}}
        objects.devices.put_class(convert(body, DeviceClass))
        for one in self._slices.values():
            objects.devices.put_slice(one)
        for asked in self._claims.values():
            objects.put_claim(asked)


def test_nodes_that_are_converted_one_by_one_are_those_that_are_converted_at_once() -> None:
    """Random changes of pods, nodes, devices and the table; a node that none concerns is the same object."""
    chance = random.Random(3)
    objects, pods, nodes = Objects(), dict[str, Pod](), dict[str, Node]()
    devices = Devices()
    rows = [{"name": AMD}, {"name": GOLD}]
    table = convert({"metadata": {"name": "default"}, "spec": {"gpuResources": rows}}, QuotaPolicyObject)
    devices.put_all(objects)
    policy: QuotaPolicyObject | None = None
    for _ in range(600):
        before, touched = {view.node.name: view for view in objects.nodes()}, set[str]()
        match chance.randrange(12):
            case 0:
                policy = None if policy else table
                objects.put_policy(table) if policy else objects.drop_policy("")
                touched = set(nodes)
            case 1 | 2:
                changed = node(f"n-{chance.randrange(3)}", chance.randrange(3))
                nodes[changed.metadata.name] = changed
                objects.put_node(changed)
                touched = {changed.metadata.name}
            case 3:
                name = f"n-{chance.randrange(3)}"
                nodes.pop(name, None)
                objects.drop_node(name)
                touched = {name}
            case 4:
                name = f"p-{chance.randrange(12)}"
                touched = {gone.spec.node_name} if (gone := pods.pop(name, None)) else set()
                objects.drop_pod(name)
            case 5 | 6 | 7 | 8:
                devices.change(chance, objects)
                touched = set(nodes)
            case _:
                fresh = pod(chance)
                old = pods.pop(fresh.metadata.uid, fresh)
                pods[fresh.metadata.uid] = fresh
                objects.put_pod(fresh)
                touched = {old.spec.node_name, fresh.spec.node_name}
        whole = Objects()
        for each in nodes.values():
            whole.put_node(each)
        for one in pods.values():
            whole.put_pod(one)
        devices.put_all(whole)
        if policy:
            whole.put_policy(policy)
        found = objects.nodes()
        assert [_sorted(view) for view in found] == [_sorted(view) for view in whole.nodes()]
        assert all(view is before.get(view.node.name, view) for view in found if view.node.name not in touched)


def _sorted(view: NodeView) -> NodeView:
    """Return the view without which of equal devices a foreign pod was given."""
    holders = sorted(holder for holders in view.held.values() for holder in holders)
    resources = tuple(replace(one, held=dict(sorted(one.held.items()))) for one in view.resources)
    return replace(view, held={i: (holder,) for i, holder in enumerate(holders)}, used={}, resources=resources)
