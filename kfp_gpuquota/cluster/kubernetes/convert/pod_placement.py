"""Reads from a pod where it may run, where it was admitted to, and what its admission will change. Pure."""

from __future__ import annotations

from sys import intern
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import NodeConstraints, constraints_of
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MOST_ENTRIES
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import NodeSelectorTerm, Pod

NODE_NAME_FIELD: Final = "metadata.name"
NOWHERE: Final = "(no node)"  # no node has such a name: devices there count against the quota only


class GateShape(msgspec.Struct, frozen=True, gc=False):
    """The parts of a pod that determine the patch that removes its scheduling gate: see requests.admission.

    `terms`: for each required node selector term, whether it has matchFields; None without required terms.
    `expressions`: for each of them, whether it has matchExpressions.
    `affinity`: depth of /spec/affinity: 0 none, 1 an affinity, 2 a nodeAffinity. `selects`: /spec/nodeSelector exists,
    `prefers`: the nodeAffinity has preferences.
    """

    index: int
    affinity: int = 0
    terms: tuple[bool, ...] | None = None
    annotated: bool = False
    selects: bool = False
    prefers: bool = False
    expressions: tuple[bool, ...] = ()


def gate_of(pod: Pod) -> GateShape | None:
    """Return the parts of a pod that is gated by the quota on which its admission depends; None for another pod."""
    index = next((i for i, gate in enumerate(pod.spec.scheduling_gates) if gate.name == labels.QUOTA_GATE), None)
    if index is None:
        return None
    affinity = pod.spec.affinity
    depth = 0 if affinity is None else 1 if affinity.node_affinity is None else 2
    terms = _terms(pod)
    shape = None if terms is None else tuple(bool(term.match_fields) for term in terms)
    return GateShape(
        index=index,
        affinity=depth,
        terms=shape,
        expressions=tuple(bool(term.match_expressions) for term in terms or ()),
        annotated=pod.metadata.annotations is not None,
        selects=bool(pod.spec.node_selector),
        prefers=depth == 2 and bool(affinity.node_affinity.preferred),  # type: ignore[union-attr] # by its depth
    )


def _terms(pod: Pod) -> tuple[NodeSelectorTerm, ...] | None:
    affinity = pod.spec.affinity
    if affinity is None or affinity.node_affinity is None or affinity.node_affinity.required is None:
        return None
    return affinity.node_affinity.required.node_selector_terms


def sent_to(pod: Pod) -> str:
    """Return the node that the pod was admitted to, which is the last field of all its node selector terms; "" if none.

    The user's own fields come before it, and may name other nodes.
    """
    terms = _terms(pod)
    if not terms or labels.DEVICES not in (pod.metadata.annotations or {}):
        return ""
    last = terms[0].match_fields[-1:]
    pins = (m.values[0] for m in last if m.key == NODE_NAME_FIELD and m.operator == "In" and len(m.values) == 1)
    return next(pins, "")


def own_constraints(pod: Pod, gate: GateShape | None) -> NodeConstraints:
    """Return the constraints that the pod was created with, without those of its admission.

    The pool that a label requests is left out at every stage: the plan considers only nodes of that pool anyway, and an
    admission to a stand-in adds it to the node selector, where it may have been before. So is the exclusion of pools,
    and so are too many tolerations of a pod that was released, to which its user may add more. Raises
    InvalidFieldError.
    """
    spec, annotations = pod.spec, pod.metadata.annotations or {}
    selector = spec.node_selector
    if selector.get(labels.POOL) and selector[labels.POOL] == pod.metadata.labels.get(labels.POOL):
        selector = {key: value for key, value in selector.items() if key != labels.POOL}
        spec = msgspec.structs.replace(spec, node_selector=selector)
    if gate is None and len(spec.tolerations) > MOST_ENTRIES:
        spec = msgspec.structs.replace(spec, tolerations=spec.tolerations[:MOST_ENTRIES])
    constraints = constraints_of(spec)
    not_pinned = labels.OPENED in annotations or labels.RESERVED_ON in annotations
    pinned = gate is None and labels.DEVICES in annotations and not not_pinned
    return (constraints.unpinned() if pinned else constraints.within_any_pool()).bounded()


def opened_on(annotations: Mapping[str, str]) -> str:
    """Return the stand-in to which the pod was admitted; "" for a real node."""
    stand_in = annotations.get(labels.OPENED, "")
    return intern(stand_in) if stand_in and labels.DEVICES in annotations and pool_of(stand_in) else ""


def reserved_node(annotations: Mapping[str, str]) -> str:
    """Return the node on which a pod that is not pinned holds devices, or NOWHERE; "" for a pinned pod."""
    if labels.DEVICES not in annotations or (node := annotations.get(labels.RESERVED_ON)) is None:
        return ""
    return intern(node) if node else NOWHERE
