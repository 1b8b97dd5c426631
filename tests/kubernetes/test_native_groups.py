"""Groups of Kubernetes' own (scheduling.k8s.io PodGroup) beside kube-scheduler's own gang scheduling, both real."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.kubernetes.conftest import RESTRICTED, install_crds, start_or_skip
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_gangs import create_job
from tools.devcluster import Options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

GATES = "GenericWorkload=true,GangScheduling=true,WorkloadWithJob=true"
API = "/apis/scheduling.k8s.io/v1alpha2"

pytestmark = pytest.mark.xdist_group("native-groups")


@pytest.fixture(scope="module")
def native_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A control plane whose Job controller makes a PodGroup of each indexed Job, which kube-scheduler keeps whole."""
    programs = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    flags = {program: [f"--feature-gates={GATES}"] for program in programs}
    flags["kube-apiserver"].append("--runtime-config=scheduling.k8s.io/v1alpha2=true")
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
    path = f"{API}/namespaces/{team}/podgroups"
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


def test_pods_beyond_the_least_of_a_group_start_when_the_quota_has_room(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=2, limit=2)
    controlled.start()
    create_group(controlled, team, "some", gang={"minCount": 2})
    for name in ("a", "b", "c"):
        controlled.pod(team, name, **in_group("some"))
    controlled.wait(lambda: len(controlled.bound(team)) == 2, controlled.log)
    controlled.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": 3, "limit": 3}})
    controlled.wait(lambda: len(controlled.bound(team)) == 3, controlled.log)


def test_pods_of_a_group_without_a_gang_start_one_by_one(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=2, limit=2)
    controlled.start()
    create_group(controlled, team, "each", basic={})
    for name in ("a", "b", "c"):
        controlled.pod(team, name, **in_group("each"))
    controlled.wait(lambda: len(controlled.bound(team)) == 2, controlled.log)
    assert len(controlled.waiting(team)) == 1
