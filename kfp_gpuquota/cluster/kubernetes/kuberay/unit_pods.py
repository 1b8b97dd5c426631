"""Follows the pods of units, also those that are seen before their RayCluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import is_ray_pod

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.kuberay.admissions import Admissions
    from kfp_gpuquota.cluster.kubernetes.kuberay.owner_patches import OwnerPatches
    from kfp_gpuquota.cluster.kubernetes.kuberay.unit_registry import UnitRegistry
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Slot, Unit

OWNER_WITHIN_S: Final = 10.0


class UnitPods:
    """The pods of units. Before `start` it owns none.

    A pod may be seen before its RayCluster, because the order of different watches is not defined: it is kept for
    OWNER_WITHIN_S.
    """

    def __init__(self, units: UnitRegistry, admissions: Admissions, patches: OwnerPatches) -> None:
        self._set, self._admissions, self._patches = units, admissions, patches
        self._early: dict[str, dict[str, PodView]] = {}  # by the uid of a RayCluster that is not known yet
        self._unknown: set[str] = set()  # RayClusters that were waited for in vain
        self._put_again: Callable[[PodView], None] | None = None

    def start(self, put_again: Callable[[PodView], None]) -> None:
        """Own pods from now on; `put_again` receives pods whose owner became known later."""
        self._put_again = put_again

    def forget(self, cluster_uid: str) -> None:
        """Forget that a RayCluster, now deleted, was waited for."""
        self._unknown.discard(cluster_uid)

    def owns(self, pod: PodView) -> bool:
        """Return whether the pod is a worker of a unit, or may be one when its RayCluster is known."""
        if pod.uid in self._set.by_pod:
            return True
        if self._put_again is None or not is_ray_pod(pod):
            return False
        return self._set.unit_of(pod) is not None or self._is_early(pod)

    def ungrouped(self, pod: PodView) -> PodView:
        """Return a pod outside of units without its group, if other pods of its cluster are in units."""
        if not pod.ray_group or not self._set.of_cluster(pod.controller_uid):
            return pod
        return msgspec.structs.replace(pod, group="", group_size=0, owner=None)

    def put(self, pod: PodView) -> None:
        """Add or update a pod that this owns."""
        unit = self._set.by_pod.get(pod.uid) or self._set.unit_of(pod)
        if unit is None:
            self._keep_early(pod)
            return
        self._set.by_pod[pod.uid] = unit
        self._advance(unit, pod)
        if unit.uid in self._set.units:
            self._patches.sync(unit)

    def drop(self, uid: str) -> None:
        """Remove a deleted pod."""
        for pods in self._early.values():
            pods.pop(uid, None)
        unit = self._set.by_pod.get(uid)
        if unit is not None:
            self._set.release(unit, uid)
            self._patches.sync(unit)

    def waiting_of(self, unit_uid: str) -> list[PodView]:
        """Return the waiting pods of a unit, oldest first."""
        unit = self._set.units.get(unit_uid)
        return [] if unit is None else unit.waiting_in_order()

    def holder_of(self, pod_uid: str) -> str:
        """Return the slot of a unit's worker, which holds its devices; "" for other pods."""
        unit = self._set.by_pod.get(pod_uid)
        slot = None if unit is None else unit.slot_of(pod_uid)
        return "" if slot is None else slot.id

    def leave(self, pod_uid: str) -> bool:
        """Record that a pod is evicted because it does not start; return whether it is a worker of a unit."""
        unit = self._set.by_pod.get(pod_uid)
        slot = None if unit is None else unit.slot_of(pod_uid)
        if unit is not None and slot is not None:
            unit.leave(slot, None)
        return slot is not None

    def _advance(self, unit: Unit, pod: PodView) -> None:
        slot = unit.slot_of(pod.uid)
        if pod.stage in {Stage.ENDED, Stage.OUTSIDE}:
            self._set.release(unit, pod.uid)
        elif pod.stage is Stage.WAITING and slot is None:
            unit.waiting[pod.uid] = pod
            self._admissions.admit(unit)
        elif slot is None:
            slot = unit.adopt(pod)
        else:
            unit.follow(slot, pod)
        if slot is not None and pod.stage is Stage.TERMINATING:
            self._terminating(unit, slot)

    def _terminating(self, unit: Unit, slot: Slot) -> None:
        """Record that a pod is being deleted; Ray's autoscaler may have chosen another one than the plan."""
        if slot.leaving:
            return
        planned = (one for one in unit.pods(slot.group) if one.leaving and one.by_kuberay and not one.terminating)
        instead = next(planned, None)
        unit.leave(slot, self._set.ledger.now())
        if instead is not None:
            unit.stay(instead)

    def _is_early(self, pod: PodView) -> bool:
        known = self._set.owners.owner_of(pod.controller_uid) is not None or pod.controller_uid in self._unknown
        return pod.stage is Stage.WAITING and not known

    def _keep_early(self, pod: PodView) -> None:
        cluster = pod.controller_uid
        if cluster not in self._early:
            asyncio.get_running_loop().call_later(OWNER_WITHIN_S, self._give_up, cluster)
        self._early.setdefault(cluster, {})[pod.uid] = pod

    def _give_up(self, cluster_uid: str) -> None:
        if self._set.owners.owner_of(cluster_uid) is None:
            self._unknown.add(cluster_uid)
        self.put_early_again(cluster_uid)

    def put_early_again(self, cluster_uid: str) -> None:
        """Pass on the pods that came before their RayCluster."""
        for pod in self._early.pop(cluster_uid, {}).values():
            if self._put_again is not None:
                self._put_again(pod)
