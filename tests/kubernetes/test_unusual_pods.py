"""Pods that are created, resized, relabelled or deleted in unusual ways are counted as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.convert.owners import JOBSET_LABEL
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import gpus_of, resource_requests_of
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
from tests.kubernetes.controlled import pod_body
from tests.kubernetes.installation import QUOTAS

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

GPU = labels.GPU_RESOURCE
HOST = "kubernetes.io/hostname"


def container(gpus: int, name: str = "main", cpu: str = "1", **more: Any) -> dict[str, Any]:
    amounts = {GPU: str(gpus), "cpu": cpu} if gpus else {"cpu": cpu}
    return {"name": name, "image": "none", "resources": {"limits": amounts, "requests": amounts}, **more}


def sidecar(gpus: int, cpu: str = "1") -> dict[str, Any]:
    return container(gpus, "sidecar", cpu, restartPolicy="Always")


@pytest.mark.parametrize(
    ("spec", "gpus", "milli"),
    [
        ({"containers": [container(1)], "initContainers": [sidecar(2, "3")]}, 3, 4000),
        ({"containers": [container(1)], "initContainers": [container(4, "first", "8")]}, 4, 8000),
        ({"containers": [container(1)], "initContainers": [sidecar(2), container(3, "second", "9")]}, 5, 10_000),
        ({"containers": [container(2)], "initContainers": [container(3, "first"), sidecar(1)]}, 3, 2000),
    ],
    ids=["sidecar", "init", "sidecar, then init", "init, then sidecar"],
)
def test_gpus_and_cpus_of_init_containers_are_counted_as_kube_scheduler_does(
    controlled: Controlled, spec: dict[str, Any], gpus: int, milli: int
) -> None:
    counted = msgspec.convert(spec, PodSpec)
    assert (gpus_of(counted), resource_requests_of(counted).cpu) == (gpus, milli)
    (node,) = controlled.add_nodes(1, gpus=gpus)
    team = controlled.team(guaranteed=gpus + 1)
    controlled.start()
    bound = controlled.until_bound(controlled.pod(team, "first", **spec))
    assert bound["metadata"]["annotations"][labels.DEVICES].count(",") == gpus - 1
    controlled.pod(team, "second", nodeSelector={HOST: node})
    (other,) = controlled.add_nodes(1, gpus=1)
    controlled.until_bound(controlled.pod(team, "proof", nodeSelector={HOST: other}))
    assert controlled.waiting(team) == {"second"}


def test_static_pods_and_those_of_a_daemon_set_are_counted_on_their_nodes(controlled: Controlled) -> None:
    """Neither is gated: a kubelet creates the mirror of a static pod, a DaemonSet outside the quota pins its pods."""
    (node,) = controlled.add_nodes(1, gpus=3)
    team = controlled.team(guaranteed=3)
    system = controlled.cluster.make_namespace("system-pods")
    mirror = pod_body("static", 1, gated=False, annotations={"kubernetes.io/config.mirror": "x"}, nodeName=node)
    kubelet = controlled.cluster.api
    kubelet.create(f"/api/v1/namespaces/{system}/pods", mirror)
    sets = f"/apis/apps/v1/namespaces/{system}/daemonsets"
    template = {
        "metadata": {"labels": {"app": "d"}},
        "spec": {**pod_body("x", gated=False)["spec"], "nodeSelector": {HOST: node}},
    }
    spec = {"selector": {"matchLabels": {"app": "d"}}, "template": template}
    controlled.cluster.api.create(sets, {"metadata": {"name": "monitor"}, "spec": spec})
    controlled.wait(lambda: len(controlled.bound(system)) == 2)
    controlled.start()
    controlled.pod(team, "large", gpus=2)
    controlled.until_bound(controlled.pod(team, "small"))
    assert controlled.waiting(team) == {"large"}
    controlled.cluster.api.delete(f"{sets}/monitor")
    controlled.wait(lambda: len(controlled.pods(system)) == 1)
    controlled.cluster.api.delete(f"/api/v1/namespaces/{system}/pods/static", 0)
    controlled.wait(lambda: controlled.bound(team) == {"large", "small"}, controlled.log)


def test_a_pod_that_is_resized_in_place_counts_with_its_new_request(controlled: Controlled) -> None:
    (node,) = controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    controlled.start()
    cpu = controlled.cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]["cpu"]
    first = controlled.pod(team, "first", containers=[container(1, cpu="1")])
    pod = controlled.until(first, lambda pod: pod["status"].get("containerStatuses"))
    amounts = container(1, cpu="1")["resources"]  # as the kubelet reports them, so that the API server allows a resize
    statuses = [{**one, "resources": amounts} for one in pod["status"]["containerStatuses"]]
    controlled.cluster.api.patch(f"{first}/status", {"status": {"containerStatuses": statuses}})
    grown = {"cpu": str(int(cpu) - 2), GPU: "1"}
    change = {"spec": {"containers": [{"name": "main", "resources": {"requests": grown, "limits": grown}}]}}
    controlled.cluster.api.patch(f"{first}/resize", change, "application/strategic-merge-patch+json")
    controlled.pod(team, "second", containers=[container(1, cpu="4")])
    controlled.until_bound(controlled.pod(team, "third", containers=[container(1, cpu="1")]))
    assert controlled.waiting(team) == {"second"}
    controlled.cluster.api.delete(first)
    controlled.wait(lambda: controlled.bound(team) == {"second", "third"}, controlled.log)


def test_names_with_dots_are_planned_also_with_shares(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    name = "train.v1.2-long." + "x" * 60
    controlled.until_bound(controlled.pod(team, name))
    share = controlled.pod(team, f"share.{name}", gpus=0, annotations={"gpu-fraction": "0.5"})
    controlled.until(share, lambda pod: not pod["spec"].get("schedulingGates"))


def test_the_waiting_pods_of_a_deleted_quota_are_explained_and_start_with_the_next_one(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team, other = controlled.team(guaranteed=1, limit=1), controlled.team(guaranteed=1)
    controlled.start()
    controlled.until_bound(controlled.pod(team, "runs"))
    waits = controlled.pod(team, "waits")
    controlled.cluster.api.delete(f"{QUOTAS}/{team}")
    controlled.cluster.api.until_gone(f"{QUOTAS}/{team}")
    controlled.until_bound(controlled.pod(other, "proof"))
    assert controlled.waiting(team) == {"waits"}
    assert controlled.bound(team) == {"runs"}

    def explained() -> bool:
        found = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
        return any(e["reason"] == "Waiting" and e["involvedObject"]["name"] == "waits" for e in found)

    controlled.wait(explained, controlled.log)
    controlled.cluster.api.delete(waits)
    controlled.cluster.api.until_gone(waits, 10)


def test_a_victim_that_crashes_in_a_loop_holds_its_gpu_until_its_object_is_gone(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    borrower, lender = controlled.team("borrower", guaranteed=0), controlled.team("lender", guaranteed=1)
    controlled.start()
    path = controlled.pod(borrower, "crashes", annotations={"devcluster/does-not-start": "yes"})
    controlled.until_bound(path)
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    status = {"name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 7, "state": waiting}
    controlled.cluster.api.patch(f"{path}/status", {"status": {"phase": "Running", "containerStatuses": [status]}})
    controlled.cluster.api.patch(path, {"metadata": {"finalizers": ["example.com/keeps"]}})
    controlled.pod(lender, "owner")
    controlled.until(path, lambda pod: "deletionTimestamp" in pod["metadata"])
    other = controlled.team(guaranteed=1)
    controlled.add_nodes(1, gpus=1)
    controlled.wait(lambda: controlled.bound(lender) == {"owner"}, controlled.log)  # on the node that was added
    controlled.pod(other, "next")
    controlled.wait(lambda: "next" in controlled.waiting(other))
    controlled.cluster.api.patch(path, {"metadata": {"finalizers": None}})
    controlled.wait(lambda: controlled.bound(other) == {"next"}, controlled.log)


def test_a_running_pod_is_counted_whatever_becomes_of_its_labels_and_its_namespace(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team, other = controlled.team(guaranteed=2, limit=2), controlled.team(guaranteed=1)
    namespace = f"/api/v1/namespaces/{team}"
    controlled.cluster.api.patch(namespace, {"metadata": {"labels": {labels.MANAGED: "true"}}})
    controlled.start()
    group: dict[str, Any] = {"labels_": {labels.POD_GROUP: "gang"}, "annotations": {labels.POD_GROUP_SIZE: "2"}}
    first, _ = (controlled.pod(team, name, **group) for name in ("first", "second"))
    controlled.wait(lambda: controlled.bound(team) == {"first", "second"})
    controlled.cluster.api.patch(namespace, {"metadata": {"labels": {labels.MANAGED: None}}})
    elsewhere = {labels.POD_GROUP: "other", JOBSET_LABEL: "another", labels.MANAGED: None}
    controlled.cluster.api.patch(first, {"metadata": {"labels": elsewhere}})
    controlled.pod(team, "third")
    controlled.until_bound(controlled.pod(other, "proof"))
    assert controlled.waiting(team) == {"third"}
    controlled.kill()
    controlled.start()
    assert controlled.waiting(team) == {"third"}
    controlled.cluster.api.delete(first)
    controlled.wait(lambda: controlled.bound(team) == {"second", "third"}, controlled.log)
