"""The CRD of WorkloadPolicy. Constraints on two fields are CEL rules with the messages of `api`."""

from __future__ import annotations

from typing import Final

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.validation import MAX_NAME_LENGTH
from kfp_gpuquota.cluster.kubernetes.crd.structural import Schema, column, definition, rule

_VALUES: Final = {
    "default": "The value of workloads without one.",
    "most": "The maximum value.",
    "forced": "The value of all workloads, whatever they specify.",
}


def workload_policy(metadata: Schema, name_rule: Schema) -> Schema:
    """Return the CustomResourceDefinition."""
    columns = [
        column("Project", "string", ".spec.project", "the policy applies to this project only"),
        column("Kind", "string", ".spec.kind", "the policy applies to this kind only"),
        *(column(f"{name.capitalize()} part", "number", f".spec.gpuFractionLimit.{name}") for name in _VALUES),
        *(column(f"{name.capitalize()} memory", "string", f".spec.gpuMemoryLimit.{name}") for name in _VALUES),
    ]
    body = {
        "description": "Defaults, maxima and forced values for the limits of workloads that share GPUs.",
        "type": "object",
        "required": ["spec"],
        "properties": {"metadata": metadata, "spec": _spec()},
        "x-kubernetes-validations": [name_rule],
    }
    return definition("WorkloadPolicy", "workloadpolicies", "wp", "Cluster", body, columns)


def _spec() -> Schema:
    part = {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1}
    size = {"type": "string", "maxLength": 40, "x-kubernetes-validations": [_positive()]}
    properties = {
        "project": {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_NAME_LENGTH,
            "description": "The policy applies to this project only.",
        },
        "kind": {
            "type": "string",
            "enum": [kind.value for kind in Kind],
            "description": "The policy applies to this kind only.",
        },
        "gpuFractionLimit": _rules(part, "The limit of workloads that request a fraction.", _order("gpuFractionLimit")),
        "gpuMemoryLimit": _rules(
            size, "The limit of workloads that request memory, for example 8Gi.", _order_of_sizes()
        ),
    }
    some = rule(
        "has(self.gpuFractionLimit) || has(self.gpuMemoryLimit)",
        "it has no rule; give a limit as default, most or forced",
    )
    return {"type": "object", "properties": properties, "x-kubernetes-validations": [some]}


def _rules(value: Schema, description: str, order: list[Schema]) -> Schema:
    properties = {name: {**value, "description": text} for name, text in _VALUES.items()}
    some = rule("has(self.default) || has(self.most) || has(self.forced)", "give a limit as default, most or forced")
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "x-kubernetes-validations": [some, *order],
    }


def _order(field: str) -> list[Schema]:
    return [
        rule(
            f"!has(self.{name}) || !has(self.most) || self.{name} <= self.most",
            f"{field}.{name} is %s, but it cannot exceed {field}.most, which is %s",
            f"self.{name}",
            "self.most",
        )
        for name in ("default", "forced")
    ]


def _order_of_sizes() -> list[Schema]:
    both = "!has(self.{0}) || !has(self.most) || !isQuantity(self.{0}) || !isQuantity(self.most)"
    return [
        rule(
            f"{both.format(name)} || quantity(self.{name}).compareTo(quantity(self.most)) <= 0",
            f"gpuMemoryLimit.{name} is %s, but it cannot exceed gpuMemoryLimit.most, which is %s",
            f"self.{name}",
            "self.most",
        )
        for name in ("default", "forced")
    ]


def _positive() -> Schema:
    return rule(
        "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
        "it is '%s', but it must be more than 0, a number with one of the suffixes Ki Mi Gi Ti (of 1024) or k M G T"
        " (of 1000); for example 8Gi",
        "self",
    )
