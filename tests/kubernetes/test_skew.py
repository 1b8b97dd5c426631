"""An upgrade from 0.1.0 and back, on a real API server: its kinds, its objects and its running workers.

In release_0_1 are the kinds that 0.1.0 installed (crds.yaml), and what its controller had written (objects.json) of
a team with a running elastic job, a waiting one and a pod. Only names and uids are placeholders.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.api.policy import IdleRule, PartRule, WorkloadPolicy
from kfp_gpuquota.cluster.kubernetes.objects.paths import WORKLOAD_POLICIES
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import policy_body
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.errors import UsageError
from tests.kubernetes.installation import QUOTAS, jobs_of
from tests.kubernetes.test_churn import stuck
from tests.kubernetes.test_crds import job
from tests.kubernetes.users import connection_of
from tests.polling import TIMEOUT_S, until
from tools.observer.churn import Churn
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kubernetes.controlled import Controlled, Process
    from tools.devcluster import Api, DevCluster

RELEASE = Path(__file__).with_name("release_0_1")
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
Object = dict[str, Any]


def apply(api: Api, definitions: list[Object], *, has_gpu_compute: bool) -> None:
    """Install these kinds, and return when they are in force: `gpuCompute` came after 0.1.0."""
    for one in definitions:
        api.apply(f"{DEFINITIONS}/{one['metadata']['name']}", one)
    probe = {
        "apiVersion": "gpuquota.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "probe"},
        "spec": {**job()["spec"], "gpuFraction": 0.5, "gpuCompute": 0.5},
    }
    until(lambda: ("gpuCompute" in api.create(jobs_of("default"), probe, dryRun="All")["spec"]) is has_gpu_compute)


@pytest.fixture
def release_0_1(system_cluster: DevCluster) -> Iterator[list[Object]]:
    """The kinds of 0.1.0, which are in force; today's are, again, after the test."""
    definitions = list(yaml.safe_load_all((RELEASE / "crds.yaml").read_text()))
    apply(system_cluster.api, definitions, has_gpu_compute=False)
    yield definitions
    apply(system_cluster.api, custom_resource_definitions(), has_gpu_compute=True)


def stored(controlled: Controlled, node: str) -> str:
    """Store the objects of 0.1.0 as they were, and return the team's name."""
    api, text = controlled.cluster.api, (RELEASE / "objects.json").read_text()
    team = controlled.cluster.make_namespace(f"skew-{controlled.port}")
    controlled.teams.append(team)
    text = text.replace("the-team", team).replace("the-node", node)
    for one in json.loads(text)["ElasticJob"]:
        uid = one["metadata"].pop("uid")
        made = api.create(jobs_of(team), one)
        text = text.replace(f"short-{uid}", made["metadata"]["uid"][:8]).replace(uid, made["metadata"]["uid"])
        api.patch(f"{jobs_of(team)}/{one['metadata']['name']}/status", {"status": one["status"]})
    objects = json.loads(text)
    for quota in objects["GpuQuota"]:
        api.create(QUOTAS, quota)
    for policy in objects["WorkloadPolicy"]:
        api.create(WORKLOAD_POLICIES, policy)
        controlled.on_close.append(partial(remove, api, f"{WORKLOAD_POLICIES}/{policy['metadata']['name']}"))
    for pod in objects["Pod"]:
        api.create(f"/api/v1/namespaces/{team}/pods", pod)
    return team


def remove(api: Api, path: str) -> None:
    api.delete(path)


def contents(controlled: Controlled, team: str) -> dict[str, Object]:
    """What users wrote, by kind and name."""
    api = controlled.cluster.api
    found = [*api.items(jobs_of(team)), api.get(f"{QUOTAS}/{team}"), *api.items(WORKLOAD_POLICIES)]
    return {f"{one['kind']}/{one['metadata']['name']}": one["spec"] for one in found}


def workers(controlled: Controlled, team: str) -> dict[str, str]:
    """The uids of the pods that have a node, by name."""
    return {name: pod["metadata"]["uid"] for name, pod in controlled.pods(team).items() if pod["spec"].get("nodeName")}


@pytest.mark.slow
def test_objects_and_workers_of_the_last_release_survive_the_upgrade_and_the_way_back(
    release_0_1: list[Object], controlled: Controlled
) -> None:
    api = controlled.cluster.api
    (node,) = controlled.add_nodes(1, gpus=4)
    team = stored(controlled, node)
    written, before = contents(controlled, team), workers(controlled, team)
    training, waits = f"{jobs_of(team)}/training", f"{jobs_of(team)}/waits"
    assert set(before) == {"training-0", "training-1", "training-2", "gated"}
    for pod in before:
        api.until(f"/api/v1/namespaces/{team}/pods/{pod}", lambda one: one["status"].get("phase") == "Running")

    apply(api, custom_resource_definitions(), has_gpu_compute=True)
    assert contents(controlled, team) == written
    controlled.start()
    controlled.until(f"{QUOTAS}/{team}", lambda one: one.get("status", {}).get("gpus") == 4)
    explained = controlled.until(waits, lambda one: "limit of 4" in one["status"].get("message", ""))
    assert explained["status"]["phase"] == "Pending"
    found = api.get(training)["status"]
    assert (found["phase"], found["gpus"], found["restarts"], found["attempt"]) == ("Running", 3, 0, 1)
    assert workers(controlled, team) == before, "no worker is replaced"
    isolated = controlled.until(training, lambda one: one["status"].get("networkPolicy"))["status"]["networkPolicy"]
    assert api.exists(f"/apis/networking.k8s.io/v1/namespaces/{team}/networkpolicies/{isolated}"), "0.1.0 created none"

    api.patch(training, {"spec": {"suspend": True}})  # it gives way, and the job of 0.1.0 that waits is planned
    controlled.until_phase(training, "Suspended")
    api.delete(f"/api/v1/namespaces/{team}/pods/gated", 0)
    controlled.until_phase(waits, "Running")

    apply(api, release_0_1, has_gpu_compute=False)
    written["ElasticJob/training"]["suspend"] = True
    assert contents(controlled, team) == written
    api.patch(training, {"spec": {"suspend": False}})
    resumed = {"Pending", "Starting", "Running"}  # the newer controller still works with the older kinds
    controlled.until(training, lambda job: job.get("status", {}).get("phase") in resumed)


@pytest.mark.slow
def test_an_upgrade_and_a_rollback_under_churn_violate_nothing(release_0_1: list[Object], electing: Controlled) -> None:
    """The kinds of 0.1.0, those of today, and those of 0.1.0 again, while replicas are replaced as a rollout does."""
    nodes, teams = electing.add_nodes(2, gpus=4), [electing.team("skew", guaranteed=4) for _ in range(2)]
    running = [electing.start()]
    changes: list[tuple[float, Callable[[], object]]] = [
        (3.0, partial(apply, electing.cluster.api, custom_resource_definitions(), has_gpu_compute=True)),
        (6.0, lambda: running.append(electing.start())),
        (7.0, lambda: end(running.pop(0))),
        (9.0, partial(apply, electing.cluster.api, release_0_1, has_gpu_compute=False)),
        (10.0, lambda: running.append(electing.start())),
        (11.0, lambda: end(running.pop(0))),
    ]

    def beside(elapsed: float) -> None:
        while changes and changes[0][0] <= elapsed:
            changes.pop(0)[1]()

    with Watching(electing.cluster.kubeconfig) as watching:
        churn = Churn(electing.cluster.api, teams, nodes, seed=3)
        churn.create_job()  # whatever a busy machine leaves time for
        churn.run(15.0, 8.0, beside)
        while changes:
            beside(changes[0][0])
        churn.settle()
        until(lambda: not stuck(electing, teams), lambda: stuck(electing, teams), 90)
        found = watching.violations()
    assert not found, "\n".join(map(str, found))
    assert watching.observer.admissions > 0
    assert all(process.poll() is None for process in running)
    assert "Traceback" not in electing.log()


@pytest.mark.slow
def test_a_field_that_the_older_kinds_lack_is_refused_and_never_dropped(
    release_0_1: list[Object], system_cluster: DevCluster, namespace: str
) -> None:
    """A job would run on any GPUs, and a policy would suspend nothing, without a word."""
    del release_0_1
    client = KubernetesClient(connection_of(system_cluster.kubeconfig), image="trainer:1", retry_for_s=5)
    plain = JobSpec(name="plain", project=namespace, command=("true",), gpus=1)
    assert client.submit(plain).spec.gpus == 1
    with pytest.raises(UsageError, match=r"has no field spec.gpuTypes: .* kubectl apply --server-side"):
        client.submit(msgspec.structs.replace(plain, name="typed", gpu_types=("H100",)))
    assert [job.spec.name for job in client.list_jobs(namespace).jobs] == ["plain"]
    policy = WorkloadPolicy(name=namespace, project=namespace, gpu_fraction_limit=PartRule(default=1.0))
    client.set_policy(policy)
    idle = msgspec.structs.replace(policy, idle=IdleRule(warn_after_s=60, suspend_after_s=120))
    with pytest.raises(UsageError, match=r"has no field spec.idle"):
        client.calls.patch(f"{WORKLOAD_POLICIES}/{namespace}", {"spec": policy_body(idle)["spec"]})
    client.delete_policy(namespace)


def end(process: Process) -> None:
    """End a replica as a kubelet does."""
    process.terminate()
    process.wait(TIMEOUT_S)
