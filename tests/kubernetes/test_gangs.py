"""Groups of real controllers: what is replaced, resumed, added or created later never waits beside idle GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.convert.owners import LEADER_WORKER_LABEL, REPLICA_LABEL
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.controlled import pod_body
from tests.kubernetes.installation import batch_jobs_of
from tests.kubernetes.test_owners import install_training_jobs, replicas

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

GROUP: dict[str, Any] = {"labels_": {labels.POD_GROUP: "gang"}}
LABELS = {"app": "x", labels.POD_GROUP: "gang"}
STAYS_UNREADY = {"devcluster/does-not-start": "true"}


def sized(size: int) -> dict[str, Any]:
    return {**GROUP, "annotations": {labels.POD_GROUP_SIZE: str(size)}}


def create_job(controlled: Controlled, team: str, pods: int, **spec: Any) -> str:
    jobs = batch_jobs_of(team)
    template = {"spec": {**pod_body("x")["spec"], "restartPolicy": "Never"}}
    counts = {"parallelism": pods, "completions": pods, "completionMode": "Indexed"}
    controlled.cluster.api.create(
        jobs, {"metadata": {"name": "train"}, "spec": {**counts, "template": template, **spec}}
    )
    return f"{jobs}/train"


def pods_path(team: str, name: str) -> str:
    return f"/api/v1/namespaces/{team}/pods/{name}"


def test_a_failed_index_and_a_drained_pod_are_replaced_also_after_a_restart(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=3)
    team = controlled.team(guaranteed=3)
    controlled.start()
    job = create_job(controlled, team, 3, backoffLimit=5)
    controlled.wait(lambda: len(controlled.bound(team)) == 3)
    first, second, _ = sorted(controlled.bound(team))
    controlled.until(pods_path(team, first), lambda pod: pod["status"].get("containerStatuses"))
    controlled.finish(pods_path(team, first), exit_code=1)
    controlled.wait(lambda: len(running(controlled, team)) == 3, controlled.log)
    controlled.kill()
    controlled.start()
    controlled.cluster.api.delete(pods_path(team, second))
    controlled.wait(lambda: second not in controlled.pods(team))
    controlled.wait(lambda: len(running(controlled, team)) == 3, controlled.log)
    controlled.cluster.api.delete(job)


def wait_for(controlled: Controlled, team: str, name: str) -> None:
    controlled.wait(lambda: name in controlled.bound(team), controlled.log)


def running(controlled: Controlled, team: str) -> set[str]:
    """Return the names of pods that hold GPUs."""
    over = {
        name for name, pod in controlled.pods(team).items() if pod["status"].get("phase") in {"Failed", "Succeeded"}
    }
    return controlled.bound(team) - over


def test_a_resumed_job_starts_without_the_index_that_is_done(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=3)
    team = controlled.team(guaranteed=3)
    controlled.start()
    job = create_job(controlled, team, 3)
    controlled.wait(lambda: len(controlled.bound(team)) == 3)
    first = min(controlled.bound(team))
    controlled.until(pods_path(team, first), lambda pod: pod["status"].get("containerStatuses"))
    controlled.finish(pods_path(team, first))
    controlled.until(job, lambda found: found["status"].get("succeeded") == 1)
    controlled.cluster.api.patch(job, {"spec": {"suspend": True}})
    controlled.wait(lambda: not running(controlled, team))
    controlled.cluster.api.patch(job, {"spec": {"suspend": False}})
    controlled.wait(lambda: len(running(controlled, team)) == 2, controlled.log)
    controlled.cluster.api.delete(job)


def test_a_replica_of_a_deployment_with_a_group_is_replaced(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=3)
    team = controlled.team(guaranteed=3)
    controlled.start()
    path = f"/apis/apps/v1/namespaces/{team}/deployments"
    template = {"metadata": {"labels": LABELS}, "spec": pod_body("x")["spec"]}
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    controlled.cluster.api.create(path, {"metadata": {"name": "serve"}, "spec": spec})
    controlled.wait(lambda: len(controlled.bound(team)) == 3)
    first = min(controlled.bound(team))
    controlled.cluster.api.delete(pods_path(team, first))
    controlled.wait(lambda: first not in controlled.pods(team))
    controlled.wait(lambda: len(controlled.bound(team)) == 3, controlled.log)
    controlled.cluster.api.delete(f"{path}/serve")


def test_more_pods_than_start_together_start_after_them_and_within_the_quota(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=3, limit=3)
    controlled.start()
    for number in range(5):
        controlled.pod(team, f"p{number}", **sized(2))
    controlled.wait(lambda: len(controlled.bound(team)) == 3, controlled.log)
    controlled.kill()
    controlled.start()
    controlled.cluster.api.delete(pods_path(team, min(controlled.bound(team))))
    controlled.wait(lambda: len(controlled.bound(team)) == 3 and len(controlled.pods(team)) == 4, controlled.log)


def test_a_pod_that_joins_a_running_group_by_its_label_changes_nothing_for_it(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team, other = controlled.team(guaranteed=2, limit=2), controlled.team(guaranteed=1)
    controlled.start()
    for name in ("a", "b"):
        controlled.pod(team, name, **sized(2))
    controlled.wait(lambda: controlled.bound(team) == {"a", "b"})
    before = {name: pod["metadata"]["annotations"] for name, pod in controlled.pods(team).items()}
    controlled.pod(team, "late", **sized(2))
    controlled.until_bound(controlled.pod(other, "proof"))  # it was planned with the late one waiting beside it
    assert controlled.waiting(team) == {"late"}
    assert {name: controlled.pods(team)[name]["metadata"]["annotations"] for name in ("a", "b")} == before
    controlled.cluster.api.delete(pods_path(team, "a"))
    controlled.wait(lambda: controlled.bound(team) == {"b", "late"}, controlled.log)


def test_a_start_order_reserves_the_quota_of_the_pods_that_come_later(controlled: Controlled) -> None:
    """The pods of a StatefulSet are created one by one, each when the one before it is ready."""
    controlled.add_nodes(1, gpus=4)
    team, other = controlled.team(guaranteed=3, limit=3), controlled.team(guaranteed=1)
    controlled.start()
    sets = f"/apis/apps/v1/namespaces/{team}/statefulsets"
    meta = {"labels": LABELS, "annotations": STAYS_UNREADY}
    template = {"metadata": meta, "spec": pod_body("x")["spec"]}
    spec = {"replicas": 3, "serviceName": "x", "selector": {"matchLabels": {"app": "x"}}, "template": template}
    controlled.cluster.api.create(sets, {"metadata": {"name": "set"}, "spec": spec})
    controlled.wait(lambda: controlled.bound(team) == {"set-0"}, controlled.log)
    controlled.pod(team, "impatient")
    controlled.until_bound(controlled.pod(other, "proof"))
    assert controlled.waiting(team) == {"impatient"}
    controlled.kill()
    controlled.start()
    for number in range(3):
        starts = {"metadata": {"annotations": {"devcluster/does-not-start": None}}}
        wait_for(controlled, team, f"set-{number}")
        controlled.cluster.api.patch(pods_path(team, f"set-{number}"), starts)
    assert controlled.waiting(team) == {"impatient"}
    controlled.cluster.api.delete(f"{sets}/set")


def test_a_restarted_worker_of_a_training_operator_is_released(controlled: Controlled) -> None:
    install_training_jobs(controlled.cluster)
    controlled.add_nodes(1, gpus=3)
    team = controlled.team(guaranteed=3)
    controlled.start()
    path = f"/apis/kubeflow.org/v1/namespaces/{team}/pytorchjobs"
    spec = {"pytorchReplicaSpecs": {"Master": replicas(1, 1), "Worker": replicas(2, 1)}}
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": spec}
    uid = controlled.cluster.api.create(path, body)["metadata"]["uid"]
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "train", "uid": uid, "controller": True}
    names = ("master", "worker-0", "worker-1")
    for name in names:
        controlled.pod(team, name, owner=owner)
    controlled.wait(lambda: controlled.bound(team) == set(names), controlled.log)
    controlled.cluster.api.delete(pods_path(team, "worker-1"), 0)
    controlled.wait(lambda: "worker-1" not in controlled.pods(team))
    controlled.pod(team, "worker-1", owner=owner)
    controlled.wait(lambda: controlled.bound(team) == set(names), controlled.log)


def test_a_leader_worker_set_that_is_raised_counts_its_new_replicas_and_lets_them_wait(controlled: Controlled) -> None:
    """Each replica is a group of two pods; a double of the operator creates them."""
    controlled.add_nodes(1, gpus=16)
    team, other = controlled.team(guaranteed=6, limit=6), controlled.team(guaranteed=1)
    controlled.start()

    def replica(number: int) -> None:
        written = {LEADER_WORKER_LABEL: "serve", REPLICA_LABEL: str(number), labels.POD_GROUP: f"serve-{number}"}
        for name in (f"serve-{number}", f"serve-{number}-1"):
            controlled.pod(team, name, labels_=written, annotations={labels.POD_GROUP_SIZE: "2"})

    for number in range(2):
        replica(number)
    controlled.wait(lambda: len(controlled.bound(team)) == 4)
    for number in range(2, 8):
        replica(number)
    controlled.wait(lambda: len(controlled.bound(team)) == 6, controlled.log)
    controlled.until_bound(controlled.pod(other, "proof"))
    running = {name.split("-")[1] for name in controlled.bound(team)}
    assert len(running) == 3, "a replica starts whole"
    assert len(controlled.waiting(team)) == 10
