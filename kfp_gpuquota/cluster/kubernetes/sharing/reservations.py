"""Shared GPUs: each held by one reservation pod while anybody shares it, and given to a sharer when its part is free.

    seats ─► which GPUs are shared ─► reservation pods made and removed
    reservation pods ─► UUIDs, and whom the node's agent calls ready ─► sharers may start

What is wanted follows from who holds parts of which devices (seats.py), what is there from the watch, so nothing is
remembered that a controller started anew would not find out: one that finds a reservation without sharers removes it,
and one that lacks a reservation makes it under a name that only one pod can have. Writes about one GPU are never under
way together.

A sharer waits here between the plan's decision and its start: until the reservation has said which GPU it holds, and,
where an agent runs on the node, until that has said that the request is free on it. Without an agent nobody is waited
for: then a request is counted by the scheduler, and guaranteed by nobody.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.convert.pods import elastic_owner
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import bounded_number
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import worker_id
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods, share_annotations
from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.request import Write
    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node
    from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationSettings, ReservationView
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote

AGENT: Final = "gpuquota-node-agent"
AGAIN_S: Final = 1.0
PATIENCE_S: Final = 20.0

log = logging.getLogger(__name__)


class DeviceAssignment(NamedTuple):
    """Where a sharer starts. `note` names its GPUs; `simulated`: their folders, where they exist by name only."""

    note: ShareNote
    simulated: tuple[str, ...] = ()


class Sharer(NamedTuple):
    """Who waits for its part. `told(reason, message)` is for an event that its user sees."""

    note: ShareNote
    ready: Callable[[DeviceAssignment], None]
    failed: Callable[[Exception], None]
    told: Callable[[str, str], None] = lambda _reason, _message: None


@dataclass(slots=True)
class Room:
    """A device that is, or was, shared. `writing`: a request about it is under way; `ended`: to be removed, and not yet
    gone; `trouble`: why the last request was refused.
    """

    node: str
    device: int
    pod: ReservationView | None = None
    writing: bool = False
    ended: str = ""
    start_failure: str = ""

    @property
    def gpu(self) -> str:
        """The UUID of the GPU that is held; "" where it is not known (yet)."""
        held = self.pod is not None and not self.pod.leaving and not self.pod.over and self.pod.uid != self.ended
        return self.pod.gpu if held and self.pod is not None else ""


class Reservations:
    """All of a cluster's. `noted(pod)` gets the answers of writes, which are news that the watch will repeat.

    `recall(holder)` is the note of one who has been told to start, from what it asked for; `later` a timer.
    `displaced(holder, why)` is told once of one who runs on a GPU that is not reserved any more.
    """

    def __init__(
        self,
        allocator: DeviceAllocator,
        nodes: Mapping[str, Node],
        writer: Writer,
        settings: ReservationSettings,
        noted: Callable[[Pod], None],
        recall: Callable[[str], ShareNote | None],
        displaced: Callable[[str, str], None],
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._allocator, self._nodes, self._writer, self._settings = allocator, nodes, writer, settings
        self._noted, self._recall, self._later = noted, recall, later or _on_the_loop
        self._displaced, self._told_displaced = displaced, set[str]()
        self._rooms: dict[tuple[str, int], Room] = {}
        self._agents: dict[str, str] = {}  # uid of an agent's pod -> its node
        self._configs: dict[str, str] = {}  # uid of a sharer's pod -> the ConfigMap that it refers to
        self._bound: dict[str, tuple[str, str]] = {}  # uid of a sharer's pod on its node -> the holder, its GPUs
        self._waiting: dict[str, Sharer] = {}
        self._notes: dict[str, ShareNote] = {}  # of those that were told to start
        self._pod = msgspec.json.Decoder(Pod)
        self._started = False
        allocator.shared_changed = self._shared_changed

    def start(self) -> None:
        """All has been listed, and all who hold parts are seated: put right what an earlier controller left."""
        for key in list(self._allocator.shared()):
            self._room(*key)
        for room in list(self._rooms.values()):
            self._remember(room)
        self._started = True
        for room in list(self._rooms.values()):
            self._sync(room)
            self._find_displaced(room)

    def _remember(self, room: Room) -> None:
        """Whom an earlier controller has told to start stands on the reservation; who had to wait is planned anew.

        Where somebody has taken the reservation away meanwhile, what its sharers asked for says the same.
        """
        sharers = self._allocator.sharers(room.node, room.device)
        noted = share_annotations.read(room.pod.sharers) if room.pod is not None else ()
        self._notes |= {note.holder: note for note in noted if note.holder in sharers}
        for holder in sharers - self._notes.keys():
            if (note := self._recall(holder)) is not None:
                self._notes[holder] = note
        for uid, (holder, gpus) in self._bound.items():
            self._note_bound(holder, uid, gpus)

    # What is seen

    def see(self, pod: Pod) -> bool:
        """A pod is as given; whether it is a reservation, and nobody else's business."""
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
        """A pod is gone."""
        self._configs.pop(uid, None)
        self._bound.pop(uid, None)
        if (node := self._agents.pop(uid, None)) is not None:
            for room in [room for room in self._rooms.values() if room.node == node]:
                self._look_at(room)
        for room in [room for room in self._rooms.values() if room.pod is not None and room.pod.uid == uid]:
            room.pod, room.ended = None, ""
            self._look_at(room)

    def config_of(self, uid: str) -> str:
        """The ConfigMap that a pod's containers read their GPUs from; "" for one that refers to none."""
        return self._configs.get(uid, "")

    def _see_reservation(self, view: ReservationView) -> None:
        room = self._room(view.node, view.device)
        known = room.pod
        if known is not None and known.uid != view.uid and view.leaving:
            return  # late news of the one before
        room.pod = view
        if self._started:
            self._look_at(room)
            self._find_displaced(room)

    def _see_bound(self, pod: Pod) -> None:
        """An agent, or a sharer that was sent to its node and is there now."""
        meta = pod.metadata
        if meta.namespace == self._settings.agents and meta.labels.get("app.kubernetes.io/name") == AGENT:
            self._agents[meta.uid] = pod.spec.node_name
        if gpus := (meta.annotations or {}).get(labels.GPUS, ""):
            self._bound[meta.uid] = _holder(pod), gpus
            self._note_bound(_holder(pod), meta.uid, gpus)

    def _note_bound(self, holder: str, uid: str, gpus: str) -> None:
        if (note := self._notes.get(holder)) is not None and note.uid != uid:
            self._notes[holder] = msgspec.structs.replace(note, uid=uid, gpus=tuple(gpus.split(",")))
            if self._started:
                self._sync_rooms_of(holder)
                for room in self._rooms_of(holder):
                    self._find_displaced(room)

    def _find_displaced(self, room: Room) -> None:
        """A reservation that was made anew may have another GPU: who runs on the one before shares it with anybody."""
        for holder in self._allocator.sharers(room.node, room.device) if room.gpu else ():
            note = self._notes.get(holder)
            if note is None or not note.uid or room.gpu in note.gpus or holder in self._told_displaced:
                continue
            self._told_displaced.add(holder)
            held = ", ".join(note.gpus)
            self._displaced(
                holder, f"it runs on {held}; the reservation was made anew and has {room.gpu} of {room.node}"
            )

    # What is wanted

    def prepare(self, sharer: Sharer) -> None:
        """Tell the sharer, who has its seat, when it may start, and on which GPUs."""
        holder = sharer.note.holder
        self._waiting[holder] = sharer
        self._later(PATIENCE_S, partial(self._remind, sharer))
        self._advance(holder)

    def gives_up(self, holder: str) -> bool:
        """Whether the holder still waited here, and does not any more."""
        waited = self._waiting.pop(holder, None) is not None
        if waited:
            self._sync_rooms_of(holder)
        return waited

    def _shared_changed(self, holder: str, node: str, devices: tuple[int, ...]) -> None:
        if self._allocator.held(holder) is None:
            self._waiting.pop(holder, None)
            self._notes.pop(holder, None)
            self._told_displaced.discard(holder)
        if self._started:
            for device in devices:
                self._sync(self._room(node, device))

    def _room(self, node: str, device: int) -> Room:
        return self._rooms.setdefault((node, device), Room(node, device))

    def _rooms_of(self, holder: str) -> list[Room]:
        node, devices = self._allocator.held(holder) or ("", ())
        return [self._room(node, device) for device in devices]

    def _sync_rooms_of(self, holder: str) -> None:
        for room in self._rooms_of(holder):
            self._sync(room)

    def _look_at(self, room: Room) -> None:
        self._sync(room)
        for holder in self._allocator.sharers(room.node, room.device):
            if holder in self._waiting:
                self._advance(holder)

    # Who may start

    def _advance(self, holder: str) -> None:
        """Start the sharer where all its GPUs are known, and its part of them is free."""
        sharer, rooms = self._waiting[holder], self._rooms_of(holder)
        if not rooms or not all(room.gpu for room in rooms):
            return
        for room in rooms:
            self._sync(room)  # it is noted before it starts, so that an agent knows of it whatever happens to us
        watched = rooms[0].node in self._agents.values()
        if not all(_may_start(room, sharer.note.ticket, watched=watched) for room in rooms):
            return
        del self._waiting[holder]
        self._notes[holder] = note = self._named(sharer.note, rooms)
        folders = self._folders(rooms[0].node)
        sharer.ready(
            DeviceAssignment(note, tuple(folders[room.device] for room in rooms if room.device < len(folders)))
        )

    def _named(self, note: ShareNote, rooms: list[Room]) -> ShareNote:
        return msgspec.structs.replace(note, gpus=tuple(room.gpu for room in rooms))

    def _remind(self, sharer: Sharer) -> None:
        """It has waited long: say for what. A GPU that cannot be reserved may be had elsewhere: it is planned anew."""
        holder = sharer.note.holder
        if self._waiting.get(holder) is not sharer:
            return
        lacking = [room for room in self._rooms_of(holder) if not room.gpu]
        if not lacking:
            sharer.told(
                "WaitsForGpuMemory", "the memory agent of its node makes room for what it has requested; it starts then"
            )
            self._later(PATIENCE_S, partial(self._remind, sharer))
            return
        room = lacking[0]
        name = f"{self._settings.namespace}/{reservation_pods.name_of(room.node, room.device)}"
        start_failure = room.pod.start_failure if room.pod is not None else room.start_failure
        why = f"its GPU on node {room.node} is not reserved yet: pod {name}: {start_failure or 'it does not run yet'}"
        sharer.told("WaitsForReservation", why)
        self.gives_up(holder)
        sharer.failed(RunError(why))

    # Reservation pods

    def _sync(self, room: Room) -> None:
        """One step towards what is wanted, unless a step is under way; its end leads here again."""
        if room.writing:
            return
        wanted, pod = bool(self._allocator.sharers(room.node, room.device)), room.pod
        if pod is None:
            if wanted:
                self._write(room, self._creation(room))
            else:
                self._rooms.pop((room.node, room.device), None)
        elif pod.leaving or pod.uid == room.ended:
            return
        elif not wanted or pod.over:
            self._write(room, reservation_pods.removal(pod, self._settings), ended=pod.uid)
        elif (sharers := self._sharers(room)) != pod.sharers:
            self._write(room, reservation_pods.annotation(pod, self._settings, sharers))

    def _creation(self, room: Room) -> Write:
        folders = self._folders(room.node)
        simulated = folders[room.device].rpartition("/")[2] if room.device < len(folders) else ""
        return reservation_pods.creation(room.node, room.device, self._settings, simulated)

    def _folders(self, node: str) -> list[str]:
        """The simulated devices of a node, in their order, as its annotation names them."""
        known = self._nodes.get(node)
        text = (known.metadata.annotations or {}).get(labels.SIMULATED, "") if known is not None else ""
        return [folder.strip() for folder in text.split(",") if folder.strip()]

    def _sharers(self, room: Room) -> str:
        """All that were told to start, and the newcomers that an agent is to make room for."""
        notes = []
        for holder in self._allocator.sharers(room.node, room.device):
            if (note := self._notes.get(holder)) is not None:
                notes.append(note)
            elif (sharer := self._waiting.get(holder)) is not None and all(r.gpu for r in self._rooms_of(holder)):
                notes.append(self._named(sharer.note, self._rooms_of(holder)))
        return share_annotations.written(notes)

    def _write(self, room: Room, write: Write, *, ended: str = "") -> None:
        room.writing, room.ended = True, ended or room.ended  # who comes while it is removed waits for the next one
        self._writer.submit(write, partial(self._answered, room, ended), partial(self._refused, room))

    def _answered(self, room: Room, ended: str, answer: bytes) -> None:
        room.writing, room.start_failure = False, ""
        if ended:
            room.ended = ended if room.pod is not None and room.pod.uid == ended else ""
            self._sync(room)
        else:
            self._noted(self._pod.decode(answer))
            self._look_at(room)

    def _refused(self, room: Room, error: Exception) -> None:
        """Another state than was thought, which the watch will tell; or a trouble that may pass."""
        if not (isinstance(error, ApiError) and error.status == 409) and room.start_failure != str(error):
            log.warning("GPU %s of node %s: its reservation: %s", room.device, room.node, error)
        room.start_failure = str(error)
        self._later(AGAIN_S, partial(self._again, room))

    def _again(self, room: Room) -> None:
        room.writing, room.ended = False, ""
        self._look_at(room)


def _on_the_loop(seconds: float, action: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, action)


def _may_start(room: Room, ticket: str, *, watched: bool) -> bool:
    assert room.pod is not None, "its GPU is known"
    return ticket in room.pod.ready if watched else ticket in room.pod.sharers


def _holder(pod: Pod) -> str:
    """Under which name it has its seat: an ElasticJob's worker under the worker's."""
    meta = pod.metadata
    owner = elastic_owner(meta)
    return meta.uid if owner is None else worker_id(owner.uid, bounded_number(meta.labels.get(labels.WORKER, "0")) or 0)
