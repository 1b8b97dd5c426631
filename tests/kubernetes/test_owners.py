"""The number of pods that start together, by their owner; through the real API server and controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.convert.owners import (
    ALONE,
    INDEX_ANNOTATION,
    JOBSET_LABEL,
    GangSize,
    Owner,
    Rest,
    gang_size,
    owner_of,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from tests.kubernetes.controlled import Controlled, pod_body
from tests.kubernetes.installation import batch_jobs_of

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

INDEXED = {INDEX_ANNOTATION: "0"}


def template(gpus: int) -> dict[str, Any]:
    limits = {"limits": {labels.GPU_RESOURCE: gpus}} if gpus else {}
    return {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "main", "resources": limits}]}}


def job(gpus: int = 1, **spec: Any) -> dict[str, Any]:
    return {"template": template(gpus), **spec}


def replicas(count: int | None, gpus: int, **more: Any) -> dict[str, Any]:
    return {**({} if count is None else {"replicas": count}), "template": template(gpus), **more}


def replicated(count: int, parallelism: int, gpus: int, name: str = "x", **more: Any) -> dict[str, Any]:
    return {"name": name, "replicas": count, "template": {"spec": job(gpus, parallelism=parallelism)}, **more}


def replicated_status(**states: dict[str, int]) -> dict[str, Any]:
    return {"replicatedJobsStatus": [{"name": name, **state} for name, state in states.items()]}


def leader_workers(size: int, **more: Any) -> dict[str, Any]:
    return {"replicas": 2, "leaderWorkerTemplate": {"size": size, "workerTemplate": template(1), **more}}


TORCH = {"pytorchReplicaSpecs": {"Master": replicas(1, 1), "Worker": replicas(3, 2)}}
MPI = {"mpiReplicaSpecs": {"Launcher": replicas(1, 0), "Worker": replicas(4, 8)}}
JOBSET = {"replicatedJobs": [replicated(2, 3, 1), replicated(1, 1, 0)]}
MPI_LAUNCHER = {"mpiReplicaSpecs": {"Launcher": replicas(1, 1), "Worker": replicas(2, 1)}}
INDEXED_JOB = job(parallelism=4, completions=4, completionMode="Indexed")
STAGES = {"replicatedJobs": [replicated(2, 1, 1, "driver"), replicated(1, 3, 1, "workers")]}
IN_ORDER = {"startupPolicy": {"startupPolicyOrder": "InOrder"}}
NEEDS_READY, NEEDS_END = (
    {
        "replicatedJobs": [
            replicated(2, 1, 1, "driver"),
            replicated(1, 3, 1, "workers", dependsOn=[{"name": "driver", "status": status}]),
        ]
    }
    for status in ("Ready", "Complete")
)
TWO_THEN_THREE = GangSize(2, 2, (Rest(3, 1),))
READY = {"startupPolicy": "LeaderReady"}
NO_GPU_LEADER = leader_workers(4, leaderTemplate=template(0))
LAST = {"launcherCreationPolicy": "WaitForWorkersReady"}
ORDERED = STAGES | IN_ORDER
LEAST = {"runPolicy": {"schedulingPolicy": {"minAvailable": 2}}}
RAY = {"headGroupSpec": {"template": template(0)}, "workerGroupSpecs": [replicas(4, 1, minReplicas=2, numOfHosts=2)]}


@pytest.mark.parametrize(
    ("kind", "spec", "expected"),
    [
        ("batch/v1 Job", job(parallelism=3, completions=3, completionMode="Indexed"), GangSize(3, 3)),
        ("batch/v1 Job", job(parallelism=3, completions=9, completionMode="Indexed"), GangSize(1, 3)),
        ("batch/v1 Job", job(parallelism=3, completions=2), GangSize(1, 2)),
        ("batch/v1 Job", job(), ALONE),
        ("batch/v1 Job", job(gpus=0, parallelism=3, completions=3, completionMode="Indexed"), ALONE),
        ("apps/v1 ReplicaSet", replicas(4, 1), GangSize(1, 4)),
        ("apps/v1 StatefulSet", replicas(None, 1), ALONE),
        ("jobset.x-k8s.io/v1alpha2 JobSet", JOBSET, GangSize(6, 6)),
        ("leaderworkerset.x-k8s.io/v1 LeaderWorkerSet", leader_workers(4), GangSize(4, 4)),
        ("leaderworkerset.x-k8s.io/v1 LeaderWorkerSet", leader_workers(4, leaderTemplate=template(0)), GangSize(3, 3)),
        ("leaderworkerset.x-k8s.io/v1 LeaderWorkerSet", leader_workers(4) | READY, GangSize(1, 1, (Rest(3, 1),))),
        ("leaderworkerset.x-k8s.io/v1 LeaderWorkerSet", NO_GPU_LEADER | READY, GangSize(3, 3)),
        ("apps/v1 StatefulSet", replicas(4, 2), GangSize(1, 1, (Rest(3, 2),))),
        ("apps/v1 StatefulSet", replicas(4, 2, podManagementPolicy="Parallel"), GangSize(1, 4)),
        ("jobset.x-k8s.io/v1alpha2 JobSet", ORDERED, TWO_THEN_THREE),
        ("jobset.x-k8s.io/v1alpha2 JobSet", NEEDS_READY, TWO_THEN_THREE),
        ("jobset.x-k8s.io/v1alpha2 JobSet", NEEDS_END, GangSize(2, 2)),
        ("kubeflow.org/v2beta1 MPIJob", MPI_LAUNCHER | LAST, GangSize(2, 2, (Rest(1, 1),))),
        ("kubeflow.org/v2beta1 MPIJob", MPI_LAUNCHER, GangSize(3, 3)),
        ("leaderworkerset.x-k8s.io/v1 LeaderWorkerSet", leader_workers(1, workerTemplate=template(0)), ALONE),
        ("kubeflow.org/v1 PyTorchJob", TORCH, GangSize(4, 4)),
        ("kubeflow.org/v1 PyTorchJob", TORCH | LEAST, GangSize(2, 2)),
        ("kubeflow.org/v2beta1 MPIJob", MPI, GangSize(4, 4)),
        ("ray.io/v1 RayCluster", RAY, GangSize(8, 8)),
        ("ray.io/v1 RayCluster", RAY | {"enableInTreeAutoscaling": True}, GangSize(4, 4)),
        ("ray.io/v1 RayCluster", RAY | {"headGroupSpec": {"template": template(1)}}, GangSize(9, 9)),
        ("scheduling.x-k8s.io/v1alpha1 PodGroup", {"minMember": 5}, GangSize(5, 5)),
        ("apps/v1 DaemonSet", {}, ALONE),
        ("kubeflow.org/v1 PyTorchJob", {"pytorchReplicaSpecs": 7}, ALONE),
    ],
)  # fmt: skip
def test_an_owner_says_how_many_of_its_pods_start_together(kind: str, spec: dict[str, Any], expected: GangSize) -> None:
    version, _, name = kind.partition(" ")
    assert gang_size(Owner(version, name, "team", "x"), msgspec.json.encode({"spec": spec})) == expected


@pytest.mark.parametrize(
    ("kind", "spec", "status", "expected"),
    [
        ("batch/v1 Job", INDEXED_JOB, {"succeeded": 1}, GangSize(3, 3)),
        ("batch/v1 Job", INDEXED_JOB, {"succeeded": 1, "failedIndexes": "0,2-3"}, ALONE),
        ("batch/v1 Job", INDEXED_JOB, {"failedIndexes": "nonsense"}, ALONE),
        ("kubeflow.org/v1 PyTorchJob", TORCH, {"replicaStatuses": {"Worker": {"succeeded": 2}}}, GangSize(2, 2)),
        ("jobset.x-k8s.io/v1alpha2 JobSet", ORDERED, replicated_status(driver={"ready": 1}), TWO_THEN_THREE),
        ("jobset.x-k8s.io/v1alpha2 JobSet", ORDERED, replicated_status(driver={"ready": 2}), GangSize(5, 5)),
        ("jobset.x-k8s.io/v1alpha2 JobSet", NEEDS_READY, replicated_status(driver={"succeeded": 2}), GangSize(3, 3)),
        ("jobset.x-k8s.io/v1alpha2 JobSet", NEEDS_END, replicated_status(driver={"ready": 2}), GangSize(2, 2)),
        ("jobset.x-k8s.io/v1alpha2 JobSet", NEEDS_END, replicated_status(driver={"succeeded": 2}), GangSize(3, 3)),
    ],
)  # fmt: skip
def test_what_has_succeeded_is_not_waited_for_and_what_is_ready_lets_others_start(
    kind: str, spec: dict[str, Any], status: dict[str, Any], expected: GangSize
) -> None:
    version, _, name = kind.partition(" ")
    body = msgspec.json.encode({"spec": spec, "status": status})
    assert gang_size(Owner(version, name, "team", "x"), body) == expected


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_an_owner_that_says_nonsense_leaves_its_pods_alone(value: object) -> None:
    for field in ("parallelism", "pytorchReplicaSpecs", "template", "completions"):
        for kind in (Owner("batch/v1", "Job", "t", "x"), Owner("kubeflow.org/v1", "PyTorchJob", "t", "x")):
            assert gang_size(kind, msgspec.json.encode({"spec": {field: value}})).pods >= 1


def owned(api_version: str, kind: str, **meta: Any) -> Owner | None:
    reference = {"apiVersion": api_version, "kind": kind, "name": "x", "uid": "u", "controller": True}
    body = {"metadata": {"name": "p", "namespace": "team", "ownerReferences": [reference], **meta}}
    return owner_of(msgspec.convert(body, Pod))


def test_only_owners_that_could_say_more_than_one_are_asked() -> None:
    assert owned("batch/v1", "Job") is None
    assert owned("apps/v1", "StatefulSet") is None
    assert owned("example.com/v1", "Thing") is None
    indexed = owned("batch/v1", "Job", annotations=INDEXED)
    assert indexed is not None
    assert indexed.path == "/apis/batch/v1/namespaces/team/jobs/x"
    in_group = owned("apps/v1", "StatefulSet", labels={labels.POD_GROUP: "g"})
    assert in_group is not None
    assert in_group.path == "/apis/apps/v1/namespaces/team/statefulsets/x"


def test_a_jobset_a_leader_worker_set_and_a_pod_group_go_before_the_job_that_made_the_pod() -> None:
    jobset = owned("batch/v1", "Job", labels={"jobset.sigs.k8s.io/jobset-name": "js"}, annotations=INDEXED)
    assert jobset is not None
    assert jobset.path == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/js"
    named = {"leaderworkerset.sigs.k8s.io/name": "lws", "leaderworkerset.sigs.k8s.io/group-index": "1"}
    replica = owned("apps/v1", "StatefulSet", labels=named)
    assert replica is not None
    assert replica.path == "/apis/leaderworkerset.x-k8s.io/v1/namespaces/team/leaderworkersets/lws"
    assert replica.group == "LeaderWorkerSet/lws/1"
    group = owned("kubeflow.org/v1", "PyTorchJob", labels={"scheduling.x-k8s.io/pod-group": "pg"})
    assert group is not None
    assert group.group == "PodGroup/pg"


def test_the_pods_of_an_indexed_job_start_together_or_not_at_all(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    blocker = controlled.pod(team, "blocker", gpus=2)
    controlled.start()
    controlled.until_bound(blocker)
    jobs = batch_jobs_of(team)
    body = {**pod_body("x")["spec"], "restartPolicy": "Never"}
    spec = {"parallelism": 3, "completions": 3, "completionMode": "Indexed", "template": {"spec": body}}
    controlled.cluster.api.create(jobs, {"metadata": {"name": "train"}, "spec": spec})
    controlled.wait(lambda: len(controlled.waiting(team)) == 3)
    controlled.until_bound(controlled.pod(team, "small"))  # it was planned with the job waiting beside it
    assert len(controlled.waiting(team)) == 3
    controlled.kill()
    controlled.cluster.api.delete(blocker)
    controlled.start()
    controlled.wait(lambda: len(controlled.bound(team)) == 4, lambda: controlled.log()[-3000:])
    controlled.cluster.api.delete(f"{jobs}/train")


def test_a_training_operators_pods_differ_and_start_together(controlled: Controlled) -> None:
    install_training_jobs(controlled.cluster)
    controlled.add_nodes(1, gpus=6)
    team = controlled.team(guaranteed=6)
    blocker = controlled.pod(team, "blocker", gpus=2)
    controlled.start()
    controlled.until_bound(blocker)
    path = f"/apis/kubeflow.org/v1/namespaces/{team}/pytorchjobs"
    spec = {"pytorchReplicaSpecs": {"Master": replicas(1, 1), "Worker": replicas(2, 2)}}
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": spec}
    uid = controlled.cluster.api.create(path, body)["metadata"]["uid"]
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "train", "uid": uid, "controller": True}
    controlled.pod(team, "master", gpus=1, owner=owner)
    controlled.pod(team, "worker-0", gpus=2, owner=owner)
    controlled.until_bound(controlled.pod(team, "small"))
    controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/small", 0)
    assert controlled.waiting(team) == {"master", "worker-0"}  # both would fit, but not all pods of the job exist
    controlled.pod(team, "worker-1", gpus=2, owner=owner)
    controlled.until_bound(controlled.pod(team, "proof"))
    assert controlled.waiting(team) == {"master", "worker-0", "worker-1"}
    controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/proof", 0)
    controlled.cluster.api.delete(blocker)
    controlled.wait(lambda: not controlled.waiting(team), lambda: controlled.log()[-3000:])
    devices = {n: p["metadata"]["annotations"][labels.DEVICES].count(",") for n, p in controlled.pods(team).items()}
    assert devices == {"master": 0, "worker-0": 1, "worker-1": 1}


def test_a_pod_whose_owner_cannot_be_read_starts_alone(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    controlled.until_bound(controlled.pod(team, "orphan", labels_={JOBSET_LABEL: "gone"}))  # JobSet is not installed
    assert "planned one by one" in controlled.log()


def test_a_replica_set_of_which_a_label_makes_a_group_says_how_large_it_is(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    blocker = controlled.pod(team, "blocker")
    controlled.start()
    controlled.until_bound(blocker)
    sets = f"/apis/apps/v1/namespaces/{team}/replicasets"
    body = {"metadata": {"labels": {"app": "x", labels.POD_GROUP: "g"}}, "spec": pod_body("x")["spec"]}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "x"}}, "template": body}
    controlled.cluster.api.create(sets, {"metadata": {"name": "set"}, "spec": spec})
    controlled.wait(lambda: len(controlled.waiting(team)) == 2)
    controlled.until_bound(controlled.pod(team, "small"))  # it was planned with the group waiting beside it
    assert len(controlled.waiting(team)) == 2
    for name in ("blocker", "small"):
        controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{name}")
    controlled.wait(lambda: len(controlled.bound(team)) == 2, lambda: controlled.log()[-3000:])
    controlled.cluster.api.delete(f"{sets}/set")


def install_training_jobs(cluster: DevCluster) -> None:
    """The operator's kind, as far as we look at it."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "pytorchjobs.kubeflow.org"},
        "spec": {
            "group": "kubeflow.org",
            "scope": "Namespaced",
            "names": {"kind": "PyTorchJob", "plural": "pytorchjobs"},
            "versions": [version],
        },
    }
    cluster.api.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pytorchjobs.kubeflow.org", definition)
    cluster.api.until_served("/apis/kubeflow.org/v1/namespaces/default/pytorchjobs")


def test_why_a_pod_waits_is_told_on_it_once(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1, limit=1)
    controlled.start()
    controlled.until_bound(controlled.pod(team, "runs"))
    controlled.pod(team, "waits")
    controlled.pod(team, "lonely", labels_={labels.POD_GROUP: "g"}, annotations={labels.POD_GROUP_SIZE: "2"})

    def reported() -> dict[str, list[str]]:
        events = controlled.cluster.api.items(f"/api/v1/namespaces/{team}/events")
        why = [(e["involvedObject"]["name"], e["message"]) for e in events if e["reason"] == "Waiting"]
        return {name: [message for who, message in why if who == name] for name, _ in why}

    controlled.wait(lambda: set(reported()) == {"waits", "lonely"}, lambda: controlled.log()[-3000:])
    found = reported()
    assert "limit of 1" in found["waits"][0]
    assert found["lonely"] == ["1 of the 2 pods of group g exist; they start together"]
    for i in range(3):  # each of them is another plan, with the same result
        controlled.pod(team, f"more-{i}")
    controlled.wait(lambda: len(reported()) == 5)
    assert len(reported()["waits"]) == 1
