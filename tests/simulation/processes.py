"""The workers' processes as models, behind the interface through which the engine starts and ends real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kfp_gpuquota.cluster.local.workers.shims import EXIT_SHIM_LOST, Found
from tests.simulation.trainings import ELASTIC, EPOCH, KILLED, Member, Pace, Trainings

if TYPE_CHECKING:
    import random
    from asyncio import AbstractEventLoop
    from collections.abc import Collection

    from kfp_gpuquota.api import JobSpec, Reason, Worker
    from kfp_gpuquota.cluster.local.driver import Driver
    from kfp_gpuquota.engine.records import JobRecord


@dataclass(eq=False, kw_only=True)
class Process(Member):
    """One process; it is `lost` if it ended with its node."""

    worker: Worker
    job: JobRecord
    running: bool = False
    lost: bool = False
    ended_at: float | None = None


class Killed(BaseException):
    """The engine's process ends here; nothing of it may catch that."""


class Processes:
    """A `WorkerRuntime`. It outlives the engine, whose present driver is `driver`; None: the engine is down."""

    def __init__(self, loop: AbstractEventLoop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.driver: Driver | None = None
        self.paces: dict[str, Pace] = {}
        self.all: dict[str, Process] = {}
        self.prevented: set[str] = set()
        self.asks: int | None = None  # workers that are asked to leave before the engine is killed
        self.trainings = Trainings(loop, rng, lambda member, code: self.end(cast("Process", member), code))

    # WorkerRuntime

    def check(self, spec: JobSpec) -> None:
        """Any job can run."""

    def start(self, job: JobRecord, worker: Worker) -> None:
        if worker.id in self.all or worker.id in self.prevented:
            raise AssertionError(f"worker {worker.id} is started a second time")
        process = self.all[worker.id] = Process(
            id=worker.id, job_uid=job.uid, pace=self.paces[job.spec.name], worker=worker, job=job
        )
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
        if self.asks is not None:
            self.asks -= 1
            if self.asks < 0:
                self.asks = None
                raise Killed
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

    def ended_at(self, worker: Worker) -> float | None:
        process = self.all.get(worker.id)
        return None if process is None else process.ended_at

    def why_ended(self, spec: JobSpec, worker: Worker) -> Reason | None:
        return None

    def last_error(self, worker: Worker) -> str:
        return ""

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
            self.loop.call_later(process.pace.joins_s, self.trainings.join, process)
        elif process.pace.works_s is not None:
            self.loop.call_later(process.pace.works_s, self.end, process, 0)

    def end(self, process: Process, code: int) -> None:
        """End it with this exit code, unless it has ended."""
        if not process.alive:
            return
        process.code, process.ended_at = code, EPOCH + self.loop.time()
        self.trainings.ended(process)
        self.loop.call_later(self.rng.choice((0.0, 0.1, 2.0)), self._report_end, process)

    def _report_end(self, process: Process) -> None:
        if self.driver is not None and process.code is not None:
            self.driver.worker_ended(process.worker.id, process.code)

    def lose_node(self, node: str) -> None:
        """End all processes of a node; the engine learns that they are lost, not why they ended."""
        for process in list(self.all.values()):
            if process.alive and process.worker.node == node:
                process.code, process.lost = KILLED, True
                self.trainings.ended(process)
                if self.driver is not None:
                    self.loop.call_soon(self._report_lost, process)

    def _report_lost(self, process: Process) -> None:
        if self.driver is not None:
            self.driver.worker_lost(process.worker.id, f"node {process.worker.node} was lost")

    def engine_stopped(self) -> None:
        """Every connection breaks."""
        self.driver = None
        self.trainings.engine_stopped()

    def engine_started(self, driver: Driver) -> None:
        """Workers connect again."""
        self.driver = driver
        self.trainings.engine_started(driver.membership)
