"""Restricts pods to the nodes on which their volumes can be mounted: the zone of a zonal disk, the node of a local one.

kube-scheduler's VolumeBinding filter refuses all other nodes, so they must not be planned. The restriction is the node
affinity of the PersistentVolume to which a claim is bound. An unbound claim restricts nothing: its volume is created
where the pod runs (WaitForFirstConsumer), or the restriction applies after binding.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api.affinity import within
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import terms_of
from kfp_gpuquota.cluster.kubernetes.convert.unmodelled import ONE_POD, is_unmodelled
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.api.affinity import NodeTerm
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import PersistentVolume, PersistentVolumeClaim

MAX_TERMS: Final = 64  # alternatives of one pod; beyond it the plan leaves volumes to kube-scheduler

log = logging.getLogger(__name__)


class Volumes:
    """Tracked claims and volumes. `changed(namespace, claim)` is called when the nodes of a claim have changed."""

    def __init__(self, changed: Callable[[str, str], None]) -> None:
        self._changed = changed
        self._claims: dict[tuple[str, str], tuple[str, str]] = {}  # (namespace, claim) -> (uid, volume)
        self._of_one_pod: set[str] = set()  # uids of claims
        self._unmodelled: set[str] = set()  # names of volumes
        self._claim_keys: dict[str, tuple[str, str]] = {}
        self._terms: dict[
            str, tuple[NodeTerm, ...]
        ] = {}  # volume -> terms of its nodes; volumes without a restriction are left out
        self._volume_names: dict[str, str] = {}

    def put_claim(self, claim: PersistentVolumeClaim) -> None:
        """Add or update a claim."""
        meta = claim.metadata
        key, value = (meta.namespace, meta.name), (meta.uid, claim.spec.volume_name)
        before, self._claims[key] = self._claims.get(key, ("", "")), value
        self._claim_keys[meta.uid] = key
        if ONE_POD in claim.spec.access_modes:
            self._of_one_pod.add(meta.uid)
        if self._terms.get(before[1], ()) != self._terms.get(value[1], ()):
            self._changed(*key)

    def drop_claim(self, uid: str) -> None:
        """Remove a deleted claim."""
        key = self._claim_keys.pop(uid, None)
        self._of_one_pod.discard(uid)
        if key is not None and self._claims[key][0] == uid:
            _, volume = self._claims.pop(key)
            if self._terms.get(volume):
                self._changed(*key)

    def put_volume(self, volume: PersistentVolume) -> None:
        """Add or update a volume."""
        name, affinity = volume.metadata.name, volume.spec.node_affinity
        self._volume_names[volume.metadata.uid] = name
        if is_unmodelled(volume):
            self._unmodelled.add(name)
        try:
            terms = terms_of(affinity.required) if affinity is not None else ()
        except InvalidFieldError as error:
            log.warning("the node affinity of volume %s is left to kube-scheduler: %s", name, error.message)
            terms = ()
        if terms == self._terms.get(name, ()):
            return
        self._terms[name] = terms
        self._volume_changed(name)

    def drop_volume(self, uid: str) -> None:
        """Remove a deleted volume."""
        name = self._volume_names.pop(uid, "")
        self._unmodelled.discard(name)
        if self._terms.pop(name, ()):
            self._volume_changed(name)

    def _volume_changed(self, name: str) -> None:
        for key in [key for key, (_, bound_to) in self._claims.items() if bound_to == name]:
            self._changed(*key)

    def terms(self, namespace: str, claims: Iterable[str]) -> tuple[NodeTerm, ...]:
        """Return the terms of which a node must satisfy one so that all claims can be mounted; () for any node."""
        found: tuple[NodeTerm, ...] = ()
        for claim in claims:
            _, volume = self._claims.get((namespace, claim), ("", ""))
            found = within(found, self._terms.get(volume, ()))
            if len(found) > MAX_TERMS:
                log.warning("%s: volumes with %d node selector terms are ignored in the plan", namespace, len(found))
                return ()
        return found

    def unmodelled(self, namespace: str, claims: Iterable[str]) -> bool:
        """Return whether kube-scheduler checks more of a claim than its volume's nodes, as of one that is not bound."""
        for claim in claims:
            uid, volume = self._claims.get((namespace, claim), ("", ""))
            if not volume or volume in self._unmodelled or uid in self._of_one_pod:
                return True
        return False

    def apply(self, pod: PodView) -> PodView:
        """Return the pod restricted to nodes on which its volumes can be mounted, whether it waits or runs."""
        terms = self.terms(pod.namespace, pod.claims) if pod.claims else ()
        return pod if terms == pod.volume_terms else msgspec.structs.replace(pod, volume_terms=terms)
