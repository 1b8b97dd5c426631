"""Explains to the users of a namespace what the deletion of its quota means for what runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.quota.profiles import SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota

REASON: Final = "QuotaDeleted"
CONSEQUENCE: Final = (
    "the pod keeps its GPUs until another team needs them, and no other one starts before there is a quota again"
)


def record_deletion(quota: GpuQuota, pods: Iterable[PodView], recorder: Recorder) -> None:
    """Record an event on each pod of the quota's namespace that holds GPUs."""
    name = quota.metadata.name
    profile = f" with its Profile {name}" if quota.metadata.labels.get(labels.SOURCE) == SOURCE else ""
    message = f"GpuQuota {name} was deleted{profile}: {CONSEQUENCE}"
    for pod in pods:
        if pod.namespace == name and pod.holds and pod.counted:
            recorder.record(pod.subject, REASON, message, warning=True)
