"""Tracks the shared GPUs of a node, and maps processes to pods, from pods alone. Pure.

The sharers are annotated on the reservation pods, which only the controller writes. Other pods are read only for their
container ids, since the cgroups of some machines name the container and not its pod.
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


class TrackedPod(NamedTuple):
    """A pod of this node, and its containers' names by id."""

    namespace: str
    name: str
    containers: Mapping[str, str]


class NodeShares:
    """Shares of a node. `namespace` is that of the reservations; `kubelet_root` has the pods' volumes."""

    def __init__(self, namespace: str, kubelet_root: Path) -> None:
        self._namespace, self._pods_root = namespace, kubelet_root / "pods"
        self.reservations: dict[str, ReservationView] = {}
        self.pods: dict[str, TrackedPod] = {}
        self._sharers: dict[str, tuple[ShareNote, ...]] = {}  # by the reservation's uid
        self._pod_of_container: dict[str, str] = {}

    def put(self, pod: Pod) -> bool:
        """Add or update a pod; return whether it is a reservation."""
        if pod.metadata.namespace == self._namespace and (view := reservation_pods.view_of(pod)) is not None:
            self.reservations[view.uid] = view
            self._sharers[view.uid] = share_annotations.read(view.sharers)
            return True
        self._forget(pod.metadata.uid)
        statuses = (*pod.status.container_statuses, *pod.status.init_container_statuses)
        containers = {status.container_id.rpartition("//")[2]: status.name for status in statuses}
        self.pods[pod.metadata.uid] = TrackedPod(pod.metadata.namespace, pod.metadata.name, containers)
        self._pod_of_container.update(dict.fromkeys(containers, pod.metadata.uid))
        return False

    def drop(self, uid: str) -> None:
        """Remove a deleted pod."""
        self.reservations.pop(uid, None)
        self._sharers.pop(uid, None)
        self._forget(uid)

    def _forget(self, uid: str) -> None:
        if known := self.pods.pop(uid, None):
            for container in known.containers:
                self._pod_of_container.pop(container, None)

    def owner_of(self, container: ContainerIdentity) -> str:
        """Return the uid of the pod to which a process belongs."""
        return container.pod or self._pod_of_container.get(container.container, UNKNOWN)

    def container_of(self, container: ContainerIdentity) -> str:
        """Return the name of the container to which a process belongs; "" if it is unknown."""
        pod = self.pods.get(self.owner_of(container))
        return "" if pod is None else pod.containers.get(container.container, "")

    def notes(self) -> dict[str, ShareNote]:
        """Return all shares of this node's GPUs, by the workload of their claims."""
        return {note.uid or note.ticket: note for notes in self._sharers.values() for note in notes}

    def shares(self, totals: Mapping[str, int]) -> list[Share]:
        """Return the claims of all sharers. `totals`: MiB by UUID; GPUs without a total are left out."""
        claims: dict[str, list[Claim]] = {}
        for view in self.reservations.values():
            if view.gpu in totals:
                for note in self._sharers[view.uid]:
                    claims.setdefault(note.uid or note.ticket, []).append(
                        share_annotations.claim(note, view.gpu, totals[view.gpu])
                    )
        return [Share(tuple(found), self.directory_of(workload)) for workload, found in claims.items()]

    def directory_of(self, uid: str) -> Path:
        """Return the directory of the pod's volume that it shares with the agent."""
        return Path(f"{self._pods_root}/{uid}/volumes/kubernetes.io~empty-dir/{MEMORY_VOLUME}")

    def ready_on(self, view: ReservationView, ready: frozenset[str]) -> frozenset[str]:
        """Return the tickets of sharers of a GPU that have not started and may start."""
        return frozenset(n.ticket for n in self._sharers[view.uid] if not n.uid and n.ticket in ready)
