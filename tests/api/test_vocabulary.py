"""Projects, nodes and the error tree."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kfp_gpuquota import errors
from kfp_gpuquota.api import Device, JobSpec, Node, Phase, Project
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guaranteed": -1}, "guaranteed"),
        ({"guaranteed": 2, "limit": 1}, "limit"),
        ({"over_quota_weight": -0.5}, "over_quota_weight"),
        ({"priority": -1}, "priority"),
        ({"parent": "team-a"}, "parent"),
        ({"name": "Team A"}, "name"),
    ],
)
def test_a_quota_that_cannot_be_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Project(**{"name": "team-a", **fields})
    assert caught.value.field == field


def test_a_quota_may_be_a_part_of_a_gpu_and_whole_numbers_stay_whole() -> None:
    half = msgspec.json.decode(b'{"name": "a", "guaranteed": 0.5, "limit": 2.0}', type=Project)
    assert b'"limit":2,' in msgspec.json.encode(half)
    assert f"{half.guaranteed} of at most {half.limit}" == "0.5 of at most 2"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "2", 1e9])
def test_what_is_no_number_of_gpus_is_no_quota(value: object) -> None:
    with pytest.raises(InvalidFieldError, match="guaranteed is"):
        Project(name="a", guaranteed=value)  # type: ignore[arg-type]


def test_a_limit_equal_to_the_guaranteed_quota_is_a_static_allocation() -> None:
    assert Project(name="team-a", guaranteed=2, limit=2).limit == 2


def test_two_devices_of_a_node_cannot_have_one_index() -> None:
    with pytest.raises(InvalidFieldError, match="unique"):
        Node(name="node-0", devices=(Device(index=0), Device(index=0)))


def test_only_three_phases_are_final() -> None:
    assert {phase for phase in Phase if phase.final} == {Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED}


def test_every_error_has_a_code_of_its_own_that_leads_back_to_it() -> None:
    found = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, GpuQuotaError)]
    assert len({c.code for c in found}) == len(found)
    assert all(errors.by_code(c.code) is c for c in found)


def test_an_unknown_code_is_a_failure_of_the_world() -> None:
    assert errors.by_code("invented-tomorrow") is errors.RunError


def test_mistakes_end_with_2_and_failures_with_1() -> None:
    assert errors.NotFoundError("x").exit_code == 2
    assert errors.ClusterUnavailableError("x").exit_code == 1


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(InvalidFieldError("name", "x" * 10_000, "it is too long").message) < 200


def test_the_schema_of_a_job_says_what_it_needs_and_forbids_the_rest() -> None:
    schema = msgspec.json.schema(JobSpec)
    described = schema["$defs"]["JobSpec"]
    assert described["required"] == ["name", "project", "command"]
    assert described["additionalProperties"] is False
    assert described["properties"]["gpus"] == {"type": "integer", "default": 1, "minimum": 0, "maximum": 1_000_000}
    assert schema["$defs"]["Kind"]["enum"] == ["build", "train"]
