"""A project: a team's queue, its guaranteed quota and what it may borrow."""

from __future__ import annotations

import msgspec

from kfp_gpuquota.api.validation import (
    MAX_PRIORITY,
    MAX_WEIGHT,
    Count,
    Name,
    Priority,
    Weight,
    check_count,
    check_name,
    check_range,
)
from kfp_gpuquota.errors import InvalidFieldError

DEFAULT_PROJECT_PRIORITY = 100


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A team's quota, in whole GPUs.

    `guaranteed` can always be got back. `limit` is the most the project may hold: None borrows all that is idle,
    limit = guaranteed is a static allocation. Idle GPUs are shared by `priority` (higher first), within one
    priority by `over_quota_weight` (0 borrows nothing while others want to). `parent` names a department.
    """

    name: Name
    guaranteed: Count = 0
    limit: Count | None = None
    priority: Priority = DEFAULT_PROJECT_PRIORITY
    over_quota_weight: Weight = 1.0
    parent: Name | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_count("guaranteed", self.guaranteed)
        check_range("priority", self.priority, 0, MAX_PRIORITY)
        check_range("over_quota_weight", self.over_quota_weight, 0, MAX_WEIGHT)
        if self.limit is not None:
            check_count("limit", self.limit)
            if self.limit < self.guaranteed:
                raise InvalidFieldError(
                    "limit", self.limit, f"it must be at least the guaranteed {self.guaranteed} GPUs"
                )
        if self.parent is not None:
            check_name("parent", self.parent)
            if self.parent == self.name:
                raise InvalidFieldError("parent", self.parent, "a project cannot be its own parent")
