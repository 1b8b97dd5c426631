"""What the controller watches: the kinds of objects, and the part that processes each of them.

An object that cannot be read is quarantined, until it is changed or deleted. Of a pod that cannot be decoded, what
determines its devices is read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import PATH, SELECTOR, ManagedJob
from kfp_gpuquota.cluster.kubernetes.objects import (
    core_types,
    custom_types,
    device_types,
    labels,
    paths,
    ray_types,
)
from kfp_gpuquota.cluster.kubernetes.objects.core_types import (
    Container,
    Metadata,
    Pod,
    PodSpec,
    PodStatus,
    Resources,
    Subject,
)
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import KINDS, Suspendable
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import NOTEBOOKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.client.quarantine import Quarantine
    from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
    from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges
    from kfp_gpuquota.cluster.kubernetes.convert.published_devices import PublishedDevices
    from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes
    from kfp_gpuquota.cluster.kubernetes.kuberay.reconciler import RayUnits
    from kfp_gpuquota.cluster.kubernetes.managed_jobs.reconciler import ManagedJobs
    from kfp_gpuquota.cluster.kubernetes.pods.device_claims import DeviceClaims
    from kfp_gpuquota.cluster.kubernetes.quota.profiles import Profiles
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
    from kfp_gpuquota.cluster.kubernetes.suspension.resuming import Resuming
    from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import UnusedWorkloads


def recovered_pod(raw: msgspec.Raw, problem: str) -> Pod:
    """Return a pod that cannot be decoded, with the fields that determine its devices; others have their defaults."""
    given = msgspec.json.decode(raw)
    spec, status = _fields(given, "spec"), _fields(given, "status")
    limits = [_fields(_fields(one, "resources"), "limits") for one in _items(spec, "containers")]
    inits = [_fields(_fields(one, "resources"), "limits") for one in _items(spec, "initContainers")]
    return Pod(
        metadata=msgspec.convert(_fields(given, "metadata"), Metadata),
        spec=PodSpec(
            node_name=str(spec.get("nodeName") or ""),
            resource_claims=tuple(_claim(one) for one in _items(spec, "resourceClaims")),
            containers=tuple(Container(resources=Resources(limits=one)) for one in limits),
            init_containers=tuple(Container(resources=Resources(limits=one)) for one in inits),
        ),
        status=PodStatus(phase=str(status.get("phase") or "")),
        problem=problem,
    )


def _claim(given: object) -> core_types.PodClaim:
    claim = given if isinstance(given, dict) else {}
    return core_types.PodClaim(
        resource_claim_name=str(claim.get("resourceClaimName") or ""),
        resource_claim_template_name=str(claim.get("resourceClaimTemplateName") or ""),
    )


def _fields(given: object, name: str) -> dict[str, Any]:
    found = given.get(name) if isinstance(given, dict) else None
    return found if isinstance(found, dict) else {}


def _items(given: dict[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    return found if isinstance(found, list) else []


PROFILES: Final = "/apis/kubeflow.org/v1/profiles"
FOREIGN_KINDS: Final = frozenset(
    {PROFILES, NOTEBOOKS, ray_types.CLUSTERS, ray_types.JOBS, *(kind.path for kind in KINDS)}
)
LOOKED_FOR_S: Final = 2.0  # pause between requests for a kind that a quota depends on and that is not installed
_NAMES: Final = {
    "PolicyObject": "WorkloadPolicy",
    "QuotaPolicyObject": "QuotaPolicy",
    "ManagedJob": "Job",
}  # of structs of another name


class Watches:
    """Makes the watches of a controller."""

    def __init__(self, connection: Connection, quarantine: Quarantine) -> None:
        self._connection, self._quarantine = connection, quarantine

    def pods(
        self, changed: Callable[[core_types.Pod], None], deleted: Callable[[str], None]
    ) -> Reflector[core_types.Pod]:
        """Return the watch of pods; `changed` quarantines them itself."""
        return self._watch("/api/v1/pods", core_types.Pod, changed, deleted, recover=recovered_pod)

    def namespaces(
        self, changed: Callable[[core_types.Namespace], None], deleted: Callable[[str], None]
    ) -> Reflector[core_types.Namespace]:
        """Return the watch of namespaces."""
        return self._watch("/api/v1/namespaces", core_types.Namespace, changed, deleted)

    def own_kinds(
        self,
        snapshot: Snapshot,
        quota_changed: Callable[[custom_types.GpuQuota], None],
        quota_deleted: Callable[[str], None],
        rules: CurrentRules,
        managed: ManagedJobs,
        policies: CurrentPolicies,
    ) -> list[Reflector[Any]]:
        """Return the watches of this project's kinds, and of Jobs that are run as ElasticJobs."""

        def job_changed(job: custom_types.ElasticJob) -> None:
            snapshot.put_job(job)
            managed.put_elastic_job(job)

        def job_deleted(uid: str) -> None:
            snapshot.drop_job(uid)
            managed.drop_elastic_job(uid)

        awaited = {"not_installed_s": LOOKED_FOR_S}
        return [
            self._watch(paths.QUOTAS, custom_types.GpuQuota, quota_changed, quota_deleted, **awaited),
            self._watch(paths.JOBS, custom_types.ElasticJob, job_changed, job_deleted, **awaited),
            self._watch(paths.QUOTA_POLICIES, custom_types.QuotaPolicyObject, rules.put, rules.drop),
            self._watch(paths.WORKLOAD_POLICIES, custom_types.PolicyObject, policies.put, policies.drop),
            self._watch(PATH, ManagedJob, managed.put_job, managed.drop_job, optional=True, selector=SELECTOR),
        ]

    def cluster_kinds(
        self, snapshot: Snapshot, volumes: Volumes, limits: LimitRanges, devices: PublishedDevices
    ) -> list[Reflector[Any]]:
        """Return the watches of Kubernetes' own kinds that decide where pods can run."""

        def node_changed(node: core_types.Node) -> None:
            snapshot.put_node(devices.apply(node))

        def node_deleted(uid: str) -> None:
            devices.drop_node(uid)
            snapshot.drop_node(uid)

        claims, stored = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"
        return [
            self._watch("/api/v1/nodes", core_types.Node, node_changed, node_deleted),
            self._watch(claims, core_types.PersistentVolumeClaim, volumes.put_claim, volumes.drop_claim),
            self._watch(stored, core_types.PersistentVolume, volumes.put_volume, volumes.drop_volume),
            self._watch("/api/v1/limitranges", core_types.LimitRange, limits.put, limits.drop),
        ]

    def device_kinds(self, claims: DeviceClaims, devices: PublishedDevices) -> list[Reflector[Any]]:
        """Return the watches of Dynamic Resource Allocation, which an older API server does not have."""

        def class_changed(device_class: device_types.DeviceClass) -> None:
            devices.put_class(device_class)
            claims.put_class(device_class)

        def class_deleted(uid: str) -> None:
            devices.drop_class(uid)
            claims.drop_class(uid)

        claim, template = device_types.ResourceClaim, device_types.ResourceClaimTemplate
        published = device_types.ResourceSlice
        watched = (
            (device_types.CLASSES, device_types.DeviceClass, class_changed, class_deleted),
            (device_types.SLICES, published, devices.put_slice, devices.drop_slice),
            (device_types.CLAIMS, claim, claims.put_claim, claims.drop_claim),
            (device_types.TEMPLATES, template, claims.put_template, claims.drop_template),
        )
        return [self._watch(*one, optional=True) for one in watched]

    def foreign_kinds(self, profiles: Profiles, ray: RayUnits, unused: UnusedWorkloads) -> list[Reflector[Any]]:
        """Return the watches of other projects' kinds, which need not be installed."""
        profile, found = core_types.Profile, (profiles.put_profile, profiles.drop_profile)
        return [
            self._watch(PROFILES, profile, *found, optional=True, not_installed_s=LOOKED_FOR_S),
            self._watch(ray_types.CLUSTERS, ray_types.RayCluster, ray.put_cluster, ray.drop_cluster, optional=True),
            self._watch(ray_types.JOBS, ray_types.RayJob, ray.put_job, ray.drop_job, optional=True),
            self._watch(NOTEBOOKS, core_types.Notebook, unused.put_notebook, unused.drop_notebook, optional=True),
        ]

    def suspended_owners(self, resuming: Resuming) -> list[Reflector[Any]]:
        """Return the watches of owners that the controller has suspended, by their label."""
        return [
            self._watch(
                kind.path,
                Suspendable,
                partial(resuming.put, kind),
                resuming.drop,
                optional=True,
                selector=f"{labels.SUSPENDED}=true",
            )
            for kind in KINDS
        ]

    def _watch(self, path: str, kind: Any, changed: Any, deleted: Any, **more: Any) -> Reflector[Any]:
        def handled(found: Any) -> None:
            changed(found)
            if kind is not core_types.Pod:
                self._quarantine.release(found.metadata.uid)

        def released(uid: str) -> None:
            self._quarantine.release(uid)
            deleted(uid)

        def quarantined(metadata: core_types.Metadata, problem: str) -> None:
            version = path.removeprefix("/apis/").removeprefix("/api/").rpartition("/")[0]
            name = _NAMES.get(kind.__name__, kind.__name__)
            self._quarantine.put(Subject(name, metadata.name, metadata.namespace, metadata.uid, version), problem)

        return Reflector(
            self._connection, path, kind, changed=handled, deleted=released, quarantined=quarantined, **more
        )
