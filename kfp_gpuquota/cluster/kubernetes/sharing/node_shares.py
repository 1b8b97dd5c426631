"""What a node's agent knows of its node: who shares which GPU, and whose each process is. From pods alone: pure.

Who shares stands on the reservation pods, which nobody but the controller writes. Other pods are only asked which
containers they have, for the cgroups of some machines name the container and not its pod.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods, share_annotations
from kfp_gpuquota.cluster.kubernetes.sharing.gpu_config import MEMORY_VOLUME
from kfp_gpuquota.fractions.agent import Share
from kfp_gpuquota.fractions.claims import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
    from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationView
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.fractions import Claim
    from kfp_gpuquota.fractions.processes import ContainerIdentity


class KnownPod(NamedTuple):
    """A pod of this node, and its containers' names by their numbers."""

    namespace: str
    name: str
    containers: Mapping[str, str]


class NodeShares:
    """`namespace` is that of the reservations; `kubelet_root` is where the kubelet keeps its pods' volumes."""

    def __init__(self, namespace: str, kubelet_root: Path) -> None:
        self._namespace, self._pods_root = namespace, kubelet_root / "pods"
        self.reservations: dict[str, ReservationView] = {}
        self.pods: dict[str, KnownPod] = {}
        self._sharers: dict[str, tuple[ShareNote, ...]] = {}  # by the reservation's uid
        self._pod_of_container: dict[str, str] = {}

    def put(self, pod: Pod) -> bool:
        """A pod is as given; whether it is a reservation."""
        if pod.metadata.namespace == self._namespace and (view := reservation_pods.view_of(pod)) is not None:
            self.reservations[view.uid] = view
            self._sharers[view.uid] = share_annotations.read(view.sharers)
            return True
        self._forget(pod.metadata.uid)
        statuses = (*pod.status.container_statuses, *pod.status.init_container_statuses)
        containers = {status.container_id.rpartition("//")[2]: status.name for status in statuses}
        self.pods[pod.metadata.uid] = KnownPod(pod.metadata.namespace, pod.metadata.name, containers)
        self._pod_of_container.update(dict.fromkeys(containers, pod.metadata.uid))
        return False

    def drop(self, uid: str) -> None:
        """A pod is gone."""
        self.reservations.pop(uid, None)
        self._sharers.pop(uid, None)
        self._forget(uid)

    def _forget(self, uid: str) -> None:
        if known := self.pods.pop(uid, None):
            for container in known.containers:
                self._pod_of_container.pop(container, None)

    def owner_of(self, place: ContainerIdentity) -> str:
        """The uid of the pod that a process belongs to."""
        return place.pod or self._pod_of_container.get(place.container, UNKNOWN)

    def container_of(self, place: ContainerIdentity) -> str:
        """The name of the container that a process belongs to; "" where it is not known."""
        known = self.pods.get(self.owner_of(place))
        return "" if known is None else known.containers.get(place.container, "")

    def notes(self) -> dict[str, ShareNote]:
        """All that share GPUs of this node, by what their claims are called."""
        return {note.uid or note.ticket: note for notes in self._sharers.values() for note in notes}

    def shares(self, totals: Mapping[str, int]) -> list[Share]:
        """Their claims. `totals`: MiB by UUID; of a GPU that is not there nothing can be claimed."""
        claims: dict[str, list[Claim]] = {}
        for view in self.reservations.values():
            if view.gpu in totals:
                for note in self._sharers[view.uid]:
                    claims.setdefault(note.uid or note.ticket, []).append(
                        share_annotations.claim(note, view.gpu, totals[view.gpu])
                    )
        return [Share(tuple(found), self.directory_of(workload)) for workload, found in claims.items()]

    def directory_of(self, uid: str) -> Path:
        """The volume of a pod in which it listens; a newcomer has none yet."""
        return Path(f"{self._pods_root}/{uid}/volumes/kubernetes.io~empty-dir/{MEMORY_VOLUME}")

    def ready_on(self, view: ReservationView, ready: frozenset[str]) -> frozenset[str]:
        """The newcomers of a GPU that may start."""
        return frozenset(n.ticket for n in self._sharers[view.uid] if not n.uid and n.ticket in ready)
