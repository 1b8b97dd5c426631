"""Which pods are moved, and which are only stopped: it depends on whether their owner creates another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Device, Node, Project
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_view
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import QuotaPolicyObject
from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import ClusterRules, CurrentRules, rules_of
from kfp_gpuquota.errors import InvalidFieldError
from tests.kubernetes.controlled import pod_body

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from tests.kubernetes.controlled import Controlled


def owned_by(api_version: str, kind: str, **written: str) -> PodView:
    owner = {"apiVersion": api_version, "kind": kind, "name": "o", "uid": "owner", "controller": True}
    container = {"name": "m", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
    meta = {"name": "p", "namespace": "team", "uid": "u", "labels": written, "ownerReferences": [owner]}
    spec = {"containers": [container], "schedulingGates": [{"name": labels.QUOTA_GATE}]}
    return pod_view(msgspec.convert({"metadata": meta, "spec": spec}, Pod))


def policy(spec: dict[str, Any], uid: str = "1") -> QuotaPolicyObject:
    return msgspec.convert({"metadata": {"name": "default", "uid": uid}, "spec": spec}, QuotaPolicyObject)


@pytest.mark.parametrize(
    ("api_version", "kind"),
    [
        ("apps/v1", "ReplicaSet"),
        ("apps/v1", "StatefulSet"),
        ("apps/v1", "DaemonSet"),
        ("batch/v1", "Job"),
        ("v1", "ReplicationController"),
        ("kubeflow.org/v1", "PyTorchJob"),
        ("kubeflow.org/v2beta1", "MPIJob"),
        ("ray.io/v1", "RayCluster"),
        (labels.API_VERSION, "ElasticJob"),
    ],
)
def test_these_owners_create_another_pod(api_version: str, kind: str) -> None:
    assert ClusterRules().recreates(owned_by(api_version, kind))


@pytest.mark.parametrize(
    ("api_version", "kind", "written"),
    [
        ("argoproj.io/v1alpha1", "Workflow", {}),
        ("tekton.dev/v1", "TaskRun", {}),
        ("batch.example.com/v1", "Job", {}),  # the kind alone is not sufficient
        ("ray.io/v1", "RayCluster", {"ray.io/node-type": "head"}),
    ],
)
def test_other_owners_do_not_as_far_as_is_known(api_version: str, kind: str, written: dict[str, str]) -> None:
    assert not ClusterRules().recreates(owned_by(api_version, kind, **written))


def test_the_policy_adds_owners_and_takes_some_away() -> None:
    rules = rules_of(policy({"recreatingOwners": ["apps.kruise.io/CloneSet", "-batch/Job"]}))
    assert rules.recreates(owned_by("apps.kruise.io/v1alpha1", "CloneSet"))
    assert not rules.recreates(owned_by("batch/v1", "Job"))
    assert rules.recreates(owned_by("apps/v1", "ReplicaSet"))


@pytest.mark.parametrize("owner", ["CloneSet", "/Pod", "a/b/C", "-", "apps/"])
def test_an_owner_without_a_group_and_a_kind_is_refused(owner: str) -> None:
    with pytest.raises(InvalidFieldError, match="recreatingOwners"):
        rules_of(policy({"recreatingOwners": [owner]}))


def test_a_policy_that_cannot_be_leaves_the_one_before_in_force_and_its_end_the_defaults() -> None:
    changes: list[int] = []
    book = CurrentRules(lambda: changes.append(1))
    book.put(policy({"recreatingOwners": ["-batch/Job"]}))
    book.put(policy({"recreatingOwners": ["Job"]}))
    assert not book.rules.recreates(owned_by("batch/v1", "Job"))
    book.put(policy({"recreatingOwners": ["-batch/Job"]}, uid="2"))  # deleted and created again: the end may come last
    book.drop("1")
    assert not book.rules.recreates(owned_by("batch/v1", "Job"))
    book.drop("2")
    assert book.rules == ClusterRules()
    assert len(changes) == 2


def test_a_step_of_an_argo_workflow_is_not_moved_and_a_replica_is() -> None:
    assert moved_for_a_large_pod(owned_by("apps/v1", "ReplicaSet"))
    assert not moved_for_a_large_pod(owned_by("argoproj.io/v1alpha1", "Workflow"))


def test_a_pod_whose_owner_counts_that_as_a_failure_is_not_moved_without_the_others_of_its_owner() -> None:
    """It failed a JobSet with `backoffLimit: 0` within its team's guarantee, to make room for a pod."""
    gang = {"group": "x", "group_size": 2}
    wrapped = {"labels": {"workload.codeflare.dev/appwrapper": "w"}}
    replica, job = owned_by("apps/v1", "StatefulSet"), owned_by("batch/v1", "Job")
    assert moved_for_a_large_pod(msgspec.structs.replace(replica, **gang))
    assert not moved_for_a_large_pod(msgspec.structs.replace(job, **gang))
    leader = Owner("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "team", "x", "0")
    assert not moved_for_a_large_pod(msgspec.structs.replace(replica, owner=leader, **gang)), "all are created again"
    assert not moved_for_a_large_pod(job), "two pods of a work queue, each of which starts alone"
    assert moved_for_a_large_pod(job, ("one", "two")), "of two Jobs"
    assert not moved_for_a_large_pod(msgspec.structs.replace(job, **wrapped), ("one", "two")), "of one AppWrapper"


def moved_for_a_large_pod(small: PodView, owners: tuple[str, str] = ("owner", "owner")) -> bool:
    """Two nodes of 2 GPUs, of each a pod has one: one of them must move for a pod with 2."""
    state, allocator = scheduler.State(), DeviceAllocator()
    for name in ("n0", "n1"):
        allocator.resize(name, 2)
        state.apply(scheduler.NodeChanged(Node(name=name, devices=(Device(index=0), Device(index=1)))))
    state.apply(scheduler.QuotaChanged(Project(name="team", guaranteed=4)))
    plain = PlainPods(state.apply, allocator)
    plain.settle()
    for uid, owner in zip(("a", "b"), owners, strict=True):
        plain.put(msgspec.structs.replace(small, uid=uid, name=uid, controller_uid=owner))
    for uid, node in (("a", "n0"), ("b", "n1")):
        plain.assume_sent(uid, node, (0,))
    plain.put(msgspec.structs.replace(small, uid="large", name="large", gpus=2, group="", group_size=0))
    return bool(scheduler.plan(state, 1000.0).move)


def replica_set(controlled: Controlled, team: str) -> str:
    """One replica that asks for a GPU; the name of its pod."""
    template = {"metadata": {"labels": {"app": "x"}}, "spec": pod_body("x")["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    path = f"/apis/apps/v1/namespaces/{team}/replicasets"
    controlled.cluster.api.create(path, {"metadata": {"name": "set"}, "spec": spec})
    controlled.wait(lambda: controlled.bound(team))
    (name,) = controlled.bound(team)
    return name


def test_of_two_pods_the_one_that_comes_back_is_stopped_for_others(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    borrower, lender = controlled.team(guaranteed=0), controlled.team(guaranteed=2)
    controlled.start()
    replica = replica_set(controlled, borrower)
    workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "1" * 8}
    # the younger of the two, which would otherwise go first
    controlled.until_bound(controlled.pod(borrower, "step", owner={**workflow, "controller": True}))
    controlled.until_bound(controlled.pod(lender, "mine"))
    assert controlled.bound(borrower) == {"step"}
    assert replica not in controlled.pods(borrower)
    assert "does not create it again" not in controlled.log()
    controlled.until_bound(controlled.pod(lender, "also-mine"))
    assert "its owner, a Workflow of argoproj.io, does not create it again, so the Workflow may" in controlled.log()
    assert f"label {labels.PREEMPTIBLE}=false keeps such pods within quota" in controlled.log()
    controlled.cluster.api.delete(f"/apis/apps/v1/namespaces/{borrower}/replicasets/set")
