"""The RayClusters and RayJobs as last seen, and the requests of their units. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.reflector import version_of
from kfp_gpuquota.cluster.kubernetes.kuberay.specs import (
    Given,
    Request,
    SizeNote,
    elastic_groups,
    fixed_request,
    gpu_groups,
    group_request,
    has_devices,
    notes_of,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import (
    API_VERSION,
    GROUP,
    HEAD_GROUP,
    RayCluster,
    RayJob,
    WorkerGroup,
)

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes
    from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayClusterSpec
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules

_CLUSTER_KIND: Final = f"{GROUP}/RayCluster"


@dataclass
class Owners:
    """RayClusters and RayJobs by uid. An owner of units is a RayJob, or a RayCluster that no RayJob owns."""

    limits: LimitRanges
    volumes: Volumes
    rules: CurrentRules
    clusters: dict[str, RayCluster] = field(default_factory=dict)
    jobs: dict[str, RayJob] = field(default_factory=dict)

    def put_cluster(self, cluster: RayCluster) -> bool:
        """Add or update a RayCluster; return False for an older version than the known one."""
        return _put(self.clusters, cluster)

    def put_job(self, job: RayJob) -> bool:
        """Add or update a RayJob; return False for an older version than the known one."""
        return _put(self.jobs, job)

    def owner_of(self, cluster_uid: str) -> RayCluster | RayJob | None:
        """Return the owner of a cluster's units; None while it, or the RayJob that owns it, is not known."""
        cluster = self.clusters.get(cluster_uid)
        job_uid = "" if cluster is None else job_of(cluster)
        return self.jobs.get(job_uid) if job_uid else cluster

    def clusters_of(self, owner_uid: str) -> list[RayCluster]:
        """Return the RayClusters of an owner of units, the newest first."""
        found = (c for c in self.clusters.values() if owner_uid in {c.metadata.uid, job_of(c)})
        alive = [cluster for cluster in found if cluster.metadata.deletion_timestamp is None]
        return sorted(alive, key=lambda cluster: version_of(cluster.metadata), reverse=True)

    def requests_of(self, owner: RayCluster | RayJob) -> dict[str, Request]:
        """Return the requests of an owner's units by uid. Raises InvalidFieldError."""
        prefix = f"ray/{owner.metadata.uid}"
        if isinstance(owner, RayJob):
            request = self._job_request(owner)
            return {} if request is None else {prefix: request}
        if not is_elastic(owner):
            return {}
        groups = elastic_groups(owner.spec)
        return {f"{prefix}/{group.group_name}": self._group(owner, owner, group) for group in groups}

    def group_of(self, owner_uid: str, request: Request) -> tuple[RayCluster, int, WorkerGroup] | None:
        """Return the cluster, the index and the group that a unit with one worker group sizes."""
        (name, *others) = request.gpus
        for cluster in self.clusters_of(owner_uid)[:1]:
            for index, group in enumerate(cluster.spec.worker_group_specs):
                if group.group_name == name and not others:
                    return cluster, index, group
        return None

    def _job_request(self, job: RayJob) -> Request | None:
        spec = job.spec.ray_cluster_spec
        if spec is None:
            return None
        weights = self.rules.rules.gpu_weights
        groups = [group for group in gpu_groups(spec, weights) if group.replicas or _scaled(spec)]
        if not groups:
            return None
        (first, *others) = groups
        single = not others and first.group_name != HEAD_GROUP and first.num_of_hosts == 1
        if single and has_devices(first) and (is_elastic(job) or _scaled(spec)):
            request = self._group(job, *self._live(job, first))
        elif _scaled(spec):
            return None
        else:
            request = fixed_request(self._given(job), groups)
        return request if job.spec.shutdown_after_job_finishes else _not_preemptible(request)

    def _live(self, job: RayJob, group: WorkerGroup) -> tuple[RayCluster | RayJob, WorkerGroup]:
        """Return the RayJob's cluster and its group, or the RayJob and its specification while there is no cluster."""
        for cluster in self.clusters_of(job.metadata.uid)[:1]:
            for found in cluster.spec.worker_group_specs:
                if found.group_name == group.group_name:
                    return cluster, found
        return job, group

    def _group(self, owner: RayCluster | RayJob, sized: RayCluster | RayJob, group: WorkerGroup) -> Request:
        spec = sized.spec.ray_cluster_spec if isinstance(sized, RayJob) else sized.spec
        note = notes_of(sized.metadata).get(group.group_name, SizeNote())
        return group_request(self._given(owner), group, note, autoscaled=spec is not None and _scaled(spec))

    def _given(self, owner: RayCluster | RayJob) -> Given:
        meta = owner.metadata
        defaults = self.limits.requests_in(meta.namespace)
        rules = self.rules.rules
        return Given(meta.name, meta.namespace, defaults, self.volumes.apply, rules.gpu_weights, rules.user_of)


def subject_of(owner: RayCluster | RayJob) -> Subject:
    """Return the owner as the object that an event refers to."""
    meta = owner.metadata
    return Subject(type(owner).__name__, meta.name, meta.namespace, meta.uid, API_VERSION)


def job_of(cluster: RayCluster) -> str:
    """Return the uid of the RayJob that owns the cluster; "" if none does."""
    owners = (o for o in cluster.metadata.owner_references if o.controller and o.kind == "RayJob")
    return next((o.uid for o in owners if o.api_version.partition("/")[0] == GROUP), "")


def is_elastic(owner: RayCluster | RayJob) -> bool:
    """Return whether the user has labelled it as elastic."""
    return owner.metadata.labels.get(labels.ELASTIC) == "true"


def is_autoscaled(cluster: RayCluster) -> bool:
    """Return whether Ray's autoscaler sizes the cluster's groups."""
    return _scaled(cluster.spec)


def is_ray_pod(pod: PodView) -> bool:
    """Return whether KubeRay has created the pod for a RayCluster, and it requests whole GPUs."""
    return bool(pod.ray_group) and not pod.share and pod.controller_kind.startswith(_CLUSTER_KIND)


def suspended_by_controller(job: RayJob) -> bool:
    """Return whether the controller has suspended the RayJob, and may resume it."""
    return labels.SUSPENDED in (job.metadata.annotations or {})


def _scaled(spec: RayClusterSpec) -> bool:
    return spec.enable_in_tree_autoscaling


def _not_preemptible(request: Request) -> Request:
    """Return the request of a RayJob that KubeRay cannot suspend: within quota, and never stopped."""
    change = msgspec.structs.replace
    parts = {name: change(spec, preemptible=False) for name, spec in request.parts.items()}
    return request._replace(spec=change(request.spec, preemptible=False), parts=parts)


def _put(found: dict[str, RayCluster] | dict[str, RayJob], new: RayCluster | RayJob) -> bool:
    before = found.get(new.metadata.uid)
    if before is not None and version_of(new.metadata) < version_of(before.metadata):
        return False
    found[new.metadata.uid] = new  # type: ignore[assignment]
    return True
