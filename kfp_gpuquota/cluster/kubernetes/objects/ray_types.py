"""KubeRay's RayCluster and RayJob (ray.io/v1) as structs with only the fields that are read."""

from __future__ import annotations

from typing import Final

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, PodSpec, Struct

GROUP: Final = "ray.io"
API_VERSION: Final = f"{GROUP}/v1"
CLUSTERS: Final = f"/apis/{API_VERSION}/rayclusters"
JOBS: Final = f"/apis/{API_VERSION}/rayjobs"
HEAD_GROUP: Final = "headgroup"
"""KubeRay's name of the head's group in the label ray.io/group."""


class PodTemplate(Struct, frozen=True):
    """The template of a group's pods."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()


class ScaleStrategy(Struct, frozen=True):
    """The pods that KubeRay deletes when it next reconciles the group."""

    workers_to_delete: tuple[str, ...] = ()


class HeadGroup(Struct, frozen=True):
    """The head pod."""

    template: PodTemplate = PodTemplate()


class WorkerGroup(Struct, frozen=True):
    """A group of equal workers; with `num_of_hosts` each replica is so many pods. `suspend`: it has no pods."""

    group_name: str
    replicas: int = 0
    min_replicas: int = 0
    max_replicas: int = 0
    num_of_hosts: int = 1
    template: PodTemplate = PodTemplate()
    scale_strategy: ScaleStrategy = ScaleStrategy()
    suspend: bool = False


class RayClusterSpec(Struct, frozen=True):
    """The specification of a Ray cluster. `suspend`: it has no pods."""

    enable_in_tree_autoscaling: bool = False
    suspend: bool = False
    head_group_spec: HeadGroup = HeadGroup()
    worker_group_specs: tuple[WorkerGroup, ...] = ()


class RayCluster(Struct, frozen=True):
    """A Ray cluster: a head pod and groups of workers."""

    metadata: Metadata
    spec: RayClusterSpec = RayClusterSpec()


class RayJobSpec(Struct, frozen=True):
    """The specification of a RayJob; without `ray_cluster_spec` it runs on a cluster that exists."""

    suspend: bool = False
    shutdown_after_job_finishes: bool = False
    ray_cluster_spec: RayClusterSpec | None = None


class RayJobStatus(Struct, frozen=True):
    """The status of a RayJob."""

    job_deployment_status: str = ""


class RayJob(Struct, frozen=True):
    """A RayJob: a Ray cluster that KubeRay creates for one job, and deletes after it."""

    metadata: Metadata
    spec: RayJobSpec = RayJobSpec()
    status: RayJobStatus = RayJobStatus()

    @property
    def finished(self) -> bool:
        """Return whether no more pods are created for it."""
        return self.status.job_deployment_status in {"Complete", "Failed", "ValidationFailed"}
