"""Reservations in random histories: sharers come and go, writes are late, refused or done without an answer, the
controller is killed, somebody deletes what is not theirs. A plain dictionary is the API server; time is a list.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods, share_annotations
from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationSettings
from kfp_gpuquota.cluster.kubernetes.sharing.reservations import AGENT, DeviceAssignment, Reservations, Sharer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write

SETTINGS = ReservationSettings()
NODES, GPUS, MOST = ("one", "two"), 2, 3
Json = dict[str, Any]


@dataclass
class World:
    """A cluster without anything but reservations, agents and sharers. `admitted`: (node, devices) by holder."""

    chance: random.Random
    agents: bool
    stored: dict[str, Json] = field(default_factory=dict)
    news: list[tuple[str, Any]] = field(default_factory=list)
    writes: list[tuple[Write, Callable[[bytes], None], Callable[[Exception], None]]] = field(default_factory=list)
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    wishes: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    admitted: dict[str, DeviceAssignment] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.restart()

    # The controller

    def restart(self) -> None:
        """Kill the controller: sent writes are applied or not, and its memory is lost."""
        for write, _, _ in self.writes:
            if self.chance.random() < 0.5:
                with contextlib.suppress(ApiError):
                    self._carry_out(write)
        self.writes, self.timers, self.news = [], [], []
        self.allocator = DeviceAllocator()
        for node in NODES:
            self.allocator.resize(node, GPUS)
        later = lambda seconds, action: self.timers.append((seconds, action))  # noqa: E731
        writer: Any = self
        self.reservations = Reservations(
            self.allocator,
            {},
            writer,
            SETTINGS,
            written_pods=self,
            sharers=self,
            later=later,
        )
        for body in self.stored.values():
            self.reservations.see(msgspec.convert(body, Pod))
        for number, node in enumerate(NODES if self.agents else ()):
            self.reservations.see(msgspec.convert(_agent(number, node), Pod))
        for holder in self.admitted:
            self._seat(holder)
            self.reservations.see(self._sharer(holder))
        self.reservations.start()
        for holder in self.wishes:
            if holder not in self.admitted:
                self._prepare(holder)

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        self.writes.append((write, done, failed))

    def note(self, pod: Pod) -> None:
        self.reservations.see(pod)

    def share_of(self, holder: str) -> share_annotations.ShareNote:
        """As it is with a pod that exists: a ticket of its own, no GPUs."""
        return msgspec.structs.replace(self.admitted[holder].note, ticket=f"{holder}@0", uid="", gpus=())

    def gpu_changed(self, holder: str, _why: str) -> None:
        self.news.append(("displaced", holder))

    def _seat(self, holder: str) -> None:
        node, devices = self.wishes[holder]
        assert self.allocator.take(holder, node, len(devices), devices, part=True) == devices

    def _prepare(self, holder: str) -> None:
        self._seat(holder)
        spec = JobSpec(
            name="a", project="t", command=("x",), gpu_fraction=0.25, gpu_devices=len(self.wishes[holder][1])
        )
        self.made += 1
        note = share_annotations.note_of(spec, holder, f"t/{holder}", float(self.made))
        self.reservations.prepare(Sharer(note, partial(self._start, holder), partial(self._not_reserved, holder)))

    def _start(self, holder: str, assignment: DeviceAssignment) -> None:
        """Check the start condition: every reservation exists, names its GPU and the pod, and its agent has agreed."""
        node, devices = self.wishes[holder]
        for device, gpu in zip(devices, assignment.note.gpus, strict=True):
            body = self.stored.get(reservation_pods.name_of(node, device))
            if body is not None and "deletionTimestamp" not in body["metadata"]:
                assert assignment.note.ticket in body["metadata"]["annotations"][labels.SHARERS]
                assert gpu == f"GPU-{body['metadata']['uid']}"
                if self.agents:
                    assert assignment.note.ticket in body["metadata"]["annotations"][labels.READY]
        self.admitted[holder] = assignment
        self.reservations.see(self._sharer(holder))

    def _sharer(self, holder: str) -> Pod:
        gpus = ",".join(self.admitted[holder].note.gpus)
        named = {"name": holder, "namespace": "t", "uid": holder, "annotations": {labels.GPUS: gpus}}
        return msgspec.convert({"metadata": named, "spec": {"nodeName": self.wishes[holder][0]}}, Pod)

    def _made_anew(self, holder: str) -> None:
        """It is ended, and another one comes in its place."""
        if holder in self.admitted:
            wish = self.wishes[holder]
            self._end(holder)
            self.made += 1
            self.wishes[f"holder-{self.made}"] = wish
            self._prepare(f"holder-{self.made}")

    def _not_reserved(self, holder: str, _: Exception) -> None:
        """Given back, and planned again."""
        self.allocator.release(holder)
        self._prepare(holder)

    # The API server

    def _carry_out(self, write: Write) -> Json:
        name = write.about.rpartition("/")[2]
        there = self.stored.get(name)
        if write.verb == "POST":
            if there is not None:
                raise ApiError(409, "AlreadyExists", name)
            self.made += 1
            there = {**write.body, "status": {"phase": "Pending"}}
            there["metadata"] = {**there["metadata"], "uid": str(self.made), "namespace": SETTINGS.namespace}
            self.stored[name] = there
        elif there is None:
            raise ApiError(404, "NotFound", name)
        elif write.verb == "DELETE":
            if write.body["preconditions"]["uid"] != there["metadata"]["uid"]:
                raise ApiError(409, "Conflict", name)
            there = self._changed(name, deletionTimestamp="2026-11-21T10:00:00Z")
        else:
            test, add = write.body
            if test["value"] != there["metadata"]["uid"]:
                raise ApiError(422, "Invalid", name)
            there = self._annotated(name, labels.SHARERS, add["value"])
        self.news.append(("changed", there))
        return there

    def _changed(self, name: str, **metadata: Any) -> Json:
        there = self.stored[name]
        self.stored[name] = {**there, "metadata": {**there["metadata"], **metadata}}
        return self.stored[name]

    def _annotated(self, name: str, annotation: str, value: str) -> Json:
        return self._changed(name, annotations={**self.stored[name]["metadata"]["annotations"], annotation: value})

    def answer(self) -> None:
        """Any of the writes under way is done, refused, or done without an answer and then repeated."""
        write, done, failed = self.writes.pop(self.chance.randrange(len(self.writes)))
        kind = self.chance.random()
        if kind < 0.1:
            failed(ApiError(500, "InternalError", "no"))
            return
        try:
            stored = self._carry_out(write)
            if kind < 0.2:
                stored = self._carry_out(write)
        except ApiError as error:
            failed(error)
        else:
            done(msgspec.json.encode(stored))

    def watch(self) -> None:
        kind, what = self.news.pop(0)
        if kind == "changed":
            self.reservations.see(msgspec.convert(what, Pod))
        elif kind == "displaced":
            self._made_anew(what)
        else:
            self.reservations.drop(what)

    # Other components

    def kubelet(self) -> None:
        """A pod runs and has reported its GPU, or has finally been removed."""
        name = self.chance.choice(sorted(self.stored))
        body = self.stored[name]
        if "deletionTimestamp" in body["metadata"]:
            del self.stored[name]
            self.news.append(("gone", body["metadata"]["uid"]))
        elif body["status"]["phase"] == "Pending":
            said = {"terminated": {"exitCode": 0, "message": f"GPU-{body['metadata']['uid']}"}}
            status = {"phase": "Running", "initContainerStatuses": [{"name": "report", "state": said}]}
            self.stored[name] = {**body, "status": status}
            self.news.append(("changed", self.stored[name]))

    def agent(self) -> None:
        """The agent lets every pod start at some time."""
        name = self.chance.choice(sorted(self.stored))
        notes = share_annotations.read(self.stored[name]["metadata"]["annotations"].get(labels.SHARERS, ""))
        ready = ",".join(note.ticket for note in notes if not note.uid)
        if ready != self.stored[name]["metadata"]["annotations"].get(labels.READY, ""):
            self.news.append(("changed", self._annotated(name, labels.READY, ready)))

    def meddler(self) -> None:
        """A reservation is deleted by a user, or fails."""
        name = self.chance.choice(sorted(self.stored))
        if self.chance.random() < 0.5:
            self.news.append(("changed", self._changed(name, deletionTimestamp="2026-11-21T10:00:00Z")))
        else:
            self.stored[name] = {**self.stored[name], "status": {"phase": "Failed"}}
            self.news.append(("changed", self.stored[name]))

    def come(self) -> None:
        self.made += 1
        devices = tuple(sorted(self.chance.sample(range(GPUS), self.chance.randint(1, GPUS))))
        holder = f"holder-{self.made}"
        self.wishes[holder] = (self.chance.choice(NODES), devices)
        self._prepare(holder)

    def go(self) -> None:
        self._end(self.chance.choice(sorted(self.wishes)))

    def _end(self, holder: str) -> None:
        self.reservations.drop(holder)
        self.allocator.release(holder)
        del self.wishes[holder]
        self.admitted.pop(holder, None)

    def fire(self) -> None:
        """Choose an early deadline mostly: some waits end in a timeout."""
        self.timers.sort(key=lambda timer: timer[0])
        self.timers.pop(0 if self.chance.random() < 0.95 else -1)[1]()

    def step(self, *, calm: bool = False) -> None:
        possible: list[Callable[[], None]] = []
        possible += [self.answer] * (4 if self.writes else 0) + [self.watch] * (4 if self.news else 0)
        possible += [self.kubelet] * (3 if self.stored else 0)
        possible += [self.fire] * (bool(self.timers) and (not calm or not self.writes or self.chance.random() < 0.2))
        possible += [self.agent] * (3 if self.stored and self.agents else 0)
        if not calm:
            possible += [self.come] * (len(self.wishes) < MOST * 2) + [self.go] * bool(self.wishes)
            possible += [self.meddler] * bool(self.stored) + [self.restart] * (self.chance.random() < 0.3)
        self.chance.choice(possible or [lambda: None])()

    # What holds

    def at_rest(self) -> bool:
        """Check that every pod has started, and that exactly one reservation exists for each shared GPU."""
        wanted = {
            reservation_pods.name_of(node, device) for node, devices in self.wishes.values() for device in devices
        }
        standing = {name for name, body in self.stored.items() if body["status"]["phase"] == "Running"}
        if (
            self.writes
            or self.news
            or set(self.admitted) != set(self.wishes)
            or not wanted == standing == set(self.stored)
        ):
            return False
        return all(self._noted(name) == self._sharers(name) for name in wanted) and all(map(self._at_home, self.wishes))

    def _at_home(self, holder: str) -> bool:
        """It runs on the GPUs that are reserved."""
        node, devices = self.wishes[holder]
        reserved = (self.stored[reservation_pods.name_of(node, device)]["metadata"]["uid"] for device in devices)
        return self.admitted[holder].note.gpus == tuple(f"GPU-{uid}" for uid in reserved)

    def _noted(self, name: str) -> dict[str, str]:
        notes = share_annotations.read(self.stored[name]["metadata"]["annotations"].get(labels.SHARERS, ""))
        return {note.holder: note.uid for note in notes}

    def _sharers(self, name: str) -> dict[str, str]:
        here = {
            h
            for h, (node, devices) in self.wishes.items()
            for d in devices
            if reservation_pods.name_of(node, d) == name
        }
        return {holder: holder for holder in here}


def _agent(number: int, node: str) -> Json:
    named = {"name": f"agent-{number}", "uid": f"agent-{number}", "labels": {"app.kubernetes.io/name": AGENT}}
    return {"metadata": {**named, "namespace": SETTINGS.agents}, "spec": {"nodeName": node}}


@pytest.mark.parametrize("agents", [False, True], ids=["no-agents", "agents"])
@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_every_shared_gpu_comes_to_have_one_reservation_and_every_sharer_starts(
    seed: int, agents: bool
) -> None:
    world = World(random.Random(seed), agents)
    for _ in range(120):
        world.step()
    for _ in range(4000):
        if world.at_rest():
            break
        world.step(calm=True)
    assert world.at_rest(), (world.wishes, set(world.admitted), world.stored, len(world.writes), len(world.news))
    while world.wishes:
        world.go()
    for _ in range(2000):
        if not world.stored and not world.writes and not world.news:
            break
        world.step(calm=True)
    assert not world.stored


def test_who_comes_while_a_reservation_is_being_removed_starts_on_the_next_one() -> None:
    world = World(random.Random(0), agents=False)
    world.wishes["first"] = ("one", (0,))
    world._prepare("first")
    while not world.at_rest():
        world.step(calm=True)
    (before,) = world.admitted["first"].note.gpus
    world._end("first")
    assert [write.verb for write, *_ in world.writes] == ["DELETE"]  # it is on its way
    world.wishes["second"] = ("one", (0,))
    world._prepare("second")
    while not world.at_rest():
        world.step(calm=True)
    assert set(world.admitted) == {"second"}  # it was not displaced, and made again
    assert world.admitted["second"].note.gpus != (before,)
