"""Conditions of an object's status, as Kubernetes' conventions have them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition


def any_is_true(conditions: Iterable[Condition] | None, types: Collection[str]) -> bool:
    """Return whether a condition of one of these types is true."""
    return any(one.type in types and one.status == "True" for one in conditions or ())


def with_condition(known: Sequence[Condition], wanted: Condition, now: float) -> tuple[Condition, ...]:
    """Return the conditions with this one; its transition time, in whole seconds, changes only with its status."""
    old = next((c for c in known if c.type == wanted.type), None)
    same = old is not None and old.status == wanted.status
    at = old.last_transition_time if same and old is not None else datetime.fromtimestamp(int(now), UTC)
    dated = msgspec.structs.replace(wanted, last_transition_time=at)
    return (*(c for c in known if c.type != wanted.type), dated)
