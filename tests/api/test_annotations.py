"""GPU requests by a pod's annotations, and the messages for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.api.annotations import as_annotations, asks_for_share, share_of_pod
from kfp_gpuquota.errors import InvalidFieldError

VARIABLE = "RUNAI_GPU_MEMORY_LIMIT"


def spec_of(annotations: dict[str, str], environment: dict[str, str] | None = None) -> JobSpec:
    return JobSpec(name="pod", project="team-a", command=("true",), **share_of_pod(annotations, environment or {}))


@pytest.mark.parametrize(
    ("annotations", "environment", "share"),
    [
        ({"gpu-fraction": "0.25"}, {}, {"gpu_fraction": 0.25}),
        (
            {"gpuquota.dev/gpu-fraction": "0.25", "gpuquota.dev/gpu-fraction-limit": "0.8"},
            {},
            {"gpu_fraction": 0.25, "gpu_fraction_limit": 0.8},
        ),
        ({"gpu-fraction": "0.5", "gpuquota.dev/gpu-fraction": "0.5"}, {}, {"gpu_fraction": 0.5}),
        ({"gpu-fraction": "0.25"}, {VARIABLE: "0.75"}, {"gpu_fraction": 0.25, "gpu_fraction_limit": 0.75}),
        ({"gpu-fraction": "0.25"}, {VARIABLE: "1"}, {"gpu_fraction": 0.25, "gpu_fraction_limit": 1.0}),
        ({"gpu-memory": "4096"}, {VARIABLE: "8Gi"}, {"gpu_memory_mib": 4096, "gpu_memory_limit_mib": 8192}),
        ({"gpu-memory": "100"}, {VARIABLE: "500000000"}, {"gpu_memory_mib": 100, "gpu_memory_limit_mib": 477}),
        ({"gpu-memory": "100"}, {VARIABLE: "2500M"}, {"gpu_memory_mib": 100, "gpu_memory_limit_mib": 2385}),
        (
            {"gpu-memory": "40960", "gpu-memory-limit": "80Gi", "gpu-fraction-num-devices": "8"},
            {},
            {"gpu_memory_mib": 40960, "gpu_memory_limit_mib": 81920, "gpu_devices": 8},
        ),
        ({"gpu-memory": "100", "gpu-compute": "0.5"}, {}, {"gpu_memory_mib": 100, "gpu_compute": 0.5}),
        ({"other": "1"}, {VARIABLE: "0.5"}, {}),
    ],
)
def test_a_pod_asks_for(annotations: dict[str, str], environment: dict[str, str], share: dict[str, float]) -> None:
    assert share_of_pod(annotations, environment) == share


@pytest.mark.parametrize(
    ("annotations", "environment", "message"),
    [
        ({"gpu-fraction": ""}, {}, "gpu-fraction is '', but it must be a number, such as 0.25"),
        ({"gpu-fraction": "-0.5"}, {}, "gpu-fraction is '-0.5', but it must be more than 0 and at most 1"),
        ({"gpu-fraction": "1.5"}, {}, "gpu-fraction is '1.5', but it must be more than 0 and at most 1"),
        ({"gpu-fraction": "nan"}, {}, "gpu-fraction is 'nan', but it must be a number, such as 0.25"),
        ({"gpu-fraction": "1"}, {}, "it must be more than 0 and less than 1; ask for whole GPUs with gpus"),
        ({"gpu-fraction": "1_0"}, {}, "it must be a number"),
        (
            {"gpu-memory": "4G"},
            {},
            "gpu-memory is '4G', but it must be a whole number of MiB, at most 1099511627776",
        ),
        ({"gpu-memory": "-5"}, {}, "it must be a whole number of MiB"),
        ({"gpu-memory": "0"}, {}, "gpu_memory_mib is 0, but it must be"),
        (
            {"gpu-memory": "4096", "gpu-memory-limit": "0.5XB"},
            {},
            "gpu-memory-limit is '0.5XB', but it must be a number",
        ),
        (
            {"gpu-memory": "4096", "gpu-memory-limit": "1Gi"},
            {},
            "it must be at least gpu_memory_mib, which is 4096 (4Gi)",
        ),
        (
            {"gpu-fraction": "0.5", "gpu-fraction-limit": "0.2"},
            {},
            "it must be between gpu_fraction, which is 0.5, and 1",
        ),
        ({"gpu-fraction": "0.5", "gpu-memory": "4096"}, {}, "ask for a fraction or for memory"),
        ({"gpu-fraction": "0.5", "gpuquota.dev/gpu-fraction": "0.4"}, {}, "leave out one of the two"),
        ({"gpu-fraction": "0.5", "gpu-fraction-limit": "0.8"}, {VARIABLE: "0.9"}, "leave out one of the two"),
        ({"gpu-fraction": "0.5"}, {VARIABLE: "4G"}, "RUNAI_GPU_MEMORY_LIMIT is '4G', but it must be a number"),
        ({"gpu-memory": "4096"}, {VARIABLE: "half"}, "RUNAI_GPU_MEMORY_LIMIT is 'half', but it must be a number with"),
        ({"gpu-fraction-limit": "0.5"}, {}, "there is no gpu_fraction of which it is the limit"),
        ({"gpu-fraction-num-devices": "2"}, {}, "it counts the GPUs of which a job holds a share, and there is none"),
        ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "0"}, {}, "gpu_devices is 0"),
        (
            {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "two"},
            {},
            "it must be a whole number, at most 1000000",
        ),
    ],
)
def test_a_pod_may_not_ask_for(annotations: dict[str, str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        spec_of(annotations, environment)
    assert message in str(refused.value)
    assert asks_for_share(annotations)


@given(
    st.dictionaries(
        st.sampled_from(
            ["gpu-fraction", "gpu-fraction-limit", "gpu-memory", "gpu-memory-limit", "gpuquota.dev/gpu-memory"]
        ),
        st.text(max_size=6) | st.sampled_from(["0.5", "1", "4096", "1e3", "\u0661", "1Gi", "9" * 50, "1e999"]),
    ),
    st.dictionaries(st.just(VARIABLE), st.text(max_size=6) | st.sampled_from(["0.5", "4G"])),
)
def test_whatever_a_pod_says_is_a_share_or_one_clear_error(
    annotations: dict[str, str], environment: dict[str, str]
) -> None:
    try:
        spec = spec_of(annotations, environment)
    except InvalidFieldError:
        return
    assert spec.shared == bool(share_of_pod(annotations, environment))


@pytest.mark.parametrize(
    "share",
    [
        {"gpu_fraction": 0.001, "gpu_fraction_limit": 1.0, "gpu_compute": 1e-05, "gpu_devices": 3},
        {"gpu_memory_mib": 4096, "gpu_memory_limit_mib": 5000, "gpu_devices": 1},
        {},
    ],
)
def test_a_jobs_share_is_read_again_from_its_annotations(share: dict[str, Any]) -> None:
    spec = JobSpec(name="job", project="team-a", command=("true",), **share)
    assert share_of_pod(as_annotations(spec), {}) == share
