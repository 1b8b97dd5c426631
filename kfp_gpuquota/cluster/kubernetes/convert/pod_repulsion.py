"""Finds the pods that other pods' required anti-affinity keeps away from nodes. No I/O.

kube-scheduler applies the anti-affinity of running pods to a new pod: a pod without any constraint of its own is then
refused by some nodes. Which nodes these are depends on topology domains, so such a pod is not pinned (unmodelled.py).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import LabelSelector, PodAffinityTerm, PodSpec

ANY_NAMESPACE: Final = "*"
MOST_TERMS: Final = 64  # of one pod
MOST_ENTRIES: Final = 256  # of one term: requirements, their values, namespaces
MOST_REPULSIONS: Final = 4096  # different ones, of all pods in any namespace or in one

Requirement = tuple[str, str, tuple[str, ...]]


class Repulsion(msgspec.Struct, frozen=True, gc=False):
    """Pods that are kept away: those in these namespaces whose labels satisfy all requirements."""

    namespaces: tuple[str, ...]
    requirements: tuple[Requirement, ...]

    def applies_to(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels satisfy all requirements."""
        return all(_satisfied(labels.get(key), operator, values) for key, operator, values in self.requirements)


EVERYTHING: Final = Repulsion((ANY_NAMESPACE,), ())
"""Of a pod whose anti-affinity is longer than what is evaluated. What may be kept away is not pinned, which is safe."""


def repulsions_of(spec: PodSpec, namespace: str) -> tuple[Repulsion, ...]:
    """Return what the pod's required anti-affinity keeps away; pods of one template share one object."""
    affinity = spec.affinity
    if affinity is None or affinity.pod_anti_affinity is None:
        return ()
    terms = affinity.pod_anti_affinity.required
    if len(terms) > MOST_TERMS:
        return (EVERYTHING,)
    return tuple(_shared(_repulsion(term, namespace, term.label_selector)) for term in terms if term.label_selector)


def _repulsion(term: PodAffinityTerm, namespace: str, selector: LabelSelector) -> Repulsion:
    """Return the term's pods. Of a namespace selector all namespaces are assumed: their labels are not followed."""
    namespaces = (ANY_NAMESPACE,) if term.namespace_selector is not None else term.namespaces or (namespace,)
    labels = ((key, "In", (value,)) for key, value in selector.match_labels.items())
    more = ((one.key, one.operator, one.values) for one in selector.match_expressions)
    requirements = tuple(sorted((*labels, *more)))
    entries = sum(1 + len(values) for _, _, values in requirements)
    return EVERYTHING if entries + len(namespaces) > MOST_ENTRIES else Repulsion(namespaces, requirements)


@lru_cache(4096)
def _shared(repulsion: Repulsion) -> Repulsion:
    return repulsion


def _satisfied(value: str | None, operator: str, values: tuple[str, ...]) -> bool:
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    return (value in values) is (operator == "In")


class PodRepulsions:
    """The repulsions of all pods, by namespace. Thousands of pods have few different ones."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Repulsion, ...]] = {}  # by the pod's uid
        self._counts: dict[str, Counter[Repulsion]] = {}

    def put(self, uid: str, repulsions: tuple[Repulsion, ...]) -> None:
        """Add or update a pod."""
        if self._of.get(uid, ()) == repulsions:
            return
        self.drop(uid)
        if repulsions:
            self._of[uid] = repulsions
        for repulsion in repulsions:
            for namespace in repulsion.namespaces:
                self._counts.setdefault(namespace, Counter())[repulsion] += 1

    def drop(self, uid: str) -> None:
        """Remove a deleted pod."""
        for repulsion in self._of.pop(uid, ()):
            for namespace in repulsion.namespaces:
                self._counts[namespace][repulsion] -= 1
                if not self._counts[namespace][repulsion]:
                    del self._counts[namespace][repulsion]

    def keeps_away(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return whether any pod's anti-affinity applies to a pod with these labels, or too many may."""
        given = [self._counts[key] for key in (namespace, ANY_NAMESPACE) if key in self._counts]
        if sum(map(len, given)) > MOST_REPULSIONS:
            return True
        found = (repulsion for counts in given for repulsion in counts)
        return any(repulsion.applies_to(labels) for repulsion in found)
