"""Manages shared GPUs: one reservation pod holds each while it has sharers, and a sharer starts when its part is free.

    device allocator ─► shared devices ─► reservation pods created and deleted
    reservation pods ─► UUIDs, and sharers that the node's agent reports as ready ─► sharers may start

Invariant: the desired state follows from the device allocator, the actual state from the watch, so a restarted
controller needs no other state: it deletes a reservation without sharers, and creates a missing one under a name that
is unique to the GPU. At most one write for a GPU is in flight. Rejected: a record of its own, which could diverge.

A sharer waits here between the plan's decision and its start: until the reservation has reported its GPU, and, if an
agent runs on the node, until the agent has reported that the requested memory is free. Without an agent it does not
wait: then the scheduler counts the request, but the memory is not enforced.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.convert.pods import elastic_owner
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import bounded_number
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import worker_id
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods, share_annotations
from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node
    from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationSettings, ReservationView
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote

AGENT: Final = "gpuquota-node-agent"
AGAIN_S: Final = 1.0
REMIND_AFTER_S: Final = 20.0

log = logging.getLogger(__name__)


class DeviceAssignment(NamedTuple):
    """The GPUs of a sharer that starts. `note` has their UUIDs; `simulated`: folders of simulated devices."""

    note: ShareNote
    simulated: tuple[str, ...] = ()


class Sharer(NamedTuple):
    """A sharer that waits for its part. `report(reason, message)` records an event for its user."""

    note: ShareNote
    ready: Callable[[DeviceAssignment], None]
    failed: Callable[[Exception], None]
    report: Callable[[str, str], None] = lambda _reason, _message: None


@dataclass(slots=True)
class SharedDevice:
    """A device that is, or was, shared. `writing`: a request is in flight; `ended`: uid of a pod that is being deleted.

    `start_failure`: why the last request was refused.
    """

    node: str
    device: int
    pod: ReservationView | None = None
    writing: bool = False
    ended: str = ""
    start_failure: str = ""

    @property
    def gpu(self) -> str:
        """Return the UUID of the reserved GPU; "" if it was not reported yet."""
        held = self.pod is not None and not self.pod.leaving and not self.pod.over and self.pod.uid != self.ended
        return self.pod.gpu if held and self.pod is not None else ""


class Sharers(Protocol):
    """The pods and workers that hold parts of GPUs; implemented by the controller."""

    def share_of(self, holder: str, /) -> ShareNote | None:
        """Return the share note of a started holder, from its request."""

    def gpu_changed(self, holder: str, why: str, /) -> None:
        """Replace a holder that runs on a GPU that is no longer reserved; called once for each."""


class Reservations:
    """All reservations of a cluster. `later` sets a timer."""

    def __init__(
        self,
        allocator: DeviceAllocator,
        nodes: Mapping[str, Node],
        writer: Writer,
        settings: ReservationSettings,
        written_pods: WrittenPods,
        sharers: Sharers,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._allocator, self._nodes, self._writer, self._settings = allocator, nodes, writer, settings
        self._written_pods, self._holders, self._later = written_pods, sharers, later or _on_the_loop
        self._reported_displaced = set[str]()
        self._devices: dict[tuple[str, int], SharedDevice] = {}
        self._agents: dict[str, str] = {}  # uid of an agent's pod -> its node
        self._configs: dict[str, str] = {}  # uid of a sharer's pod -> the ConfigMap that it refers to
        self._bound: dict[str, tuple[str, str]] = {}  # uid of a sharer's pod on its node -> the holder, its GPUs
        self._waiting: dict[str, Sharer] = {}
        self.memory_reserve = 0.0
        self._notes: dict[str, ShareNote] = {}  # of sharers that were started
        self._pod = msgspec.json.Decoder(Pod)
        self._started = False
        allocator.observe(self)

    def start(self) -> None:
        """Reconcile all reservations, after all objects were listed and all devices were assigned."""
        for key in list(self._allocator.shared()):
            self._entry(*key)
        for entry in list(self._devices.values()):
            self._remember(entry)
        self._started = True
        for entry in list(self._devices.values()):
            self._sync(entry)
            self._find_displaced(entry)

    def _remember(self, entry: SharedDevice) -> None:
        """Restore the sharers that an earlier controller has started from the reservation's annotation.

        If the reservation was deleted in the meantime, the notes are derived from the sharers' requests.
        """
        sharers = self._allocator.sharers(entry.node, entry.device)
        noted = share_annotations.read(entry.pod.sharers) if entry.pod is not None else ()
        self._notes |= {note.holder: note for note in noted if note.holder in sharers}
        for holder in sharers - self._notes.keys():
            if (note := self._holders.share_of(holder)) is not None:
                self._notes[holder] = note
        for uid, (holder, gpus) in self._bound.items():
            self._note_bound(holder, uid, gpus)

    # Observed changes

    def see(self, pod: Pod) -> bool:
        """Process a pod; return whether it is a reservation, which no other component handles."""
        meta = pod.metadata
        if meta.namespace == self._settings.namespace and (view := reservation_pods.view_of(pod)) is not None:
            self._see_reservation(view)
            return True
        if meta.annotations and (config := meta.annotations.get(labels.GPU_CONFIG, "")):
            self._configs[meta.uid] = config
        if pod.spec.node_name:
            self._see_bound(pod)
        return False

    def drop(self, uid: str) -> None:
        """Remove a deleted pod."""
        self._configs.pop(uid, None)
        self._bound.pop(uid, None)
        if (node := self._agents.pop(uid, None)) is not None:
            for entry in [entry for entry in self._devices.values() if entry.node == node]:
                self._look_at(entry)
        for entry in [entry for entry in self._devices.values() if entry.pod is not None and entry.pod.uid == uid]:
            entry.pod, entry.ended = None, ""
            self._look_at(entry)

    def config_of(self, uid: str) -> str:
        """Return the ConfigMap with the pod's GPU configuration; "" if it refers to none."""
        return self._configs.get(uid, "")

    def _see_reservation(self, view: ReservationView) -> None:
        entry = self._entry(view.node, view.device)
        known = entry.pod
        if known is not None and known.uid != view.uid and view.leaving:
            return  # a late update of the previous pod
        entry.pod = view
        if self._started:
            self._look_at(entry)
            self._find_displaced(entry)

    def _see_bound(self, pod: Pod) -> None:
        """Track a bound pod that is an agent or a sharer."""
        meta = pod.metadata
        if meta.namespace == self._settings.agents and meta.labels.get("app.kubernetes.io/name") == AGENT:
            self._agents[meta.uid] = pod.spec.node_name
        if gpus := (meta.annotations or {}).get(labels.GPUS, ""):
            self._bound[meta.uid] = _holder(pod), gpus
            self._note_bound(_holder(pod), meta.uid, gpus)

    def _note_bound(self, holder: str, uid: str, gpus: str) -> None:
        holder = holder if holder in self._notes else uid  # as which a worker of a deleted job holds its part
        if (note := self._notes.get(holder)) is not None and note.uid != uid:
            self._notes[holder] = msgspec.structs.replace(note, uid=uid, gpus=tuple(gpus.split(",")))
            if self._started:
                self._sync_devices_of(holder)
                for entry in self._devices_of(holder):
                    self._find_displaced(entry)

    def _find_displaced(self, entry: SharedDevice) -> None:
        """Report sharers on another GPU than the reserved one, which happens after a reservation was recreated."""
        for holder in self._allocator.sharers(entry.node, entry.device) if entry.gpu else ():
            note = self._notes.get(holder)
            if note is None or not note.uid or entry.gpu in note.gpus or holder in self._reported_displaced:
                continue
            self._reported_displaced.add(holder)
            held = ", ".join(note.gpus)
            self._holders.gpu_changed(
                holder,
                f"it runs on {held}; the recreated reservation has {entry.gpu} of {entry.node}",
            )

    # Desired state

    def prepare(self, sharer: Sharer) -> None:
        """Call the sharer's `ready` with its GPUs when it may start; its devices are already assigned."""
        holder = sharer.note.holder
        self._waiting[holder] = sharer
        self._later(REMIND_AFTER_S, partial(self._remind, sharer))
        self._advance(holder)

    def gives_up(self, holder: str) -> bool:
        """Stop waiting; return whether the holder still waited."""
        waited = self._waiting.pop(holder, None) is not None
        if waited:
            self._sync_devices_of(holder)
        return waited

    def shared_changed(self, holder: str, node: str, devices: tuple[int, ...]) -> None:
        """Reserve and release devices after parts of them were taken or released."""
        if self._allocator.held(holder) is None:
            self._waiting.pop(holder, None)
            self._notes.pop(holder, None)
            self._reported_displaced.discard(holder)
        if self._started:
            for device in devices:
                self._sync(self._entry(node, device))

    def _entry(self, node: str, device: int) -> SharedDevice:
        return self._devices.setdefault((node, device), SharedDevice(node, device))

    def _devices_of(self, holder: str) -> list[SharedDevice]:
        node, devices = self._allocator.held(holder) or ("", ())
        return [self._entry(node, device) for device in devices]

    def _sync_devices_of(self, holder: str) -> None:
        for entry in self._devices_of(holder):
            self._sync(entry)

    def _look_at(self, entry: SharedDevice) -> None:
        self._sync(entry)
        for holder in self._allocator.sharers(entry.node, entry.device):
            if holder in self._waiting:
                self._advance(holder)

    # Start of sharers

    def _advance(self, holder: str) -> None:
        """Start the sharer if all its GPUs were reported and its part of them is free."""
        sharer, entries = self._waiting[holder], self._devices_of(holder)
        if not entries or not all(entry.gpu for entry in entries):
            return
        for entry in entries:
            self._sync(entry)  # annotated before its start, so that the agent tracks it even if this process is killed
        watched = entries[0].node in self._agents.values()
        if not all(_may_start(entry, sharer.note.ticket, watched=watched) for entry in entries):
            return
        del self._waiting[holder]
        self._notes[holder] = note = self._named(sharer.note, entries)
        folders = self._folders(entries[0].node)
        sharer.ready(
            DeviceAssignment(
                note,
                tuple(folders[entry.device] for entry in entries if entry.device < len(folders)),
            )
        )

    def _named(self, note: ShareNote, entries: list[SharedDevice]) -> ShareNote:
        return msgspec.structs.replace(note, gpus=tuple(entry.gpu for entry in entries))

    def _remind(self, sharer: Sharer) -> None:
        """Record why a sharer has waited long; if its GPU cannot be reserved, it is planned again."""
        holder = sharer.note.holder
        if self._waiting.get(holder) is not sharer:
            return
        lacking = [entry for entry in self._devices_of(holder) if not entry.gpu]
        if not lacking:
            sharer.report(
                "WaitsForGpuMemory",
                "the memory agent of its node frees the memory that it has requested, then it starts",
            )
            self._later(REMIND_AFTER_S, partial(self._remind, sharer))
            return
        entry = lacking[0]
        name = f"{self._settings.namespace}/{reservation_pods.name_of(entry.node, entry.device)}"
        start_failure = entry.pod.start_failure if entry.pod is not None else entry.start_failure
        why = f"its GPU on node {entry.node} is not reserved yet: pod {name}: {start_failure or 'it does not run yet'}"
        sharer.report("WaitsForReservation", why)
        self.gives_up(holder)
        sharer.failed(RunError(why))

    # Reservation pods

    def _sync(self, entry: SharedDevice) -> None:
        """Send the next write towards the desired state, unless one is in flight, whose response calls this again."""
        if entry.writing:
            return
        wanted, pod = bool(self._allocator.sharers(entry.node, entry.device)), entry.pod
        if pod is None:
            if wanted:
                self._write(entry, self._creation(entry))
            else:
                self._devices.pop((entry.node, entry.device), None)
        elif pod.leaving or pod.uid == entry.ended:
            return
        elif not wanted or pod.over:
            self._write(entry, reservation_pods.removal(pod, self._settings), ended=pod.uid)
        elif (sharers := self._sharers(entry)) != pod.sharers:
            self._write(entry, reservation_pods.annotation(pod, self._settings, sharers))

    def _creation(self, entry: SharedDevice) -> Write:
        folders = self._folders(entry.node)
        simulated = folders[entry.device].rpartition("/")[2] if entry.device < len(folders) else ""
        return reservation_pods.creation(entry.node, entry.device, self._settings, simulated)

    def _folders(self, node: str) -> list[str]:
        """Return the simulated devices of a node in the order of its annotation."""
        known = self._nodes.get(node)
        text = (known.metadata.annotations or {}).get(labels.SIMULATED, "") if known is not None else ""
        return [folder.strip() for folder in text.split(",") if folder.strip()]

    def _sharers(self, entry: SharedDevice) -> str:
        """Return the annotation of all started sharers, and of those that wait for the agent to free memory."""
        notes = []
        for holder in self._allocator.sharers(entry.node, entry.device):
            if (note := self._notes.get(holder)) is not None:
                notes.append(note)
            elif (sharer := self._waiting.get(holder)) is not None and all(r.gpu for r in self._devices_of(holder)):
                notes.append(self._named(sharer.note, self._devices_of(holder)))
        return share_annotations.written(notes, self.memory_reserve)

    def _write(self, entry: SharedDevice, write: Write, *, ended: str = "") -> None:
        entry.writing, entry.ended = (
            True,
            ended or entry.ended,
        )  # new sharers wait for the next reservation
        self._writer.submit(write, partial(self._answered, entry, ended), partial(self._refused, entry))

    def _answered(self, entry: SharedDevice, ended: str, answer: bytes) -> None:
        entry.writing, entry.start_failure = False, ""
        if ended:
            entry.ended = ended if entry.pod is not None and entry.pod.uid == ended else ""
            self._sync(entry)
        else:
            self._written_pods.note(self._pod.decode(answer))
            self._look_at(entry)

    def _refused(self, entry: SharedDevice, error: Exception) -> None:
        """Retry after a conflict (the watch reports the new state) or a transient failure."""
        if not (isinstance(error, ApiError) and error.status == 409) and entry.start_failure != str(error):
            log.warning("GPU %s of node %s: its reservation: %s", entry.device, entry.node, error)
        entry.start_failure = str(error)
        self._later(AGAIN_S, partial(self._again, entry))

    def _again(self, entry: SharedDevice) -> None:
        entry.writing, entry.ended = False, ""
        self._look_at(entry)


def _on_the_loop(seconds: float, action: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, action)


def _may_start(entry: SharedDevice, ticket: str, *, watched: bool) -> bool:
    assert entry.pod is not None, "its GPU was reported"
    return ticket in entry.pod.ready if watched else ticket in entry.pod.sharers


def _holder(pod: Pod) -> str:
    """Return the holder of the pod's devices: the worker's id for an ElasticJob's pod, else its uid."""
    meta = pod.metadata
    owner = elastic_owner(meta)
    return meta.uid if owner is None else worker_id(owner.uid, bounded_number(meta.labels.get(labels.WORKER, "0")) or 0)
