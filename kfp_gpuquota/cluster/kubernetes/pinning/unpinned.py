"""Decides which pods are pinned, and tracks those without a pin: kube-scheduler checks more of them than is planned.

    released ──────────────► bound                      counted on the node that kube-scheduler has chosen
       │ refused for STUCK_S   ▲
       ▼                       │
    reserved elsewhere ────────┤                         the node that refused it is not reserved for it for REFUSED_S
       │ no node has devices   │
       ▼                       │
    reserved on no node ───────┘                         counts against the quota only, until devices become idle

Invariants. The pod's GPUs count against its team's quota from its release on. On a node they are reserved until the pod
is bound, so that no other pod is planned there, but not on devices that are promised to a job: others were stopped for
it. Nothing is deleted when kube-scheduler refuses a node. A pod is pinned only while none of these pods may still be
bound to its node: then it is released without a pin, too.

The reservation is annotated on the pod, so that a restarted controller continues with it. Rejected: to model pod
affinity and the like, since kube-scheduler's filters change with its version and its configuration; and to pin no pod
at all, since kube-scheduler spreads pods where the plan packs them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import NOWHERE
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.convert.pod_repulsion import PodRepulsions
    from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes

REFUSED_S: Final = 600.0
"""For this long after a node has refused a pod it is not reserved for it: it may have lacked CPU only for a moment."""


class PodOwners(Protocol):
    """The parts that account for pods; implemented by the controller."""

    def put_pod(self, pod: PodView, /) -> None:
        """Process a pod whose reservation has moved."""

    def holder_of(self, pod: PodView, /) -> str:
        """Return by which name the pod's devices are held."""

    def promised_devices(self) -> Mapping[str, set[int]]:
        """Return the devices that are promised to jobs, by node."""


class UnpinnedPods:
    """Reservations of unbound pods without a pin. `nodes` are those of the plan."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        allocator: DeviceAllocator,
        volumes: Volumes,
        repulsions: PodRepulsions,
        writer: Writer,
        owners: PodOwners,
    ) -> None:
        self._nodes, self._allocator, self._volumes, self._repulsions = nodes, allocator, volumes, repulsions
        self._writer, self._owners = writer, owners
        self._unbound: dict[str, PodView | None] = {}  # by uid; None: released or being created, and not seen since
        self._since: dict[str, float] = {}  # by uid, in the event loop's time
        self._reserved_on: dict[str, str] = {}  # by uid, until the pod's annotation names it
        self._refused: dict[str, dict[str, float]] = {}  # by uid and node, until when, in the event loop's time

    def is_pinned(self, pod: PodView, node: str) -> bool:
        """Return whether the pod is pinned to its planned node; if not, it is tracked from now on.

        A worker that is being created has no uid yet: it is tracked by another one until it is dropped.
        """
        pinned = self._may_be_pinned(pod)
        if not pinned and not pool_of(node):
            self._track(pod.uid, None)
        return pinned

    @property
    def oldest_s(self) -> float:
        """Return for how long the oldest of these pods has not been bound; 0 without any: all others are pinned."""
        now = asyncio.get_running_loop().time()
        return max((now - since for since in self._since.values()), default=0.0)

    def _track(self, uid: str, pod: PodView | None) -> None:
        self._unbound[uid] = pod
        self._since.setdefault(uid, asyncio.get_running_loop().time())

    def _may_be_pinned(self, pod: PodView) -> bool:
        """Return whether the plan models all that decides where the pod can run."""
        if pod.share:
            return True  # its part is of a device of that node
        if self._unbound or pod.unmodelled or self._volumes.unmodelled(pod.namespace, pod.claims):
            return False
        return not self._repulsions.keeps_away(pod.namespace, pod.labels)

    def release_failed(self, uid: str) -> None:
        """Forget a pod, unless an earlier attempt to release it has succeeded, as the watch has reported."""
        if self._unbound.get(uid) is None:
            self.drop(uid)

    def drop(self, uid: str) -> None:
        """Forget a pod that was deleted, or is bound."""
        self._unbound.pop(uid, None)
        self._since.pop(uid, None)
        self._reserved_on.pop(uid, None)
        self._refused.pop(uid, None)

    def apply(self, pod: PodView) -> PodView:
        """Return the pod with the node on which its devices are reserved at present."""
        if not pod.reserved_on:
            return pod
        if pod.bound or pod.stage is not Stage.ASSIGNED:
            self.drop(pod.uid)
            return pod
        node = self._reserved_on.get(pod.uid, pod.reserved_on)
        if node == pod.reserved_on:
            self._reserved_on.pop(pod.uid, None)
        elif node != pod.node:
            pod = msgspec.structs.replace(pod, node=node, devices=None)
        self._track(pod.uid, pod)
        return pod

    def note_bound(self, pod: PodView) -> None:
        """Annotate the node and the devices of a pod that kube-scheduler has bound to another node."""
        if pod.reserved_on and pod.bound and pod.node != pod.reserved_on and pod.holds:
            self._annotate(pod, pod.node)

    def refuse(self, pod: PodView) -> str:
        """Move the reservation of a pod that kube-scheduler does not bind to its node; return the next node."""
        self._refused.setdefault(pod.uid, {})[pod.node] = asyncio.get_running_loop().time() + REFUSED_S
        node, devices = self._place_for(pod, self._idle())
        self._reserve(pod, node, devices)
        return node

    def reserve_again(self) -> None:
        """Reserve devices for the pods without any, oldest first; called before each plan, so before other pods."""
        without = [pod for pod in self._unbound.values() if pod is not None and pod.node == NOWHERE]
        idle = self._idle() if without else {}
        for pod in sorted(without, key=lambda pod: (pod.created, pod.uid)):
            node, devices = self._place_for(pod, idle)
            if node != NOWHERE:
                self._reserve(pod, node, devices)
                idle[node] = idle[node][len(devices) :]

    def _idle(self) -> dict[str, tuple[int, ...]]:
        """Return the devices that nobody holds or is promised, by node."""
        promised = self._owners.promised_devices()
        found = {name: self._allocator.idle(name, promised.get(name, ())) for name in self._nodes}
        return {name: devices for name, devices in found.items() if devices}

    def _place_for(self, pod: PodView, idle: Mapping[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
        """Return devices of the node with the fewest idle ones that are enough, of those that did not refuse it.

        None for a pod with another resource that counts as GPUs: only kube-scheduler knows where that is free.
        """
        if pod.gpu_weights:
            return NOWHERE, ()
        refused, now = self._refused.get(pod.uid, {}), asyncio.get_running_loop().time()
        enough = (name for name, free in idle.items() if len(free) >= pod.gpus and refused.get(name, 0.0) <= now)
        fitting = (name for name in enough if self._admits(name, pod))
        node = min(fitting, key=lambda name: (len(idle[name]), name), default=NOWHERE)
        return node, idle.get(node, ())[: pod.gpus]

    def _admits(self, name: str, pod: PodView) -> bool:
        node = self._nodes[name]
        return node.ready and node.pool == pod.pool and pod.constraints.within(pod.volume_terms).admit(node)

    def _reserve(self, pod: PodView, node: str, devices: tuple[int, ...]) -> None:
        if node == pod.node:
            return
        self._reserved_on[pod.uid] = node
        self._owners.put_pod(msgspec.structs.replace(pod, node=node, devices=devices or None))
        self._annotate(pod, "" if node == NOWHERE else node)

    def _annotate(self, pod: PodView, node: str) -> None:
        """Annotate where the pod holds devices; not while a controller starts, before it has counted the pod."""
        if held := self._allocator.held(self._owners.holder_of(pod)):
            self._writer.submit(requests.reservation_note(pod, node, held[1]), lambda _: None, lambda _: None)
