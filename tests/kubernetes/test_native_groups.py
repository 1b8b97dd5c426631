"""Groups of Kubernetes' own (scheduling.k8s.io PodGroup) beside kube-scheduler's own gang scheduling, both real."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.conftest import RESTRICTED, install_crds, start_or_skip
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_gangs import create_job
from tools.devcluster import Options, binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

# Of 1.36, which tests build; GPUQUOTA_KUBERNETES=v1.37.2 builds 1.37 (CONTRIBUTING.md)
VERSIONS = {
    (1, 36): ("v1alpha2", "GenericWorkload=true,GangScheduling=true,WorkloadWithJob=true"),
    (1, 37): ("v1beta1", "GenericWorkload=true,WorkloadWithJob=true"),
}
WHOLE = (1, 37)  # from here on kube-scheduler binds no pod of a group while another one of it has a gate

pytestmark = pytest.mark.xdist_group("native-groups")


@pytest.fixture(scope="module")
def native_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A control plane whose Job controller makes a PodGroup of each indexed Job, which kube-scheduler keeps whole."""
    programs = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    version, gates = VERSIONS[binaries.provided_version()]
    flags = {program: [f"--feature-gates={gates}"] for program in programs}
    flags["kube-apiserver"].append(f"--runtime-config=scheduling.k8s.io/{version}=true")
    running = start_or_skip(tmp_path_factory.mktemp("native"), Options(kwok_nodes=0, flags=flags))
    install_crds(running)
    running.make_namespace("gpuquota-system")
    running.make_namespace("gpuquota-reservations", RESTRICTED)
    yield running
    running.stop()


@pytest.fixture
def controlled(native_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    running = Controlled(native_cluster, tmp_path)
    yield running
    running.close()


def create_group(controlled: Controlled, team: str, name: str, **policy: dict[str, int]) -> str:
    version, _ = VERSIONS[binaries.provided_version()]
    path = f"/apis/scheduling.k8s.io/{version}/namespaces/{team}/podgroups"
    controlled.cluster.api.create(path, {"metadata": {"name": name}, "spec": {"schedulingPolicy": policy}})
    return f"{path}/{name}"


def in_group(name: str) -> dict[str, Any]:
    return {"schedulingGroup": {"podGroupName": name}}


def reasons(controlled: Controlled, team: str) -> str:
    """Return what the pods' events say."""
    events = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    return "\n".join(event["message"] for event in events if event["reason"] == "Waiting")


def test_an_indexed_job_starts_whole_when_its_quota_does(controlled: Controlled) -> None:
    controlled.add_nodes(2, gpus=2)
    team = controlled.team(guaranteed=3, limit=3)
    controlled.start()
    job = create_job(controlled, team, 4)
    controlled.wait(lambda: len(controlled.pods(team)) == 4)
    assert all(pod["spec"]["schedulingGroup"]["podGroupName"] for pod in controlled.pods(team).values())
    controlled.wait(lambda: "4 GPUs" in reasons(controlled, team), lambda: reasons(controlled, team))
    assert not controlled.bound(team)
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": 4, "limit": 4}})
    controlled.wait(lambda: len(controlled.bound(team)) == 4, controlled.log)
    controlled.cluster.api.delete(job)


def test_pods_wait_for_their_group_to_be_created(controlled: Controlled) -> None:
    """kube-scheduler does not bind them before either, so they would hold GPUs for nothing."""
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    for name in ("a", "b"):
        controlled.pod(team, name, **in_group("later"))
    controlled.wait(lambda: "PodGroup later" in reasons(controlled, team), controlled.log)
    assert controlled.waiting(team) == {"a", "b"}
    create_group(controlled, team, "later", gang={"minCount": 2})
    controlled.wait(lambda: controlled.bound(team) == {"a", "b"}, controlled.log)


def start_of_three(controlled: Controlled, **policy: dict[str, int]) -> str:
    """A team with two GPUs of quota and three pods of a group."""
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=2, limit=2)
    create_group(controlled, team, "some", **policy)
    for name in ("a", "b", "c"):
        controlled.pod(team, name, **in_group("some"))
    controlled.start()  # all exist when it reads their group
    return team


def test_pods_beyond_the_least_of_a_group_start_when_the_quota_has_room(controlled: Controlled) -> None:
    """With kube-scheduler 1.37 all start then: two without the third would hold GPUs, and never be bound."""
    team = start_of_three(controlled, gang={"minCount": 2})
    whole = binaries.provided_version() >= WHOLE
    controlled.wait(lambda: reasons(controlled, team), controlled.log)
    controlled.wait(lambda: len(controlled.bound(team)) == (0 if whole else 2), controlled.log)
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": 3, "limit": 3}})
    controlled.wait(lambda: len(controlled.bound(team)) == 3, controlled.log)


def test_pods_of_a_group_without_a_gang_start_one_by_one(controlled: Controlled) -> None:
    team = start_of_three(controlled, basic={})
    whole = binaries.provided_version() >= WHOLE
    controlled.wait(lambda: reasons(controlled, team), controlled.log)
    controlled.wait(lambda: len(controlled.bound(team)) == (0 if whole else 2), controlled.log)
    assert len(controlled.waiting(team)) == (3 if whole else 1)


def test_a_gang_outside_of_the_quota_that_kube_scheduler_preempts_is_reported(controlled: Controlled) -> None:
    """A plan that is outdated when it is written sends a pod with a high PriorityClass to a full node."""
    (node,) = controlled.add_nodes(1, gpus=2)
    api = controlled.cluster.api
    outside = controlled.cluster.make_namespace(f"outside-{node}")
    create_group(controlled, outside, "gang", gang={"minCount": 2})
    for name in ("a", "b"):
        controlled.pod(outside, name, gated=False, **in_group("gang"))
    controlled.wait(lambda: len(controlled.bound(outside)) == 2)
    api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": f"high-{node}"}, "value": 1000})
    team = controlled.team(guaranteed=2)
    controlled.start()
    pod = controlled.pod(team, "urgent", priorityClassName=f"high-{node}")
    controlled.wait(lambda: reasons(controlled, team), controlled.log)
    assert controlled.waiting(team) == {"urgent"}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    annotations = {labels.DEVICES: "0", labels.RESERVED_ON: node}
    released = {"schedulingGates": [], "affinity": {"nodeAffinity": required}}
    api.patch(pod, {"metadata": {"annotations": annotations}, "spec": released})

    def reported() -> set[str]:
        events = api.items(f"/api/v1/namespaces/{outside}/events")
        return {one["involvedObject"]["name"] for one in events if one["reason"] == "PreemptedByScheduler"}

    controlled.wait(reported, controlled.log)
    assert reported() <= {"a", "b"}
    for name in controlled.pods(outside):
        api.delete(f"/api/v1/namespaces/{outside}/pods/{name}", 0)
    api.delete(f"/apis/scheduling.k8s.io/v1/priorityclasses/high-{node}")
