"""Reconciles units: Ray clusters' elastic groups and RayJobs. All methods run in the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.kuberay.admissions import Admissions
from kfp_gpuquota.cluster.kubernetes.kuberay.decisions import Decisions
from kfp_gpuquota.cluster.kubernetes.kuberay.owner_patches import OwnerPatches
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import Owners, job_of, subject_of, suspended_by_controller
from kfp_gpuquota.cluster.kubernetes.kuberay.unit_pods import UnitPods
from kfp_gpuquota.cluster.kubernetes.kuberay.unit_registry import UnitRegistry
from kfp_gpuquota.cluster.kubernetes.kuberay.units import Ledger, Unit
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.kuberay.decisions import PodEvictions
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods


class RayUnits:
    """All units, from their RayClusters and RayJobs. Before `start` it only collects objects.

    `pods` follows their pods, `decisions` carries out plans.
    """

    def __init__(
        self,
        owners: Owners,
        ledger: Ledger,
        writer: Writer,
        evictions: PodEvictions,
        recorder: Recorder,
        written_pods: WrittenPods,
        unpinned: UnpinnedPods,
    ) -> None:
        self._set = UnitRegistry(owners, ledger)
        self._recorder = recorder
        self._patches = OwnerPatches(self._set, writer, self.put_cluster, self.put_job)
        admissions = Admissions(writer, written_pods, unpinned)
        self.pods = UnitPods(self._set, admissions, self._patches)
        self.decisions = Decisions(self._set, admissions, self._patches, writer, evictions, recorder)
        self._started = False

    def start(self, put_again: Callable[[PodView], None]) -> None:
        """Submit the units of all listed objects; `put_again` receives pods whose owner became known later."""
        self.pods.start(put_again)
        self._started = True
        for job in sorted(self._set.owners.jobs.values(), key=lambda job: job.metadata.uid):
            self._refresh(job)
        for cluster in sorted(self._set.owners.clusters.values(), key=lambda cluster: cluster.metadata.uid):
            if not job_of(cluster):
                self._refresh(cluster)

    def put_cluster(self, cluster: RayCluster) -> None:
        """Add or update a RayCluster."""
        if not self._set.owners.put_cluster(cluster) or not self._started:
            return
        owner = self._set.owners.owner_of(cluster.metadata.uid)
        if owner is not None:
            self._refresh(owner)
            self.pods.put_early_again(cluster.metadata.uid)

    def drop_cluster(self, uid: str) -> None:
        """Remove a deleted RayCluster."""
        self._set.owners.clusters.pop(uid, None)
        self.pods.forget(uid)
        self._set.end_of_owner(uid)

    def put_job(self, job: RayJob) -> None:
        """Add or update a RayJob."""
        if not self._set.owners.put_job(job) or not self._started:
            return
        self._refresh(job)
        for cluster in self._set.owners.clusters_of(job.metadata.uid):
            self.pods.put_early_again(cluster.metadata.uid)

    def drop_job(self, uid: str) -> None:
        """Remove a deleted RayJob."""
        self._set.owners.jobs.pop(uid, None)
        self._set.end_of_owner(uid)

    def avoid(self, cluster_uid: str, nodes: tuple[str, ...]) -> None:
        """Exclude these nodes for the next workers of the cluster, instead of those excluded before."""
        for unit in self._set.of_cluster(cluster_uid):
            if not unit.ended:
                self._set.ledger.emit(scheduler.NodesBarred(unit.uid, nodes))

    def limits_changed(self, namespace: str) -> None:
        """Update the namespace's units after its default requests or volumes have changed."""
        jobs, clusters = self._set.owners.jobs.values(), self._set.owners.clusters.values()
        owners: list[RayCluster | RayJob] = [*jobs, *(cluster for cluster in clusters if not job_of(cluster))]
        for owner in owners if self._started else ():
            if owner.metadata.namespace == namespace:
                self._refresh(owner)

    def _refresh(self, owner: RayCluster | RayJob) -> None:
        """Submit or update the owner's units."""
        if isinstance(owner, RayJob) and owner.finished:
            self._set.end_of_owner(owner.metadata.uid)
            return
        try:
            found = self._set.owners.requests_of(owner)
        except GpuQuotaError as error:
            self._recorder.record(subject_of(owner), "NotElastic", error.message, warning=True)
            return
        for uid, request in found.items():
            unit = self._set.units.get(uid)
            if unit is None:
                meta = owner.metadata
                at = meta.creation_timestamp.timestamp() if meta.creation_timestamp else self._set.ledger.now()
                movable = not isinstance(owner, RayJob)
                unit = Unit(uid, meta.uid, meta.namespace, at, request, self._set.ledger, movable)
                self._set.units[uid] = unit
                unit.submit()
            elif not request.parts:
                unit.update(request)
            self._look(unit, owner)

    def _look(self, unit: Unit, owner: RayCluster | RayJob) -> None:
        """Pause or continue a unit, and write what its owner needs."""
        if isinstance(owner, RayJob):
            ours = suspended_by_controller(owner)
            if owner.spec.suspend and ours:
                self._set.stops.pop(unit.uid, None)
            paused = owner.spec.suspend and not ours and unit.uid not in self._set.stops
        else:
            paused = owner.spec.suspend
        sized = self._set.owners.group_of(unit.owner_uid, unit.request)
        unit.pause(paused=paused or (sized is not None and (sized[2].suspend or not sized[2].replicas)))
        self._patches.sync(unit)
