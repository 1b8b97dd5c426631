"""Amounts as Kubernetes writes them: "4G", "4Gi", "2500M", "500m", "1e9".

The grammar is that of `resource.ParseQuantity` in k8s.io/apimachinery: a decimal number, and a binary suffix (Ki ...
Ei), a decimal one (n, u, m, k, M ... E) or an exponent. Values are rounded up to a thousand-millionth, and capped at
2^63 - 1. Not taken over: Kubernetes reads a suffix or a sign without any digit as 0, and is wrong about some amounts
above 2^63 (1000E is 1).
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Final

from kfp_gpuquota.errors import InvalidFieldError

MIB: Final = 1 << 20
MOST_BARE_MIB: Final = 10_000_000
"""A larger number of MiB (9.5 TiB) is one of bytes, written without its unit."""

LARGEST: Final = (1 << 63) - 1

_FORM = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:([KMGTPE]i|[numkMGTPE]?)|[eE]([+-]?\d+))", re.ASCII)
_SUFFIXES: Final = {
    "": Fraction(1),
    **{suffix: Fraction(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Fraction(1, 1000) ** power for power, suffix in enumerate(("m", "u", "n"), start=1)},
}
_BYTES = re.compile(r"[\d.]+[kKMGTPE]i?B", re.ASCII)  # as people write it; Kubernetes has no such suffix
_SMALLEST: Final = Fraction(1, 10**9)
_LARGEST_EXPONENT: Final = 40
"""Beyond it a number is above the cap, or below the smallest, whatever its digits: there are no more than that many."""

_LONGEST: Final = 40


def parse_quantity(field: str, text: str) -> Fraction:
    """The exact value. Raises InvalidFieldError for what is no quantity."""
    match = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise InvalidFieldError(
            field, text, "it must be a number with one of the suffixes Ki Mi Gi Ti (of 1024) or k M G T (of 1000)",
            hint="for example 4Gi, 4G or 500m",
        )  # fmt: skip
    sign, number, suffix, exponent = match.groups()
    value = Fraction(number) * (_SUFFIXES[suffix] if exponent is None else _power(exponent))
    value = min(ceil(value / _SMALLEST) * _SMALLEST, Fraction(LARGEST))
    return -value if sign == "-" else value


def _power(exponent: str) -> Fraction:
    bounded = max(-2 * _LARGEST_EXPONENT, min(2 * _LARGEST_EXPONENT, int(exponent)))
    return Fraction(10) ** bounded


def exact_text(value: float) -> str:
    """Return the shortest decimal that is read as this number, without an exponent."""
    return f"{Decimal(repr(value)):f}"


def parse_mib(field: str, text: str) -> int:
    """An amount of memory in MiB, rounded up: "4G" or "4GB" is 3815, "4Gi" or "4GiB" 4096. Raises InvalidFieldError."""
    value = parse_quantity(field, text[:-1] if _BYTES.fullmatch(text) else text)
    if value <= 0:
        raise InvalidFieldError(field, text, "it must be more than 0")
    return ceil(value / MIB)


def parse_gpu_memory(field: str, text: str) -> int:
    """GPU memory in MiB: a bare number is MiB, as in the annotation `gpu-memory`; "4G" is 3815. InvalidFieldError."""
    if not (text.isascii() and text.isdecimal()):
        return parse_mib(field, text)
    if len(text) > _LONGEST or int(text) > MOST_BARE_MIB:
        raise InvalidFieldError(
            field, text, f"a number without a unit is MiB, and more than {MOST_BARE_MIB} are more than a GPU has",
            hint=f"write {parse_mib(field, text[:_LONGEST])}Mi where bytes are meant, or {text[:_LONGEST]}Mi",
        )  # fmt: skip
    return parse_mib(field, f"{text}Mi")


def parse_cores(field: str, text: str) -> float:
    """A number of CPU cores, rounded up to thousandths: "500m" is 0.5. Raises InvalidFieldError."""
    return ceil(parse_quantity(field, text) * 1000) / 1000


def show_mib(mib: int) -> str:
    """The amount as people write it: "40Gi", "1500Mi"."""
    return f"{mib // 1024}Gi" if mib and mib % 1024 == 0 else f"{mib}Mi"


def show_gpus(count: float) -> str:
    """A number of GPUs with its unit: "1 GPU", "2 GPUs", "0.5 GPUs"."""
    return "1 GPU" if count == 1 else f"{as_number(count)} GPUs"


SHOWN_PLACES: Final = 4
"""Decimal places of numbers of GPUs that are sums of parts: seven sevenths, to six places each, are shown as 1."""


def as_number(value: float) -> int | float:
    """Whole numbers as such, others to six places: what a share of devices adds up to."""
    rounded = round(value, 6)
    return int(rounded) if rounded == int(rounded) else rounded


def gpus_or_fraction(text: str | None, *, memory: str | None) -> tuple[int, float | None]:
    """Return (GPUs, fraction of one) for `-g`. Raises InvalidFieldError, also where `memory` is asked for as well."""
    if text is None:
        return 1, None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if 0 < value < 1:
        return 1, value
    if value != value // 1:
        raise InvalidFieldError("gpus", text, "it must be a whole number of GPUs, or a part of one, such as 0.25")
    if memory is not None:
        raise InvalidFieldError(
            "gpus", text, "it counts whole GPUs, and the job asks for a share of them (gpu_memory)",
            hint="leave it out; for the same share of several GPUs of a node give --gpu-devices",
        )  # fmt: skip
    return whole_number("gpus", text.removesuffix(".0")), None


def whole_number(field: str, text: str, unit: str = "GPUs") -> int:
    """Return the number. Raises InvalidFieldError."""
    try:
        return int(text)
    except ValueError:
        raise InvalidFieldError(field, text, f"it must be a whole number{unit and f' of {unit}'}") from None


def gpu_quota(field: str, text: str) -> float:
    """Return a quota's number of GPUs, or part of one. Raises InvalidFieldError."""
    try:
        return float(text)
    except ValueError:
        raise InvalidFieldError(field, text, "it must be a number of GPUs, such as 4 or 0.5") from None
