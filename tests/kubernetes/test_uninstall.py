"""`gpuquota uninstall` on a real API server: what runs goes on, and a list of everything finds nothing of ours."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.removal import Removal, Step, Waiting
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from tests import forked, programs
from tests.kubernetes.conftest import start_or_skip
from tests.kubernetes.installation import QUOTAS, batch_jobs_of, jobs_of
from tests.kubernetes.test_chart import run_helm
from tests.kubernetes.test_crds import job, quota
from tests.kubernetes.users import connection_of
from tools.chart.__main__ import CHART
from tools.devcluster import DevCluster, Options

if TYPE_CHECKING:
    from pathlib import Path

Object = dict[str, Any]

CONTAINER = {"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
GATE = {"name": labels.QUOTA_GATE}


def gpuquota(cluster: DevCluster, folder: Path, *words: str) -> tuple[int, str]:
    """The exit code and all output of a command."""
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(folder), "GPUQUOTA_CONTEXT": "."}
    done = forked.run(programs.gpuquota, *words, environment=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def fill(cluster: DevCluster) -> str:
    """A team with an elastic job that runs, one that waits, a pod that runs and one at the gate; the team's pods."""
    team = cluster.make_namespace("team-a")
    cluster.api.create(QUOTAS, quota(team, guaranteed=1))
    running = cluster.api.create(jobs_of(team), {**job(), "metadata": {"name": "running"}})
    cluster.api.create(jobs_of(team), {**job(), "metadata": {"name": "waits"}})
    owner = {key: running["metadata"][key] for key in ("name", "uid")}
    owner |= {"kind": "ElasticJob", "apiVersion": labels.API_VERSION, "controller": True}
    pods = f"/api/v1/namespaces/{team}/pods"
    # not under the quota yet, since there is no controller to make them: these stand for pods that it has made
    made: list[tuple[Object, Object]] = [
        ({"name": "running-0", "ownerReferences": [owner]}, {}),
        ({"name": "plain", "annotations": {labels.DEVICES: "0"}}, {}),
        ({"name": "waiting", "labels": {labels.KIND: "train"}}, {"schedulingGates": [GATE]}),
        ({"name": "shares", "annotations": {labels.GPU_CONFIG: "gpuquota-gpu-0"}}, {"schedulingGates": [GATE]}),
    ]
    for metadata, spec in made:
        cluster.api.create(pods, {"metadata": metadata, "spec": {"containers": [CONTAINER], **spec}})
    for name in ("running-0", "plain"):
        cluster.api.until(f"{pods}/{name}", lambda one: one["status"].get("phase") == "Running")
    cluster.api.create(
        f"/api/v1/namespaces/{team}/secrets",
        {"metadata": {"name": "running-membership", "ownerReferences": [owner]}, "stringData": {"token": "x"}},
    )
    cluster.api.create(
        f"/apis/networking.k8s.io/v1/namespaces/{team}/networkpolicies",
        {"metadata": {"name": "running-workers", "ownerReferences": [owner]}, "spec": {"podSelector": {}}},
    )
    cluster.api.create("/api/v1/namespaces/gpuquota-reservations/pods", {"metadata": {"name": "gpu-0"}, **reserving()})
    cluster.api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": {labels.MANAGED: "true"}}})
    cluster.api.patch("/api/v1/nodes/fake-0", {"metadata": {"labels": {labels.POOL: "a100"}}})
    return pods


def reserving() -> Object:
    container = {
        "name": "main",
        "image": "none",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"spec": {"containers": [container], "securityContext": security}}


def everything(cluster: DevCluster) -> list[str]:
    """Every object of every kind whose metadata names gpuquota, whatever `inventory` looks for; without events."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    wanted = ",".join(kind for kind in kinds if not kind.startswith("events"))
    listed = json.loads(cluster.kubectl("get", wanted, "--all-namespaces", "-o", "json"))
    return [
        f"{one['kind']}/{one['metadata']['name']}" for one in listed["items"] if "gpuquota" in json.dumps(named(one))
    ]


def named(found: Object) -> Object:
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    return {**metadata, "roleRef": found.get("roleRef"), "gates": found.get("spec", {}).get("schedulingGates")}


def test_everything_is_removed_and_what_runs_goes_on(tmp_path: Path) -> None:
    cluster = start_or_skip(tmp_path / "cluster", Options(kwok_nodes=1))
    try:
        values = ("--set", "kubeflow.enabled=true", "--set", "nodeAgent.enabled=true")
        cluster.make_namespace("kubeflow")
        run_helm("install", "gpuquota", str(CHART), "--namespace=default", *values, kubeconfig=cluster.kubeconfig)
        pods = fill(cluster)
        before = {one["metadata"]["uid"] for one in cluster.api.items(pods)}
        assert len(everything(cluster)) > 50
        code, shown = gpuquota(cluster, tmp_path, "uninstall", "--dry-run", "--waiting-pods=open")
        assert code == 0
        assert "1 jobs that wait are deleted and never start (team-a/waits)" in shown
        assert gpuquota(cluster, tmp_path, "uninstall")[0] == 2, "nobody has confirmed"
        code, shown = gpuquota(cluster, tmp_path, "uninstall", "--waiting-pods=open", "--yes")
        assert code == 0, shown
        assert "removing gates of waiting pods: 1" in shown
        left = {one["metadata"]["name"]: one for one in cluster.api.items(pods)}
        assert {one["metadata"]["uid"] for one in left.values()} == before
        assert left["running-0"]["status"]["phase"] == left["plain"]["status"]["phase"] == "Running"
        assert everything(cluster) == ["Pod/shares"], "its GPU is in a ConfigMap that nobody fills any more"
        cluster.api.until(f"{pods}/waiting", lambda one: one["status"].get("phase") == "Running")
        cluster.api.delete(f"{pods}/shares", grace_s=0)
        assert "nothing of gpuquota is installed" in gpuquota(cluster, tmp_path, "uninstall", "--yes")[1]
    finally:
        cluster.stop()


def test_a_removal_lists_what_it_finds_before_anything_is_changed(crds_cluster: DevCluster, namespace: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    crds_cluster.api.create(jobs_of(namespace), job("waits"))
    for name, note in (("whole", {}), ("shares", {labels.GPU_CONFIG: "gpuquota-gpu-0"})):
        metadata = {"name": name, "annotations": note}
        crds_cluster.api.create(
            pods, {"metadata": metadata, "spec": {"containers": [CONTAINER], "schedulingGates": [GATE]}}
        )
    calls = Calls(connection_of(crds_cluster.kubeconfig), retry_for_s=10)
    kept, opened = (Removal(calls, waiting) for waiting in Waiting)
    of_ours = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in kept.unopened}
    assert {(namespace, "whole"), (namespace, "shares")} <= of_ours
    assert (namespace, "whole") not in {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in opened.unopened}
    assert (namespace, "shares") in {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in opened.unopened}
    assert (namespace, "waits") in {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in kept.ends}
    (kinds,) = [step for step in kept.steps if step.title.startswith("kinds")]
    assert len(kinds.objects) == 4
    assert "gates of waiting pods" not in {step.title for step in kept.steps}
    assert crds_cluster.api.get(f"{pods}/whole")["spec"]["schedulingGates"] == [GATE]


def of_namespace(removal: Removal, title: str, namespace: str) -> list[tuple[Step, Object]]:
    """The step with this title, and its objects of one namespace: the cluster is shared with other tests."""
    found = [(step, one) for step in removal.steps if step.title == title for one in step.objects]
    return [
        (step, one) for step, one in found if namespace in (one["metadata"].get("namespace"), one["metadata"]["name"])
    ]


def test_steps_open_gates_release_workers_and_remove_labels(crds_cluster: DevCluster, namespace: str) -> None:
    api, pods = crds_cluster.api, f"/api/v1/namespaces/{namespace}/pods"
    made = api.create(jobs_of(namespace), job("train"))
    owner = {key: made["metadata"][key] for key in ("name", "uid")}
    owner |= {"kind": "ElasticJob", "apiVersion": labels.API_VERSION, "controller": True}
    worker = {"name": "train-0", "ownerReferences": [owner], "labels": {labels.JOB: "train"}}
    api.create(pods, {"metadata": worker, "spec": {"containers": [CONTAINER]}})
    gates = [{"name": "example.com/other"}, GATE]
    api.create(pods, {"metadata": {"name": "waiting"}, "spec": {"containers": [CONTAINER], "schedulingGates": gates}})
    api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {labels.MANAGED: "true"}}})
    suspended = batch_jobs_of(namespace)
    spec = {"suspend": True, "template": {"spec": {"containers": [CONTAINER], "restartPolicy": "Never"}}}
    api.create(suspended, {"metadata": {"name": "gave-way", "labels": {labels.SUSPENDED: "true"}}, "spec": spec})
    removal = Removal(Calls(connection_of(crds_cluster.kubeconfig), retry_for_s=10), Waiting.OPEN)
    for title in (
        "suspended owners of pods",
        "gates of waiting pods",
        "labels and annotations of pods",
        "jobs",
        "labels of namespaces",
    ):
        ((step, one),) = of_namespace(removal, title, namespace)
        step.act(one)
    assert api.get(f"{pods}/waiting")["spec"]["schedulingGates"] == gates[:1]
    left = api.get(f"{pods}/train-0")["metadata"]
    assert not left.get("ownerReferences")
    assert not left.get("labels")
    assert not api.items(jobs_of(namespace))
    assert not api.get(f"{suspended}/gave-way")["spec"]["suspend"]
    assert labels.MANAGED not in api.get(f"/api/v1/namespaces/{namespace}")["metadata"]["labels"]


def test_a_dry_run_shows_the_steps_and_nothing_is_removed_without_a_confirmation(
    crds_cluster: DevCluster, namespace: str, tmp_path: Path
) -> None:
    crds_cluster.api.create(jobs_of(namespace), job("waits"))
    code, shown = gpuquota(crds_cluster, tmp_path, "uninstall", "--dry-run")
    assert code == 0
    assert "kinds, with quotas and policies" in shown
    assert "jobs that wait are deleted and never start" in shown
    code, shown = gpuquota(crds_cluster, tmp_path, "uninstall")
    assert code == 2
    assert "confirm with --yes" in shown
    assert crds_cluster.api.items(jobs_of(namespace))
    code, shown = gpuquota(crds_cluster, tmp_path, "--context", "embedded", "uninstall")
    assert code == 2
    assert "choose one with --context NAME" in shown
