"""Ray clusters that KubeRay operates, under quota: the real API server and controller, KubeRay's own definitions.

The operator is KubeRay's own if GPUQUOTA_KUBERAY is its program, which `make soak` builds (three minutes); otherwise a
double of it (kuberay.py). GPUQUOTA_KUBERAY_CRDS names the folder with KubeRay's rayclusters.yaml, rayjobs.yaml and
rayservices.yaml, which are not part of this repository.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from tests.kubernetes.controlled import Controlled, is_leaving
from tests.kubernetes.kuberay import Autoscaler, Operator, RealOperator, cluster_spec, elastic, group, ray_path
from tools import kuberay_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.devcluster import DevCluster

PROGRAM = os.environ.get("GPUQUOTA_KUBERAY", "")
Object = dict[str, Any]


@pytest.fixture
def ray(ray_cluster: DevCluster, controlled: Controlled) -> Iterator[Ray]:
    """A controller's cluster with KubeRay's kinds; operators are ended with the test."""
    running = Ray(controlled)
    yield running
    running.close()


class Ray:
    """Ray clusters and jobs of a test, and the operators of its teams."""

    def __init__(self, controlled: Controlled) -> None:
        self.controlled, self.api = controlled, controlled.cluster.api
        self.operators: dict[str, Operator | RealOperator] = {}
        self._autoscalers: list[Autoscaler] = []

    def team(self, **quota: object) -> str:
        """A team with an operator."""
        team = self.controlled.team("ray", **quota)
        self.operators[team] = (
            RealOperator(PROGRAM, self.controlled.cluster, team, self.controlled.folder)
            if PROGRAM
            else Operator(self.api, team)
        )
        self._autoscalers.append(Autoscaler(self.api, team))
        return team

    def close(self) -> None:
        for autoscaler in self._autoscalers:
            autoscaler.close()
        for team, operator in self.operators.items():
            operator.close()
            for plural in ("rayservices", "rayjobs", "rayclusters"):
                for found in self.api.items(ray_path(team, plural)):
                    self.api.delete(ray_path(team, plural, found["metadata"]["name"]))

    def create(self, team: str, kind: str, name: str, spec: Object, written: Object | None = None) -> str:
        """Create an object; its path."""
        plural = f"{kind.lower()}s"
        meta = {"name": name, "labels": written or {}}
        self.api.create(
            ray_path(team, plural), {"apiVersion": "ray.io/v1", "kind": kind, "metadata": meta, "spec": spec}
        )
        return ray_path(team, plural, name)

    def cluster(self, team: str, *groups: Object, name: str = "c", **more: Any) -> str:
        """Create an elastic RayCluster; its path."""
        return self.create(team, "RayCluster", name, cluster_spec(*groups, **more), elastic())

    def job(self, team: str, *groups: Object, written: Object | None = None, **more: Any) -> str:
        """Create a RayJob; its path."""
        spec = {"entrypoint": "python train.py", "shutdownAfterJobFinishes": True, **more}
        return self.create(team, "RayJob", "j", {**spec, "rayClusterSpec": cluster_spec(*groups)}, written)

    def workers(self, team: str) -> set[str]:
        """Names of the team's running GPU workers."""
        return {name for name in self.controlled.bound(team) if "-worker-" in name}

    def until(self, condition: Callable[[], object]) -> None:
        self.controlled.wait(condition, lambda: self.controlled.log()[-6000:] + self._operators_log())

    def _operators_log(self) -> str:
        real = [operator for operator in self.operators.values() if isinstance(operator, RealOperator)]
        return "".join(operator.log.read_text()[-6000:] for operator in real)

    def until_workers(self, team: str, count: int) -> set[str]:
        """The running workers, as soon as they are this many and no other is ending."""
        self.until(lambda: len(self.workers(team)) == count and not self._ending(team))
        return self.workers(team)

    def _ending(self, team: str) -> bool:
        return any(is_leaving(pod) for pod in self.controlled.pods(team).values())

    def group(self, path: str) -> Object:
        """The first worker group of a RayCluster."""
        return dict(self.api.get(path)["spec"]["workerGroupSpecs"][0])


def test_an_elastic_group_borrows_idle_gpus_up_to_its_maximum(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=8)
    team = ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.cluster(team, group("gpu", 2, minReplicas=1, maxReplicas=5))
    ray.until_workers(team, 5)
    assert ray.group(path)["replicas"] == 5
    assert not ray.controlled.waiting(team)


def test_borrowed_workers_leave_by_their_names_in_one_patch_and_no_arbitrary_one_does(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    lender, team = ray.controlled.team(guaranteed=2), ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.cluster(team, group("gpu", 2, minReplicas=1, maxReplicas=4))
    before = ray.until_workers(team, 4)
    for name in ("a", "b"):
        ray.controlled.until_bound(ray.controlled.pod(lender, name))
    after = ray.until_workers(team, 2)
    sized = ray.group(path)
    assert sized["replicas"] == 2
    named = set(sized["scaleStrategy"]["workersToDelete"])
    assert named
    assert named <= before - after  # those of the last patch
    operator = ray.operators[team]
    assert isinstance(operator, RealOperator) or not operator.arbitrary
    for name in ("a", "b"):
        ray.api.delete(f"/api/v1/namespaces/{lender}/pods/{name}")
    assert after < ray.until_workers(team, 4)


def test_a_worker_is_notified_on_its_pod_before_it_is_deleted(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=2)
    lender, team = ray.controlled.team(guaranteed=1), ray.team(guaranteed=1)
    ray.controlled.start()
    ray.cluster(team, group("gpu", 1, minReplicas=1, maxReplicas=2))
    ray.until_workers(team, 2)
    ray.operators[team].pause()  # so that the pod stays
    ray.controlled.pod(lender, "a")

    def notified() -> list[str]:
        pods = ray.controlled.pods(team)
        return [name for name in pods if labels.RECLAIMED_AT in pods[name]["metadata"].get("annotations", {})]

    ray.until(lambda: len(notified()) == 1)


def test_workers_that_an_operator_does_not_delete_are_evicted(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=2)
    lender, team = ray.controlled.team(guaranteed=1), ray.team(guaranteed=1)
    ray.controlled.start()
    ray.cluster(team, group("gpu", 1, minReplicas=1, maxReplicas=2))
    ray.until_workers(team, 2)
    ray.operators[team].pause()
    ray.controlled.until_bound(ray.controlled.pod(lender, "a"))
    assert len(ray.workers(team)) == 1


def test_the_replacement_of_a_worker_that_a_user_deletes_is_released(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=3)
    team = ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.cluster(team, group("gpu", 2, minReplicas=1, maxReplicas=3))
    before = ray.until_workers(team, 3)
    ray.api.delete(f"/api/v1/namespaces/{team}/pods/{min(before)}")
    ray.until(lambda: len(ray.workers(team)) == 3 and ray.workers(team) != before)
    assert ray.group(path)["replicas"] == 3
    assert len(ray.workers(team) & before) == 2


def test_a_users_own_size_is_kept_after_the_controller_has_changed_it(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=8)
    team = ray.team(guaranteed=8)
    ray.controlled.start()
    path = ray.cluster(team, group("gpu", 1, minReplicas=1, maxReplicas=3))
    ray.until_workers(team, 3)
    groups = ray.api.get(path)["spec"]["workerGroupSpecs"]
    groups[0] |= {"replicas": 2, "maxReplicas": 2, "scaleStrategy": {}}
    ray.api.patch(path, {"spec": {"workerGroupSpecs": groups}})
    ray.until_workers(team, 2)
    ray.until(lambda: ray.group(path)["replicas"] == 2)


def test_a_controller_that_restarts_takes_over_the_sizes(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    lender, team = ray.controlled.team(guaranteed=2), ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.cluster(team, group("gpu", 2, minReplicas=1, maxReplicas=4))
    before = ray.until_workers(team, 4)
    ray.controlled.kill()
    ray.controlled.start()
    for name in ("a", "b"):
        ray.controlled.until_bound(ray.controlled.pod(lender, name))
    assert ray.until_workers(team, 2) < before
    assert ray.group(path)["replicas"] == 2


def test_with_rays_autoscaler_its_maximum_is_bound_and_lifted_again(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    lender, team = ray.controlled.team(guaranteed=2), ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.cluster(team, group("gpu", 4, minReplicas=0, maxReplicas=6), enableInTreeAutoscaling=True)
    ray.until_workers(team, 4)
    for name in ("a", "b"):
        ray.controlled.until_bound(ray.controlled.pod(lender, name))
    ray.until(lambda: len(ray.workers(team)) == 2)
    ray.until(lambda: ray.group(path)["maxReplicas"] == 6)
    assert ray.group(path)["replicas"] == 2  # lowered by the autoscaler, not by the controller


def test_a_rayjob_gives_way_by_suspension_and_comes_back(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    lender, team = ray.controlled.team(guaranteed=4), ray.team(guaranteed=0)
    ray.controlled.start()
    path = ray.job(team, group("gpu", 2))
    ray.until_workers(team, 2)
    names = ("a", "b", "c", "d")
    for name in names:
        ray.controlled.until_bound(ray.controlled.pod(lender, name))
    job = ray.api.get(path)
    assert job["spec"]["suspend"]
    assert "takes back" in job["metadata"]["annotations"][labels.SUSPENDED]
    ray.until(lambda: not ray.controlled.pods(team))
    for name in names:
        ray.api.delete(f"/api/v1/namespaces/{lender}/pods/{name}")
    ray.until_workers(team, 2)
    job = ray.api.get(path)
    assert not job["spec"]["suspend"]
    assert labels.SUSPENDED not in job["metadata"].get("annotations", {})
    assert job["status"]["jobDeploymentStatus"] in {"Running", "Initializing"}  # KubeRay itself waits for the dashboard


def test_a_rayjob_with_another_vendors_gpus_is_a_unit_as_well(ray: Ray) -> None:
    """It was a group of pods, of which the head was evicted: KubeRay does not create it again."""
    ray.controlled.add_nodes(1, gpus=0)
    (node,), amounts = ray.controlled.nodes, {"amd.com/gpu": "4"}
    ray.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"allocatable": amounts, "capacity": amounts}})
    policy = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    ray.api.apply(f"{QUOTA_POLICIES}/default", {**policy, "spec": {"gpuResources": [{"name": "amd.com/gpu"}]}})

    def forget() -> None:
        ray.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"gpuResources": None}})

    ray.controlled.on_close.append(forget)
    lender, team = ray.controlled.team(guaranteed=4), ray.team(guaranteed=0)
    ray.controlled.start()
    notes = {labels.GPU_WEIGHTS: "amd.com/gpu=1"}
    amd = group("gpu", 2)
    amd["template"]["metadata"] = {"annotations": notes}
    amd["template"]["spec"]["containers"][0]["resources"]["limits"] = {"amd.com/gpu": "2"}
    path = ray.job(team, amd)
    ray.until_workers(team, 2)
    container = {"name": "main", "image": "none", "resources": {"limits": {"amd.com/gpu": "4"}}}
    owner = ray.controlled.pod(lender, "owner", annotations=notes, containers=[container])
    ray.controlled.until_bound(owner)
    assert "takes back" in ray.api.get(path)["metadata"]["annotations"][labels.SUSPENDED]
    ray.until(lambda: not ray.controlled.pods(team))
    ray.api.delete(owner, 0)
    ray.until_workers(team, 2)


def test_a_rayjob_of_several_groups_starts_all_of_them_together(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    team = ray.team(guaranteed=4)
    ray.controlled.start()
    ray.controlled.until_bound(ray.controlled.pod(team, "blocker"))
    ray.job(team, group("small", 2), group("large", 1, gpus=2))
    ray.controlled.wait(lambda: len(ray.controlled.waiting(team)) == 3)
    ray.controlled.until_bound(ray.controlled.pod(team, "proof"))  # planned with the gang waiting beside it
    assert len(ray.controlled.waiting(team)) == 3
    for name in ("blocker", "proof"):
        ray.api.delete(f"/api/v1/namespaces/{team}/pods/{name}")
    ray.until_workers(team, 3)


def test_an_elastic_rayjob_shrinks_before_it_is_suspended(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    lender, team = ray.controlled.team(guaranteed=3), ray.team(guaranteed=1)
    ray.controlled.start()
    path = ray.job(team, group("gpu", 1, minReplicas=1, maxReplicas=4), written=elastic())
    before = ray.until_workers(team, 4)
    for name in ("a", "b", "c"):
        ray.controlled.until_bound(ray.controlled.pod(lender, name))
    assert ray.until_workers(team, 1) < before
    assert not ray.api.get(path)["spec"].get("suspend", False)


def test_a_users_suspension_is_not_lifted(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=2)
    team = ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.job(team, group("gpu", 2), suspend=True)
    ray.controlled.until_bound(ray.controlled.pod(team, "proof", gpus=2))  # its GPUs are not kept for the job
    assert ray.api.get(path)["spec"]["suspend"]
    ray.api.delete(f"/api/v1/namespaces/{team}/pods/proof")
    ray.api.patch(path, {"spec": {"suspend": False}})
    ray.until_workers(team, 2)


@pytest.mark.parametrize("what", ["cluster", "group"])
def test_a_suspended_cluster_or_group_keeps_no_gpus(ray: Ray, what: str) -> None:
    ray.controlled.add_nodes(1, gpus=2)
    team = ray.team(guaranteed=2)
    ray.controlled.start()
    suspended = [group("gpu", 2, suspend=what == "group")]
    path = ray.cluster(team, *suspended, suspend=what == "cluster")
    ray.controlled.until_bound(ray.controlled.pod(team, "proof", gpus=2))
    ray.api.delete(f"/api/v1/namespaces/{team}/pods/proof")
    ray.api.patch(path, {"spec": {"suspend": False, "workerGroupSpecs": [group("gpu", 2)]}})
    ray.until_workers(team, 2)


def test_a_rayjob_that_cannot_be_suspended_does_not_borrow(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    other, team = ray.controlled.team(guaranteed=3), ray.team(guaranteed=1)
    ray.controlled.start()
    ray.job(team, group("gpu", 2), shutdownAfterJobFinishes=False)
    ray.controlled.wait(lambda: len(ray.controlled.waiting(team)) == 2)
    ray.controlled.until_bound(ray.controlled.pod(other, "proof"))
    assert len(ray.controlled.waiting(team)) == 2


def test_gpus_of_a_finished_rayjob_are_free_when_its_cluster_is(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=2)
    team = ray.team(guaranteed=2)
    ray.controlled.start()
    path = ray.job(team, group("gpu", 2))
    ray.until_workers(team, 2)
    ray.api.patch(f"{path}/status", {"status": {"jobDeploymentStatus": "Complete"}})
    next_one = ray.controlled.pod(team, "next")
    (cluster,) = ray.api.items(ray_path(team, "rayclusters"))
    ray.api.delete(ray_path(team, "rayclusters", cluster["metadata"]["name"]))
    ray.controlled.until_bound(next_one)


def test_a_group_of_several_hosts_is_not_elastic_and_its_user_learns_why(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    team = ray.team(guaranteed=4)
    ray.controlled.start()
    ray.cluster(team, group("gpu", 1, minReplicas=1, maxReplicas=2, numOfHosts=2))
    ray.until_workers(team, 2)
    events = ray.api.items(f"/api/v1/namespaces/{team}/events")
    assert any(event["reason"] == "NotElastic" and "numOfHosts" in event["message"] for event in events)


def test_the_cluster_of_a_rayservice_is_elastic_as_well(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=3)
    team = ray.team(guaranteed=1)
    ray.controlled.start()
    config = cluster_spec(group("gpu", 1, minReplicas=1, maxReplicas=3))
    service = ray.api.get(ray.create(team, "RayService", "s", {"rayClusterConfig": config}, elastic()))
    owner = {"apiVersion": "ray.io/v1", "kind": "RayService", "name": "s", "uid": service["metadata"]["uid"]}
    meta = {"name": "s-1", "labels": elastic(), "ownerReferences": [{**owner, "controller": True}]}
    body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta, "spec": config}
    ray.api.create(ray_path(team, "rayclusters"), body)  # as KubeRay does, with the service's labels
    ray.until_workers(team, 3)


def test_a_cluster_without_the_label_keeps_its_size(ray: Ray) -> None:
    ray.controlled.add_nodes(1, gpus=4)
    team = ray.team(guaranteed=4)
    ray.controlled.start()
    path = ray.create(team, "RayCluster", "c", cluster_spec(group("gpu", 2, minReplicas=1, maxReplicas=4)))
    ray.until_workers(team, 2)
    ray.controlled.until_bound(ray.controlled.pod(team, "proof", gpus=2))
    assert ray.group(path)["replicas"] == 2


def test_the_script_for_real_clusters_passes(
    ray: Ray, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.controlled.add_nodes(1, gpus=2)
    lender, borrower = ray.team(guaranteed=1), ray.team(guaranteed=1)
    ray.controlled.start()
    written = kuberay_check.Check.template

    def gated(check: kuberay_check.Check, name: str, *, gpus: int) -> Object:
        """The webhook is not installed here."""
        template = written(check, name, gpus=gpus)
        return {"spec": template["spec"] | ({"schedulingGates": [{"name": labels.QUOTA_GATE}]} if gpus else {})}

    monkeypatch.setattr(kuberay_check.Check, "template", gated)
    arguments = [lender, borrower, "--timeout", "30", "--kubeconfig", str(ray.controlled.cluster.kubeconfig)]
    kuberay_check.main(arguments)
    printed = capsys.readouterr().out
    assert "it has grown again" in printed
    assert "it runs with 2 workers again" in printed
