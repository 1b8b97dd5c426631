"""A JobSpec and an ElasticJob's spec are equivalent for every input."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.start_conditions import ArrayTask
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobSpec
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import as_read, as_written

NAMED: dict[str, Any] = {"name": "job", "project": "team", "command": ("true",)}
GIVEN: list[dict[str, Any]] = [
    {},
    {"kind": Kind.BUILD, "gpus": 2, "priority": 7, "preemptible": False},
    {"gpus": 4, "min_gpus": 2, "max_gpus": 8, "gpus_per_worker": 2, "cool_down_s": 0.0, "min_run_time_s": 60.0},
    {"gpu_fraction": 0.25, "gpu_fraction_limit": 0.5, "gpu_devices": 2},
    {"gpu_memory_mib": 4096, "gpu_memory_limit_mib": 8192, "gpu_compute": 0.5},
    {"node_pool": "a", "required_topology": "rack", "preferred_topology": "zone", "spread": True},
    {"gpus": 4, "gpus_per_worker": 1, "segment": 2, "segment_topology": "rack"},
    {"gpu_types": ("H100", "A100")},
    {"begin_at": 1.8e9 + 0.25, "after": ("prep", "any:clean")},
    {"array": ArrayTask(name="sweep", index=3, limit=8)},
    {"grace_period_s": 5.0, "max_restarts": 0},
]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "+".join(given) or "nothing")
def test_a_job_that_is_written_is_read_again(given: dict[str, Any]) -> None:
    spec = JobSpec(**NAMED, **given)
    read = as_read(msgspec.convert(as_written(spec), ElasticJobSpec))
    assert msgspec.convert({**NAMED, **read}, JobSpec, strict=False) == spec


def test_the_kind_and_whole_gpus_are_always_written_and_other_defaults_never() -> None:
    assert as_written(JobSpec(**NAMED)) == {"kind": "train", "gpus": 1}
    assert as_written(JobSpec(**NAMED, gpu_memory_mib=512)) == {"kind": "train", "gpuMemory": "512Mi"}
