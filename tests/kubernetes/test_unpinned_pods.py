"""Pods with constraints that the plan does not model: kube-scheduler chooses their node, nothing is deleted for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.api.resources import WHOLE_PORT
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import NOWHERE
from kfp_gpuquota.cluster.kubernetes.convert.pod_repulsion import PodRepulsions, repulsions_of
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import ports_of
from kfp_gpuquota.cluster.kubernetes.convert.unmodelled import unmodelled_in
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import REFUSED_S
from tests.kubernetes.detached import Detached, detached
from tests.simulation.loop import SimulatedLoop

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

HOST = "kubernetes.io/hostname"
TERM = {"labelSelector": {"matchLabels": {"app": "loud"}}, "topologyKey": HOST}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}
PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": TERM}]}


def notes_of(pod: dict[str, Any]) -> dict[str, str]:
    notes: dict[str, str] = pod["metadata"].get("annotations", {})
    return notes


def required_of(pod: dict[str, Any]) -> set[str]:
    """The operators of the pod's required node affinity."""
    terms = pod["spec"]["affinity"]["nodeAffinity"].get(next(iter(REQUIRED)), {}).get("nodeSelectorTerms", [])
    matches = [m for term in terms for m in (*term.get("matchFields", []), *term.get("matchExpressions", []))]
    return {match["operator"] for match in matches}


def spec_of(**spec: Any) -> PodSpec:
    return msgspec.convert(spec, PodSpec)


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"affinity": {"podAffinity": REQUIRED}}, ("pod affinity",)),
        ({"affinity": {"podAntiAffinity": REQUIRED}}, ("pod anti-affinity",)),
        ({"affinity": {"podAffinity": PREFERRED, "podAntiAffinity": PREFERRED}}, ()),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}, ("topology spread",)),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, ()),
        ({"resourceClaims": [{"name": "gpu"}]}, ("resource claims",)),
        ({"schedulerName": "volcano"}, ("scheduler volcano",)),
        ({"schedulerName": "default-scheduler"}, ()),
        ({"volumes": [{"ephemeral": {"volumeClaimTemplate": {}}}, {"rbd": {}}]}, ("volumes",)),
        ({"volumes": [{"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "data"}}]}, ()),
    ],
)
def test_what_only_kube_scheduler_checks_is_found(spec: dict[str, Any], found: tuple[str, ...]) -> None:
    assert unmodelled_in(spec_of(**spec)) == found


@pytest.mark.parametrize(
    ("selector", "labels_", "applies"),
    [
        ({"matchLabels": {"app": "x"}}, {"app": "x", "more": "y"}, True),
        ({"matchLabels": {"app": "x"}}, {"app": "y"}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}, {}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}, {"app": "x"}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, {"app": ""}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, {"app": ""}, False),
        ({}, {"app": "x"}, True),
        (None, {"app": "x"}, False),
    ],
)
def test_the_anti_affinity_of_others_applies_to_a_pod(
    selector: dict[str, Any] | None, labels_: dict[str, str], applies: bool
) -> None:
    term = {"labelSelector": selector, "topologyKey": HOST}
    anti = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    repulsions = PodRepulsions()
    repulsions.put("a", repulsions_of(spec_of(affinity=anti), "team"))
    repulsions.put("b", repulsions_of(spec_of(affinity=anti), "team"))
    assert repulsions.keeps_away("team", labels_) is applies
    assert not repulsions.keeps_away("other", labels_)
    repulsions.drop("a")
    assert repulsions.keeps_away("team", labels_) is applies
    repulsions.put("b", ())
    assert not repulsions.keeps_away("team", labels_)


def test_a_wildcard_address_takes_a_whole_port_and_any_other_its_own() -> None:
    def ports(*given: dict[str, Any]) -> dict[str, int]:
        return dict(ports_of(spec_of(containers=[{"ports": [{"containerPort": 1, **one} for one in given]}])))

    assert ports({}) == {}
    assert ports({"hostPort": 80}) == {"hostPort/TCP/80": WHOLE_PORT}
    assert ports({"hostPort": 80, "protocol": "UDP", "hostIP": "0.0.0.0"}) == {"hostPort/UDP/80": WHOLE_PORT}
    own = {"hostPort/TCP/80": 1, "hostPort/TCP/80/10.0.0.1": WHOLE_PORT}
    assert ports({"hostPort": 80, "hostIP": "10.0.0.1"}) == own
    assert ports({"hostPort": 80, "hostIP": "10.0.0.1"}, {"hostPort": 80})["hostPort/TCP/80"] == WHOLE_PORT


def released(cluster: Detached, name: str, node: str, device: int) -> str:
    """See a pod that was released without a pin, and is not bound; return its uid."""
    notes = {labels.RESERVED_ON: node, labels.DEVICES: str(device)}
    return cluster.pod("team", name, metadata={"annotations": notes}, schedulingGates=[])


def test_a_reservation_does_not_move_to_devices_that_are_promised_to_a_job() -> None:
    async def play() -> None:
        async with detached() as cluster:
            cluster.node("full", 1)
            cluster.node("other", 2)
            cluster.team("team")
            first, second = released(cluster, "first", "full", 0), released(cluster, "second", "other", 1)
            cluster.pod("team", "waiting")
            await cluster.start()
            controller = cluster.controller
            controller.snapshot.emit(scheduler.PlacementsPromised("team-waiting", (Placement("other", (0,)),), 0.0))
            assert controller.unpinned.refuse(controller.snapshot.pods[first]) == NOWHERE
            controller.unpinned.reserve_again()
            assert controller.snapshot.pods[first].node == NOWHERE
            controller._pod_deleted(second)
            controller.unpinned.reserve_again()
            assert controller.snapshot.allocator.held(first) == ("other", (1,))

    asyncio.run(play())


def test_a_node_that_refused_a_pod_long_ago_is_reserved_for_it_again() -> None:
    async def play() -> list[str]:
        async with detached() as cluster:
            cluster.node("node", 1)
            cluster.team("team")
            pod = released(cluster, "pod", "node", 0)
            await cluster.start()
            controller = cluster.controller
            nodes = [controller.unpinned.refuse(controller.snapshot.pods[pod])]
            for pause_s in (0.0, REFUSED_S):
                await asyncio.sleep(pause_s)
                controller.unpinned.reserve_again()
                nodes.append(controller.snapshot.pods[pod].node)
            return nodes

    loop = SimulatedLoop()
    try:
        assert loop.run_until_complete(play()) == [NOWHERE, NOWHERE, "node"]
    finally:
        loop.close()


def test_a_pod_whose_release_seems_to_fail_is_tracked_when_the_watch_has_reported_it() -> None:
    async def play() -> None:
        async with detached() as cluster:
            cluster.node("node", 2)
            cluster.team("team")
            await cluster.start()
            first = released(cluster, "first", "node", 0)
            cluster.pod("team", "second")
            controller = cluster.controller
            controller.actions._admission_failed(controller.snapshot.pods[first], TimeoutError())
            assert not controller.unpinned.is_pinned(controller.snapshot.pods["team-second"], "node")

    asyncio.run(play())


@pytest.mark.slow  # kube-scheduler is given 15 s to bind a pod
def test_a_refused_reservation_moves_and_nothing_is_deleted(controlled: Controlled) -> None:
    refusing, full = sorted(controlled.add_nodes(2, gpus=1))
    team, other = controlled.team(guaranteed=1, limit=1), controlled.team(guaranteed=2)
    blocker = controlled.pod(other, "blocker", nodeSelector={HOST: full})
    controlled.start()
    controlled.until_bound(blocker)
    loud = {"containers": [{"name": "main", "image": "none"}], "nodeName": refusing}
    body = {"metadata": {"name": "loud", "labels": {"app": "loud"}}, "spec": loud}
    controlled.cluster.api.create(f"/api/v1/namespaces/{team}/pods", body)
    apart = controlled.pod(team, "apart", affinity={"podAntiAffinity": REQUIRED})
    moved = controlled.until(apart, lambda pod: notes_of(pod).get(labels.RESERVED_ON) == "")
    uid = moved["metadata"]["uid"]
    assert not moved["spec"].get("schedulingGates")
    controlled.pod(team, "over")  # its team's limit is reached
    controlled.until_bound(controlled.pod(other, "next"))  # it gets the GPU that was reserved in vain
    controlled.kill()
    controlled.start()
    assert "over" in controlled.waiting(team)
    controlled.cluster.api.delete(blocker)
    bound = controlled.until_bound(apart)
    assert (bound["spec"]["nodeName"], bound["metadata"]["uid"]) == (full, uid)
    controlled.until(apart, lambda pod: notes_of(pod)[labels.RESERVED_ON] == full)
    assert "ReservationMoved" in controlled.log()


def test_no_pod_is_pinned_while_another_one_may_take_its_place(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=3)
    controlled.start()
    waits = controlled.pod(
        team, "waits", affinity={"podAffinity": REQUIRED}
    )  # kube-scheduler does not find what it wants to be near
    controlled.until(waits, lambda pod: pod["status"].get("conditions", [{}])[0].get("reason") == "Unschedulable")
    second = controlled.until_bound(controlled.pod(team, "second"))
    assert "In" not in required_of(second), "it only prefers its node"
    controlled.cluster.api.delete(waits)
    controlled.wait(lambda: "waits" not in controlled.pods(team))
    third = controlled.until_bound(controlled.pod(team, "third"))
    assert "In" in required_of(third)


def test_pods_without_a_pin_stay_in_their_pool_and_workers_in_their_required_domain(controlled: Controlled) -> None:
    small, large, other = controlled.add_nodes(3, gpus=3)
    for node, rack in ((small, "r1"), (large, "r2"), (other, "r2")):
        written = {"rack": rack, **({labels.POOL: "p"} if node != other else {})}
        controlled.cluster.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": written}})
    controlled.cluster.api.patch(f"/api/v1/nodes/{small}", {"spec": {"unschedulable": True}})
    team = controlled.team(guaranteed=6, pools={"p": {"guaranteed": 4}})
    controlled.start()
    never = {"podAntiAffinity": REQUIRED}  # nobody has that label
    pod = controlled.pod(team, "apart", labels_={labels.POOL: "p"}, affinity=never)
    bound = controlled.until_bound(pod)
    assert bound["spec"]["nodeSelector"] == {labels.POOL: "p"}
    template = {"spec": {"containers": [{"name": "main", "image": "none"}], "affinity": never}}
    outside = controlled.pod(team, "outside", affinity=never)
    controlled.job(team, "train", template, gpus=2, gpusPerWorker=1, requiredTopology="rack")
    controlled.wait(lambda: {"train-0", "train-1"} <= controlled.bound(team), controlled.log)
    selected = {pod["spec"]["nodeSelector"]["rack"] for name, pod in controlled.pods(team).items() if "train" in name}
    assert selected == {"r2"}
    controlled.until_bound(outside)
    without_pool = [pod for name, pod in controlled.pods(team).items() if name != "apart"]
    assert {pod["spec"]["nodeName"] for pod in without_pool} == {other}
