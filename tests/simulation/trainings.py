"""Elastic trainings as models: their workers join a membership, switch generations, hang, and end with the last step.

The same for each kind of cluster, whose processes are the members.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Progress
from kfp_gpuquota.membership import (
    CollectiveFailed,
    Event,
    Order,
    Propose,
    Recover,
    Release,
    Ticked,
    TrainingFinished,
    WorkerHeard,
    WorkerJoined,
    WorkerReady,
    WorkerReconnected,
)
from tests.membership.simulation import SimulatedWorker

if TYPE_CHECKING:
    import random
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from kfp_gpuquota.server.membership.service import MembershipService

EPOCH: Final = 1_700_000_000.0
STEP_S: Final = 2.0
TICK_S: Final = 3.0  # of the membership service: rarely, since its limits are 5 s and more
RETRY_S: Final = 1.0
KILLED: Final = 137
GAINS: Final = (1.0, 1.0, 0.7, 0.0, -0.5)  # exponents of throughput by workers
ELASTIC: Final = "elastic"  # the command of a job that joins a membership


@dataclass(frozen=True)
class Pace:
    """How long a job's processes take, in seconds: to start, to join, to work, to end when asked; None: they do not."""

    starts_s: float = 0.5
    joins_s: float = 3.0
    works_s: float | None = None
    ends_s: float | None = 1.0


@dataclass(eq=False)
class Member:
    """A process that may take part in a training. `code` is set when it has ended."""

    id: str
    job_uid: str
    pace: Pace
    code: int | None = None
    ending: bool = False
    silent: bool = False
    training: SimulatedWorker | None = None

    @property
    def alive(self) -> bool:
        return self.code is None


@dataclass
class Training:
    """The workers of one elastic job, and the memberships that its generations have."""

    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    memberships: dict[int, tuple[str, ...]] = field(default_factory=dict)


class Slot:
    """Delivers the order that stands to one worker, a little later; stands for the service's own slot.

    Only the last one: timers of the same moment run in any order.
    """

    def __init__(self, trainings: Trainings, process: Member) -> None:
        self._trainings, self._process = trainings, process
        self.closed = False
        self.order: Order | None = None

    def put(self, order: Order) -> None:
        self.order = order
        self._trainings.loop.call_later(0.01, self._trainings.deliver, self, self._process)

    def ping(self) -> None:
        """Nothing to say."""

    def close(self) -> None:
        self.closed = True


class Trainings:
    """All trainings of a cluster. `end(member, code)` ends a process; `service` is None while the engine is down."""

    def __init__(self, loop: AbstractEventLoop, rng: random.Random, end: Callable[[Member, int], None]) -> None:
        self.loop, self.rng, self.end = loop, rng, end
        self.service: MembershipService | None = None
        self.members: dict[str, Member] = {}
        self.trainings: dict[str, Training] = {}
        self.finished_steps: dict[str, int] = {}

    def tick(self) -> None:
        """Let the coordinator look at its clock."""
        if self.service is not None:
            self.service._clock.listened()
            for uid in list(self.service._jobs):
                self.service._apply(uid, Ticked())

    def silence(self, process: Member) -> None:
        """It hangs: it neither trains nor answers, and its connection stays."""
        process.silent = True
        if process.training is not None:
            process.training.silent = True

    def ended(self, process: Member) -> None:
        """Its process has ended: its connection breaks."""
        if process.training is not None:
            process.training.running = False
            self._disconnect(process)

    def engine_stopped(self) -> None:
        """Every connection breaks."""
        self.service = None
        for process in self.members.values():
            if process.training is not None:
                process.training.connected = False

    def engine_started(self, service: MembershipService) -> None:
        """Workers connect again within a second."""
        self.service = service
        for process in self.members.values():
            if process.alive:
                self.loop.call_later(self.rng.random(), self._connect, process)

    # A worker and its coordinator

    def join(self, process: Member) -> None:
        if not process.alive:
            return
        training = self.trainings.setdefault(process.job_uid, Training())
        if not training.workers:
            self.loop.call_later(STEP_S, self._step, process.job_uid)
        self.members[process.id] = process
        process.training = training.workers[process.id] = SimulatedWorker(process.id)
        self._connect(process)

    def _connect(self, process: Member) -> None:
        """Connect, and send what stands; again a little later while the coordinator cannot be reached."""
        worker = process.training
        if not process.alive or worker is None or process.silent or worker.connected:
            return
        if self.service is None or not self.service.is_open(process.job_uid):
            self.loop.call_later(RETRY_S, self._connect, process)
            return
        service, uid = self.service, process.job_uid
        job = service._jobs[uid]
        worker.connected = True
        hello: Event = WorkerJoined(worker.id)
        if worker.generation:
            hello = WorkerReconnected(worker.id, worker.generation, worker.members, worker.step)
        service._open_slot(uid, job, worker.id, hello)  # type: ignore[arg-type]
        slot = job.slots[worker.id] = Slot(self, process)  # type: ignore[assignment]
        slot.put(job.machine.order_for(worker.id))
        if not worker.generation:
            self._send(process, WorkerReady(worker.id))
        for event in list(worker.standing):
            self._send(process, event)

    def _disconnect(self, process: Member) -> None:
        worker = process.training
        if worker is None or not worker.connected:
            return
        worker.connected = False
        service = self.service
        job = service._jobs.get(process.job_uid) if service is not None else None
        if service is not None and job is not None and worker.id in job.slots:
            service._close_slot(process.job_uid, worker.id, job.slots[worker.id])

    def deliver(self, slot: Slot, process: Member) -> None:
        worker, order = process.training, slot.order
        if slot.closed or worker is None or order is None or not process.alive or process.silent:
            return
        worker.order = order
        if isinstance(order, Release):
            self._leave(process)

    def _send(self, process: Member, event: Event) -> None:
        if self.service is None or process.training is None or not process.training.connected or process.silent:
            return
        if self.service.is_open(process.job_uid):
            self.service._apply(process.job_uid, event)

    def _leave(self, process: Member) -> None:
        """Exit with 0, as soon as the process takes; one that never does is killed by the machine."""
        if process.training is not None:
            process.training.left = True
        if not process.ending and process.pace.ends_s is not None:
            process.ending = True
            self.loop.call_later(process.pace.ends_s, self.end, process, 0)

    # Training

    def _step(self, uid: str) -> None:
        training = self.trainings[uid]
        self._recover(training)
        for group in sorted({w.generation for w in training.workers.values() if _trains(w)}):
            self._train(uid, training, group)
        for process in self._of(uid):
            worker = process.training
            if worker is None or not process.alive or process.silent:
                continue
            self._send(process, WorkerHeard(worker.id))
            while worker.outbox:
                self._send(process, worker.outbox.pop(0))
            self._connect(process)
            if worker.left:
                self._leave(process)
        self._finish(uid, training)
        if any(worker.running for worker in training.workers.values()):
            self.loop.call_later(STEP_S, self._step, uid)
        else:
            training.workers.clear()

    def _of(self, uid: str) -> list[Member]:
        workers = self.trainings[uid].workers
        return [process for process in (self.members[w] for w in list(workers)) if process.training is not None]

    def _train(self, uid: str, training: Training, group: int) -> None:
        """One step of a generation: it succeeds if all members take part, and they then switch where they agree."""
        members = [w for w in training.workers.values() if _trains(w) and w.generation == group]
        present = {w.id for w in members if not w.silent}
        if not set(training.memberships[group]) <= present:
            for worker in members:
                self._fail(worker)
            return
        if any(w.failed for w in members):
            return
        order = self._agreed(training, members)
        for worker in members:
            worker.step += 1
        self._report(uid, self.members[training.memberships[group][0]], len(members))
        if order is not None:
            joiners = [training.workers[w] for w in order.members if w not in present]
            training.memberships[order.generation] = order.members
            for worker in joiners:
                worker.step = members[0].step
            for worker in (*members, *joiners):
                worker.adopt(order.generation, order.members)

    def _report(self, uid: str, process: Member, workers: int) -> None:
        """Report the throughput: of some jobs it grows with each worker, of others less, or it falls."""
        worker, service = process.training, self.service
        if worker is not None and worker.connected and service is not None and service.is_open(uid):
            rate = 10.0 * workers ** GAINS[list(self.trainings).index(uid) % len(GAINS)]
            progress = Progress(step=worker.step, at=EPOCH + self.loop.time(), throughput=rate, workers=workers)
            service._notices.progress_reported(uid, worker.id, progress)

    @staticmethod
    def _agreed(training: Training, members: list[SimulatedWorker]) -> Propose | None:
        order = members[0].order
        if not isinstance(order, Propose) or order.base != members[0].generation:
            return None
        others = [training.workers.get(w) for w in order.members]
        ready = all(w is not None and w.running and not w.left and not w.silent and w.order == order for w in others)
        return order if ready and all(w.order == order for w in members) else None

    @staticmethod
    def _recover(training: Training) -> None:
        """Adopt each generation whose members all run and have received the order to recover in it."""
        for order in [w.order for w in training.workers.values() if isinstance(w.order, Recover)]:
            everybody = [training.workers.get(w) for w in order.members]
            if not all(w is not None and _runs(w) and w.order == order for w in everybody):
                continue
            found = [w for w in everybody if w is not None]
            training.memberships[order.generation] = order.members
            newest = max(w.step for w in found)
            for worker in found:
                if worker.generation < order.generation:
                    worker.step = newest
                    worker.adopt(order.generation, order.members)

    @staticmethod
    def _fail(worker: SimulatedWorker) -> None:
        if not worker.failed and not worker.silent:
            worker.failed = True
            worker.stand(CollectiveFailed(worker.id, worker.generation, worker.step, members=worker.members))

    def _finish(self, uid: str, training: Training) -> None:
        """Training ends with its last step, on all workers at once."""
        last = self.finished_steps.get(uid)
        if last is None:
            return
        for process in self._of(uid):
            worker = process.training
            if worker is not None and _trains(worker) and worker.step >= last and process.alive and not process.silent:
                self._send(process, TrainingFinished(worker.id, worker.step))
                worker.left = True
                self.loop.call_later(0.2, self.end, process, 0)


def _runs(worker: SimulatedWorker) -> bool:
    return worker.running and not worker.left and not worker.silent


def _trains(worker: SimulatedWorker) -> bool:
    return worker.running and not worker.left and worker.generation > 0
