"""What a check of a cluster (`gpuquota doctor`) yields."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Level(StrEnum):
    """How bad a finding is. A warning does not keep the quota from being honoured now; a failure does."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check: what was found, and, unless it is fine, what to do."""

    check: str
    level: Level
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check=check, level=Level.OK, message=message)


def warn(check: str, message: str, remedy: str) -> Finding:
    """Return a warning."""
    return Finding(check=check, level=Level.WARN, message=message, remedy=remedy)


def fail(check: str, message: str, remedy: str) -> Finding:
    """Return a failure."""
    return Finding(check=check, level=Level.FAIL, message=message, remedy=remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)
