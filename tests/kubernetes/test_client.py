"""The command line and its client against a real API server: the same words as on one machine."""

from __future__ import annotations

import os
import threading
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, Phase, Project
from kfp_gpuquota.api.queue import ahead_of
from kfp_gpuquota.api.wire import Lease, LogChunk
from kfp_gpuquota.cli.arguments.options import named_projects
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ClusterUnavailableError,
    ConflictError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
)
from tests import forked, programs
from tests.cli.conftest import answer_of
from tests.cli.habit_table import HABITS, SUBMITTED
from tests.kubernetes.controlled import pod_body
from tests.kubernetes.faulty_proxy import FaultyProxy
from tests.kubernetes.installation import QUOTAS, jobs_of
from tests.kubernetes.users import connection_of
from tools.devcluster import binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster


@pytest.fixture
def client(crds_cluster: DevCluster) -> KubernetesClient:
    return KubernetesClient(connection_of(crds_cluster.kubeconfig), image="trainer:1", retry_for_s=5)


@pytest.fixture
def quota(crds_cluster: DevCluster, namespace: str) -> Iterator[str]:
    """A namespace with a quota."""
    crds_cluster.api.create(QUOTAS, {
        "apiVersion": "gpuquota.dev/v1alpha1", "kind": "GpuQuota",
        "metadata": {"name": namespace}, "spec": {"guaranteed": 2, "limit": 4},
    })  # fmt: skip
    yield namespace
    crds_cluster.api.delete(f"{QUOTAS}/{namespace}")


def spec(project: str, name: str = "train", **fields: object) -> JobSpec:
    return JobSpec(name=name, project=project, command=("python", "train.py"), **fields)  # type: ignore[arg-type]


def run(cluster: DevCluster, namespace: str, *command: str, **environment: str) -> forked.Completed:
    given = {"KUBECONFIG": str(cluster.kubeconfig), "GPUQUOTA_CONTEXT": ".", "GPUQUOTA_PROJECT": namespace}
    return forked.run(programs.gpuquota, *command, environment={**os.environ, **given, **environment})


def test_a_quota_is_made_changed_and_removed(client: KubernetesClient, namespace: str) -> None:
    assert client.create_project(Project(name=namespace, guaranteed=2, limit=5)).project.limit == 5
    with pytest.raises(AlreadyExistsError, match=f"gpuquota project set {namespace}"):
        client.create_project(Project(name=namespace))
    changed = client.set_project(Project(name=namespace, guaranteed=3)).project
    assert (changed.guaranteed, changed.limit) == (3, None)
    client.delete_project(namespace)
    with pytest.raises(NotFoundError, match="an admin sets it in its Profile"):
        client.get_project(namespace)


def test_a_quota_that_stands_in_a_profile_is_changed_there(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    crds_cluster.api.patch(f"{QUOTAS}/{quota}", {"metadata": {"labels": {"gpuquota.dev/source": "profile"}}})
    with pytest.raises(ConflictError, match=f"kubectl edit profile {quota}"):
        client.set_project(Project(name=quota, guaranteed=9))


def test_a_job_is_submitted_once_however_often_the_request_is_repeated(client: KubernetesClient, quota: str) -> None:
    first = client.submit(spec(quota, gpus=2, min_gpus=1), request_id="r1")
    again = client.submit(spec(quota, gpus=2, min_gpus=1), request_id="r1")
    assert again.uid == first.uid
    assert (first.spec.gpus, first.spec.min_gpus, first.status.phase) == (2, 1, Phase.PENDING)
    with pytest.raises(AlreadyExistsError, match=f"gpuquota delete -p {quota} train"):
        client.submit(spec(quota), request_id="r2")


def test_what_a_job_asks_for_reaches_its_pods_template(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    amounts: dict[str, Any] = {"cpu": 2, "memory_mib": 512, "cpu_limit": 4, "memory_limit_mib": 1024}
    client.submit(spec(quota, environment={"A": "1"}, **amounts, node_selector={"zone": "b"}))
    client.submit(spec(quota, name="labelled", labels={"stage": "test"}))
    assert client.get_job(quota, "labelled").spec.labels == {"stage": "test"}
    pod = crds_cluster.api.get(f"{jobs_of(quota)}/train")["spec"]["template"]["spec"]
    assert pod["containers"] == [
        {
            "name": "main",
            "image": "trainer:1",
            "command": ["python", "train.py"],
            "env": [{"name": "A", "value": "1"}],
            "resources": {"requests": {"cpu": "2", "memory": "512Mi"}, "limits": {"cpu": "4", "memory": "1024Mi"}},
        }
    ]
    assert pod["nodeSelector"] == {"zone": "b"}


def test_a_job_without_an_image_is_refused_with_the_next_step(crds_cluster: DevCluster, quota: str) -> None:
    bare = KubernetesClient(connection_of(crds_cluster.kubeconfig))
    with pytest.raises(UsageError, match="gpuquota submit -i IMAGE"):
        bare.submit(spec(quota))
    with pytest.raises(UsageError, match="gpus is 0, but on Kubernetes work without GPUs needs no quota"):
        bare.submit(spec(quota, gpus=0))


def test_a_job_is_suspended_resumed_cancelled_and_deleted(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    client.submit(spec(quota))
    stored = f"{jobs_of(quota)}/train"
    client.suspend_job(quota, "train")
    assert crds_cluster.api.get(stored)["spec"]["suspend"] is True
    client.resume_job(quota, "train")
    assert crds_cluster.api.get(stored)["spec"]["suspend"] is False
    client.cancel_job(quota, "train")
    assert crds_cluster.api.get(stored)["spec"]["lease"]["durationSeconds"] == 0
    client.delete_job(quota, "train")
    with pytest.raises(NotFoundError, match=f"gpuquota list -p {quota}"):
        client.get_job(quota, "train")


def test_the_log_of_a_job_without_a_worker_is_empty_and_ends_with_the_job(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    client.submit(spec(quota))
    assert client.read_log(quota, "train") == LogChunk(text=b"", next_offset=0, more=True)
    crds_cluster.api.patch(f"{jobs_of(quota)}/train/status", {"status": {"phase": "Failed"}})
    assert client.read_log(quota, "train") == LogChunk(text=b"", next_offset=0, more=False)


def test_the_log_of_a_worker_that_has_no_node_may_begin_and_of_one_that_was_deleted_it_ends(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    pods = f"/api/v1/namespaces/{quota}/pods"
    client.submit(spec(quota))
    crds_cluster.api.patch(f"{jobs_of(quota)}/train/status", {"status": {"resultWorker": "train-0"}})
    crds_cluster.api.create(pods, pod_body("train-0"))
    assert client.read_log(quota, "train") == LogChunk(text=b"", next_offset=0, more=True)
    assert client.read_log(quota, "train", worker="train-0", offset=4) == LogChunk(text=b"", next_offset=4, more=True)
    crds_cluster.api.delete(f"{pods}/train-0", 0)
    assert client.read_log(quota, "train", offset=4) == LogChunk(text=b"", next_offset=4, more=False)


def test_only_its_holder_renews_a_lease_until_another_takes_it_over(client: KubernetesClient, quota: str) -> None:
    client.submit(spec(quota), lease=Lease(holder="first", duration_s=30))
    client.renew_lease(quota, "train", Lease(holder="first", duration_s=30))
    with pytest.raises(ConflictError, match="not held by 'second'"):
        client.renew_lease(quota, "train", Lease(holder="second", duration_s=30))
    client.renew_lease(quota, "train", Lease(holder="second", duration_s=30, take_over=True))
    with pytest.raises(ConflictError, match="not held by 'first'"):
        client.renew_lease(quota, "train", Lease(holder="first", duration_s=30))
    with pytest.raises(NotFoundError):
        client.renew_lease(quota, "nobody", Lease(holder="first", duration_s=30))


def test_a_job_that_is_being_cancelled_cannot_be_taken_over(client: KubernetesClient, quota: str) -> None:
    client.submit(spec(quota), lease=Lease(holder="first", duration_s=30))
    client.cancel_job(quota, "train")
    with pytest.raises(ConflictError, match="cannot be taken over"):
        client.renew_lease(quota, "train", Lease(holder="second", duration_s=30, take_over=True))


@pytest.mark.parametrize("intent", ["cancel", "fail", "delete"])
def test_a_job_that_is_being_stopped_cannot_be_taken_over(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str, intent: str
) -> None:
    client.submit(spec(quota), lease=Lease(holder="first", duration_s=30))
    status = {"phase": "Stopping", "intent": intent}
    crds_cluster.api.patch(f"{jobs_of(quota)}/train/status", {"status": status})
    with pytest.raises(ConflictError, match="is being stopped"):
        client.renew_lease(quota, "train", Lease(holder="second", duration_s=30, take_over=True))


def test_a_job_that_is_requeued_can_be_taken_over(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    client.submit(spec(quota), lease=Lease(holder="first", duration_s=30))
    crds_cluster.api.patch(f"{jobs_of(quota)}/train/status", {"status": {"phase": "Stopping", "intent": "requeue"}})
    client.renew_lease(quota, "train", Lease(holder="second", duration_s=30, take_over=True))
    assert crds_cluster.api.get(f"{jobs_of(quota)}/train")["spec"]["lease"]["holder"] == "second"


def test_a_job_is_submitted_with_its_owner_and_the_time_after_which_it_is_deleted(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "digits-x", "uid": "u"}
    client.submit(
        spec(quota), ttl_s=60.0, metadata={"ownerReferences": [owner], "annotations": {"gpuquota.dev/step": "s"}}
    )
    made = crds_cluster.api.get(f"{jobs_of(quota)}/train")
    assert made["metadata"]["ownerReferences"] == [owner]
    assert made["metadata"]["annotations"]["gpuquota.dev/step"] == "s"
    assert made["spec"]["ttlSecondsAfterFinished"] == 60


def test_a_list_waits_for_the_next_change(client: KubernetesClient, crds_cluster: DevCluster, quota: str) -> None:
    before = client.list_jobs(quota)
    assert before.jobs == ()
    other = KubernetesClient(connection_of(crds_cluster.kubeconfig), image="x")
    submission = threading.Timer(0.3, other.submit, [spec(quota)])
    submission.start()
    began = time.monotonic()
    after = client.list_jobs(quota, after=before.revision, timeout_s=30)
    submission.join()
    assert [job.spec.name for job in after.jobs] == ["train"]
    assert time.monotonic() - began < 20


def test_a_list_of_one_job_reads_and_waits_for_that_one_alone(client: KubernetesClient, quota: str) -> None:
    client.submit(spec(quota))
    before = client.list_jobs(quota, name="train")
    client.submit(msgspec.structs.replace(spec(quota), name="other"))
    after = client.list_jobs(quota, name="train", after=before.revision, timeout_s=1)
    assert [job.spec.name for job in after.jobs] == ["train"]
    assert len(client.list_jobs(quota).jobs) == 2
    client.cancel_job(quota, "train")
    changed = client.list_jobs(quota, name="train", after=after.revision, timeout_s=30)
    assert [job.spec.name for job in changed.jobs] == ["train"]
    assert changed.revision > after.revision


def test_a_list_ends_with_its_time_where_nothing_changes(client: KubernetesClient, quota: str) -> None:
    before = client.list_jobs(quota)
    assert client.list_jobs(quota, after=before.revision, timeout_s=1).jobs == ()


def test_a_user_without_rights_is_told_so(crds_cluster: DevCluster, quota: str) -> None:
    nobody = KubernetesClient(connection_of(crds_cluster.kubeconfig_of_user("eve")), image="x", retry_for_s=5)
    with pytest.raises(UnauthorizedError, match='User "eve" cannot create resource "elasticjobs"'):
        nobody.submit(spec(quota))


def test_an_api_server_that_is_away_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "current-context: a\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:9'}}]\n"
        "users: [{name: a, user: {}}]\n"
    )
    with pytest.raises(ClusterUnavailableError, match=r"http://127\.0\.0\.1:9 does not respond"):
        KubernetesClient(connection_of(config), retry_for_s=0.2).list_jobs("x")
    with pytest.raises(UsageError, match="kubeconfig contexts is 'b', but the file has: a"):
        connect({"GPUQUOTA_CONTEXT": "b", "KUBECONFIG": str(config), "GPUQUOTA_HOME": str(tmp_path)})


def test_the_command_line_speaks_to_kubernetes(crds_cluster: DevCluster, quota: str) -> None:
    submitted = run(crds_cluster, quota, "submit", "train1", "-g", "2", "-i", "trainer:1", "--", "python", "train.py")
    assert submitted.returncode == 0, submitted.stderr
    listed = run(crds_cluster, quota, "list")
    assert "train1" in listed.stdout
    assert "Pending" in listed.stdout
    shown = run(crds_cluster, quota, "project", "list")
    assert quota in shown.stdout
    gone = run(crds_cluster, quota, "delete", "train1")
    assert gone.returncode == 0, gone.stderr
    assert "train1" not in run(crds_cluster, quota, "list").stdout


def test_each_habit_has_its_outcome(crds_cluster: DevCluster, quota: str) -> None:
    """The same table as in tests/cli/test_habits.py."""
    for words in SUBMITTED:
        assert run(crds_cluster, quota, *words).returncode == 0
    for habit in HABITS:
        habit.check(lambda words: answer_of(run(crds_cluster, quota, *words)))


def test_one_project_has_the_figures_that_it_has_among_all(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    borrower = {
        "apiVersion": "gpuquota.dev/v1alpha1",
        "kind": "GpuQuota",
        "metadata": {"name": f"{quota}-b"},
        "spec": {"guaranteed": 0},
    }
    crds_cluster.api.create(QUOTAS, borrower)
    try:
        crds_cluster.api.patch(f"{QUOTAS}/{quota}-b/status", {"status": {"gpus": 1, "borrowed": 1}})
        among_all = {view.project.name: view for view in client.list_projects()}
        assert among_all[quota].lent > 0
        assert named_projects(client, [quota]) == [among_all[quota]]
    finally:
        crds_cluster.api.delete(f"{QUOTAS}/{quota}-b")


@pytest.fixture
def alice(crds_cluster: DevCluster, quota: str) -> str:
    """The kubeconfig of a team's user: ElasticJobs in one namespace, and the quotas of all."""
    api, rbac = crds_cluster.api, "/apis/rbac.authorization.k8s.io/v1"
    group = {"apiGroups": ["gpuquota.dev"], "verbs": ["*"]}
    for path, kind, resources in (
        (f"{rbac}/namespaces/{quota}/role", "Role", ["elasticjobs"]),
        (f"{rbac}/clusterrole", "ClusterRole", ["gpuquotas"]),
    ):
        api.create(f"{path}s", {"metadata": {"name": quota}, "rules": [{**group, "resources": resources}]})
        subjects = [{"kind": "User", "name": quota, "apiGroup": "rbac.authorization.k8s.io"}]
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": quota}
        api.create(f"{path}bindings", {"metadata": {"name": quota}, "roleRef": role, "subjects": subjects})
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    api.patch(f"{rbac}/namespaces/{quota}/roles/{quota}", {"rules": [{**group, "resources": ["elasticjobs"]}, pods]})
    return str(crds_cluster.kubeconfig_of_user(quota, namespace=quota))


def test_a_teams_user_is_shown_what_they_may_see(crds_cluster: DevCluster, quota: str, alice: str) -> None:
    def of_alice(*command: str) -> forked.Completed:
        return run(crds_cluster, "", *command, KUBECONFIG=alice)

    submitted = of_alice("submit", "e", "--elastic", "-i", "trainer:1", "--", "python", "train.py")
    assert submitted.returncode == 0, submitted.stderr
    assert "elastic from 1 to 4" in of_alice("describe", "e").stdout, "the team's limit, for nodes are not hers to see"
    top = of_alice("top")
    assert top.returncode == 0, top.stderr
    assert "(nodes are not shown: your account may not see them)" in top.stdout
    assert [line.split()[:2] for line in of_alice("list").stdout.splitlines()] == [["JOB", "PROJECT"], ["e", quota]]
    crds_cluster.api.patch(f"{QUOTAS}/{quota}", {"spec": {"limit": None}})
    unbounded = of_alice("submit", "f", "--elastic", "-i", "trainer:1", "--", "python", "train.py")
    assert (unbounded.returncode, "--max-gpus N" in unbounded.stderr) == (2, True)


def test_the_project_is_the_contexts_namespace_whatever_was_configured(
    crds_cluster: DevCluster, quota: str, alice: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"project": "of-the-embedded-cluster"}')
    home = {"GPUQUOTA_HOME": str(tmp_path), "KUBECONFIG": alice}
    assert run(crds_cluster, "", "list", **home).returncode == 0
    assert run(crds_cluster, "", "config", "project", **home).stdout == f"{quota}\n"
    refused = run(crds_cluster, "", "config", "project", "other", **home)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "kubectl config set-context --current --namespace=other" in refused.stderr


def test_of_several_kubeconfigs_the_one_that_holds_the_context_counts(
    crds_cluster: DevCluster, quota: str, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("contexts: []\nclusters: []\nusers: []\n")
    several = os.pathsep.join([str(tmp_path / "none"), str(empty), str(crds_cluster.kubeconfig)])
    assert run(crds_cluster, quota, "list", KUBECONFIG=several).returncode == 0
    refused = run(crds_cluster, quota, "--context", "nowhere", "list", KUBECONFIG=several)
    assert (refused.returncode, "'nowhere'" in refused.stderr) == (2, True)


def test_an_admin_is_told_what_a_new_quota_does_not_reach(client: KubernetesClient, crds_cluster: DevCluster) -> None:
    team = crds_cluster.make_namespace(f"team-{uuid.uuid4().hex[:8]}")
    assert f"kubectl label namespace {team} gpuquota.dev/managed=true" in client.quota_gap(team)
    crds_cluster.api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": {labels.MANAGED: "true"}}})
    assert client.quota_gap(team) == ""
    assert (
        client.quota_gap("research") == "namespace 'research' does not exist; a team needs one, a department does not"
    )


def test_exec_and_port_forward_are_kubectls(crds_cluster: DevCluster, quota: str) -> None:
    api, pods = crds_cluster.api, f"/api/v1/namespaces/{quota}/pods"
    api.create(jobs_of(quota), {
        "apiVersion": "gpuquota.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "train"},
        "spec": {"template": {"spec": {"containers": [{"name": "main", "image": "none"}]}}},
    })  # fmt: skip
    meta = {"name": "train-0", "labels": {labels.JOB: "train", labels.WORKER: "0"}}
    api.create(pods, {"metadata": meta, "spec": {"containers": [{"name": "main", "image": "none"}]}})
    api.patch(f"{pods}/train-0/status", {"status": {"phase": "Running"}})
    tools = f"{binaries.provide()}:{os.environ['PATH']}"
    reached = run(crds_cluster, quota, "exec", "train", "--", "nvidia-smi", PATH=tools)
    assert "pod train-0 does not have a host assigned" in reached.stderr
    without = run(crds_cluster, quota, "exec", "train", "--", "nvidia-smi", PATH="/nowhere")
    assert without.returncode == 2
    assert f"kubectl exec --namespace={quota} -i train-0 -- nvidia-smi" in without.stderr
    forwarded = run(crds_cluster, quota, "port-forward", "train", "9000:8888", PATH=tools)
    assert "pod train-0 does not have a host assigned" in forwarded.stderr
    without = run(crds_cluster, quota, "port-forward", "train", "9000:8888", PATH="/nowhere")
    assert f"kubectl port-forward --namespace={quota} train-0 9000:8888" in without.stderr


def test_the_kubectl_plugin_uses_the_current_context(crds_cluster: DevCluster, quota: str) -> None:
    environment = {**os.environ, "KUBECONFIG": str(crds_cluster.kubeconfig)}
    listed = forked.run(programs.kubectl_gpuquota, "list", "-n", quota, environment=environment)
    assert listed.returncode == 0, listed.stderr


def test_an_api_server_that_has_just_started_may_refuse_what_it_allows(
    crds_cluster: DevCluster, quota: str, tmp_path: Path
) -> None:
    with FaultyProxy(crds_cluster, tmp_path, rate=0, seed=1) as proxy:
        client = KubernetesClient(connection_of(proxy.kubeconfig), image="trainer:1", retry_for_s=20)
        client.get_project(quota)
        proxy.restart(refusals=3)
        assert client.get_project(quota).project.guaranteed == 2
        assert proxy.injected["GET", "403"] == 3


def test_one_that_refuses_for_longer_than_calls_are_repeated_counts_as_unavailable(
    crds_cluster: DevCluster, quota: str, tmp_path: Path
) -> None:
    """A step's launcher waits for it: its job, which was submitted, runs on."""
    with FaultyProxy(crds_cluster, tmp_path, rate=0, seed=1) as proxy:
        client = KubernetesClient(connection_of(proxy.kubeconfig), image="trainer:1", retry_for_s=0)
        client.get_project(quota)
        proxy.restart(refusals=1000)
        with suppress(ClusterUnavailableError):  # its connection was broken off
            client.get_project(quota)
        with pytest.raises(ClusterUnavailableError, match="is starting and still refuses all requests: injected 403"):
            client.get_project(quota)
        with pytest.raises(ClusterUnavailableError, match="is starting"):
            client.calls.open(jobs_of(quota), 5.0, watch="1")


@pytest.mark.parametrize("status", [502, 503])
def test_an_outage_behind_a_load_balancer_is_one_of_the_cluster(
    crds_cluster: DevCluster, quota: str, tmp_path: Path, status: int
) -> None:
    with FaultyProxy(crds_cluster, tmp_path, rate=0, seed=1) as proxy:
        client = KubernetesClient(connection_of(proxy.kubeconfig), image="trainer:1", retry_for_s=0)
        proxy.load_balancer = status
        with pytest.raises(ClusterUnavailableError, match=f"{status}: <html>no backend"):
            client.get_project(quota)


def test_a_refusal_by_a_server_that_has_long_been_there_is_final(
    crds_cluster: DevCluster, quota: str, tmp_path: Path
) -> None:
    with FaultyProxy(crds_cluster, tmp_path, rate=0, seed=1) as proxy:
        proxy.restart(refusals=1)
        client = KubernetesClient(connection_of(proxy.kubeconfig), image="trainer:1", retry_for_s=20)
        with pytest.raises(UnauthorizedError):
            client.get_project(quota)
        assert proxy.injected["GET", "403"] == 1


def test_gated_pods_wait_in_the_same_queue_those_of_one_owner_as_one(
    client: KubernetesClient, crds_cluster: DevCluster, quota: str
) -> None:
    client.submit(spec(quota, "mine"))
    made = crds_cluster.api.create(f"/api/v1/namespaces/{quota}/configmaps", {"metadata": {"name": "sweep"}})
    owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "sweep",
        "uid": made["metadata"]["uid"],
        "controller": True,
    }
    pods = f"/api/v1/namespaces/{quota}/pods"
    for name in ("sweep-0", "sweep-1"):
        crds_cluster.api.create(pods, pod_body(name, owner=owner, labels_={labels.PRIORITY: "90"}))
    crds_cluster.api.create(pods, pod_body("alone"))
    crds_cluster.api.create(pods, pod_body("ungated", gated=False))
    waiting = {each.name: each for each in client.queue(quota)}
    assert set(waiting) == {"mine", "sweep", "alone"}
    assert [each.name for each in ahead_of(waiting["mine"], waiting.values())][:1] == ["sweep"]
    said = run(crds_cluster, quota, "explain", "mine").stdout
    assert "of 3 that wait in its project, after" in said
