"""Reconciles units: Ray clusters' elastic groups and RayJobs. All methods run in the event loop.

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
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Subject
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.kuberay import scaling
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import (
    Owners,
    is_ray_pod,
    job_of,
    suspended_by_controller,
)
from kfp_gpuquota.cluster.kubernetes.kuberay.units import Ledger, Slot, Unit
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import API_VERSION, RayCluster, RayJob
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer

DELETED_WITHIN_S: Final = 20.0
APPEARS_WITHIN_S: Final = 120.0
DEFERRED_S: Final = 60.0
OWNER_WITHIN_S: Final = 10.0
RETRY_S: Final = 1.0
_RECLAIMS: Final = frozenset({ReasonCode.RECLAIMED, ReasonCode.LENT_GPUS_RETURNED})

log = logging.getLogger(__name__)


class PodEvictions(Protocol):
    """Evicts pods; implemented by `Evictions`."""

    def evict(self, pod: PodView, *, bounded: bool) -> None:
        """Evict a pod; `bounded`: the reclaim bound applies."""


class RayUnits:
    """All units. Before `start` it only collects objects."""

    def __init__(
        self,
        owners: Owners,
        ledger: Ledger,
        writer: Writer,
        evictions: PodEvictions,
        recorder: Recorder,
        written_pods: WrittenPods,
    ) -> None:
        self._owners, self._ledger, self._writer = owners, ledger, writer
        self._evictions, self._recorder, self._written_pods = evictions, recorder, written_pods
        self.units: dict[str, Unit] = {}
        self._by_pod: dict[str, Unit] = {}
        self._early: dict[str, dict[str, PodView]] = {}  # by the uid of a RayCluster that is not known yet
        self._unknown: set[str] = set()  # RayClusters that were waited for in vain
        self._stops: dict[str, str] = {}  # reasons why units of RayJobs are to be suspended
        self._writing: set[str] = set()
        self._put_again: Callable[[PodView], None] = lambda _: None
        self._started = False
        self._pod = msgspec.json.Decoder(Pod)

    def start(self, put_again: Callable[[PodView], None]) -> None:
        """Submit the units of all listed objects; `put_again` receives pods whose owner became known later."""
        self._put_again, self._started = put_again, True
        for job in sorted(self._owners.jobs.values(), key=lambda job: job.metadata.uid):
            self._refresh(job)
        for cluster in sorted(self._owners.clusters.values(), key=lambda cluster: cluster.metadata.uid):
            if not job_of(cluster):
                self._refresh(cluster)

    # Objects

    def put_cluster(self, cluster: RayCluster) -> None:
        """Add or update a RayCluster."""
        if not self._owners.put_cluster(cluster) or not self._started:
            return
        owner = self._owners.owner_of(cluster.metadata.uid)
        if owner is not None:
            self._refresh(owner)
            self._admit_early(cluster.metadata.uid)

    def drop_cluster(self, uid: str) -> None:
        """Remove a deleted RayCluster."""
        self._owners.clusters.pop(uid, None)
        self._unknown.discard(uid)
        self._end_units(uid)

    def put_job(self, job: RayJob) -> None:
        """Add or update a RayJob."""
        if not self._owners.put_job(job) or not self._started:
            return
        self._refresh(job)
        for cluster in self._owners.clusters_of(job.metadata.uid):
            self._admit_early(cluster.metadata.uid)

    def drop_job(self, uid: str) -> None:
        """Remove a deleted RayJob."""
        self._owners.jobs.pop(uid, None)
        self._end_units(uid)

    def _refresh(self, owner: RayCluster | RayJob) -> None:
        """Submit or update the owner's units."""
        if isinstance(owner, RayJob) and owner.finished:
            self._end_units(owner.metadata.uid)
            return
        try:
            found = self._owners.requests_of(owner)
        except GpuQuotaError as error:
            self._record(owner, "NotElastic", error.message, warning=True)
            return
        for uid, request in found.items():
            unit = self.units.get(uid)
            if unit is None:
                meta = owner.metadata
                at = meta.creation_timestamp.timestamp() if meta.creation_timestamp else time.time()
                movable = not isinstance(owner, RayJob)
                unit = Unit(uid, meta.uid, meta.namespace, at, request, self._ledger, movable)
                self.units[uid] = unit
                unit.submit()
            elif not request.parts:
                unit.update(request)
            self._look(unit, owner)

    def _look(self, unit: Unit, owner: RayCluster | RayJob) -> None:
        """Pause or continue a unit, and write what its owner needs."""
        if isinstance(owner, RayJob):
            ours = suspended_by_controller(owner)
            if owner.spec.suspend and ours:
                self._stops.pop(unit.uid, None)
            paused = owner.spec.suspend and not ours and unit.uid not in self._stops
        else:
            paused = False
        sized = self._owners.group_of(unit.owner_uid, unit.request)
        unit.pause(paused=paused or (sized is not None and not sized[2].replicas))
        self._sync(unit)

    def _end_units(self, owner_uid: str) -> None:
        for unit in [unit for unit in self.units.values() if unit.owner_uid == owner_uid]:
            self._settle_end(unit)

    def _settle_end(self, unit: Unit) -> None:
        if unit.end():
            del self.units[unit.uid]
            self._stops.pop(unit.uid, None)

    # Pods

    def owns(self, pod: PodView) -> bool:
        """Return whether the pod is a worker of a unit, or may be one when its RayCluster is known."""
        if pod.uid in self._by_pod:
            return True
        if not self._started or not is_ray_pod(pod):
            return False
        return self._unit_for(pod) is not None or self._is_early(pod)

    def ungrouped(self, pod: PodView) -> PodView:
        """Return a pod outside of units without its group, if other pods of its cluster are in units."""
        if not pod.ray_group or not self._units_of_cluster(pod.controller_uid):
            return pod
        return msgspec.structs.replace(pod, group="", group_size=0, owner=None)

    def put_pod(self, pod: PodView) -> None:
        """Add or update a pod that this owns."""
        unit = self._by_pod.get(pod.uid) or self._unit_for(pod)
        if unit is None:
            self._keep_early(pod)
            return
        self._by_pod[pod.uid] = unit
        self._advance(unit, pod)
        if unit.uid in self.units:
            self._sync(unit)

    def drop_pod(self, uid: str) -> None:
        """Remove a deleted pod."""
        for pods in self._early.values():
            pods.pop(uid, None)
        unit = self._by_pod.get(uid)
        if unit is not None:
            self._ended(unit, uid)
            self._sync(unit)

    def waiting_of(self, unit_uid: str) -> list[PodView]:
        """Return the waiting pods of a unit, oldest first."""
        unit = self.units.get(unit_uid)
        return [] if unit is None else sorted(unit.waiting.values(), key=lambda pod: (pod.created, pod.uid))

    def _advance(self, unit: Unit, pod: PodView) -> None:
        slot = unit.slot_of(pod.uid)
        if pod.stage in {Stage.ENDED, Stage.OUTSIDE}:
            self._ended(unit, pod.uid)
        elif pod.stage is Stage.WAITING and slot is None:
            unit.waiting[pod.uid] = pod
            self._admit(unit)
        elif slot is None:
            slot = unit.adopt(pod)
        else:
            slot.pod = pod
        if slot is not None and pod.stage is Stage.TERMINATING:
            self._terminating(unit, slot)

    def _terminating(self, unit: Unit, slot: Slot) -> None:
        """Record that a pod is being deleted; Ray's autoscaler may have chosen another one than the plan."""
        if slot.leaving:
            return
        planned = (one for one in unit.pods(slot.group) if one.leaving and one.by_kuberay and not one.terminating)
        instead = next(planned, None)
        unit.leave(slot, time.time())
        if instead is not None:
            unit.stay(instead)

    def _ended(self, unit: Unit, pod_uid: str) -> None:
        self._by_pod.pop(pod_uid, None)
        unit.waiting.pop(pod_uid, None)
        if (slot := unit.slot_of(pod_uid)) is not None:
            unit.release(slot)
        if unit.ended and unit.uid in self.units:
            self._settle_end(unit)

    def _unit_for(self, pod: PodView) -> Unit | None:
        for unit in self._units_of_cluster(pod.controller_uid):
            if unit.namespace == pod.namespace and unit.request.gpus.get(pod.ray_group) == pod.gpus:
                return unit
        return None

    def _units_of_cluster(self, cluster_uid: str) -> list[Unit]:
        owner = self._owners.owner_of(cluster_uid)
        if owner is None:
            return []
        return [unit for unit in self.units.values() if unit.owner_uid == owner.metadata.uid]

    # Pods whose RayCluster was not seen yet: the order of different watches is not defined

    def _is_early(self, pod: PodView) -> bool:
        known = self._owners.owner_of(pod.controller_uid) is not None or pod.controller_uid in self._unknown
        return pod.stage is Stage.WAITING and not known

    def _keep_early(self, pod: PodView) -> None:
        cluster = pod.controller_uid
        if cluster not in self._early:
            asyncio.get_running_loop().call_later(OWNER_WITHIN_S, self._give_up, cluster)
        self._early.setdefault(cluster, {})[pod.uid] = pod

    def _give_up(self, cluster_uid: str) -> None:
        if self._owners.owner_of(cluster_uid) is None:
            self._unknown.add(cluster_uid)
        self._admit_early(cluster_uid)

    def _admit_early(self, cluster_uid: str) -> None:
        for pod in self._early.pop(cluster_uid, {}).values():
            self._put_again(pod)

    # Plans

    def carry_out(self, plan: scheduler.Plan) -> None:
        """Carry out the plan's decisions about units; others are ignored here."""
        for evict in plan.evict:
            if unit := self.units.get(evict.job):
                self._stop(unit, evict.workers, evict.reason)
        for move in plan.move:
            if unit := self.units.get(move.job):
                self._evict(unit, (move.worker,), move.reason)
        for resize in plan.resize:
            if unit := self.units.get(resize.job):
                self._shrink(unit, resize.remove, resize.reason)
                self._start(unit, resize.add)
        for bind in plan.bind:
            if unit := self.units.get(bind.job):
                self._start(unit, bind.placements)

    def _start(self, unit: Unit, placements: tuple[scheduler.Placement, ...]) -> None:
        if not placements:
            return
        for slot in unit.plan(placements, time.time()):
            asyncio.get_running_loop().call_later(APPEARS_WITHIN_S, self._check_appeared, unit, slot.id)
        self._stops.pop(unit.uid, None)
        self._admit(unit)
        self._sync(unit)

    def _shrink(self, unit: Unit, workers: Iterable[str], reason: Reason) -> None:
        """Release workers by a patch of their group."""
        for slot in self._leaving(unit, workers, reason):
            slot.by_kuberay = True
            self._insist_later(unit, slot)
        self._sync(unit)

    def _stop(self, unit: Unit, workers: Iterable[str], reason: Reason) -> None:
        """Release all workers: a RayJob is suspended, pods of a RayCluster are evicted."""
        job = self._owners.jobs.get(unit.owner_uid)
        if job is None:
            self._evict(unit, workers, reason)
            return
        for slot in self._leaving(unit, workers, reason):
            self._insist_later(unit, slot)
        self._stops[unit.uid] = reason.message
        self._record(job, "Suspended", reason.message)
        self._sync(unit)

    def _evict(self, unit: Unit, workers: Iterable[str], reason: Reason) -> None:
        for slot in self._leaving(unit, workers, reason):
            assert slot.pod is not None, "slots without pods are released at once"
            self._evictions.evict(slot.pod, bounded=slot.reclaimed)

    def _leaving(self, unit: Unit, workers: Iterable[str], reason: Reason) -> list[Slot]:
        """Mark the workers as leaving, and announce it on their pods; return those that have pods."""
        now, leaving = time.time(), []
        for slot in [unit.slots[worker] for worker in workers if worker in unit.slots]:
            if slot.pod is None or slot.pod.stage is Stage.WAITING:
                self._withdraw(unit, slot)
                continue
            unit.leave(slot, now)
            slot.reclaimed = reason.code in _RECLAIMS
            self._record_pod(slot.pod, "Evicted", reason.message)
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
            self._record_pod(slot.pod, "NotDeleted", why)
            self._evictions.evict(slot.pod, bounded=slot.reclaimed)

    def _check_appeared(self, unit: Unit, slot_id: str) -> None:
        """Release a slot for which KubeRay has created no pod."""
        slot = unit.slots.get(slot_id)
        if slot is None or slot.pod is not None:
            return
        why = f"KubeRay created no pod for it in {APPEARS_WITHIN_S:g} s; its GPUs are released"
        now = time.time()
        unit.release(slot)
        reason = Reason(code=ReasonCode.PODS_NOT_READY, message=why)
        self._ledger.emit(scheduler.JobDeferred(unit.uid, now + DEFERRED_S, reason))
        owner = self._owners.jobs.get(unit.owner_uid) or self._owners.clusters.get(unit.owner_uid)
        if owner is not None:
            self._record(owner, "NoPods", why, warning=True)

    def _admit(self, unit: Unit) -> None:
        """Admit waiting pods to the nodes of slots without pods."""
        for pod in self.waiting_of(unit.uid):
            slot = next(iter(unit.missing(pod.ray_group)), None)
            if slot is not None:
                unit.attach(slot, pod)
                write = requests.admission(pod, slot.node, slot.devices, "it is its Ray cluster's turn")
                self._writer.submit(write, self._admitted, partial(self._not_admitted, unit, slot.id))

    def _admitted(self, answer: bytes) -> None:
        self._written_pods.note(self._pod.decode(answer))

    def _not_admitted(self, unit: Unit, slot_id: str, error: Exception) -> None:
        """Try again after a pause, in which the watch reports the pod's state."""
        log.warning("a pod of %s could not be admitted: %s", unit.uid, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._retry_admission, unit, slot_id)

    def _retry_admission(self, unit: Unit, slot_id: str) -> None:
        slot = unit.slots.get(slot_id)
        if slot is not None and slot.pod is not None and slot.pod.stage is Stage.WAITING:
            pod = slot.pod
            unit.detach(slot)
            unit.waiting[pod.uid] = pod
            self._admit(unit)

    # Patches

    def _sync(self, unit: Unit) -> None:
        """Write what the unit's objects need, one patch at a time."""
        if unit.uid in self._writing:
            return
        write, done = self._needed(unit)
        if write is not None:
            self._writing.add(unit.uid)
            self._writer.submit(write, partial(self._written, unit, done), partial(self._refused, unit))

    def _needed(self, unit: Unit) -> tuple[Write | None, Callable[[bytes], None]]:
        job = self._owners.jobs.get(unit.owner_uid)
        if job is not None and not unit.ended:
            write = scaling.suspension_of(unit, job, self._stops.get(unit.uid, ""))
            if write is not None or job.spec.suspend or unit.uid in self._stops:
                return write, self._job_written
        found = self._owners.group_of(unit.owner_uid, unit.request)
        if found is None or unit.ended:
            return None, self._cluster_written
        return scaling.size_of(unit, found[0], found[1]), self._cluster_written

    def _written(self, unit: Unit, done: Callable[[bytes], None], answer: bytes) -> None:
        self._writing.discard(unit.uid)
        done(answer)

    def _cluster_written(self, answer: bytes) -> None:
        self.put_cluster(msgspec.json.decode(answer, type=RayCluster))

    def _job_written(self, answer: bytes) -> None:
        self.put_job(msgspec.json.decode(answer, type=RayJob))

    def _refused(self, unit: Unit, error: Exception) -> None:
        """Decide again after a pause, in which the watch reports the object's state."""
        if isinstance(error, ApiError) and error.not_found:
            self._writing.discard(unit.uid)
            return
        log.warning("%s could not be changed: %s", unit.uid, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._again, unit)

    def _again(self, unit: Unit) -> None:
        self._writing.discard(unit.uid)
        if unit.uid in self.units:
            self._sync(unit)

    # For `pods`

    def leave(self, pod_uid: str) -> bool:
        """Record that a pod is evicted because it does not start; return whether it is a worker of a unit."""
        unit = self._by_pod.get(pod_uid)
        slot = None if unit is None else unit.slot_of(pod_uid)
        if unit is not None and slot is not None:
            unit.leave(slot, None)
        return slot is not None

    def avoid(self, cluster_uid: str, nodes: tuple[str, ...]) -> None:
        """Exclude these nodes for the next workers of the cluster, instead of those excluded before."""
        for unit in self._units_of_cluster(cluster_uid):
            if not unit.ended:
                self._ledger.emit(scheduler.NodesBarred(unit.uid, nodes))

    def _record_pod(self, pod: PodView, reason: str, message: str) -> None:
        self._recorder.record(Subject("Pod", pod.name, pod.namespace, pod.uid), reason, message)

    def _record(self, owner: RayCluster | RayJob, reason: str, message: str, *, warning: bool = False) -> None:
        meta, kind = owner.metadata, type(owner).__name__
        self._recorder.record(
            Subject(kind, meta.name, meta.namespace, meta.uid, API_VERSION), reason, message, warning=warning
        )
