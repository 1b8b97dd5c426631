"""Node affinity, taints and tolerations mean what they mean in Kubernetes."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import (
    NodeTerm,
    Operator,
    Project,
    Requirement,
    Taint,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from kfp_gpuquota.api.affinity import keeps_off
from kfp_gpuquota.errors import InvalidFieldError

LABELS = {"zone": "a", "gpus": "8"}


@pytest.mark.parametrize(
    ("key", "operator", "values", "admits"),
    [
        ("zone", "In", ("a", "b"), True),
        ("zone", "In", ("b",), False),
        ("rack", "In", ("a",), False),
        ("zone", "NotIn", ("b",), True),
        ("zone", "NotIn", ("a",), False),
        ("rack", "NotIn", ("a",), True),
        ("zone", "Exists", (), True),
        ("rack", "Exists", (), False),
        ("rack", "DoesNotExist", (), True),
        ("zone", "DoesNotExist", (), False),
        ("gpus", "Gt", ("4",), True),
        ("gpus", "Gt", ("8",), False),
        ("gpus", "Lt", ("9",), True),
        ("zone", "Gt", ("1",), False),
        ("rack", "Lt", ("1",), False),
        ("metadata.name", "In", ("node-1",), True),
    ],
)
def test_a_requirement_compares_a_nodes_label(key: str, operator: str, values: tuple[str, ...], admits: bool) -> None:
    assert Requirement(key, Operator(operator), values).admits("node-1", LABELS) is admits


def test_a_term_needs_all_of_its_requirements_and_an_empty_one_admits_nothing() -> None:
    zone, rack = Requirement("zone", Operator.EXISTS), Requirement("rack", Operator.EXISTS)
    assert NodeTerm((zone,)).admits("n", LABELS)
    assert not NodeTerm((zone, rack)).admits("n", LABELS)
    assert not NodeTerm(()).admits("n", LABELS)


TAINT = Taint("gpu", TaintEffect.NO_SCHEDULE, "yes")


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration("gpu", value="yes"), True),
        (Toleration("gpu", value="no"), False),
        (Toleration("gpu", TolerationOperator.EXISTS), True),
        (Toleration("", TolerationOperator.EXISTS), True),
        (Toleration("other", TolerationOperator.EXISTS), False),
        (Toleration("gpu", value="yes", effect=TaintEffect.NO_SCHEDULE), True),
        (Toleration("gpu", value="yes", effect=TaintEffect.NO_EXECUTE), False),
    ],
)
def test_a_taint_keeps_off_what_does_not_tolerate_it(toleration: Toleration, tolerated: bool) -> None:
    assert (keeps_off((TAINT,), (toleration,)) is None) is tolerated


def test_a_preference_keeps_nobody_off() -> None:
    assert keeps_off((Taint("gpu", TaintEffect.PREFER_NO_SCHEDULE),), ()) is None


@pytest.mark.parametrize(
    ("key", "operator", "values", "sentence"),
    [
        ("zone", Operator.IN, (), "operator In needs at least one value"),
        ("zone", Operator.EXISTS, ("a",), "operator Exists takes no values"),
        ("zone", Operator.GT, ("a",), "operator Gt needs one value, a whole number"),
        ("zone", Operator.LT, ("1", "2"), "operator Lt needs one value, a whole number"),
        ("a b", Operator.EXISTS, (), "a label's key is"),
    ],
)
def test_a_malformed_requirement_is_refused(
    key: str, operator: Operator, values: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(InvalidFieldError, match=sentence):
        Requirement(key, operator, values)


def test_a_malformed_toleration_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="only operator Exists may leave it out"):
        Toleration(value="x")
    with pytest.raises(InvalidFieldError, match="operator Exists takes no value"):
        Toleration("gpu", TolerationOperator.EXISTS, "x")


def test_a_quota_may_cover_cpu_and_memory() -> None:
    project = Project(name="a", guaranteed_cpu=4, limit_cpu=8, guaranteed_memory_mib=10, limit_memory_mib=10)
    assert project.limit_cpu == 8
    with pytest.raises(InvalidFieldError, match="limit_cpu is 2, but it must be at least the guaranteed 4 cores"):
        Project(name="a", guaranteed_cpu=4, limit_cpu=2)
    with pytest.raises(InvalidFieldError, match="guaranteed_memory_mib is -1, but it must be between 0"):
        Project(name="a", guaranteed_memory_mib=-1)
