"""The units, the pods that are their workers, and why units of RayJobs are to be suspended. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.kuberay.owners import Owners
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Ledger, Unit


@dataclass
class UnitRegistry:
    """All units by uid. `stops`: the reasons why units of RayJobs are to be suspended, by the units' uid."""

    owners: Owners
    ledger: Ledger
    units: dict[str, Unit] = field(default_factory=dict)
    by_pod: dict[str, Unit] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)

    def end_of_owner(self, owner_uid: str) -> None:
        """End the units of a deleted or finished owner."""
        for unit in [unit for unit in self.units.values() if unit.owner_uid == owner_uid]:
            self.end(unit)

    def end(self, unit: Unit) -> None:
        """End a unit; it is removed with its last worker."""
        if unit.end():
            del self.units[unit.uid]
            self.stops.pop(unit.uid, None)

    def release(self, unit: Unit, pod_uid: str) -> None:
        """Release what a pod that has ended held in its unit."""
        self.by_pod.pop(pod_uid, None)
        unit.waiting.pop(pod_uid, None)
        if (slot := unit.slot_of(pod_uid)) is not None:
            unit.release(slot)
        if unit.ended and unit.uid in self.units:
            self.end(unit)

    def unit_of(self, pod: PodView) -> Unit | None:
        """Return the unit that the pod belongs to."""
        for unit in self.of_cluster(pod.controller_uid):
            if unit.namespace == pod.namespace and unit.request.gpus.get(pod.ray_group) == pod.gpus:
                return unit
        return None

    def of_cluster(self, cluster_uid: str) -> list[Unit]:
        """Return the units of a RayCluster."""
        owner = self.owners.owner_of(cluster_uid)
        if owner is None:
            return []
        return [unit for unit in self.units.values() if unit.owner_uid == owner.metadata.uid]
