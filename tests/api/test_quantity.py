"""Quantities mean what Kubernetes takes them for."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api.quantity import (
    LARGEST,
    MIB,
    as_number,
    parse_cores,
    parse_gpu_memory,
    parse_mib,
    parse_quantity,
    show_gpus,
    show_mib,
)
from kfp_gpuquota.errors import InvalidFieldError

# From the tables of k8s.io/apimachinery's documentation: what a suffix stands for.
VALUES = [
    ("0", Fraction(0)),
    ("12.", Fraction(12)),
    (".5", Fraction(1, 2)),
    ("+3", Fraction(3)),
    ("-3", Fraction(-3)),
    ("1Ki", Fraction(1024)),
    ("1.5Gi", Fraction(3 * 2**29)),
    ("1k", Fraction(1000)),
    ("4G", Fraction(4 * 10**9)),
    ("2500M", Fraction(2_500_000_000)),
    ("500m", Fraction(1, 2)),
    ("1E", Fraction(10**18)),
    ("1e3", Fraction(1000)),
    ("1E3", Fraction(1000)),
    ("12e-3", Fraction(12, 1000)),
    ("1n", Fraction(1, 10**9)),
    ("0.1n", Fraction(1, 10**9)),
    ("1e-300", Fraction(1, 10**9)),
    ("0e999999999", Fraction(0)),
    ("1e999999999", Fraction(LARGEST)),
    ("9Ei", Fraction(LARGEST)),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_a_quantity_has_the_value_that_kubernetes_gives_it(text: str, value: Fraction) -> None:
    assert parse_quantity("memory", text) == value


@pytest.mark.parametrize(
    "text",
    ["", " 4G", "4G ", "4 G", "0.5GB", "4K", "4g", "Gi", "1.2.3", "--1", "1e", "1e1.5", "0x10", "1_000", "nan", "٤"],
)
def test_what_is_no_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"a number with one of the suffixes.*for example 4Gi, 4G or 500m"):
        parse_quantity("gpu_memory", text)


@pytest.mark.parametrize(("text", "mib"), [("4Gi", 4096), ("4G", 3815), ("1", 1), ("2500M", 2385), ("1Ti", 2**20)])
def test_memory_is_rounded_up_to_whole_mebibytes(text: str, mib: int) -> None:
    assert parse_mib("memory", text) == mib


@pytest.mark.parametrize("text", ["0", "-4G", "-0"])
def test_memory_is_more_than_nothing(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="it must be more than 0"):
        parse_mib("memory", text)


@pytest.mark.parametrize(("text", "cores"), [("2", 2.0), ("500m", 0.5), ("0.1", 0.1), ("100u", 0.001)])
def test_cores_are_rounded_up_to_thousandths(text: str, cores: float) -> None:
    assert parse_cores("cpu", text) == cores


@given(st.integers(1, 2**62))
def test_memory_is_never_less_than_was_written(size: int) -> None:
    assert 0 <= parse_mib("memory", str(size)) * MIB - size < MIB


@given(st.text(alphabet="+-.0123456789eEinumkKMGTP", max_size=12))
def test_every_text_is_a_quantity_or_refused_with_a_sentence(text: str) -> None:
    with contextlib.suppress(InvalidFieldError):
        value = parse_quantity("memory", text)
        assert abs(value) <= LARGEST
        assert value * 10**9 == int(value * 10**9)


def test_amounts_are_shown_as_they_are_written() -> None:
    assert [show_mib(n) for n in (4096, 3815, 1)] == ["4Gi", "3815Mi", "1Mi"]
    assert [as_number(x) for x in (2.0, 0.1 + 0.2, 3)] == [2, 0.3, 3]


def test_gpu_memory_without_a_unit_is_in_mib_as_in_the_annotation() -> None:
    assert [parse_gpu_memory("gpu_memory", text) for text in ("2500", "4G", "4Gi")] == [2500, 3815, 4096]


def test_gpu_memory_that_must_be_bytes_is_refused_with_both_readings() -> None:
    with pytest.raises(InvalidFieldError) as refused:
        parse_gpu_memory("gpu_memory", "20000000000")
    assert "write 19074Mi where bytes are meant, or 20000000000Mi" in str(refused.value)


def test_one_gpu_is_no_gpus() -> None:
    assert [show_gpus(count) for count in (0, 1, 1.0, 0.5, 2)] == ["0 GPUs", "1 GPU", "1 GPU", "0.5 GPUs", "2 GPUs"]
