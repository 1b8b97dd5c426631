"""What the decorator takes, refuses, and hands to the launcher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Kind
from kfp_gpuquota.dsl.spec.options import StepOptions, checked, from_environment, to_environment
from kfp_gpuquota.errors import DefinitionError, InvalidFieldError


@st.composite
def _options(draw: st.DrawFn) -> StepOptions:
    gpus = draw(st.integers(1, 64))
    interactive = draw(st.booleans())
    return StepOptions(
        gpus=gpus,
        min_gpus=None if interactive else draw(st.none() | st.integers(1, gpus)),
        max_gpus=None if interactive else draw(st.none() | st.integers(gpus, 128)),
        interactive=interactive,
        preemptible=draw(st.none() | st.booleans()),
        priority=draw(st.none() | st.integers(0, 1000)),
        max_runtime_s=draw(st.none() | st.floats(1, 86_400)),
        name=draw(st.sampled_from(["", "train-digits"])),
    )


@given(_options())
def test_options_reach_the_launcher_as_they_were_written(options: StepOptions) -> None:
    assert from_environment(to_environment(options)) == options


def test_only_what_differs_from_the_default_and_the_size_travel() -> None:
    assert to_environment(StepOptions()) == {"GPUQUOTA_GPUS": "1"}
    assert to_environment(StepOptions(gpus=2, interactive=True, preemptible=False)) == {
        "GPUQUOTA_GPUS": "2",
        "GPUQUOTA_INTERACTIVE": "true",
        "GPUQUOTA_PREEMPTIBLE": "false",
    }


def test_a_job_is_what_the_options_say() -> None:
    spec = StepOptions(gpus=2, interactive=True, priority=7).job_spec(name="n", project="p", command=("sh",))
    assert (spec.gpus, spec.kind, spec.effective_priority, spec.may_be_preempted) == (2, Kind.BUILD, 7, False)


def test_a_share_of_a_gpu_and_its_type_reach_the_job() -> None:
    options = checked("train", {"memory": "4Gi", "memory_limit": "8G", "devices": 2, "gpu_type": "NVIDIA-L4"})
    spec = from_environment(to_environment(options)).job_spec(name="n", project="p", command=("sh",))
    assert (spec.gpu_memory_mib, spec.gpu_memory_limit_mib, spec.gpu_devices, spec.gpus) == (4096, 7630, 2, 2)
    assert spec.gpu_types == ("NVIDIA-L4",)
    assert (
        checked("train", {"fraction": 0.25, "fraction_limit": 0.8, "compute": 0.5})
        .job_spec(name="n", project="p", command=("sh",))
        .gpu_compute
        == 0.5
    )


@pytest.mark.parametrize("types", ["H100,A100", ["H100", "A100"], ("H100", "A100")])
def test_several_types_of_gpus_are_in_the_order_of_preference(types: object) -> None:
    spec = from_environment(to_environment(checked("train", {"gpu_type": types}))).job_spec(
        name="n", project="p", command=("sh",)
    )
    assert spec.gpu_types == ("H100", "A100")


@pytest.mark.parametrize(
    ("text", "seconds"), [(90, 90.0), (1.5, 1.5), ("90m", 5400.0), ("2h", 7200.0), ("1.5 d", 129600.0)]
)
def test_a_time_limit_is_seconds_or_a_number_with_a_unit(text: object, seconds: float) -> None:
    assert checked("train", {"max_runtime": text}).max_runtime_s == seconds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 1, "min_gpus": 3}, "min_gpus is 3, but it cannot exceed the requested 1 GPU"),
        ({"gpus": 2, "max_gpus": 1}, "max_gpus is 1, but it cannot be below the requested 2 GPUs"),
        ({"gpus": 0}, "gpus is 0, but it must be at least 1 GPU"),
        ({"gpus": "2"}, "gpus is '2', but it must be a whole number"),
        ({"gpus": True}, "gpus is True, but it must be a whole number"),
        ({"gpus": 1.5}, "gpus is 1.5, but it must be a whole number"),
        ({"gpus": 0.5}, "gpus is 0.5, but it must be a whole number; for a part of a GPU write fraction=0.5"),
        ({"gpus": 3, "gpus_per_worker": 2}, "gpus is 3, but it must be a multiple of gpus_per_worker, which is 2"),
        ({"interactive": "yes"}, "interactive is 'yes', but it must be True or False"),
        (
            {"interactive": True, "max_gpus": 2},
            "interactive is True, but an interactive session has one size; leave out min_gpus and max_gpus",
        ),
        ({"max_runtime": "2y"}, "max_runtime is '2y', but it must be seconds or a time such as '90m', '2h', '1d'"),
        (
            {"fraction": 1.5},
            "fraction is 1.5, but it must be more than 0 and less than 1; ask for whole GPUs with gpus",
        ),
        (
            {"fraction": 0.5, "fraction_limit": 0.2},
            "fraction_limit is 0.2, but it must be between fraction, which is 0.5, and 1",
        ),
        ({"memory": 4096}, "memory is 4096, but it must be an amount with a unit; for example '4Gi' or '4G'"),
        (
            {"memory": "4Gi", "memory_limit": "2Gi"},
            "memory_limit is 2048, but it must be at least memory, which is 4096 (4Gi)",
        ),
        (
            {"fraction": 0.5, "memory": "4Gi"},
            "memory is 4096, but the job already asks for fraction 0.5; ask for a fraction or for memory",
        ),
        (
            {"fraction": 0.5, "gpus": 2},
            "gpus is 2, but it counts whole GPUs, and the job asks for a share of them (fraction); leave it out; for "
            "the same share of several GPUs of a node give devices",
        ),
        *(
            (
                {"gpu_type": value},
                f"gpu_type is {value!r}, but it must be a type of GPUs, or a list of some, the best one first",
            )
            for value in (5, [1], {"A100"})
        ),
        (
            {"resource_claim_template": "My Claim"},
            "resource_claim_template is 'My Claim', but a name is 1 to 63 lower-case letters, digits and '-', and "
            "starts and ends with one of the first two; for example 'my-claim'",
        ),
        (
            {"checkpoint": "My Claim"},
            "checkpoint is 'My Claim', but a name is 1 to 63 lower-case letters, digits and '-', and starts and ends "
            "with one of the first two; for example 'my-claim'",
        ),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(given: dict[str, object], message: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        checked("train", given)
    assert caught.value.message == f"component 'train': {message}"


def test_a_name_that_no_job_can_have_is_refused() -> None:
    with pytest.raises(DefinitionError, match="component 'train': name is 'Train!', but a name is"):
        checked("train", {"name": "Train!"})


def test_a_broken_environment_is_a_usage_error_not_a_traceback() -> None:
    with pytest.raises(InvalidFieldError, match="GPUQUOTA"):
        from_environment({"GPUQUOTA_GPUS": "many"})
