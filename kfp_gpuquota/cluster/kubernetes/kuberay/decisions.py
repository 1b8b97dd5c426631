"""Carries out the plan's decisions about units.

| the plan | RayCluster's group | RayJob |
|---|---|---|
| starts workers | gated pods are admitted; for more of them `replicas` grows | the same; a suspended one is resumed |
| takes some workers | `replicas` shrinks, with `workersToDelete` | the same |
| takes all workers | its pods are evicted, and KubeRay creates others, which wait | `suspend`: KubeRay does not create the head of a RayJob again |

KubeRay is expected to delete pods within DELETED_WITHIN_S; pods that remain are evicted, within the reclaim bound that
began with the decision (it is annotated on the pods).
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import subject_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.kuberay.admissions import Admissions
    from kfp_gpuquota.cluster.kubernetes.kuberay.owner_patches import OwnerPatches
    from kfp_gpuquota.cluster.kubernetes.kuberay.unit_registry import UnitRegistry
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Slot, Unit

DELETED_WITHIN_S: Final = 20.0
APPEARS_WITHIN_S: Final = 120.0
DEFERRED_S: Final = 60.0
_RECLAIMS: Final = frozenset({ReasonCode.RECLAIMED, ReasonCode.LENT_GPUS_RETURNED})


class PodEvictions(Protocol):
    """Evicts pods; implemented by `Evictions`."""

    def evict(self, pod: PodView, *, bounded: bool) -> None:
        """Evict a pod; `bounded`: the reclaim bound applies."""


class Decisions:
    """Starts, shrinks and stops units."""

    def __init__(
        self,
        units: UnitRegistry,
        admissions: Admissions,
        patches: OwnerPatches,
        writer: Writer,
        evictions: PodEvictions,
        recorder: Recorder,
    ) -> None:
        self._set, self._admissions, self._patches = units, admissions, patches
        self._writer, self._evictions, self._recorder = writer, evictions, recorder

    def carry_out(self, plan: scheduler.Plan) -> None:
        """Carry out the plan's decisions about units; others are ignored here."""
        for evict in plan.evict:
            if unit := self._set.units.get(evict.job):
                self._stop(unit, evict.workers, evict.reason)
        for move in plan.move:
            if unit := self._set.units.get(move.job):
                self._evict(unit, (move.worker,), move.reason)
        for resize in plan.resize:
            if unit := self._set.units.get(resize.job):
                self._shrink(unit, resize.remove, resize.reason)
                self._start(unit, resize.add)
        for bind in plan.bind:
            if unit := self._set.units.get(bind.job):
                self._start(unit, bind.placements)

    def _start(self, unit: Unit, placements: tuple[scheduler.Placement, ...]) -> None:
        if not placements:
            return
        for slot in unit.plan(placements):
            asyncio.get_running_loop().call_later(APPEARS_WITHIN_S, self._check_appeared, unit, slot.id)
        self._set.stops.pop(unit.uid, None)
        self._admissions.admit(unit)
        self._patches.sync(unit)

    def _shrink(self, unit: Unit, workers: Iterable[str], reason: Reason) -> None:
        """Release workers by a patch of their group."""
        for slot in self._leaving(unit, workers, reason):
            slot.by_kuberay = True
            self._insist_later(unit, slot)
        self._patches.sync(unit)

    def _stop(self, unit: Unit, workers: Iterable[str], reason: Reason) -> None:
        """Release all workers: a RayJob is suspended, pods of a RayCluster are evicted."""
        job = self._set.owners.jobs.get(unit.owner_uid)
        if job is None:
            self._evict(unit, workers, reason)
            return
        for slot in self._leaving(unit, workers, reason):
            self._insist_later(unit, slot)
        self._set.stops[unit.uid] = reason.message
        self._recorder.record(subject_of(job), "Suspended", reason.message)
        self._patches.sync(unit)

    def _evict(self, unit: Unit, workers: Iterable[str], reason: Reason) -> None:
        for slot in self._leaving(unit, workers, reason):
            assert slot.pod is not None, "slots without pods are released at once"
            self._evictions.evict(slot.pod, bounded=slot.reclaimed)

    def _leaving(self, unit: Unit, workers: Iterable[str], reason: Reason) -> list[Slot]:
        """Mark the workers as leaving, and announce it on their pods; return those that have pods."""
        now = self._set.ledger.now()
        leaving: list[Slot] = []
        for slot in [unit.slots[worker] for worker in workers if worker in unit.slots]:
            if slot.pod is None or slot.pod.stage is Stage.WAITING:
                self._withdraw(unit, slot)
                continue
            unit.leave(slot, now)
            slot.reclaimed = reason.code in _RECLAIMS
            self._recorder.record(slot.pod.subject, "Evicted", reason.message, copy=bool(leaving))
            self._writer.submit(requests.reclaim_note(slot.pod, now), lambda _: None, lambda _: None)
            leaving.append(slot)
        return leaving

    def _withdraw(self, unit: Unit, slot: Slot) -> None:
        """Release a slot whose pod has not been admitted; an admission in flight makes its pod a new slot."""
        pod = slot.pod
        unit.release(slot)
        if pod is not None:
            unit.waiting[pod.uid] = pod

    def _insist_later(self, unit: Unit, slot: Slot) -> None:
        asyncio.get_running_loop().call_later(DELETED_WITHIN_S, self._insist, unit, slot.id)

    def _insist(self, unit: Unit, slot_id: str) -> None:
        """Evict a pod that KubeRay should have deleted by now."""
        slot = unit.slots.get(slot_id)
        if slot is not None and slot.pod is not None and not slot.terminating:
            why = f"KubeRay did not delete it in {DELETED_WITHIN_S:g} s: it is evicted"
            self._recorder.record(slot.pod.subject, "NotDeleted", why)
            self._evictions.evict(slot.pod, bounded=slot.reclaimed)

    def _check_appeared(self, unit: Unit, slot_id: str) -> None:
        """Release a slot for which KubeRay has created no pod."""
        slot = unit.slots.get(slot_id)
        if slot is None or slot.pod is not None:
            return
        why = f"KubeRay created no pod for it in {APPEARS_WITHIN_S:g} s; its GPUs are released"
        now = self._set.ledger.now()
        unit.release(slot)
        reason = Reason(code=ReasonCode.PODS_NOT_READY, message=why)
        self._set.ledger.emit(scheduler.JobDeferred(unit.uid, now + DEFERRED_S, reason))
        owner = self._set.owners.jobs.get(unit.owner_uid) or self._set.owners.clusters.get(unit.owner_uid)
        if owner is not None:
            self._recorder.record(subject_of(owner), "NoPods", why, warning=True)
