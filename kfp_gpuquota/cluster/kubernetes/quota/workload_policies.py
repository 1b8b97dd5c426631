"""Converts WorkloadPolicy objects to policies, and back. Pure. Their meaning is documented in api/policy.py."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.policy import IdleRule, MemoryRule, PartRule, WorkloadPolicy
from kfp_gpuquota.api.quantity import parse_mib
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import PolicyObject


_IDLE: Final = {
    "warnAfterSeconds": "warn_after_s",
    "preemptAfterSeconds": "preempt_after_s",
    "suspendAfterSeconds": "suspend_after_s",
}

log = logging.getLogger(__name__)


def policy_of(stored: PolicyObject) -> WorkloadPolicy:
    """Return the policy of an object. Raises InvalidFieldError for an invalid one."""
    spec = stored.spec
    part, size = spec.gpu_fraction_limit, spec.gpu_memory_limit
    try:
        return WorkloadPolicy(
            name=stored.metadata.name,
            project=spec.project,
            kind=None if spec.kind is None else Kind(spec.kind),
            gpu_fraction_limit=None if part is None else msgspec.convert(part, PartRule),
            gpu_memory_limit_mib=None
            if size is None
            else MemoryRule(**{name: parse_mib(f"gpuMemoryLimit.{name}", str(text)) for name, text in size.items()}),
            idle=None if spec.idle is None else IdleRule(**{_IDLE[name]: at for name, at in spec.idle.items()}),
        )
    except (msgspec.ValidationError, TypeError, ValueError, KeyError) as error:
        raise InvalidFieldError("spec", stored.metadata.name, str(error)) from None


def policy_body(policy: WorkloadPolicy) -> dict[str, Any]:
    """Return the object of a policy."""
    spec: dict[str, Any] = {"project": policy.project, "kind": policy.kind}
    if policy.gpu_fraction_limit is not None:
        spec["gpuFractionLimit"] = msgspec.to_builtins(policy.gpu_fraction_limit)
    if policy.gpu_memory_limit_mib is not None:
        sizes = msgspec.to_builtins(policy.gpu_memory_limit_mib)
        spec["gpuMemoryLimit"] = {name: f"{mib}Mi" for name, mib in sizes.items()}
    if policy.idle is not None:
        times = {name: getattr(policy.idle, field) for name, field in _IDLE.items()}
        spec["idle"] = {name: at for name, at in times.items() if at is not None}
    given = {name: value for name, value in spec.items() if value is not None}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "WorkloadPolicy",
        "metadata": {"name": policy.name},
        "spec": given,
    }


def set_by(annotations: Mapping[str, str] | None) -> dict[str, str]:
    """Return the policy that has set each field, from the annotation that admission writes."""
    try:
        return msgspec.json.decode((annotations or {}).get(labels.SET_BY, "{}"), type=dict[str, str])
    except msgspec.DecodeError:
        return {}


class CurrentPolicies:
    """The policies in effect. An invalid one leaves its previous version in effect."""

    def __init__(self) -> None:
        self._policies: dict[str, WorkloadPolicy] = {}
        self._names: dict[str, str] = {}
        self.all: tuple[WorkloadPolicy, ...] = ()

    def put(self, stored: PolicyObject) -> None:
        """Add or update a policy."""
        self._names[stored.metadata.uid] = stored.metadata.name
        try:
            self._policies[stored.metadata.name] = policy_of(stored)
        except InvalidFieldError as error:
            log.error("policy %s is invalid, its previous version is kept: %s", stored.metadata.name, error.message)
        self._gather()

    def drop(self, uid: str) -> None:
        """Remove a deleted policy, unless another one with its name exists."""
        name = self._names.pop(uid, "")
        if name not in self._names.values():
            self._policies.pop(name, None)
        self._gather()

    def _gather(self) -> None:
        self.all = tuple(self._policies.values())
