"""Finds the constraints of a pod that only kube-scheduler checks: such a pod is never pinned to a node. Pure.

| constraint | why the plan does not model it |
|---|---|
| required pod affinity or anti-affinity, topology spread with DoNotSchedule | depends on all pods of a domain |
| a claim that is not bound | its volume is created where kube-scheduler places the pod |
| a CSI volume, ReadWriteOncePod, attached disks, a volume with a zone | nodes limit them, or one pod excludes another |
| resource claims (DRA) | devices are allocated by kube-scheduler, by more than their class |
| another scheduler | its rules are its own |

All else that excludes a node is planned: node selector and affinity, taints, bound volumes' nodes, and all amounts
(resource_requests.py). Preferences exclude no node. An unknown field of a later Kubernetes version is not seen here:
the pod is pinned then, and recovery.py handles what kube-scheduler refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import PersistentVolume, PodSpec, PodVolume

DEFAULT_SCHEDULER: Final = "default-scheduler"
ONE_POD: Final = "ReadWriteOncePod"
_ZONES: Final = frozenset(
    f"{prefix}/{what}"
    for prefix in ("topology.kubernetes.io", "failure-domain.beta.kubernetes.io")
    for what in ("zone", "region")
)


def unmodelled_in(spec: PodSpec) -> tuple[str, ...]:
    """Return the constraints of the pod's specification that the plan does not model, as words for messages."""
    return tuple(dict.fromkeys(_unmodelled(spec)))


def _unmodelled(spec: PodSpec) -> Iterator[str]:
    affinity = spec.affinity
    if affinity is not None and affinity.pod_affinity is not None and affinity.pod_affinity.required:
        yield "pod affinity"
    if affinity is not None and affinity.pod_anti_affinity is not None and affinity.pod_anti_affinity.required:
        yield "pod anti-affinity"
    if any(one.when_unsatisfiable == "DoNotSchedule" for one in spec.topology_spread_constraints):
        yield "topology spread"
    if spec.resource_claims:
        yield "resource claims"
    if spec.scheduler_name not in {"", DEFAULT_SCHEDULER}:
        yield f"scheduler {spec.scheduler_name}"
    if any(map(_is_attached, spec.volumes)):
        yield "volumes"


def _is_attached(volume: PodVolume) -> bool:
    kinds = (
        volume.ephemeral,
        volume.gce_persistent_disk,
        volume.aws_elastic_block_store,
        volume.azure_disk,
        volume.iscsi,
        volume.rbd,
    )
    return any(kind is not None for kind in kinds)


def is_unmodelled(volume: PersistentVolume) -> bool:
    """Return whether kube-scheduler checks more of the volume than its node affinity."""
    return volume.spec.csi is not None or not _ZONES.isdisjoint(volume.metadata.labels)
