"""What the controller writes because of what it has read is refused if another writer has changed the object since."""

from __future__ import annotations

import ast
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

import kfp_gpuquota.cluster.kubernetes as package
from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import forgotten_suspension
from kfp_gpuquota.cluster.kubernetes.kuberay.scaling import suspension as ray_suspension
from kfp_gpuquota.cluster.kubernetes.managed_jobs.reconciler import _patch as managed_patch
from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types, labels, ray_types
from kfp_gpuquota.cluster.kubernetes.quota.profiles import dropped, managed
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import KINDS, Suspendable, suspension
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import elastic_suspension
from tests.kubernetes.conftest import install_crds
from tests.kubernetes.installation import QUOTAS, batch_jobs_of, jobs_of
from tests.kubernetes.trainer import install_kind
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
    from tools.devcluster import DevCluster

VERSIONED: Final = "the object's resourceVersion"
OWN: Final = "annotations or fields that only this project writes, of the object with that uid or name"
GUARDED: Final = {
    "convert/requests.py:_release": "tests the uid and the gate",
    "convert/requests.py:reservation_note": OWN,
    "convert/requests.py:reclaim_note": OWN,
    "convert/requests.py:deletion": "the uid",
    "elasticjob/membership/job_credentials.py:_replace": OWN,
    "elasticjob/reconciler.py:forgotten_suspension": VERSIONED,
    "quota/default_quotas.py:default_quota": "server-side apply: other managers' fields conflict",
    "quota/profiles.py:dropped": VERSIONED,
    "quota/profiles.py:managed": VERSIONED,
    "quota/profiles.py:mirrored": "server-side apply of what the Profile says",
    "managed_jobs/reconciler.py:_patch": VERSIONED,
    "client/writes/status_writer.py:_apply": OWN,
    "kuberay/scaling.py:suspension": VERSIONED,
    "kuberay/scaling.py:_cluster_patch": "tests the uid, and each value that it replaces",
    "suspension/kinds.py:_marking": VERSIONED,
    "unused_gpus/unused_workloads.py:_patch": VERSIONED,
    "sharing/node_agent.py:_write": OWN,
    "sharing/reservation_pods.py:annotation": OWN,
    "sharing/gpu_config.py:config_map": OWN,
}
CHANGING: Final = {"PATCH", "PUT", "DELETE"}


def changing_writes() -> set[str]:
    """Return the functions of the controller that build a request which changes or deletes an object."""
    root, found = Path(package.__file__).parent, set[str]()
    for path in root.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = (one for one in ast.walk(function) if isinstance(one, ast.Call))
                if any(_changes(call) for call in calls):
                    found.add(f"{path.relative_to(root)}:{function.name}")
    return found


def _changes(call: ast.Call) -> bool:
    verbs = (one.value for one in call.keywords if one.arg == "verb")
    return getattr(call.func, "id", "") == "Write" and any(getattr(one, "value", "") in CHANGING for one in verbs)


def test_each_write_that_changes_an_object_says_what_guards_it() -> None:
    """Add a new one with its guard, and if it is the object's version, to the test below."""
    assert changing_writes() == set(GUARDED)


Body = dict[str, Any]
ELASTIC: Final = {"gpus": 1, "template": {"spec": {"containers": [{"name": "main", "image": "none"}]}}}
JOB: Final = {
    "suspend": False,
    "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]}},
}
BATCH_JOB = next(kind for kind in KINDS if kind.kind == "Job")


@pytest.mark.parametrize(
    ("collection", "spec", "kind", "write"),
    [
        (batch_jobs_of, JOB, Suspendable, lambda one: suspension(BATCH_JOB, one, "why")),
        (jobs_of, ELASTIC, custom_types.ElasticJob, lambda one: elastic_suspension(one, "why")),
        (jobs_of, ELASTIC, custom_types.ElasticJob, forgotten_suspension),
        (jobs_of, ELASTIC, custom_types.ElasticJob, lambda one: managed_patch(one, {"suspend": True}, "digest")),
        (lambda _: QUOTAS, {"guaranteed": 1}, custom_types.GpuQuota, dropped),
        (lambda _: "/api/v1/namespaces", {}, core_types.Namespace, managed),
        ("rayjobs", {}, ray_types.RayJob, lambda one: ray_suspension(one, "why")),
    ],
    ids=["job", "elastic-job", "resumed-by-user", "managed-job", "quota", "namespace", "ray-job"],
)
def test_a_write_is_refused_after_another_writer_has_changed_the_object(
    cluster: DevCluster, collection: Any, spec: Body, kind: Any, write: Callable[[Any], Write]
) -> None:
    api, team = cluster.api, cluster.make_namespace(f"versions-{uuid.uuid4().hex[:6]}")
    name = f"{team}-x"
    install_crds(cluster)
    typed = {}
    if collection == "rayjobs":
        install_kind(api, "ray.io/v1", "RayJob")
        api.until_served(f"/apis/ray.io/v1/namespaces/{team}/rayjobs")
    path = f"/apis/ray.io/v1/namespaces/{team}/rayjobs" if collection == "rayjobs" else collection(team)
    notes = {"annotations": {labels.SUSPENDED: "why"}}
    if kind in {custom_types.ElasticJob, custom_types.GpuQuota, ray_types.RayJob}:
        version = "ray.io/v1" if collection == "rayjobs" else labels.API_VERSION
        typed = {"apiVersion": version, "kind": kind.__name__}
    read = api.create(path, {**typed, "metadata": {"name": name, **notes}, **({"spec": spec} if spec else {})})
    decided = write(msgspec.json.decode(msgspec.json.encode(read), type=kind))
    changed = api.patch(f"{path}/{name}", {"metadata": {"labels": {labels.MANAGED: "false", "theirs": "yes"}}})
    with pytest.raises(ApiError) as refused:
        send(cluster, decided)
    assert refused.value.status == 409
    found = api.get(f"{path}/{name}")
    assert (found.get("spec"), found["metadata"]["labels"]) == (changed.get("spec"), changed["metadata"]["labels"])
    send(cluster, write(msgspec.json.decode(msgspec.json.encode(found), type=kind)))  # decided again, by what it is now
    api.delete(f"{path}/{name}")


def send(cluster: DevCluster, one: Write) -> None:
    path, _, query = one.path.partition("?")
    given = dict(pair.split("=", 1) for pair in query.split("&")) if query else {}
    cluster.api.request(one.verb, path, one.body, content_type=one.content_type, query=given)
