"""Which nodes a pod may use, as the scheduler reads it: pure.

What kube-scheduler would refuse must not be planned. What it would only rather not do (preferences) binds nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api.affinity import NODE_NAME, NodeTerm, Operator, Requirement, Taint, TaintEffect, Toleration
from kfp_gpuquota.api.affinity import TolerationOperator as Tolerates
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.kubernetes.objects import core_types


class Place(msgspec.Struct, frozen=True, gc=False):
    """Labels that a node must have, terms of which one must admit it, taints that are put up with."""

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    def constraints(self) -> dict[str, Any]:
        """As fields of a JobSpec."""
        return {
            "node_selector": dict(self.selector),
            "node_affinity": self.terms,
            "tolerations": self.tolerations,
        }

    def avoiding(self, nodes: tuple[str, ...]) -> Place:
        """The same, but for these nodes: terms are alternatives, so each of them says so."""
        apart = Requirement(NODE_NAME, Operator.NOT_IN, nodes)
        terms = tuple(NodeTerm((*term.requirements, apart)) for term in self.terms or (NodeTerm(()),))
        return Place(self.selector, terms, self.tolerations)

    def within(self, terms: tuple[NodeTerm, ...]) -> Place:
        """The same, where one of these terms holds as well."""
        return Place(self.selector, within(self.terms, terms), self.tolerations)


_OPERATORS = frozenset(Operator)
_KNOWN: dict[Place, Place] = {}
_MOST_KNOWN = 4096


def place_of(spec: core_types.PodSpec) -> Place:
    """The pod's constraints; pods of one template share one object. Raises InvalidFieldError."""
    terms: tuple[NodeTerm, ...] = ()
    affinity = spec.affinity.node_affinity if spec.affinity else None
    if affinity is not None and affinity.required is not None:
        terms = terms_of(affinity.required)
    tolerations = tuple(t for t in map(_toleration, spec.tolerations) if t is not None)
    place = Place(tuple(sorted(spec.node_selector.items())), terms, tolerations)
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    return _KNOWN.setdefault(place, place)


def terms_of(selector: core_types.NodeSelector | None) -> tuple[NodeTerm, ...]:
    """The selector's alternatives; () where there is none. Raises InvalidFieldError."""
    return () if selector is None else tuple(map(_term, selector.node_selector_terms))


def within(terms: tuple[NodeTerm, ...], others: tuple[NodeTerm, ...]) -> tuple[NodeTerm, ...]:
    """Alternatives that fulfil one of both sides each; () stands for any node. To apply `others` twice changes nothing
    where they are one term, as volumes have.
    """
    if not terms or not others:
        return terms or others
    both = ((*one.requirements, *other.requirements) for one in terms for other in others)
    return tuple(dict.fromkeys(NodeTerm(tuple(dict.fromkeys(requirements))) for requirements in both))


def taints_of(taints: Iterable[core_types.Taint]) -> tuple[Taint, ...]:
    """Those that keep pods away; preferences do not."""
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
        return None  # of a kind that this version does not know: it tolerates nothing, which is the safe side
