"""Converts a pod's node selector, affinity and tolerations to the scheduler's constraints. Pure.

A placement that kube-scheduler would refuse must not be planned. Preferences are ignored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.affinity import (
    NODE_NAME,
    NodeTerm,
    Operator,
    Requirement,
    Taint,
    TaintEffect,
    Toleration,
    keeps_off,
    within,
)
from kfp_gpuquota.api.affinity import TolerationOperator as Tolerates
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import check_length
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.kubernetes.objects import core_types


MOST_VALUES: Final = 1024  # of all conditions of a pod on nodes together
OUTSIDE_POOLS: Final = Requirement(labels.POOL, Operator.DOES_NOT_EXIST)


class NodeConstraints(msgspec.Struct, frozen=True, gc=False):
    """Labels that a node must have, terms of which it must satisfy one, and tolerated taints."""

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    def constraints(self) -> dict[str, Any]:
        """Return the constraints as fields of a JobSpec."""
        return {
            "node_selector": dict(self.selector),
            "node_affinity": self.terms,
            "tolerations": self.tolerations,
        }

    def admit(self, node: Node) -> bool:
        """Return whether the node matches, and has no taint that is not tolerated."""
        if any(node.labels.get(key) != value for key, value in self.selector):
            return False
        if self.terms and not any(term.admits(node.name, node.labels) for term in self.terms):
            return False
        return keeps_off(node.taints, self.tolerations) is None

    def excluding(self, nodes: tuple[str, ...]) -> NodeConstraints:
        """Return the constraints without these nodes. Terms are alternatives, so each of them excludes the nodes."""
        exclusion = Requirement(NODE_NAME, Operator.NOT_IN, nodes)
        terms = tuple(NodeTerm((*term.requirements, exclusion)) for term in self.terms or (NodeTerm(()),))
        return NodeConstraints(self.selector, terms, self.tolerations)

    def unpinned(self) -> NodeConstraints:
        """Return the constraints without the pin of an admission, which is the last field of every term.

        Constraints without the pin are returned as they are.
        """
        if not self.terms or not all(term.requirements and _is_pin(term.requirements[-1]) for term in self.terms):
            return self
        terms = tuple(NodeTerm(term.requirements[:-1]) for term in self.terms)
        return NodeConstraints(self.selector, () if terms == (NodeTerm(()),) else terms, self.tolerations)

    def within_any_pool(self) -> NodeConstraints:
        """Return the constraints without the exclusion of pools, which the plan applies to all pods without a pool."""
        if not any(OUTSIDE_POOLS in term.requirements for term in self.terms):
            return self
        terms = tuple(NodeTerm(tuple(r for r in term.requirements if r != OUTSIDE_POOLS)) for term in self.terms)
        return NodeConstraints(self.selector, () if NodeTerm(()) in terms else terms, self.tolerations)

    def bounded(self) -> NodeConstraints:
        """Return one object for equal constraints: thousands of pods have the same. Raises InvalidFieldError.

        Each node is compared with each condition in each plan, so a tenant's pod of a megabyte would stop all plans.
        """
        requirements = [requirement for term in self.terms for requirement in term.requirements]
        values = sum(len(one.values) for one in requirements)
        check_length("nodeSelector", len(self.selector))
        check_length("affinity.nodeAffinity.required", len(requirements))
        check_length("affinity.nodeAffinity.required values", values, MOST_VALUES)
        return _shared(self)

    def within(self, terms: tuple[NodeTerm, ...]) -> NodeConstraints:
        """Return the constraints restricted to nodes that satisfy one of these terms as well."""
        return NodeConstraints(self.selector, within(self.terms, terms), self.tolerations)


_OPERATORS = frozenset(Operator)


def constraints_of(spec: core_types.PodSpec) -> NodeConstraints:
    """Return the pod's constraints; of all but tolerations any number. Raises InvalidFieldError."""
    check_length("tolerations", len(spec.tolerations))  # first: these are what takes longest
    terms: tuple[NodeTerm, ...] = ()
    affinity = spec.affinity.node_affinity if spec.affinity else None
    if affinity is not None and affinity.required is not None:
        terms = terms_of(affinity.required)
    tolerations = tuple(t for t in map(_toleration, spec.tolerations) if t is not None)
    return NodeConstraints(tuple(sorted(spec.node_selector.items())), terms, tolerations)


def _is_pin(last: Requirement) -> bool:
    return last.key == NODE_NAME and last.operator is Operator.IN and len(last.values) == 1


@lru_cache(4096)
def _shared(constraints: NodeConstraints) -> NodeConstraints:
    return constraints


def terms_of(selector: core_types.NodeSelector | None) -> tuple[NodeTerm, ...]:
    """Return the selector's terms; () for no selector. Raises InvalidFieldError."""
    return () if selector is None else tuple(map(_term, selector.node_selector_terms))


def taints_of(taints: Iterable[core_types.Taint]) -> tuple[Taint, ...]:
    """Return the taints that repel pods; PreferNoSchedule does not."""
    return tuple(
        Taint(key=taint.key, effect=TaintEffect(taint.effect), value=taint.value)
        for taint in taints
        if taint.effect in {TaintEffect.NO_SCHEDULE, TaintEffect.NO_EXECUTE}
    )


def _term(term: core_types.NodeSelectorTerm) -> NodeTerm:
    return NodeTerm(tuple(map(_requirement, (*term.match_expressions, *term.match_fields))))


def _requirement(match: core_types.NodeMatch) -> Requirement:
    if match.operator not in _OPERATORS:
        raise InvalidFieldError("operator", match.operator, f"it must be one of {', '.join(sorted(_OPERATORS))}")
    return Requirement(match.key, Operator(match.operator), match.values)


def _toleration(given: core_types.Toleration) -> Toleration | None:
    try:
        return Toleration(
            key=given.key,
            operator=Tolerates(given.operator or "Equal"),
            value=given.value,
            effect=TaintEffect(given.effect) if given.effect else None,
        )
    except (InvalidFieldError, ValueError):
        return None  # an operator or effect that this version does not support: no toleration is the safe choice
