"""What policies give, bound and overrule, and which of several wins."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.policy import MemoryRule, PartRule, WorkloadPolicy, admit
from kfp_gpuquota.errors import InvalidFieldError


def spec(**fields: Any) -> JobSpec:
    return JobSpec(**{"name": "job", "project": "vision", "command": ("true",), "gpu_fraction": 0.25, **fields})


def policy(name: str = "p", **fields: Any) -> WorkloadPolicy:
    return WorkloadPolicy(**{"name": name, "gpu_fraction_limit": PartRule(default=1.0), **fields})


SESSIONS = policy("sessions", project="vision", kind=Kind.BUILD)


def test_a_default_is_given_to_who_did_not_say_and_admission_says_by_which_policy() -> None:
    admitted = admit(spec(kind=Kind.BUILD), [SESSIONS])
    assert admitted.spec.gpu_fraction_limit == 1.0
    assert admitted.set_by == {"gpu_fraction_limit": "sessions"}


def test_a_default_leaves_alone_who_did_say() -> None:
    assert admit(spec(kind=Kind.BUILD, gpu_fraction_limit=0.5), [SESSIONS]) == (
        spec(kind=Kind.BUILD, gpu_fraction_limit=0.5),
        {},
    )


@pytest.mark.parametrize("other", [{"kind": Kind.TRAIN}, {"kind": Kind.BUILD, "project": "speech"}])
def test_a_policy_is_for_its_project_and_kind_only(other: dict[str, Any]) -> None:
    assert admit(spec(**other), [SESSIONS]) == (spec(**other), {})


def test_a_policy_is_for_the_kind_of_request_it_speaks_of() -> None:
    by_memory = spec(gpu_fraction=None, gpu_memory_mib=4096)
    assert admit(by_memory, [policy()]).spec == by_memory
    whole = spec(gpu_fraction=None, gpus=2)
    assert admit(whole, [policy(gpu_memory_limit_mib=MemoryRule(forced=100))]).spec == whole


def test_a_forced_limit_overrules_what_is_given() -> None:
    admitted = admit(spec(gpu_fraction_limit=0.9), [policy("tight", gpu_fraction_limit=PartRule(forced=0.5))])
    assert admitted.spec.gpu_fraction_limit == 0.5
    assert admitted.set_by == {"gpu_fraction_limit": "tight"}


def test_the_more_special_policy_wins_whatever_the_order() -> None:
    general, of_kind, of_project = (
        policy("general"),
        policy("kind", kind=Kind.TRAIN, gpu_fraction_limit=PartRule(default=0.6)),
        policy("project", project="vision", gpu_fraction_limit=PartRule(default=0.4)),
    )
    for order in ([general, of_kind, of_project], [of_project, of_kind, general]):
        assert admit(spec(), order).set_by == {"gpu_fraction_limit": "project"}


@pytest.mark.parametrize(
    ("fields", "rule", "message"),
    [
        (
            {"gpu_fraction_limit": 0.9},
            {"gpu_fraction_limit": PartRule(most=0.8)},
            "gpu_fraction_limit is 0.9, but policy 'p' allows at most 0.8",
        ),
        (
            {"gpu_fraction": 0.7},
            {"gpu_fraction_limit": PartRule(forced=0.5)},
            "gpu_fraction is 0.7, but policy 'p' sets the limit to 0.5; ask for less",
        ),
        (
            {"gpu_fraction": None, "gpu_memory_mib": 1024, "gpu_memory_limit_mib": 8192},
            {"gpu_memory_limit_mib": MemoryRule(most=4096)},
            "gpu_memory_limit_mib is 8192, but policy 'p' allows at most 4Gi",
        ),
    ],
)
def test_what_a_policy_forbids_names_it(fields: dict[str, Any], rule: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        admit(spec(**fields), [policy(**rule)])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu_fraction_limit": None}, "policy is 'p', but it has no rule"),
        ({"gpu_fraction_limit": PartRule(default=1.5)}, "gpu_fraction_limit.default is 1.5"),
        (
            {"gpu_fraction_limit": PartRule(default=0.9, most=0.5)},
            "it cannot exceed gpu_fraction_limit.most, which is 0.5",
        ),
        ({"gpu_memory_limit_mib": MemoryRule(forced=0)}, "gpu_memory_limit_mib.forced is 0"),
        ({"project": "Not A Name"}, "project is 'Not A Name'"),
    ],
)
def test_a_malformed_policy_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        policy(**fields)
    assert message in str(refused.value)
