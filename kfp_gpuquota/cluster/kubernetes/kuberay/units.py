"""Tracks the pods of one unit as the workers of a job of the scheduler. No I/O.

A slot is a worker: it holds devices from the plan that assigned them until its pod has ended.

| event                                  | slot                                        | scheduler's event       |
|----------------------------------------|---------------------------------------------|-------------------------|
| planned                                | new, without a pod                          | WorkerStarted           |
| a gated pod of its group waits         | has the pod, which is admitted to its node  |                         |
| an admitted pod without a slot is seen | new (after a restart)                       | WorkerStarted           |
| its pod is bound or reserved elsewhere | on that node                                | WorkerMoved             |
| asked to leave, or its pod is deleted  | leaves                                      | WorkerLeaving           |
| its pod has ended; none appeared       | removed                                     | WorkerGone              |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.kuberay.specs import Request


@dataclass(slots=True)
class Slot:
    """A planned worker. `reclaimed`: it leaves because its GPUs are borrowed, so that the reclaim bound applies.

    `by_kuberay`: KubeRay deletes its pod for a patch of its group, so no eviction is requested at first.
    """

    id: str
    group: str
    node: str
    devices: tuple[int, ...]
    since: float
    pod: PodView | None = None
    leaving: bool = False
    reclaimed: bool = False
    by_kuberay: bool = False

    @property
    def terminating(self) -> bool:
        """Return whether its pod is being deleted."""
        return self.pod is not None and self.pod.stage is Stage.TERMINATING


@dataclass(slots=True)
class Ledger:
    """Where slots are accounted: the scheduler's state and the devices of nodes. `now` is in seconds since 1970."""

    emit: Callable[[scheduler.Event], None]
    allocator: DeviceAllocator
    now: Callable[[], float]


@dataclass
class Unit:
    """A job of the scheduler whose pods KubeRay creates. `owner_uid` is that of its RayJob or RayCluster.

    `paused`: the user has suspended it, or its group requests no replicas. `ended`: it gets no more workers, and is
    removed with its last one.
    """

    uid: str
    owner_uid: str
    namespace: str
    at: float
    request: Request
    ledger: Ledger
    movable: bool
    slots: dict[str, Slot] = field(default_factory=dict)
    waiting: dict[str, PodView] = field(default_factory=dict)
    paused: bool = False
    ended: bool = False
    _by_pod: dict[str, Slot] = field(default_factory=dict)
    _made: int = 0

    def submit(self) -> None:
        """Submit it to the scheduler."""
        request = self.request
        self.ledger.emit(
            scheduler.JobSubmitted(
                self.uid,
                request.spec,
                self.at,
                movable=self.movable,
                overlapping=True,
                parts=request.parts,
                user=request.user,
            )
        )

    def update(self, request: Request) -> None:
        """Apply a changed request; what pods of other sizes request counts from their next start on."""
        if request != self.request and not self.ended:
            if request.user != self.request.user:
                self.ledger.emit(scheduler.UserChanged(self.uid, request.user))
            self.request = request
            self.ledger.emit(scheduler.JobUpdated(self.uid, request.spec))
            self.ledger.emit(scheduler.ConstraintsChanged(self.uid, request.spec))

    def pause(self, *, paused: bool) -> None:
        """Exclude it from planning, and release what waits for pods that will not be created; or include it again."""
        if paused != self.paused and not self.ended:
            self.paused = paused
            self.ledger.emit(scheduler.JobSuspended(self.uid) if paused else scheduler.JobResumed(self.uid))
            for slot in self.missing() if paused else ():
                self.release(slot)

    def end(self) -> bool:
        """Start no more workers; return whether it holds nothing, and is removed."""
        for slot in self.missing():
            self.release(slot)
        if not self.ended:
            self.ended = True
            self.ledger.emit(scheduler.JobCompleting(self.uid))
        if self.slots:
            return False
        self.ledger.emit(scheduler.JobRemoved(self.uid))
        return True

    # Slots

    def plan(self, placements: tuple[scheduler.Placement, ...]) -> list[Slot]:
        """Return a new slot for each placement.

        It counts from the creation of the pod that gets it, which is all that a restarted controller sees.
        """
        only, waiting = next(iter(self.request.gpus)), self.waiting_in_order()
        slots = []
        for one in placements:
            group = one.part or only
            pod = next((pod for pod in waiting if pod.ray_group == group), None)
            if pod is not None:
                waiting.remove(pod)
            at = self.ledger.now() if pod is None else pod.created
            slots.append(self._slot(group, one.node, one.devices, at))
        return slots

    def adopt(self, pod: PodView) -> Slot:
        """Return a new slot for a pod that was admitted before."""
        slot = self._slot(pod.ray_group, pod.node, pod.devices, pod.created)
        self.attach(slot, pod)
        return slot

    def attach(self, slot: Slot, pod: PodView) -> None:
        """Give the slot its pod."""
        self.waiting.pop(pod.uid, None)
        slot.pod = pod
        self._by_pod[pod.uid] = slot

    def follow(self, slot: Slot, pod: PodView) -> None:
        """Update the slot's pod, and hold devices of the node that was chosen for it since, if it is another one."""
        slot.pod = pod
        if (node := pod.located) and node != slot.node:
            slot.node, slot.devices = node, self.ledger.allocator.move(slot.id, node, pod.devices)
            self.ledger.emit(scheduler.WorkerMoved(slot.id, node, slot.devices))

    def detach(self, slot: Slot) -> None:
        """Take the slot's pod, which was not admitted, from it."""
        if slot.pod is not None:
            self._by_pod.pop(slot.pod.uid, None)
            slot.pod = None

    def slot_of(self, pod_uid: str) -> Slot | None:
        """Return the slot of a pod, if it has one."""
        return self._by_pod.get(pod_uid)

    def missing(self, group: str = "") -> list[Slot]:
        """Return the slots (of a group) that have no pod."""
        return [slot for slot in self.slots.values() if slot.pod is None and group in {"", slot.group}]

    def pods(self, group: str) -> Iterator[Slot]:
        """Return the slots of a group that have pods."""
        return (slot for slot in self.slots.values() if slot.pod is not None and slot.group == group)

    def waiting_in_order(self) -> list[PodView]:
        """Return the waiting pods, oldest first."""
        return sorted(self.waiting.values(), key=lambda pod: (pod.created, pod.uid))

    def leave(self, slot: Slot, now: float | None) -> None:
        """Record that the slot's worker was asked to leave."""
        if not slot.leaving:
            slot.leaving = True
            self.ledger.emit(scheduler.WorkerLeaving(slot.id, now))

    def stay(self, slot: Slot) -> None:
        """Record that the slot's worker stays, because another one leaves instead."""
        self.release(slot)
        pod = slot.pod
        assert pod is not None, "only workers with pods are asked to leave"
        self.attach(self._slot(slot.group, slot.node, slot.devices, slot.since), pod)

    def release(self, slot: Slot) -> None:
        """Release the slot's devices."""
        del self.slots[slot.id]
        if slot.pod is not None:
            self._by_pod.pop(slot.pod.uid, None)
        self.ledger.allocator.release(slot.id)
        self.ledger.emit(scheduler.WorkerGone(slot.id))

    def _slot(self, group: str, node: str, devices: tuple[int, ...] | None, at: float) -> Slot:
        self._made += 1
        name = f"{self.uid}/{self._made}"
        taken = self.ledger.allocator.take(name, node, self.request.gpus[group], devices)
        part = group if self.request.parts else ""
        self.ledger.emit(scheduler.WorkerStarted(name, self.uid, node, taken, at, part))
        slot = self.slots[name] = Slot(name, group, node, taken, at)
        return slot
