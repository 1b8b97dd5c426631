"""The kinds in manifests/crds/crds.yaml against the structs of `api` and `objects`: fields, types, ranges, defaults."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, Kind, Project
from kfp_gpuquota.api.defragmentation import MAX_GPU_MINUTES, Defragmentation
from kfp_gpuquota.api.node import MAX_MEMORY_RESERVE, MAX_SMALLEST_SHARE, SharingRules
from kfp_gpuquota.api.share import SMALLEST_FRACTION
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_NAME_LENGTH, MAX_SECONDS
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_WEIGHT
from kfp_gpuquota.cluster.kubernetes.objects import custom_types
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import JOB_FIELDS
from kfp_gpuquota.cluster.kubernetes.operations.definitions import schema_of_kind
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import (
    MIN_WEIGHT,
    NAME,
    RECLAIM_SLACK_S,
    ClusterRules,
    Unmanaged,
)

Schema = dict[str, Any]

CHANGEABLE = {
    "priority",
    "preemptible",
    "gracePeriodSeconds",
    "maxRestarts",
    "maxRuntimeSeconds",
    "restartWindowSeconds",
    "coolDownSeconds",
    "minRunTimeSeconds",
    "after",
    "array",
    "begin",
}
"""Fields of a job's scheduling policy, which may change while its workers run."""
DEFAULTED = {"kind", "gracePeriodSeconds", "maxRestarts", "coolDownSeconds", "minRunTimeSeconds"}
QUOTA_FIELDS = {
    "guaranteed": "guaranteed",
    "limit": "limit",
    "priority": "priority",
    "overQuotaWeight": "over_quota_weight",
    "parent": "parent",
    "pools": "pools",
    "defaultRuntimeSeconds": "default_runtime_s",
    "maxRuntimeSeconds": "max_runtime_s",
    "minRuntimeSeconds": "min_runtime_s",
    "reserveAfterSeconds": "reserve_after_s",
    "stopPolicy": "stop_policy",
}


def structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """A structural schema: without references, alternatives and defaults, with bounds as in OpenAPI 3.0."""
    if "$ref" in schema:
        return structural(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        (given,) = (one for one in schema["anyOf"] if one != {"type": "null"})
        return {**structural(given, definitions), "nullable": True}
    left_out = {"title", "default", "examples", "description"}
    kept = {name: value for name, value in schema.items() if name not in left_out}
    if not kept.get("required", True):
        del kept["required"]
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]  # the API server prunes unknown fields, and warns of them on request
    if "exclusiveMinimum" in kept:
        kept |= {"minimum": kept["exclusiveMinimum"], "exclusiveMinimum": True}
    if "enum" in kept:
        kept["type"] = "string"
    for holder in {"items", "additionalProperties"} & kept.keys():
        kept[holder] = structural(kept[holder], definitions)
    if "properties" in kept:
        kept["properties"] = {name: structural(one, definitions) for name, one in kept["properties"].items()}
    return kept


def of_struct(struct: type) -> dict[str, Schema]:
    """The structural schemas of a struct's fields."""
    whole = msgspec.json.schema(struct)
    found: dict[str, Schema] = structural(whole, whole["$defs"])["properties"]
    return found


def properties(kind: str, *path: str) -> dict[str, Schema]:
    """The schemas of a kind's fields below `path`."""
    schema = schema_of_kind(kind)
    for name in path:
        schema = schema[name] if name == "additionalProperties" else schema["properties"][name]
    found: dict[str, Schema] = schema["properties"]
    return found


def bare(schema: Schema) -> Schema:
    """A schema of the kinds without texts, defaults, rules and list types: what a struct can express."""
    dropped = ("description", "default", "x-kubernetes-")
    kept = {name: value for name, value in schema.items() if not name.startswith(dropped)}
    for holder in {"items", "additionalProperties"} & kept.keys():
        kept[holder] = bare(kept[holder])
    if "properties" in kept:
        kept["properties"] = {name: bare(one) for name, one in kept["properties"].items()}
    return kept


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("ElasticJob", custom_types.ElasticJobSpec),
        ("GpuQuota", custom_types.GpuQuotaSpec),
        ("QuotaPolicy", custom_types.QuotaPolicySpec),
        ("WorkloadPolicy", custom_types.PolicySpec),
    ],
)
def test_a_spec_has_the_fields_that_the_controller_reads(kind: str, spec: type[msgspec.Struct]) -> None:
    # a field that the schema does not have is dropped by the API server without a word
    assert set(properties(kind, "spec")) == set(spec.__struct_encode_fields__)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("ElasticJob", custom_types.ElasticJobStatus), ("GpuQuota", custom_types.GpuQuotaStatus)],
)
def test_a_status_has_the_fields_that_the_controller_writes(kind: str, status: type) -> None:
    assert {name: bare(one) for name, one in properties(kind, "status").items()} == of_struct(status)


@pytest.mark.parametrize(
    "wire", sorted(wire for wire, field in JOB_FIELDS.items() if not field.is_memory and wire != "begin")
)
def test_a_job_s_field_has_the_range_of_the_vocabulary(wire: str) -> None:
    expected = of_struct(JobSpec)[JOB_FIELDS[wire].name]
    expected.pop("nullable", None)  # users omit unset fields; null is an error
    if wire == "gpus":
        expected["minimum"] = 1  # without GPUs a Job does, which needs no quota
    assert bare(properties("ElasticJob", "spec")[wire]) == expected


def test_a_job_s_defaults_are_those_of_the_vocabulary() -> None:
    given = {wire: one["default"] for wire, one in properties("ElasticJob", "spec").items() if "default" in one}
    assert given.pop("suspend") is False
    assert given == {wire: msgspec.to_builtins(JOB_FIELDS[wire].default) for wire in DEFAULTED}


def test_fields_that_running_workers_depend_on_cannot_be_changed() -> None:
    rules = schema_of_kind("ElasticJob")["properties"]["spec"]["x-kubernetes-validations"]
    fixed = {
        one["message"].partition(" cannot be changed")[0]: one["rule"] for one in rules if "oldSelf" in one["rule"]
    }
    assert set(fixed) == set(JOB_FIELDS) - CHANGEABLE
    for field, rule in fixed.items():
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
        assert rule == same


def test_a_quota_s_fields_have_the_ranges_and_defaults_of_the_vocabulary() -> None:
    given, expected = properties("GpuQuota", "spec"), of_struct(Project)
    for wire, field in QUOTA_FIELDS.items():
        expected[field].pop("nullable", None)
        found = bare(given[wire])
        found.pop("maxProperties", None)
        assert found == expected[field], wire
    defaults = {wire: one["default"] for wire, one in given.items() if "default" in one}
    project = Project(name="x")
    assert defaults == {
        wire: getattr(project, QUOTA_FIELDS[wire]) for wire in ("guaranteed", "priority", "overQuotaWeight")
    }


def test_a_workload_policy_names_a_project_and_a_kind_of_the_vocabulary() -> None:
    spec = properties("WorkloadPolicy", "spec")
    assert spec["project"]["maxLength"] == MAX_NAME_LENGTH
    assert spec["kind"]["enum"] == [kind.value for kind in Kind]


def test_the_cluster_s_policy_has_the_defaults_and_the_bounds_of_its_rules() -> None:
    rules, spec = ClusterRules(), properties("QuotaPolicy", "spec")
    reclaim, sharing = rules.reclaim, SharingRules()
    assert spec["reclaim"]["default"] == {
        "boundSeconds": reclaim.bound_s,
        "maxGracePeriodSeconds": reclaim.max_grace_s,
        "maxMinRunTimeSeconds": reclaim.max_min_run_time_s,
    }
    assert spec["sharing"]["default"] == {
        "maxSharers": sharing.max_sharers,
        "memoryReserve": sharing.memory_reserve,
        "smallestShare": sharing.smallest_share,
    }
    for group in ("reclaim", "sharing"):
        inner = spec[group]["properties"]
        assert {name: one["default"] for name, one in inner.items()} == spec[group]["default"]
    assert all(one["maximum"] == MAX_SECONDS for one in spec["reclaim"]["properties"].values())
    bounds = {name: (one["minimum"], one["maximum"]) for name, one in spec["sharing"]["properties"].items()}
    assert bounds == {
        "maxSharers": (1, MAX_COUNT),
        "memoryReserve": (0, MAX_MEMORY_RESERVE),
        "smallestShare": (SMALLEST_FRACTION, MAX_SMALLEST_SHARE),
    }
    defaults = {name: one["default"] for name, one in spec.items() if "default" in one and one["type"] != "object"}
    assert defaults == {
        "unmanaged": rules.unmanaged.value,
        "isolateWorkers": rules.isolates_workers,
        "limitGraceSeconds": rules.limit_grace_s,
        "moves": rules.moves,
        "reserveAfterSeconds": rules.reserve_after_s,
        "maxWaitingPods": rules.max_waiting_pods,
        "userLabel": rules.user_label,
    }
    assert spec["unmanaged"]["enum"] == [mode.value for mode in Unmanaged]


def test_the_rules_of_defragmentation_have_the_defaults_and_bounds_of_the_code() -> None:
    given = properties("QuotaPolicy", "spec")["defragmentation"]["properties"]
    rule = Defragmentation(window="22:00-06:00")
    assert {name: one.get("default") for name, one in given.items()} == {
        "window": None,
        "timeZone": "UTC",
        "budgetGpuMinutes": rule.budget_gpu_minutes,
        "maxGpuMinutesPerGpu": rule.max_gpu_minutes_per_gpu,
        "minAgeSeconds": rule.min_age_s,
    }
    assert given["budgetGpuMinutes"]["maximum"] == given["maxGpuMinutesPerGpu"]["maximum"] == MAX_GPU_MINUTES
    assert given["minAgeSeconds"]["maximum"] == MAX_SECONDS
    for window in ("22:00-06:00", "Mon-Fri 22:00-06:00", "sat,Sun-Mon 0:00-24:00"):
        assert re.search(given["window"]["pattern"], window)
        Defragmentation(window=window)


def test_the_rules_of_the_cluster_s_policy_name_the_limits_of_the_code() -> None:
    whole, spec = schema_of_kind("QuotaPolicy"), properties("QuotaPolicy", "spec")
    assert whole["x-kubernetes-validations"][0]["rule"] == f"self.metadata.name == '{NAME}'"
    (fits,) = spec["reclaim"]["x-kubernetes-validations"]
    needed = f"self.maxGracePeriodSeconds + self.maxMinRunTimeSeconds + {RECLAIM_SLACK_S}"
    assert fits["rule"] == f"{needed} <= self.boundSeconds"
    bounded = spec["gpuResources"]["items"]["x-kubernetes-validations"][1]["rule"]
    assert f"self.countsAs >= {MIN_WEIGHT} && self.countsAs <= {MAX_WEIGHT}.0" in bounded
