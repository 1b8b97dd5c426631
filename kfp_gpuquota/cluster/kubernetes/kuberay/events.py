"""Events about RayClusters, RayJobs and their pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Subject
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import API_VERSION

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob


@dataclass(frozen=True, slots=True)
class RayEvents:
    """Records events."""

    recorder: Recorder

    def pod(self, pod: PodView, reason: str, message: str) -> None:
        """Record an event about a pod."""
        self.recorder.record(Subject("Pod", pod.name, pod.namespace, pod.uid), reason, message)

    def owner(self, owner: RayCluster | RayJob, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an event about an owner of units."""
        meta, kind = owner.metadata, type(owner).__name__
        self.recorder.record(
            Subject(kind, meta.name, meta.namespace, meta.uid, API_VERSION), reason, message, warning=warning
        )
