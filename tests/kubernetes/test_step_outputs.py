"""Which outputs of a job that succeeded a launcher has, on a real API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.api import Job, JobSpec, Phase
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.dsl.launcher.pod_workers import POD_NAME, PodWorkers
from kfp_gpuquota.dsl.launcher.staging import Staging
from kfp_gpuquota.errors import JobFailedError
from tests.kubernetes.controlled import pod_body
from tests.kubernetes.installation import jobs_of
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster import DevCluster

Json = dict[str, Any]


@pytest.fixture
def location(crds_cluster: DevCluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> PodWorkers:
    """The workers of a launcher in this namespace."""
    body = pod_body("launcher", 0)
    crds_cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    monkeypatch.setenv(POD_NAME, "launcher")
    kubeconfig = crds_cluster.kubeconfig_of_user("launcher", "system:masters", namespace=namespace)
    return PodWorkers(KubernetesClient(connection_of(kubeconfig)))


@pytest.fixture
def job(crds_cluster: DevCluster, namespace: str) -> Job:
    """A job whose first worker has succeeded."""
    client = KubernetesClient(connection_of(crds_cluster.kubeconfig), image="trainer:1")
    made = client.submit(JobSpec(name="train", project=namespace, command=("step",)))
    status = msgspec.structs.replace(made.status, phase=Phase.SUCCEEDED, result_worker="train-0")
    return msgspec.structs.replace(made, status=status)


def staging(folder: Path, **outputs: Json) -> Staging:
    return Staging({"outputs": {"outputFile": str(folder / "executor_output.json"), **outputs}}, "train")


def test_a_step_whose_outputs_no_attempt_has_received_fails_by_their_names(
    location: PodWorkers, job: Job, tmp_path: Path
) -> None:
    artifacts = {name: {"artifacts": [{"uri": f"/{name}"}]} for name in ("model", "executor-logs")}
    declared = staging(tmp_path, artifacts=artifacts, parameters={"loss": {"outputFile": "/loss"}})
    with pytest.raises(JobFailedError, match="its outputs did not arrive: loss, model"):
        location.has_outputs(job, declared)
    assert location.has_outputs(job, staging(tmp_path, artifacts={"executor-logs": artifacts["executor-logs"]}))


@pytest.mark.parametrize("own", [True, False])
def test_outputs_that_an_attempt_has_received_are_those_of_its_pod(
    location: PodWorkers, job: Job, crds_cluster: DevCluster, tmp_path: Path, own: bool
) -> None:
    declared = staging(tmp_path, parameters={"loss": {"outputFile": "/loss"}})
    pod = crds_cluster.api.get(f"/api/v1/namespaces/{job.spec.project}/pods/launcher")
    received = {"outputs.gpuquota.dev/0": pod["metadata"]["uid"] if own else "of-an-earlier-pod"}
    crds_cluster.api.patch(f"{jobs_of(job.spec.project)}/train", {"metadata": {"annotations": received}})
    assert location.has_outputs(job, declared) is own
