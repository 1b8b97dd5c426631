"""What tenants write where owners are named, on the real API server: nobody else waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.convert import owners
from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.security.test_request_paths import TRAVERSALS
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

KINDS = (
    *(("/".join((group, "v1")), kind) for group, kind in owners._READERS if group != "batch"),
    ("batch/v1", "Job"), ("kubeflow.org/v1", "PyTorchJob"), ("kubeflow.org/../v1", "xJob"),
    ("apps/v1?x=1", "ReplicaSet"), ("v1", "../../Job"), ("ray.io/v1", "RayCluster/.."),
)  # fmt: skip


def hostile_pods(controlled: Controlled, team: str) -> list[str]:
    """Create a pod for each text that the API server accepts in a field which names an owner; return some paths."""
    made: list[str] = []

    def create(**fields: Any) -> None:
        try:
            made.append(controlled.pod(team, f"hostile-{len(made)}", **fields))
        except ApiError as error:
            assert error.status in {400, 422}  # noqa: PT017  (its own validation)

    for text in TRAVERSALS:
        name = text.encode("utf-8", "replace").decode()
        create(annotations={owners.VOLCANO_ANNOTATION: name})
        for label in (owners.POD_GROUP_LABEL, owners.JOBSET_LABEL, owners.LEADER_WORKER_LABEL):
            create(labels_={label: name})
    labelled = len(made)
    for version, kind in KINDS:
        for text in ("../../../../../../api/v1/pods?watch=1", "..", "a/b", "good"):
            owner = {"apiVersion": version, "kind": kind, "name": text, "uid": "u", "controller": True}
            create(owner=owner, annotations={owners.INDEX_ANNOTATION: "0"})
    assert len(made) > labelled + len(KINDS)
    return made[:labelled]  # of owners that do not exist the garbage collector deletes the pods


def test_names_of_owners_that_no_object_can_have_stop_neither_a_restart_nor_others(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=8)
    hostile, honest = controlled.team("hostile", guaranteed=0, limit=0), controlled.team("honest", guaranteed=8)
    made = hostile_pods(controlled, hostile)
    assert len(made) > 10
    controlled.start()  # it is ready, although it has found all of them
    pod = controlled.pod(honest, "alone", annotations={owners.VOLCANO_ANNOTATION: "no-such-group"})
    controlled.until_bound(pod)
    assert controlled.waiting(hostile) >= {path.rpartition("/")[2] for path in made}
    assert "Traceback" not in controlled.log()


def test_a_job_of_a_run_that_no_workflow_can_be_ends_with_its_lease(controlled: Controlled) -> None:
    team = controlled.team("hostile", guaranteed=1)
    controlled.start()
    for number, name in enumerate(("../../../../api/v1/pods?watch=1", "..", "no-such-run")):
        owner = {"apiVersion": f"{workflows.GROUP}/v1alpha1", "kind": workflows.KIND, "name": name, "uid": "u"}
        body = {
            "apiVersion": labels.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": f"job-{number}", "namespace": team, "ownerReferences": [owner]},
            "spec": {
                "template": {"spec": {"containers": [{"name": "main", "image": "none"}]}},
                "lease": {"holder": "launcher", "durationSeconds": 1, "renewTime": "2020-01-01T00:00:00Z"},
            },
        }
        controlled.cluster.api.create(f"/apis/{labels.API_VERSION}/namespaces/{team}/elasticjobs", body)
    for number in range(3):
        path = f"/apis/{labels.API_VERSION}/namespaces/{team}/elasticjobs/job-{number}"
        controlled.until_phase(path, "Cancelled", 60)
