"""From Kubernetes' objects to the vocabulary."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import JobSpec, Kind, PoolQuota, Project
from kfp_gpuquota.api.resources import plain_job
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import job_spec_of
from kfp_gpuquota.cluster.kubernetes.convert.nodes import node_of
from kfp_gpuquota.cluster.kubernetes.convert.pod_status import KILLED
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job, pod_view
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node, Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, GpuQuota
from kfp_gpuquota.cluster.kubernetes.quota.quotas import has_spec, project_of, project_of_plugin, quota_spec
from kfp_gpuquota.cluster.kubernetes.user_client import views
from kfp_gpuquota.errors import InvalidFieldError

GATE = [{"name": "other"}, {"name": labels.QUOTA_GATE}]


def view_of(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **meta: Any) -> Any:
    container = {"name": "m", "resources": {"limits": {labels.GPU_RESOURCE: "2"}}}
    body = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", **meta},
        "spec": {"containers": [container], **(spec or {})},
        "status": status or {},
    }
    return pod_view(msgspec.convert(body, Pod))


@pytest.mark.parametrize(
    ("spec", "status", "stage"),
    [
        ({"schedulingGates": GATE}, {}, Stage.WAITING),
        ({}, {}, Stage.OUTSIDE),
        ({"nodeName": "a"}, {}, Stage.ASSIGNED),
        ({"nodeName": "a"}, {"phase": "Running"}, Stage.ASSIGNED),
        ({"nodeName": "a"}, {"phase": "Succeeded"}, Stage.ENDED),
        ({"nodeName": "a"}, {"phase": "Failed"}, Stage.ENDED),
        ({"nodeName": "a", "containers": [{"name": "m"}]}, {}, Stage.OUTSIDE),
    ],
)
def test_where_a_pod_stands(spec: dict[str, Any], status: dict[str, Any], stage: Stage) -> None:
    assert view_of(spec, status).stage is stage


def test_a_pod_that_is_being_deleted_holds_its_node_and_without_one_nothing() -> None:
    deleted: dict[str, Any] = {"deletionTimestamp": "2026-11-21T10:00:00Z"}
    assert view_of({"nodeName": "a"}, **deleted).stage is Stage.TERMINATING
    assert view_of({"schedulingGates": GATE}, **deleted).stage is Stage.ENDED


def test_init_containers_count_as_the_kubelet_counts_them() -> None:
    def limits(count: str) -> dict[str, Any]:
        return {"name": "x", "resources": {"limits": {labels.GPU_RESOURCE: count}}}

    sidecar = {**limits("1"), "restartPolicy": "Always"}
    assert view_of({"nodeName": "a", "initContainers": [limits("3")]}).gpus == 3
    assert view_of({"nodeName": "a", "initContainers": [limits("1"), sidecar]}).gpus == 3


def test_an_admitted_pod_is_found_where_its_patch_sent_it() -> None:
    gated = view_of({"schedulingGates": GATE})
    operations = requests.admission(gated, "node-7", (1, 3), "why").body
    assert operations[:2] == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "test", "path": "/spec/schedulingGates/1/name", "value": labels.QUOTA_GATE},
    ]
    (affinity,) = (o["value"] for o in operations if o["path"] == "/spec/affinity")
    notes = next(o["value"] for o in operations if o["path"] == "/metadata/annotations" and o["op"] == "add")
    sent = view_of({"affinity": affinity}, annotations=notes)
    assert (sent.stage, sent.node, sent.devices, sent.bound) == (Stage.ASSIGNED, "node-7", (1, 3), False)


def test_notebooks_are_sessions_and_labels_that_cannot_be_are_left_out() -> None:
    for name in labels.SESSIONS:
        assert view_of({"schedulingGates": GATE}, labels={name: "nb"}).kind is Kind.BUILD
    odd = view_of({"schedulingGates": GATE}, labels={labels.PRIORITY: "high", labels.PREEMPTIBLE: "perhaps"})
    assert (odd.kind, odd.priority, odd.preemptible) == (Kind.TRAIN, None, None)
    assert pod_job(odd).effective_priority == 50


def test_how_a_pod_ended() -> None:
    ended = {"phase": "Failed", "containerStatuses": [{"name": "m", "state": {"terminated": {"exitCode": 3}}}]}
    assert view_of({"nodeName": "a"}, ended).exit_code == 3
    disrupted = {**ended, "conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert view_of({"nodeName": "a"}, disrupted).exit_code == KILLED
    assert view_of({"nodeName": "a"}, {"phase": "Failed"}).exit_code == KILLED


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        (1, "begins\nValueError: 3 > 2\n", "ValueError: 3 > 2"),
        (137, "begins\nstep 2\n", ""),  # the log's end, which is not what killed it
        (137, "ModelMismatchError: 'lr'", "ModelMismatchError: 'lr'"),
        (0, "42", ""),
    ],
)
def test_what_ended_the_script_is_the_last_line_of_the_termination_message(code: int, message: str, error: str) -> None:
    ended = {"name": "m", "state": {"terminated": {"exitCode": code, "message": message}}}
    phase = "Failed" if code else "Succeeded"
    job = {"apiVersion": "gpuquota.dev/v1alpha1", "kind": "ElasticJob", "name": "j", "uid": "j", "controller": True}
    found = view_of({"nodeName": "a"}, {"phase": phase, "containerStatuses": [ended]}, ownerReferences=[job])
    assert found.error == error


@given(st.text(max_size=300))
def test_whatever_a_pod_is_called_the_scheduler_can_name_it(name: str) -> None:
    assert pod_job(msgspec.structs.replace(view_of({"schedulingGates": GATE}), name=name)).name


def test_a_nodes_devices_are_those_that_no_foreign_pod_holds() -> None:
    body = {
        "metadata": {"name": "ip-10-0-0-1.ec2.internal", "labels": {labels.GPU_MEMORY: "81559"}},
        "spec": {"taints": [{"key": "a", "effect": "PreferNoSchedule"}, {"key": "b", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {labels.GPU_RESOURCE: "4"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    node = node_of(msgspec.convert(body, Node), unplanned=(3,))
    assert [d.index for d in node.devices] == [0, 1, 2]
    assert (node.ready, node.gpu_memory_mib, [t.key for t in node.taints]) == (True, 81559, ["b"])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (b'{"guaranteed": -1}', "guaranteed"),
        (b'{"guaranteed": 3, "limit": 2}', "limit"),
        (b'{"guarantee": 3}', "spec"),
        (b'{"guaranteed": "3x"}', "spec"),
        (b"[]", "spec"),
    ],
)
def test_a_plugin_that_cannot_be_names_the_field(spec: bytes, field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        project_of_plugin("team", spec)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_no_value_of_a_quota_does_more_than_be_refused(value: object) -> None:
    for field in ("guaranteed", "limit", "priority", "overQuotaWeight", "parent"):
        quota = msgspec.convert({"metadata": {"name": "team"}, "spec": {field: value}}, GpuQuota)
        with contextlib.suppress(InvalidFieldError):
            assert project_of(quota).name == "team"


def test_an_elastic_job_asks_for_what_its_object_says() -> None:
    body = b"""{"metadata": {"name": "digits", "namespace": "team-a"}, "spec": {"gpus": 2, "minGpus": 1, "maxGpus": 4,
        "priority": 70, "gracePeriodSeconds": 5, "template": {"spec": {"nodeSelector": {"gpu": "big"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}], "containers": [{"name": "m"}]}}}}"""
    spec = job_spec_of(msgspec.json.decode(body, type=ElasticJob))
    assert (spec.project, spec.smallest, spec.gpus, spec.largest, spec.worker_gpus) == ("team-a", 1, 2, 4, 1)
    assert (spec.effective_priority, spec.grace_period_s, spec.node_selector) == (70, 5.0, {"gpu": "big"})
    assert spec.tolerations[0].key == "gpu"


def test_a_job_that_a_client_submits_is_the_job_that_the_controller_plans() -> None:
    asked = JobSpec(
        name="digits",
        project="team-a",
        command=("python", "train.py"),
        gpus=4,
        min_gpus=2,
        cpu=1.5,
        memory_mib=2048,
        node_pool="a100",
        required_topology="topology.kubernetes.io/zone",
        spread=True,
        node_selector={"disk": "fast"},
    )
    made = views.elastic_job(asked, views.pod_template(asked, "image:1"), request_id="r", lease=None, now=0.0)
    planned = plain_job(job_spec_of(msgspec.json.decode(msgspec.json.encode(made), type=ElasticJob)))
    assert planned == msgspec.structs.replace(asked, command=planned.command)


def test_a_job_with_a_claim_template_claims_its_gpus_in_its_first_container() -> None:
    spec = JobSpec(name="j", project="p", command=("true",), gpus=2, gpus_per_worker=1, resource_claim_template="one")
    body = views.elastic_job(spec, views.pod_template(spec, "image"), request_id="r", lease=None, now=0.0)
    pod = body["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": views.CLAIM, "resourceClaimTemplateName": "one"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": views.CLAIM}]
    with pytest.raises(InvalidFieldError, match="claim whole devices"):
        JobSpec(name="j", project="p", command=("true",), gpu_fraction=0.5, resource_claim_template="one")
    with pytest.raises(InvalidFieldError, match="a name is 1 to 63"):
        JobSpec(name="j", project="p", command=("true",), resource_claim_template="../x")


def test_rays_runtime_environment_is_refused_with_what_to_do_instead() -> None:
    asked = JobSpec(name="digits", project="team-a", command=("true",), runtime_env={"pip": ["einops"]})
    with pytest.raises(InvalidFieldError, match=r"runtime_env is 'pip', but only .* Ray .*; use an image"):
        views.pod_template(asked, "image:1")


def test_nodes_to_be_avoided_are_left_out_of_every_alternative() -> None:
    linux = {"matchExpressions": [{"key": "os", "operator": "In", "values": ["linux"]}]}
    anywhere = {"matchExpressions": [{"key": "os", "operator": "Exists"}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [linux, anywhere]}}
    for affinity in ({}, {"affinity": {"nodeAffinity": required}}):
        view = msgspec.structs.replace(view_of({"schedulingGates": GATE, **affinity}), excluded_nodes=("bad", "worse"))
        terms = pod_job(view).node_affinity
        assert [term.admits("good", {"os": "linux"}) for term in terms] == [True] * len(terms)
        assert not any(term.admits("bad", {"os": "linux"}) for term in terms)


AMOUNTS = st.none() | st.integers(0, 1000)


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.dictionaries(st.sampled_from(["a100", "h100"]), st.integers(0, 9)))
def test_a_quota_is_read_as_it_was_written(
    limit: int | None, cpu: int | None, memory: int | None, pools: dict[str, int]
) -> None:
    project = Project(
        name="team",
        limit=limit,
        guaranteed_cpu=None if cpu is None else cpu / 4,
        limit_memory_mib=memory,
        pools={name: PoolQuota(guaranteed=count) for name, count in pools.items()},
    )
    quota = msgspec.json.decode(msgspec.json.encode(views.gpu_quota(project)), type=GpuQuota)
    assert project_of(quota) == project
    assert has_spec(quota, quota_spec(project))


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=12))
def test_no_two_pods_ever_sit_on_the_same_whole_device(pods: list[tuple[int, bool, bool]]) -> None:
    allocator = DeviceAllocator()
    allocator.resize("n", 6)
    held: dict[str, tuple[int, ...]] = {}
    for number, (count, foreign, goes) in enumerate(pods):
        held[str(number)] = allocator.take(
            str(number), "n", count, tuple(range(count)) if goes else None, foreign=foreign
        )
        assert len(held[str(number)]) == count
        if goes and held:
            allocator.release(next(iter(held)))
            held.pop(next(iter(held)))
        taken = [device for devices in held.values() for device in devices]
        assert len(taken) == len(set(taken))
