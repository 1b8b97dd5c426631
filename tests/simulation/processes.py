"""The workers' processes as models, behind the interface through which the engine starts and ends real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.workers.shims import EXIT_SHIM_LOST, Found
from kfp_gpuquota.membership import (
    CollectiveFailed,
    Event,
    Order,
    Propose,
    Recover,
    Release,
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
    from collections.abc import Collection

    from kfp_gpuquota.api import JobSpec, Reason, Worker
    from kfp_gpuquota.cluster.local.driver import Driver
    from kfp_gpuquota.engine.records import JobRecord

STEP_S = 2.0
RETRY_S = 1.0
KILLED = 137
ELASTIC = "elastic"  # the command of a job that joins a membership


@dataclass(frozen=True)
class Pace:
    """How long a job's processes take, in seconds: to start, to join, to work, to end when asked; None: they do not."""

    starts_s: float = 0.5
    joins_s: float = 3.0
    works_s: float | None = None
    ends_s: float | None = 1.0


@dataclass
class Process:
    """One process. `code` is set when it has ended; it is `lost` if it ended with its node."""

    worker: Worker
    job: JobRecord
    pace: Pace
    running: bool = False
    code: int | None = None
    ending: bool = False
    silent: bool = False
    lost: bool = False
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
    """Delivers the coordinator's orders to one worker, a little later; stands for the service's own slot."""

    def __init__(self, processes: Processes, process: Process) -> None:
        self._processes, self._process = processes, process
        self.closed = False

    def put(self, order: Order) -> None:
        self._processes.loop.call_later(0.01, self._processes.deliver, self, self._process, order)

    def ping(self) -> None:
        """Nothing to say."""

    def close(self) -> None:
        self.closed = True


class Processes:
    """A `WorkerRuntime`. It outlives the engine, whose present driver is `driver`; None: the engine is down."""

    def __init__(self, loop: AbstractEventLoop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.driver: Driver | None = None
        self.paces: dict[str, Pace] = {}
        self.all: dict[str, Process] = {}
        self.prevented: set[str] = set()
        self.trainings: dict[str, Training] = {}
        self.finished_steps: dict[str, int] = {}

    # WorkerRuntime

    def check(self, spec: JobSpec) -> None:
        """Any job can run."""

    def start(self, job: JobRecord, worker: Worker) -> None:
        if worker.id in self.all or worker.id in self.prevented:
            raise AssertionError(f"worker {worker.id} is started a second time")
        process = self.all[worker.id] = Process(worker, job, self.paces[job.spec.name])
        self.loop.call_later(process.pace.starts_s, self._started, process)

    def adopt(self, job: JobRecord, worker: Worker, *, wanted: bool) -> Found:
        process = self.all.get(worker.id)
        if process is None:
            return Found.NEVER_STARTED
        if process.lost:
            self.loop.call_soon(self._report_lost, process)
            return Found.ASKED
        return Found.RUNNING if process.alive else Found.ENDED

    def prevent(self, worker: Worker) -> bool:
        if worker.id in self.all:
            return False
        self.prevented.add(worker.id)
        return True

    def terminate(self, worker: str) -> None:
        process = self.all.get(worker)
        if process is None or not process.alive or process.ending:
            return
        process.ending = True
        grace_s = process.job.spec.grace_period_s
        ends_s = process.pace.ends_s
        if ends_s is None or ends_s > grace_s:
            self.loop.call_later(grace_s, self.end, process, KILLED)
        else:
            self.loop.call_later(ends_s, self.end, process, 0)

    def kill(self, worker: str) -> None:
        if process := self.all.get(worker):
            self.loop.call_soon(self.end, process, KILLED)

    def watches(self, worker: str) -> bool:
        return worker in self.all and self.all[worker].alive

    def exit_code(self, worker: Worker) -> int:
        code = self.all[worker.id].code
        return EXIT_SHIM_LOST if code is None else code

    def why_ended(self, spec: JobSpec, worker: Worker) -> Reason | None:
        return None

    def process_id(self, worker: Worker) -> int | None:
        return None

    def end_unrecorded(self, tracked: Collection[str]) -> None:
        unknown = set(self.all) - set(tracked)
        assert not [w for w in unknown if self.all[w].alive], f"processes without records: {unknown}"

    async def read_log(self, worker: Worker, offset: int) -> tuple[bytes, int]:
        return b"", offset

    def remove_job(self, uid: str) -> None:
        """Nothing is on disk."""

    def close(self) -> None:
        """The processes continue."""

    # What happens to processes

    def _started(self, process: Process) -> None:
        if not process.alive:
            return
        process.running = True
        if self.driver is not None:
            self.driver.worker_started(process.worker.id)
        if process.job.spec.command[0] == ELASTIC:
            self.loop.call_later(process.pace.joins_s, self._join, process)
        elif process.pace.works_s is not None:
            self.loop.call_later(process.pace.works_s, self.end, process, 0)

    def end(self, process: Process, code: int) -> None:
        """End it with this exit code, unless it has ended."""
        if not process.alive:
            return
        process.code = code
        if process.training is not None:
            process.training.running = False
            self._disconnect(process)
        self.loop.call_later(self.rng.choice((0.0, 0.1, 2.0)), self._report_end, process)

    def _report_end(self, process: Process) -> None:
        if self.driver is not None and process.code is not None:
            self.driver.worker_ended(process.worker.id, process.code)

    def lose_node(self, node: str) -> None:
        """End all processes of a node; the engine learns that they are lost, not why they ended."""
        for process in list(self.all.values()):
            if process.alive and process.worker.node == node:
                process.code, process.lost = KILLED, True
                if process.training is not None:
                    process.training.running = False
                    self._disconnect(process)
                if self.driver is not None:
                    self.loop.call_soon(self._report_lost, process)

    def _report_lost(self, process: Process) -> None:
        if self.driver is not None:
            self.driver.worker_lost(process.worker.id, f"node {process.worker.node} was lost")

    def silence(self, process: Process) -> None:
        """It hangs: it neither trains nor answers, and its connection stays."""
        process.silent = True
        if process.training is not None:
            process.training.silent = True

    # An elastic worker and its coordinator

    def _join(self, process: Process) -> None:
        if not process.alive:
            return
        training = self.trainings.setdefault(process.job.uid, Training())
        if not training.workers:
            self.loop.call_later(STEP_S, self._step, process.job.uid)
        process.training = training.workers[process.worker.id] = SimulatedWorker(process.worker.id)
        self._connect(process)

    def _connect(self, process: Process) -> None:
        """Connect, and send what stands; again a little later while the coordinator cannot be reached."""
        worker = process.training
        if not process.alive or worker is None or process.silent or worker.connected:
            return
        if self.driver is None or not self.driver.membership.is_open(process.job.uid):
            self.loop.call_later(RETRY_S, self._connect, process)
            return
        service, uid = self.driver.membership, process.job.uid
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

    def _disconnect(self, process: Process) -> None:
        worker = process.training
        if worker is None or not worker.connected:
            return
        worker.connected = False
        service = self.driver.membership if self.driver is not None else None
        job = service._jobs.get(process.job.uid) if service is not None else None
        if service is not None and job is not None and worker.id in job.slots:
            service._close_slot(process.job.uid, worker.id, job.slots[worker.id])

    def engine_stopped(self) -> None:
        """Every connection breaks."""
        self.driver = None
        for process in self.all.values():
            if process.training is not None:
                process.training.connected = False

    def engine_started(self, driver: Driver) -> None:
        """Workers connect again within a second."""
        self.driver = driver
        for process in self.all.values():
            if process.alive and process.training is not None:
                self.loop.call_later(self.rng.random(), self._connect, process)

    def deliver(self, slot: Slot, process: Process, order: Order) -> None:
        worker = process.training
        if slot.closed or worker is None or not process.alive or process.silent:
            return
        worker.order = order
        if isinstance(order, Release):
            self._leave(process)

    def _send(self, process: Process, event: Event) -> None:
        if self.driver is None or process.training is None or not process.training.connected or process.silent:
            return
        if self.driver.membership.is_open(process.job.uid):
            self.driver.membership._apply(process.job.uid, event)

    def _leave(self, process: Process) -> None:
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
            self._train(training, group)
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

    def _of(self, uid: str) -> list[Process]:
        workers = self.trainings[uid].workers
        return [process for process in (self.all[w] for w in list(workers)) if process.training is not None]

    def _train(self, training: Training, group: int) -> None:
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
        if order is not None:
            joiners = [training.workers[w] for w in order.members if w not in present]
            training.memberships[order.generation] = order.members
            for worker in joiners:
                worker.step = members[0].step
            for worker in (*members, *joiners):
                worker.adopt(order.generation, order.members)

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
