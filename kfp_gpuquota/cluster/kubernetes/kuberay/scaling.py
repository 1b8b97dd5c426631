"""Which patch of a RayCluster or RayJob a unit needs, from what is observed. Pure.

Level-triggered: a patch follows from the difference between a unit's slots and the observed objects, so that a
restarted controller continues, and a change by anybody else is answered.

| unit | observed | patch |
|---|---|---|
| sized by the controller | workers leave | `replicas` minus their number, with their names in `workersToDelete` |
| sized by the controller | more slots than pods, and KubeRay creates no more | `replicas` for the slots |
| sized by Ray's autoscaler | workers leave | `maxReplicas`: the workers that stay |
| sized by Ray's autoscaler | none leaves, and `maxReplicas` is the controller's | `maxReplicas` of the user |
| RayJob | to be stopped, not suspended | `suspend`, with the reason |
| RayJob | suspended by the controller, and planned again | not `suspend` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.kuberay import patches
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import is_autoscaled, suspended_by_controller
from kfp_gpuquota.cluster.kubernetes.kuberay.specs import SizeNote, most_requested, notes_of, requested

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Slot, Unit
    from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob, WorkerGroup


def suspension_of(unit: Unit, job: RayJob, stop: str) -> Write | None:
    """Return the patch that suspends the RayJob for the reason `stop`, or resumes it; None if it needs none."""
    if stop:
        return None if job.spec.suspend else patches.suspension(job, stop)
    if not suspended_by_controller(job):
        return None
    resumed = not job.spec.suspend or bool(unit.missing())
    return patches.suspension(job, None) if resumed else None


def size_of(unit: Unit, cluster: RayCluster, index: int) -> Write | None:
    """Return the patch of the unit's group; None if it needs none."""
    group = cluster.spec.worker_group_specs[index]
    if is_autoscaled(cluster):
        return _bounded(unit, cluster, index, group)
    return _shrunk(unit, cluster, index, group) or _expanded(unit, cluster, index, group)


def _shrunk(unit: Unit, cluster: RayCluster, index: int, group: WorkerGroup) -> Write | None:
    """Return the patch that releases the leaving workers which KubeRay does not delete yet."""
    named = set(group.scale_strategy.workers_to_delete)
    leaving = _leaving(unit, group)
    new = sorted(leaving - named)
    if not new:
        return None
    replicas = max(0, group.replicas - len(new))
    notes = _noted(cluster, group, SizeNote(replicas=requested(group, _note(cluster, group)), wrote=replicas))
    return patches.resize(cluster, index, replicas, (*sorted(leaving & named), *new), notes)


def _expanded(unit: Unit, cluster: RayCluster, index: int, group: WorkerGroup) -> Write | None:
    """Return the patch that requests pods for slots beyond the replicas."""
    slots = [slot for slot in unit.slots.values() if not slot.leaving]
    needed = len(slots) + len(unit.waiting)
    if not unit.missing() or needed <= group.replicas:
        return None
    notes = _noted(cluster, group, SizeNote(replicas=requested(group, _note(cluster, group)), wrote=needed))
    return patches.resize(cluster, index, needed, tuple(sorted(_leaving(unit, group))), notes)


def _bounded(unit: Unit, cluster: RayCluster, index: int, group: WorkerGroup) -> Write | None:
    """Return the patch that makes Ray's autoscaler shrink the group, or lifts that bound."""
    note = _note(cluster, group)
    ours = note.bound is not None and note.bound == group.max_replicas
    if any(_to_be_deleted(slot) for slot in unit.pods(group.group_name)):
        stay = sum(not slot.leaving for slot in unit.slots.values())
        most = max(stay, group.min_replicas)
        if most >= min(group.max_replicas, group.replicas):
            return None
        bound = SizeNote(most=most_requested(group, note), bound=most)
        return patches.bound(cluster, index, most, _noted(cluster, group, bound))
    if ours and note.most is not None and not any(slot.leaving for slot in unit.slots.values()):
        return patches.bound(cluster, index, note.most, _noted(cluster, group, None))
    return None


def _leaving(unit: Unit, group: WorkerGroup) -> set[str]:
    """Return the names of the group's pods that KubeRay is to delete."""
    return {slot.pod.name for slot in unit.pods(group.group_name) if slot.pod is not None and _to_be_deleted(slot)}


def _to_be_deleted(slot: Slot) -> bool:
    """Return whether KubeRay is to delete the slot's pod."""
    return slot.leaving and slot.by_kuberay and not slot.terminating


def _note(cluster: RayCluster, group: WorkerGroup) -> SizeNote:
    return notes_of(cluster.metadata).get(group.group_name, SizeNote())


def _noted(cluster: RayCluster, group: WorkerGroup, note: SizeNote | None) -> dict[str, SizeNote]:
    """Return the cluster's notes with the group's replaced, or removed (None)."""
    others = {name: one for name, one in notes_of(cluster.metadata).items() if name != group.group_name}
    return others if note is None else {**others, group.group_name: note}
