"""The sizes that Ray clusters' groups request, and the patches that follow from a unit's slots; no API server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Device, Node, Project
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import GateShape
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes
from kfp_gpuquota.cluster.kubernetes.kuberay import scaling
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import Owners
from kfp_gpuquota.cluster.kubernetes.kuberay.units import Ledger, Unit
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from tests.kubernetes.kuberay import cluster_spec, elastic, group


def owners() -> Owners:
    return Owners(LimitRanges(lambda _: None), Volumes(lambda _namespace, _claim: None), CurrentRules())


def ray_cluster(*groups: Any, version: int = 1, notes: str = "", **more: Any) -> RayCluster:
    meta = {"name": "c", "namespace": "team", "uid": "c", "resourceVersion": str(version), "labels": elastic()}
    annotations = {"annotations": {labels.RAY_GROUPS: notes}} if notes else {}
    return msgspec.convert({"metadata": {**meta, **annotations}, "spec": cluster_spec(*groups, **more)}, RayCluster)


def ray_job(*groups: Any, head_gpus: int = 0, **more: Any) -> RayJob:
    meta = {"name": "j", "namespace": "team", "uid": "j", "resourceVersion": "1"}
    spec = {"shutdownAfterJobFinishes": True, **more, "rayClusterSpec": cluster_spec(*groups, head_gpus=head_gpus)}
    return msgspec.convert({"metadata": meta, "spec": spec}, RayJob)


def sizes(cluster: RayCluster) -> tuple[int, int, int]:
    (request,) = owners().requests_of(cluster).values()
    return request.spec.smallest, request.spec.gpus, request.spec.largest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (group("g", 2, minReplicas=1, maxReplicas=4), (1, 2, 4)),
        (group("g", 2, gpus=4, minReplicas=1, maxReplicas=4), (4, 8, 16)),
        (group("g", 2, minReplicas=0, maxReplicas=2147483647), (1, 2, 10_000)),  # KubeRay's defaults
        (group("g", 9, minReplicas=1, maxReplicas=4), (1, 4, 4)),  # nor above the maximum
        (group("g", 1, minReplicas=2, maxReplicas=4), (2, 2, 4)),  # KubeRay never goes below the minimum
    ],
)
def test_a_group_runs_between_its_bounds(given: Any, expected: tuple[int, int, int]) -> None:
    assert sizes(ray_cluster(given)) == expected


def test_with_rays_autoscaler_a_group_requests_what_that_requests() -> None:
    assert sizes(ray_cluster(group("g", 3, minReplicas=1, maxReplicas=9), enableInTreeAutoscaling=True)) == (1, 3, 3)


@pytest.mark.parametrize(
    ("notes", "request_"),
    [
        ('{"g":{"replicas":4,"wrote":2}}', 4),  # the controller has written 2, the user's request was 4
        ('{"g":{"replicas":4,"wrote":3}}', 2),  # the user has set 2 since
        ('{"other":{"replicas":4,"wrote":2}}', 2),
        ("not JSON", 2),  # anybody may write annotations
        ('{"g":{"replicas":"many"}}', 2),
    ],
)
def test_the_users_request_outlives_the_controllers_changes(notes: str, request_: int) -> None:
    assert sizes(ray_cluster(group("g", 2, minReplicas=1, maxReplicas=8), notes=notes))[1] == request_


def test_a_rayjob_counts_the_gpus_of_its_head_and_of_all_hosts() -> None:
    job = ray_job(group("small", 2, numOfHosts=2), group("large", 1, gpus=4), group("cpu", 3, gpus=0), head_gpus=1)
    (request,) = owners().requests_of(job).values()
    assert {name: part.gpus for name, part in request.parts.items()} == {"headgroup": 1, "small": 4, "large": 4}


def test_a_rayjob_that_keeps_its_cluster_is_not_preemptible() -> None:
    (request,) = owners().requests_of(ray_job(group("g", 2), shutdownAfterJobFinishes=False)).values()
    assert not request.spec.may_be_preempted


def pod(name: str, stage: Stage, node: str = "") -> PodView:
    return PodView(
        uid=name,
        namespace="team",
        name=name,
        stage=stage,
        gpus=1,
        created=1.0,
        node=node,
        gate=GateShape(index=0) if stage is Stage.WAITING else None,
        ray_group="g",
    )


def running(*names: str, cluster: RayCluster) -> Unit:
    """A unit of the cluster's group with these workers."""
    state, allocator = scheduler.State(), DeviceAllocator()
    state.apply(scheduler.NodeChanged(Node(name="n", devices=tuple(Device(index=i) for i in range(8)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=8)))
    allocator.resize("n", 8)
    ((uid, request),) = owners().requests_of(cluster).items()
    unit = Unit(uid, "c", "team", 0.0, request, Ledger(state.apply, allocator, lambda: 0.0), movable=True)
    unit.submit()
    for name in names:
        unit.adopt(pod(name, Stage.ASSIGNED, "n"))
    return unit


def values(write: Any) -> dict[str, Any]:
    return {one["path"].rpartition("/")[2]: one["value"] for one in write.body if one["op"] != "test"}


def leave(unit: Unit, *names: str) -> None:
    for name in names:
        slot = unit.slot_of(name)
        assert slot is not None
        slot.by_kuberay = True
        unit.leave(slot, 1.0)


def test_a_second_shrink_names_the_workers_that_are_still_there() -> None:
    first = ray_cluster(group("g", 4, minReplicas=1, maxReplicas=4))
    unit = running("a", "b", "c", "d", cluster=first)
    leave(unit, "b")
    write = scaling.size_of(unit, first, 0)
    assert values(write)["replicas"] == 3
    assert values(write)["scaleStrategy"] == {"workersToDelete": ["b"]}
    named = group("g", 3, minReplicas=1, maxReplicas=4, scaleStrategy={"workersToDelete": ["b"]})
    second = ray_cluster(named, version=2)
    assert scaling.size_of(unit, second, 0) is None
    leave(unit, "d")
    write = scaling.size_of(unit, second, 0)
    assert values(write)["replicas"] == 2
    assert values(write)["scaleStrategy"] == {"workersToDelete": ["b", "d"]}


def test_a_group_grows_by_replicas_only_beyond_those_that_kuberay_creates_anyway() -> None:
    cluster = ray_cluster(group("g", 2, minReplicas=1, maxReplicas=4))
    unit = running("a", cluster=cluster)
    unit.plan((scheduler.Placement("n", (4,)),))
    assert scaling.size_of(unit, cluster, 0) is None
    unit.plan((scheduler.Placement("n", (5,)),))
    write = scaling.size_of(unit, cluster, 0)
    assert values(write)["replicas"] == 3
    assert values(write)["annotations"] == {labels.RAY_GROUPS: '{"g":{"replicas":2,"wrote":3}}'}


def test_a_worker_that_stays_instead_of_another_holds_its_devices_again() -> None:
    cluster = ray_cluster(group("g", 2, minReplicas=1, maxReplicas=2), enableInTreeAutoscaling=True)
    unit = running("a", "b", cluster=cluster)
    leave(unit, "a")
    before = unit.slot_of("a")
    assert before is not None
    unit.stay(before)
    after = unit.slot_of("a")
    assert after is not None
    assert (after.node, after.devices, after.leaving) == (before.node, before.devices, False)
    assert scaling.size_of(unit, cluster, 0) is None
