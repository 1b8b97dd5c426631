"""Admitted pods that cannot start: their users learn why at once, and their GPUs are given on after the timeout."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.pods import recovery
from tests.kubernetes.controlled import pod_body
from tests.kubernetes.detached import PODS, Detached, detached
from tests.kubernetes.installation import batch_jobs_of
from tests.kubernetes.test_workers_ready import complain, stuck
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

GPU = "nvidia.com/gpu"
OTHER_GATE = {"schedulingGates": [{"name": labels.QUOTA_GATE}, {"name": "example.com/later"}]}
CLAIM = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "never"}}]}


def events(controlled: Controlled, team: str, name: str) -> dict[str, str]:
    found = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    return {e["reason"]: e["message"] for e in found if e["involvedObject"]["name"] == name}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (OTHER_GATE, "scheduling gate example.com/later of another controller"),
        ({"schedulerName": "nobody"}, "scheduler nobody has not bound it"),
        (CLAIM, 'persistentvolumeclaim "never" not found'),
    ],
    ids=["gate", "scheduler", "volume"],
)
def test_a_pod_that_is_not_bound_gives_its_gpus_on(controlled: Controlled, spec: dict[str, Any], why: str) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1, limit=1)
    controlled.start("--workers-ready-timeout=6")
    controlled.pod(team, "hangs", **spec)
    controlled.wait(lambda: "NotStarting" in events(controlled, team, "hangs"), controlled.log)
    assert why in events(controlled, team, "hangs")["NotStarting"]
    assert "hangs" in controlled.pods(team)
    controlled.until_bound(controlled.pod(team, "next"))
    assert "its GPUs are released" in events(controlled, team, "hangs")["NotReady"]


def test_a_bare_pod_whose_image_never_comes_gives_its_gpus_on(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start("--workers-ready-timeout=6")
    path = controlled.pod(team, "hangs", annotations=stuck()["metadata"]["annotations"])
    complain(controlled, path)
    controlled.wait(lambda: "NotStarting" in events(controlled, team, "hangs"), controlled.log)
    controlled.until_bound(controlled.pod(team, "next"))


def test_a_job_does_not_fail_by_a_pod_that_does_not_start(controlled: Controlled) -> None:
    """An eviction is a failure for a Job also if the pod was never bound."""
    controlled.add_nodes(1, gpus=1)
    team, api = controlled.team(guaranteed=1, limit=1), controlled.cluster.api
    controlled.start("--workers-ready-timeout=6")
    template = {"spec": {**pod_body("x", schedulerName="nobody")["spec"], "restartPolicy": "Never"}}
    api.create(batch_jobs_of(team), {"metadata": {"name": "hangs"}, "spec": {"backoffLimit": 0, "template": template}})
    controlled.wait(lambda: {"Suspended", "Resumed"} <= events(controlled, team, "hangs").keys(), controlled.log)
    assert "failed" not in api.get(f"{batch_jobs_of(team)}/hangs")["status"]
    controlled.wait(lambda: controlled.pods(team), controlled.log)


def test_a_node_that_lost_devices_gets_no_pod_until_enough_are_free(controlled: Controlled) -> None:
    (node,) = controlled.add_nodes(1, gpus=8)
    team, other = controlled.team(guaranteed=8), controlled.team(guaranteed=2)
    controlled.start()
    for number in range(7):
        controlled.until_bound(controlled.pod(team, f"p{number}"))
    controlled.cluster.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"allocatable": {GPU: "4"}}})
    controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/p0")  # it held a device that the node still has
    controlled.pod(other, "next", nodeSelector={"kubernetes.io/hostname": node})
    (proof,) = controlled.add_nodes(1, gpus=1)
    controlled.until_bound(controlled.pod(team, "proof", nodeSelector={"kubernetes.io/hostname": proof}))
    assert controlled.waiting(other) == {"next"}
    for number in range(1, 4):
        controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/p{number}")
    controlled.wait(lambda: controlled.bound(other) == {"next"}, controlled.log)
    controlled.cluster.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"allocatable": {GPU: "8"}}})


def test_a_pod_whose_gpu_has_failed_is_reported(controlled: Controlled) -> None:
    controlled.add_nodes(2, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start()
    path = controlled.pod(team, "works")
    pod = controlled.until(path, lambda pod: pod["status"].get("containerStatuses"))
    failed = {"name": GPU, "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}]}
    statuses = [{**one, "allocatedResourcesStatus": [failed]} for one in pod["status"]["containerStatuses"]]
    controlled.cluster.api.patch(f"{path}/status", {"status": {"containerStatuses": statuses}})
    controlled.wait(lambda: "GpuFailed" in events(controlled, team, "works"), controlled.log)
    assert "GPU-1" in events(controlled, team, "works")["GpuFailed"]
    assert "works" in controlled.bound(team)  # nobody would create it again


def with_gpu(name: str, health: str, owner: str) -> dict[str, Any]:
    """A pod that runs on a node with one GPU, as its kubelet reports it."""
    owners = [{"apiVersion": "apps/v1", "kind": owner, "name": "set", "uid": "set", "controller": True}]
    container = {"name": "main", "image": "none", "resources": {"limits": {GPU: "1"}}}
    gpu = {"name": GPU, "resources": [{"resourceID": "GPU-1", "health": health}]}
    status = {"name": "main", "ready": True, "state": {"running": {}}, "allocatedResourcesStatus": [gpu]}
    return {
        "metadata": {
            "name": name,
            "namespace": "a",
            "uid": name,
            "annotations": {labels.DEVICES: "0"},
            **({"ownerReferences": owners} if owner else {}),
        },
        "spec": {"nodeName": "node", "containers": [container]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@pytest.mark.parametrize(
    ("name", "owner", "later", "evicted"),
    [
        ("failed", "ReplicaSet", "Unhealthy", True),
        ("healed", "ReplicaSet", "Healthy", False),
        ("bare", "", "Unhealthy", False),
    ],
)
def test_a_pod_whose_gpu_stays_failed_is_replaced_as_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: str, later: str, *, evicted: bool
) -> None:
    """The bound is shortened; a pod that nobody creates again is only reported, since it would lose its work."""
    monkeypatch.setattr(recovery, "GPU_FAILED_S", 0.2)
    monkeypatch.setattr(recovery, "REPORT_S", 0.05)

    async def scenario() -> list[str]:
        async with detached() as test:
            test.node(gpus=2)
            test.team("a")
            await test.start()
            test.see(PODS, with_gpu(name, "Unhealthy", owner))
            await asyncio.sleep(0.1)
            test.see(PODS, with_gpu(name, later, owner))
            marker = asyncio.get_running_loop().time() + 0.4
            async with asyncio.timeout(TIMEOUT_S):
                while asyncio.get_running_loop().time() < marker or (evicted and not evictions(test)):
                    await asyncio.sleep(0.01)
            return evictions(test)

    def evictions(test: Detached) -> list[str]:
        return [path for verb, path, _ in test.connection.asked if verb == "POST" and path.endswith("/eviction")]

    assert set(asyncio.run(scenario())) == ({f"/api/v1/namespaces/a/pods/{name}/eviction"} if evicted else set())
