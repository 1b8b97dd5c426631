"""Workload policies: defaults, bounds and fixed values that admission applies, for a project, a kind, or all."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kfp_gpuquota.api.job import JobSpec, Kind
from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.validation import (
    MAX_MIB,
    MAX_RUNTIME_S,
    Fraction,
    Mebibytes,
    Name,
    RunTime,
    check_count,
    check_name,
    check_range,
)
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable


class PartRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rule for a fraction. `default`: where none is given; `most`: the bound; `forced`: whatever is given."""

    default: Fraction | None = None
    most: Fraction | None = None
    forced: Fraction | None = None


class MemoryRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The same for an amount of memory, in MiB."""

    default: Mebibytes | None = None
    most: Mebibytes | None = None
    forced: Mebibytes | None = None


class IdleRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What happens to a running job none of whose GPUs is used: its owner is warned, then it is suspended.

    All times count from the last use. From `preempt_after_s` on it is suspended once a waiting job could start in its
    place, also within its guarantee; None: not earlier than after `suspend_after_s`.
    """

    warn_after_s: RunTime
    suspend_after_s: RunTime
    preempt_after_s: RunTime | None = None

    def __post_init__(self) -> None:
        times = {field: getattr(self, field) for field in ("warn_after_s", "preempt_after_s", "suspend_after_s")}
        given = {field: value for field, value in times.items() if value is not None}
        for field, value in given.items():
            check_range(f"idle.{field}", value, 1, MAX_RUNTIME_S, "s")
        for (earlier, before), (field, value) in pairwise(given.items()):
            if value <= before:
                raise InvalidFieldError(
                    f"idle.{field}", value, f"it must be more than idle.{earlier}, which is {before:g}"
                )


class WorkloadPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rules for the workloads of `project` (None: all) of `kind` (None: both).

    A limit applies to workloads whose request is of its kind: `gpu_fraction_limit` to those that request a fraction,
    `gpu_memory_limit_mib` to those that ask for memory. Example: every interactive workload of research-vision1 may use
    the whole GPU: `WorkloadPolicy(name="sessions", project="research-vision1", kind=Kind.BUILD,
    gpu_fraction_limit=PartRule(default=1.0))`.
    """

    name: Name
    project: Name | None = None
    kind: Kind | None = None
    gpu_fraction_limit: PartRule | None = None
    gpu_memory_limit_mib: MemoryRule | None = None
    idle: IdleRule | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.project is not None:
            check_name("project", self.project)
        limits = (
            self.gpu_fraction_limit not in (None, PartRule()),
            self.gpu_memory_limit_mib not in (None, MemoryRule()),
        )
        if self.idle is None and not any(limits):
            raise InvalidFieldError(
                "policy", self.name, "it has no rule", hint="give a limit as default, most or forced, or idle times"
            )
        self._check_parts()
        self._check_memory()

    def applies_to(self, spec: JobSpec) -> bool:
        """Return whether the policy applies to this workload."""
        return self.is_of(spec.project, spec.kind)

    def is_of(self, project: str, kind: Kind) -> bool:
        """Return whether the policy applies to workloads of this kind of the project."""
        return self.project in {None, project} and self.kind in {None, kind}

    @property
    def weight(self) -> tuple[bool, bool, str]:
        """The more special policy comes first: of the project, then of the kind; then by name."""
        return (self.project is None, self.kind is None, self.name)

    def _check_parts(self) -> None:
        if (rule := self.gpu_fraction_limit) is None:
            return
        for field in ("default", "most", "forced"):
            value = getattr(rule, field)
            if value is not None and not 0 < value <= 1:
                raise InvalidFieldError(f"gpu_fraction_limit.{field}", value, "it must be more than 0 and at most 1")
        _check_order("gpu_fraction_limit", rule)

    def _check_memory(self) -> None:
        if (rule := self.gpu_memory_limit_mib) is None:
            return
        for field in ("default", "most", "forced"):
            value = getattr(rule, field)
            if value is not None:
                check_count(f"gpu_memory_limit_mib.{field}", value, 1, "MiB", MAX_MIB)
        _check_order("gpu_memory_limit_mib", rule)


class Admitted(NamedTuple):
    """A workload as it is admitted, and which policy set what: {field: policy}."""

    spec: JobSpec
    set_by: dict[str, str]


def admit(spec: JobSpec, policies: Iterable[WorkloadPolicy]) -> Admitted:
    """Apply the policies, the more special first; a field that one has set is left alone by the others.

    Raises InvalidFieldError, naming the policy, for a limit above the bound, or a request above a limit that is set.
    """
    set_by: dict[str, str] = {}
    for policy in sorted((policy for policy in policies if policy.applies_to(spec)), key=lambda policy: policy.weight):
        for field, request in (("gpu_fraction_limit", "gpu_fraction"), ("gpu_memory_limit_mib", "gpu_memory_mib")):
            rule = getattr(policy, field)
            if rule is not None and getattr(spec, request) is not None and field not in set_by:
                spec = _apply(spec, field, request, rule, policy, set_by)
    return Admitted(spec, set_by)


def idle_rule_of(project: str, kind: Kind, policies: Iterable[WorkloadPolicy]) -> WorkloadPolicy | None:
    """Return the policy whose idle rule applies to a project's jobs of a kind: the most special one that has any."""
    found = (policy for policy in policies if policy.idle is not None and policy.is_of(project, kind))
    return min(found, key=lambda policy: policy.weight, default=None)


def _apply(
    spec: JobSpec,
    field: str,
    request: str,
    rule: PartRule | MemoryRule,
    policy: WorkloadPolicy,
    set_by: dict[str, str],
) -> JobSpec:
    given = getattr(spec, field)
    if rule.most is not None and given is not None and rule.forced is None and given > rule.most:
        raise InvalidFieldError(field, given, f"policy {policy.name!r} allows at most {_shown(rule.most)}")
    value = rule.forced if rule.forced is not None else rule.default if given is None else None
    if value is None:
        return spec
    if (asked := getattr(spec, request)) > value:
        raise InvalidFieldError(
            request, asked, f"policy {policy.name!r} sets the limit to {_shown(value)}", hint="ask for less"
        )
    set_by[field] = policy.name
    return msgspec.structs.replace(spec, **{field: value})


def _check_order(field: str, rule: PartRule | MemoryRule) -> None:
    for name in ("default", "forced"):
        value = getattr(rule, name)
        if value is not None and rule.most is not None and value > rule.most:
            raise InvalidFieldError(f"{field}.{name}", value, f"it cannot exceed {field}.most, which is {rule.most:g}")


def _shown(value: float) -> str:
    return show_mib(value) if isinstance(value, int) else f"{value:g}"
