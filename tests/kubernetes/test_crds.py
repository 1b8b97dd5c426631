"""The schemas against a real API server: what it takes, what it adds, and what it refuses in which words."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.api.quantity import parse_mib
from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types
from kfp_gpuquota.errors import InvalidFieldError
from tests.effort import effort
from tests.kubernetes.installation import QUOTAS, jobs_of
from tools.devcluster import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import Api, DevCluster

TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "x", "someday": {"a": 1}}]}}


def job(name: str = "a", **spec: Any) -> dict[str, Any]:
    body = {"template": TEMPLATE, **spec}
    return {"apiVersion": "gpuquota.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}, "spec": body}


def quota(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "gpuquota.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec}


def refusal(api: Api, path: str, body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as refused:
        api.create(path, body, dryRun="All", fieldValidation="Strict")
    assert refused.value.status == 422, refused.value
    return refused.value.message


def answer(api: Api, path: str, body: dict[str, Any]) -> dict[str, Any] | ApiError:
    """What would be stored, or why not."""
    try:
        return api.create(path, body, dryRun="All")
    except ApiError as error:
        return error


@pytest.fixture
def jobs(crds_cluster: DevCluster, namespace: str) -> str:
    return jobs_of(namespace)


@pytest.fixture
def made_quotas(crds_cluster: DevCluster) -> Iterator[str]:
    name = f"q-{uuid.uuid4().hex[:8]}"
    yield name
    if crds_cluster.api.exists(f"{QUOTAS}/{name}"):
        crds_cluster.api.delete(f"{QUOTAS}/{name}")


def test_kubectl_takes_a_kind_by_its_singular_and_all_kinds_by_their_category(
    crds_cluster: DevCluster, made_quotas: str
) -> None:
    name = made_quotas
    crds_cluster.api.create(QUOTAS, quota(name, guaranteed=1))
    assert name in crds_cluster.kubectl("get", "gpuquota", name), "a category of that name would hide the kind"
    assert f"gpuquota.gpuquota.dev/{name}" in crds_cluster.kubectl("get", "kfp-gpuquota", "-A")


def test_what_is_left_out_gets_the_defaults_of_the_vocabulary(crds_cluster: DevCluster, jobs: str) -> None:
    made = crds_cluster.api.create(jobs, job())["spec"]
    defaults = JobSpec(name="x", project="x", command=("x",))
    assert made["kind"] == "train"
    assert made["suspend"] is False
    assert made["gracePeriodSeconds"] == defaults.grace_period_s
    assert made["maxRestarts"] == defaults.max_restarts
    assert "gpus" not in made
    assert "preemptible" not in made
    assert made["template"] == TEMPLATE, "a pod template is kept as it is"


def test_the_quota_of_a_department_gets_its_defaults(crds_cluster: DevCluster, made_quotas: str) -> None:
    made = crds_cluster.api.create(QUOTAS, quota(made_quotas))["spec"]
    assert made == {"guaranteed": 0, "priority": 100, "overQuotaWeight": 1.0}


@pytest.mark.parametrize(
    "spec",
    [
        {"gpus": 4, "minGpus": 2, "maxGpus": 8, "gpusPerWorker": 2},
        {"gpus": 4, "minGpus": 1},
        {"kind": "build", "gpus": 2, "preemptible": True, "priority": 0},
        {"gpuFraction": 0.25, "gpuFractionLimit": 1, "gpuCompute": 0.5},
        {"gpuMemory": "4Gi", "gpuMemoryLimit": "4G", "gpuDevices": 2} | {"gpuMemoryLimit": "5G"},
        {"maxRuntimeSeconds": 3600, "ttlSecondsAfterFinished": 0, "checkpoint": {"claimName": "team-a-checkpoints"}},
        {"lease": {"holder": "a", "durationSeconds": 60, "renewTime": "2026-11-21T14:00:00.5Z"}},
        {"begin": "2026-11-21T14:00:00+02:00", "after": ["prep", "any:clean"], "array": {"name": "a", "index": 0}},
        {"template": {"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}},
        {"template": {"spec": {"containers": [{"name": "main"}, {"name": "b", "resources": {"limits": {"cpu": 1}}}]}}},
    ],
    ids=str,
)
def test_a_good_job_is_taken(crds_cluster: DevCluster, jobs: str, spec: dict[str, Any]) -> None:
    crds_cluster.api.create(jobs, job(**spec), dryRun="All", fieldValidation="Strict")


def asking(name: str, kind: str = "limits") -> dict[str, Any]:
    return {"name": name, "image": "x", "resources": {kind: {"nvidia.com/gpu": 1, "cpu": "1"}, "claims": []}}


def template(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": list(containers) or [{"name": "main"}], **spec}}}


BAD_JOBS = [
    ({"gpus": 4, "minGpus": 5}, "minGpus is 5, but it cannot exceed the requested 4 GPUs"),
    ({"minGpus": 2}, "minGpus is 2, but it cannot exceed the requested 1 GPU"),
    ({"gpus": 4, "maxGpus": 3}, "maxGpus is 3, but it cannot be below the requested 4 GPUs"),
    ({"gpus": 4, "gpusPerWorker": 3}, "gpus is 4, but it must be a multiple of gpusPerWorker, which is 3"),
    ({"gpusPerWorker": 2}, "gpus is 1, but it must be a multiple of gpusPerWorker, which is 2"),
    ({"gpus": 4, "minGpus": 3, "gpusPerWorker": 2}, "minGpus is 3, but it must be a multiple of gpusPerWorker"),
    ({"gpus": 4, "maxGpus": 5, "gpusPerWorker": 2}, "maxGpus is 5, but it must be a multiple of gpusPerWorker"),
    ({"kind": "build", "gpus": 2, "maxGpus": 4}, "kind is 'build', but an interactive session has one size"),
    ({"gpuFraction": 1}, "gpuFraction is 1, but it must be more than 0 and less than 1"),
    ({"gpuFraction": 0}, "spec.gpuFraction"),
    ({"gpuFraction": 0.5, "gpuMemory": "4Gi"}, "gpuMemory is '4Gi', but the job already asks for gpuFraction 0.5"),
    ({"gpuFraction": 0.5, "gpuFractionLimit": 0.25}, "but it must be between gpuFraction, which is 0.5, and 1"),
    ({"gpuFractionLimit": 0.5}, "there is no gpuFraction of which it is the limit"),
    ({"gpuMemoryLimit": "4Gi"}, "there is no gpuMemory of which it is the limit"),
    ({"gpuMemory": "4Gi", "gpuMemoryLimit": "4G"}, "gpuMemoryLimit is '4G', but it must be at least gpuMemory"),
    ({"gpuMemory": "4 Gi"}, "it is '4 Gi', but it must be more than 0"),
    ({"gpuMemory": "0"}, "it is '0', but it must be more than 0"),
    ({"gpuMemory": 4}, "must be of type string"),
    ({"gpuCompute": 0.5}, "gpuCompute is 0.5, but it limits a job's share of a GPU, and there is none"),
    ({"gpuFraction": 0.5, "gpuCompute": 1}, "gpuCompute is 1, but it must be more than 0 and less than 1"),
    ({"gpuDevices": 2}, "gpuDevices is 2, but it counts the GPUs of which a job holds a share, and there is none"),
    ({"gpuFraction": 0.5, "gpus": 2}, "gpus is 2, but it counts whole GPUs"),
    ({"gpuFraction": 0.5, "gpusPerWorker": 1}, "gpusPerWorker is 1, but it counts whole GPUs"),
    ({"kind": "serve"}, 'supported values: "build", "train"'),
    ({"gpus": 0}, "spec.gpus"),
    ({"gpus": 1.5}, "spec.gpus"),
    ({"priority": -1}, "spec.priority"),
    ({"gracePeriodSeconds": 86_401}, "spec.gracePeriodSeconds"),
    ({"maxRuntimeSeconds": 0}, "spec.maxRuntimeSeconds"),
    ({"begin": "tomorrow"}, "spec.begin"),
    ({"after": ["other/prep"]}, "spec.after[0]"),
    ({"after": ["all:prep"]}, "spec.after[0]"),
    ({"after": ["prep"] * 257}, "spec.after"),
    ({"array": {"name": "a"}}, "spec.array.index"),
    ({"array": {"name": "a", "index": 0, "limit": 0}}, "spec.array.limit"),
    ({"checkpoint": {}}, "spec.checkpoint.claimName"),
    ({"lease": {"holder": ""}}, "spec.lease.holder"),
    ({"lease": {"holder": "a", "renewTime": "yesterday"}}, "spec.lease.renewTime"),
    ({"template": {}}, "spec.template.spec"),
    ({"template": {"spec": {"containers": []}}}, "spec.template.spec.containers"),
    ({"template": {"spec": {"containers": [{"image": "x"}]}}}, "spec.template.spec.containers[0].name"),
    (template(nodeName="n"), "nodeName is 'n', but workers go where the plan sends them"),
    (template(asking("main"), asking("b")), "the first container holds the worker's GPUs"),
    (template(asking("main"), asking("b", "requests")), "the first container holds the worker's GPUs"),
    (template(initContainers=[asking("b")]), "the first container holds the worker's GPUs"),
]


@pytest.mark.parametrize(("spec", "words"), BAD_JOBS, ids=[str(spec) for spec, _ in BAD_JOBS])
def test_a_bad_job_is_refused_in_our_words(
    crds_cluster: DevCluster, jobs: str, spec: dict[str, Any], words: str
) -> None:
    assert words in refusal(crds_cluster.api, jobs, job(**spec))


@pytest.mark.parametrize("name", ["a" * 64, "with.dot"])
def test_a_name_that_its_pods_could_not_bear_is_refused(crds_cluster: DevCluster, jobs: str, name: str) -> None:
    assert f"name is '{name}', but a name is 1 to 63 lower-case letters" in refusal(
        crds_cluster.api, jobs, job(name=name)
    )


def test_an_unknown_field_is_named(crds_cluster: DevCluster, jobs: str) -> None:
    with pytest.raises(ApiError, match=r'unknown field "spec.gpuz"'):
        crds_cluster.api.create(jobs, job(gpuz=1), fieldValidation="Strict")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"guaranteed": 4, "limit": 3}, "limit is 3, but it must be at least the guaranteed 4 GPUs"),
        ({"guaranteed": 0.5, "limit": 0.25}, "limit is 0.25, but it must be at least the guaranteed 0.5 GPUs"),
        ({"parent": "own"}, "parent is 'own', but a project cannot be its own parent"),
        ({"guaranteed": -1}, "spec.guaranteed"),
        ({"overQuotaWeight": -0.5}, "spec.overQuotaWeight"),
        ({"parent": "Not A Name"}, "spec.parent"),
        ({"stopPolicy": "hold"}, "spec.stopPolicy"),
        ({"stopPolicy": None, "maxRuntimeSeconds": 0}, "spec.maxRuntimeSeconds"),
        ({"defaultRuntimeSeconds": 1e300}, "spec.defaultRuntimeSeconds"),
        (
            {"defaultRuntimeSeconds": 61, "maxRuntimeSeconds": 60},
            "defaultRuntimeSeconds is 61, but it must be at most maxRuntimeSeconds, which is 60",
        ),
    ],
    ids=str,
)
def test_a_bad_quota_is_refused_in_our_words(crds_cluster: DevCluster, spec: dict[str, Any], words: str) -> None:
    assert words in refusal(crds_cluster.api, QUOTAS, quota("own", **spec))


@pytest.mark.parametrize(
    "change", [{"gpus": 3}, {"kind": "build"}, {"maxGpus": 8}, {"minGpus": None}, {"gpuDevices": 2}], ids=str
)
def test_what_a_job_is_cannot_change(crds_cluster: DevCluster, jobs: str, change: dict[str, Any]) -> None:
    crds_cluster.api.create(jobs, job(gpus=2, minGpus=1))
    with pytest.raises(ApiError, match=f"{next(iter(change))} cannot be changed; create another job"):
        crds_cluster.api.patch(f"{jobs}/a", {"spec": change})


def test_what_others_may_do_with_a_job_can_change(crds_cluster: DevCluster, jobs: str) -> None:
    crds_cluster.api.create(jobs, job(gpus=2))
    change = {"suspend": True, "priority": 10, "maxRuntimeSeconds": 60, "lease": {"holder": "a"}}
    assert crds_cluster.api.patch(f"{jobs}/a", {"spec": change})["spec"]["suspend"] is True


def test_the_status_is_a_subresource_and_keeps_all_that_is_written(crds_cluster: DevCluster, jobs: str) -> None:
    crds_cluster.api.create(jobs, job() | {"status": {"phase": "Succeeded"}})
    assert "status" not in crds_cluster.api.get(f"{jobs}/a")
    condition = core_types.Condition(type="Running", status="True", reason="fits", message="1 GPU")
    status = custom_types.ElasticJobStatus(
        phase="Running",
        gpus=0.25,
        message="lends 1 GPU to team-b",
        conditions=(condition,),
        progress=custom_types.TrainingProgress(step=3, metrics={"loss": 0.5}, not_finite={"norm": "nan"}),
    )
    written = msgspec.json.decode(msgspec.json.encode(status))
    kept = crds_cluster.api.patch(f"{jobs}/a/status", {"status": written})["status"]
    assert kept == {name: value for name, value in written.items() if value is not None}


def test_people_see_phase_size_and_reason(crds_cluster: DevCluster, jobs: str, namespace: str) -> None:
    crds_cluster.api.create(jobs, job())
    pull = {"type": "WorkersReady", "status": "False", "reason": "ImagePullBackOff", "message": "no such image"}
    pull["lastTransitionTime"] = "2026-11-22T00:00:00Z"
    status = {
        "phase": "Running", "gpus": 1, "workers": 1, "message": "lends 1 GPU to team-b", "conditions": [pull],
    }  # fmt: skip
    crds_cluster.api.patch(f"{jobs}/a/status", {"status": status})
    head, line = crds_cluster.kubectl("get", "ej", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "PHASE", "GPUS", "WORKERS", "PODS", "MESSAGE", "AGE"]
    assert line.split()[:5] == ["a", "Running", "1", "1", "ImagePullBackOff"]
    assert "lends 1 GPU to team-b" in line


WHOLE = st.integers(min_value=1, max_value=6)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": WHOLE,
        "minGpus": WHOLE,
        "maxGpus": WHOLE,
        "gpusPerWorker": WHOLE,
        "kind": st.sampled_from(["train", "build"]),
        "gpuFraction": st.sampled_from([0.1, 0.5, 1]),
        "gpuFractionLimit": st.sampled_from([0.1, 0.5, 1]),
        "gpuMemory": st.sampled_from(["1Gi", "4G", "1e9", "Gi", "-1"]),
        "gpuMemoryLimit": st.sampled_from(["1Gi", "4G", "4Gi"]),
        "gpuDevices": WHOLE,
    },
)


def vocabulary_takes(spec: dict[str, Any]) -> bool:
    """Whether `api` does, for what the API server is asked for."""
    given = {"".join(f"_{c.lower()}" if c.isupper() else c for c in name): value for name, value in spec.items()}
    try:
        for name in ("gpu_memory", "gpu_memory_limit"):
            if name in given:
                given[f"{name}_mib"] = parse_mib(name, given.pop(name))
        msgspec.convert({"name": "a", "project": "a", "command": ["a"], **given}, JobSpec)
    except InvalidFieldError:
        return False
    # here `gpus` beside a share is an error also at 1: on the wire one sees whether it was given
    shared = "gpu_fraction" in given or "gpu_memory_mib" in given
    return not (shared and "gpus" in given)


SAMPLES = pytest.mark.parametrize("examples", [40, pytest.param(effort(100, 1000), marks=pytest.mark.slow)])


@SAMPLES
def test_the_api_server_takes_what_the_vocabulary_takes_and_nothing_else(
    crds_cluster: DevCluster, jobs: str, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(spec=SPECS)
    def ask(spec: dict[str, Any]) -> None:
        given = answer(crds_cluster.api, jobs, job(**spec))
        assert vocabulary_takes(spec) is not isinstance(given, ApiError), given
        assert not isinstance(given, ApiError) or given.status == 422

    ask()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(custom_types.ElasticJobSpec.__struct_encode_fields__)


@SAMPLES
def test_whatever_the_api_server_has_taken_the_controller_can_read(
    crds_cluster: DevCluster, jobs: str, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(spec=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4))
    def ask(spec: dict[str, Any]) -> None:
        made = answer(crds_cluster.api, jobs, job(**spec))
        if isinstance(made, ApiError):
            assert made.status in {400, 422}, made
        else:
            msgspec.json.decode(msgspec.json.encode(made), type=custom_types.ElasticJob)

    ask()
