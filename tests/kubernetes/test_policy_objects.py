"""Workload policies on Kubernetes: as objects, in admission, and by the command line against the real API server."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.api.policy import MemoryRule, PartRule, WorkloadPolicy
from kfp_gpuquota.cluster.kubernetes.admission import pods as admission
from kfp_gpuquota.cluster.kubernetes.admission import review_types
from kfp_gpuquota.cluster.kubernetes.admission.shares import SharingJob
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import PolicyObject
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES, WORKLOAD_POLICIES
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import ClusterRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies, policy_body, policy_of
from kfp_gpuquota.errors import InvalidFieldError
from tests.kubernetes.installation import jobs_of
from tests.kubernetes.test_admission import environment, patched, pod
from tests.kubernetes.test_client import run
from tests.kubernetes.test_rbac import denied, user
from tests.polling import until
from tools.devcluster import ApiError

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

SESSIONS = WorkloadPolicy(name="sessions", project="team-a", kind=Kind.BUILD, gpu_fraction_limit=PartRule(default=1.0))
TIGHT = WorkloadPolicy(
    name="tight", gpu_fraction_limit=PartRule(most=0.8), gpu_memory_limit_mib=MemoryRule(forced=40 << 10)
)
FRACTIONS = st.floats(0.01, 1.0)


def stored(policy: WorkloadPolicy, uid: str = "1") -> PolicyObject:
    body = policy_body(policy)
    return msgspec.convert({**body, "metadata": {**body["metadata"], "uid": uid}}, PolicyObject)


def admitted(body: dict[str, Any], *policies: WorkloadPolicy, namespace: str = "team-a") -> dict[str, Any]:
    verdict = admission.review(msgspec.convert(body, review_types.Pod), namespace, "0" * 16, policies)
    assert verdict.allowed, verdict.message
    return patched(body, list(verdict.patch))


@given(
    most=FRACTIONS,
    part=st.floats(0.0, 1.0),
    sizes=st.lists(st.integers(1, 1 << 30), min_size=2, max_size=2).map(sorted),
    project=st.sampled_from([None, "team-a"]),
    kind=st.sampled_from([None, *Kind]),
)
def test_a_policy_is_the_same_after_it_was_an_object(
    most: float, part: float, sizes: list[int], project: str | None, kind: Kind | None
) -> None:
    policy = WorkloadPolicy(
        name="p",
        project=project,
        kind=kind,
        gpu_fraction_limit=PartRule(default=max(part * most, 0.001), most=max(most, 0.001)),
        gpu_memory_limit_mib=MemoryRule(default=sizes[0], most=sizes[1]),
    )
    assert policy_of(stored(policy)) == policy


def test_a_session_gets_the_limit_of_its_teams_policy_and_is_told_whose_it_is() -> None:
    body = pod(annotations={"gpu-fraction": "0.25"}, labels={labels.KIND: "build"})
    made = admitted(body, SESSIONS, TIGHT)
    notes = made["metadata"]["annotations"]
    assert notes["gpuquota.dev/gpu-fraction-limit"] == "1.0"
    assert json.loads(notes[labels.SET_BY]) == {"gpu_fraction_limit": "sessions"}
    assert environment(made)["RUNAI_GPU_MEMORY_LIMIT"] == "1.0"
    elsewhere = admitted(body, SESSIONS, TIGHT, namespace="team-b")
    assert labels.SET_BY not in elsewhere["metadata"]["annotations"]


def test_a_notebook_is_a_session_for_policies_too() -> None:
    made = admitted(pod(annotations={"gpu-fraction": "0.25"}, labels={labels.NOTEBOOK: "mine"}), SESSIONS)
    assert labels.SET_BY in made["metadata"]["annotations"]


def test_a_forced_limit_wins_over_annotation_and_variable_under_both_names() -> None:
    limits = {"gpu-memory-limit": "50Gi", "gpuquota.dev/gpu-memory-limit": "50Gi"}
    body = pod(annotations={"gpu-memory": "4096", **limits})
    body["spec"]["containers"][0]["env"] = [{"name": "RUNAI_GPU_MEMORY_LIMIT", "value": "50Gi"}]
    made = admitted(body, TIGHT)
    assert {made["metadata"]["annotations"][name] for name in limits} == {"40960Mi"}
    assert environment(made)["RUNAI_GPU_MEMORY_LIMIT"] == str(40 << 30)


def test_a_limit_above_the_bound_is_refused_in_the_same_words_as_everywhere() -> None:
    body = pod(annotations={"gpu-fraction": "0.25", "gpu-fraction-limit": "0.9"})
    verdict = admission.review(msgspec.convert(body, review_types.Pod), "team-a", "1", [TIGHT])
    assert verdict.status == 422
    assert verdict.message == "pod team-a/a: gpu_fraction_limit is 0.9, but policy 'tight' allows at most 0.8"


def test_who_pretends_that_a_policy_has_set_something_is_not_believed() -> None:
    made = admitted(pod(annotations={"gpu-fraction": "0.25", labels.SET_BY: '{"all": "mine"}'}))
    assert labels.SET_BY not in made["metadata"]["annotations"]


@given(fraction=FRACTIONS.filter(lambda value: value < 1), limit=FRACTIONS, forced=FRACTIONS)
def test_a_pod_that_policies_were_applied_to_is_not_changed_again(fraction: float, limit: float, forced: float) -> None:
    policy = WorkloadPolicy(name="p", gpu_fraction_limit=PartRule(default=limit, forced=forced))
    body = pod(annotations={"gpu-fraction": f"{fraction:.17f}"})
    verdict = admission.review(msgspec.convert(body, review_types.Pod), "t", "1", [policy])
    if verdict.allowed:
        made = patched(body, list(verdict.patch))
        again = admission.review(msgspec.convert(made, review_types.Pod), "t", "2", [policy])
        assert again.allowed, again.message
        assert not again.patch


def test_an_elastic_jobs_limit_is_set_too() -> None:
    job = msgspec.convert({"metadata": {}, "spec": {"gpuMemory": "4Gi", "gpuMemoryLimit": "8Gi"}}, SharingJob)
    verdict = admission.review_job(job, "team-a", [TIGHT])
    made = patched({"metadata": {}, "spec": {"gpuMemory": "4Gi"}}, list(verdict.patch))
    assert made["spec"]["gpuMemoryLimit"] == "40960Mi"
    assert json.loads(made["metadata"]["annotations"][labels.SET_BY]) == {"gpu_memory_limit_mib": "tight"}
    assert not admission.review_job(job, "team-a", [SESSIONS]).patch
    refused = msgspec.convert({"spec": {"gpuFraction": 0.5, "gpuFractionLimit": 0.9}}, SharingJob)
    assert admission.review_job(refused, "team-a", [TIGHT]).message.endswith("policy 'tight' allows at most 0.8")


@pytest.mark.parametrize(("smallest", "refused"), [(0.01, {0.009}), (0.005, set()), (0.2, {0.009, 0.1})])
def test_the_administrator_sets_the_smallest_share(smallest: float, refused: set[float]) -> None:
    rules = ClusterRules(sharing=SharingRules(smallest_share=smallest))
    for fraction in (0.009, 0.1, 0.5):
        made = msgspec.convert(pod(annotations={"gpu-fraction": str(fraction)}), review_types.Pod)
        job = msgspec.convert({"spec": {"gpuFraction": fraction}}, SharingJob)
        verdicts = admission.review(made, "t", "1", rules=rules), admission.review_job(job, "t", (), rules)
        assert [verdict.allowed for verdict in verdicts] == [fraction not in refused] * 2
        if fraction in refused:
            assert all(f"the smallest share of a GPU is {smallest:g} here" in verdict.message for verdict in verdicts)


def test_a_policy_that_cannot_be_leaves_the_one_before_in_force() -> None:
    book = CurrentPolicies()
    book.put(stored(TIGHT))
    broken = msgspec.structs.replace(stored(TIGHT), spec=msgspec.structs.replace(stored(TIGHT).spec, kind="other"))
    book.put(broken)
    assert book.all == (TIGHT,)
    book.put(stored(TIGHT, uid="2"))  # deleted and created again: the deletion event may arrive last
    book.drop("1")
    assert book.all == (TIGHT,)
    book.drop("2")
    assert not book.all


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "it has no rule; give a limit as default, most or forced"),
        ({"gpuFractionLimit": {}}, "give a limit as default, most or forced"),
        ({"gpuFractionLimit": {"default": 0}}, "should be greater than 0"),
        ({"gpuFractionLimit": {"most": 1.5}}, "should be less than or equal to 1"),
        (
            {"gpuFractionLimit": {"default": 0.9, "most": 0.5}},
            "gpuFractionLimit.default is 0.9, but it cannot exceed gpuFractionLimit.most, which is 0.5",
        ),
        (
            {"gpuMemoryLimit": {"forced": "9Gi", "most": "8Gi"}},
            "gpuMemoryLimit.forced is 9Gi, but it cannot exceed gpuMemoryLimit.most, which is 8Gi",
        ),
        ({"gpuMemoryLimit": {"default": "0.5XB"}}, "it is '0.5XB', but it must be more than 0"),
        ({"kind": "other", "gpuMemoryLimit": {"default": "1Gi"}}, "supported values"),
        ({"idle": {"warnAfterSeconds": 60}}, "spec.idle.suspendAfterSeconds: Required value"),
        ({"idle": {"warnAfterSeconds": 60, "suspendAfterSeconds": 60}}, "must be warned before anything else happens"),
        (
            {"idle": {"warnAfterSeconds": 1, "preemptAfterSeconds": 9, "suspendAfterSeconds": 9}},
            "preemptAfterSeconds is 9, but it must be less than suspendAfterSeconds, which is 9",
        ),
    ],
)
def test_the_api_server_refuses_what_cannot_be(crds_cluster: DevCluster, spec: dict[str, Any], sentence: str) -> None:
    body = {"apiVersion": labels.API_VERSION, "kind": "WorkloadPolicy", "metadata": {"name": "p"}, "spec": spec}
    with pytest.raises(ApiError) as refused:
        crds_cluster.api.create(WORKLOAD_POLICIES, body, dryRun="All")
    assert sentence in refused.value.message
    with pytest.raises(InvalidFieldError):
        policy_of(msgspec.convert({"metadata": {"name": "p"}, "spec": spec}, PolicyObject))


def test_the_command_line_makes_changes_lists_and_deletes_them(crds_cluster: DevCluster) -> None:
    def gpuquota(*command: str) -> str:
        done = run(crds_cluster, "default", "policy", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    gpuquota("set", "sessions", "-p", "research-vision1", "--kind", "build", "--gpu-limit", "1")
    gpuquota("set", "sessions", "--gpu-memory-limit-forced", "40G")  # replaced: nothing of the first is left
    assert crds_cluster.api.get(f"{WORKLOAD_POLICIES}/sessions")["spec"] == {"gpuMemoryLimit": {"forced": "38147Mi"}}
    listed = gpuquota("list")
    assert re.search(r"sessions +all +all +gpu memory limit always 38147Mi", listed)
    assert "policy sessions deleted" in gpuquota("delete", "sessions")
    again = run(crds_cluster, "default", "policy", "delete", "sessions")
    assert again.returncode == 2
    assert "there is no policy 'sessions'; see: gpuquota policy list" in again.stderr


def test_a_rule_on_unused_gpus_is_set_where_something_measures_them(crds_cluster: DevCluster) -> None:
    times = ("--idle-warn", "1h", "--idle-preempt", "2h", "--idle-suspend", "8h")
    refused = run(crds_cluster, "default", "policy", "set", "unused", *times)
    assert refused.returncode == 2
    assert "gpuUse.exporter of the QuotaPolicy names no Service" in refused.stderr
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    with pytest.raises(ApiError, match="must be the namespace and the name of a Service"):
        crds_cluster.api.create(QUOTA_POLICIES, {**body, "spec": {"gpuUse": {"exporter": "dcgm"}}}, dryRun="All")
    crds_cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": {"gpuUse": {"exporter": "gpu/dcgm"}}})
    done = run(crds_cluster, "default", "policy", "set", "unused", *times)
    assert "warned after 1h, for others after 2h, suspended after 8h" in done.stdout, done.stderr
    for path in (f"{WORKLOAD_POLICIES}/unused", f"{QUOTA_POLICIES}/default"):
        crds_cluster.api.delete(path)


def test_a_policy_that_is_applied_holds_for_the_next_pod_and_the_next_job(kubeflow_cluster: DevCluster) -> None:
    api = kubeflow_cluster.api
    team = kubeflow_cluster.make_namespace(f"policies-{uuid.uuid4().hex[:6]}", {labels.MANAGED: "true"})
    pods, body = f"/api/v1/namespaces/{team}/pods", pod(annotations={"gpu-memory": "1024"})
    body["spec"]["containers"][0]["image"] = "none"
    policy = WorkloadPolicy(name=team, project=team, gpu_memory_limit_mib=MemoryRule(forced=2048))
    api.create(WORKLOAD_POLICIES, policy_body(policy))

    def limit(made: dict[str, Any]) -> str:
        return str(made["metadata"]["annotations"].get("gpuquota.dev/gpu-memory-limit"))

    try:
        until(lambda: limit(api.create(pods, body, dryRun="All")) == "2048Mi")
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        spec = {"template": template, "gpuMemory": "1Gi", "gpuMemoryLimit": "4Gi"}
        job = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "metadata": {"name": "j"}, "spec": spec}
        made = api.create(jobs_of(team), job, dryRun="All")
        assert made["spec"]["gpuMemoryLimit"] == "2048Mi"
    finally:
        api.delete(f"{WORKLOAD_POLICIES}/{team}")
    until(lambda: limit(api.create(pods, body, dryRun="All")) != "2048Mi")


def test_everybody_reads_policies_and_a_teams_administrator_makes_none(kubeflow_cluster: DevCluster) -> None:
    team = kubeflow_cluster.make_namespace(f"policies-{uuid.uuid4().hex[:6]}")
    owner, trusted = user(kubeflow_cluster, "admin", team), user(kubeflow_cluster, "gpuquota-quota-admin")
    assert "workloadpolicies" in denied(owner.create, WORKLOAD_POLICIES, policy_body(TIGHT))
    assert trusted.create(WORKLOAD_POLICIES, policy_body(TIGHT), dryRun="All")["metadata"]["name"] == "tight"
    assert isinstance(owner.items(WORKLOAD_POLICIES), list)
