"""The embedded cluster's engine above simulated processes: requests of users, faults, restarts at any moment."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.api.policy import WorkloadPolicy
from kfp_gpuquota.api.wire import JobUpdate, Lease, StopAction, SubmitJob
from kfp_gpuquota.cluster.local.cluster import LocalCluster
from kfp_gpuquota.cluster.local.driver import Driver
from kfp_gpuquota.cluster.local.gpu_meter import GpuMeter
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.storage.state import ClusterState
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.cluster.local.unused_jobs import UnusedJobs
from kfp_gpuquota.cluster.steady_clock import SteadyClock
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.fractions.activity import GpuUse
from tests.simulation import histories as h
from tests.simulation.processes import Processes
from tests.simulation.trainings import EPOCH, TICK_S, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.engine.job_book import Change
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
    from tests.simulation.loop import SimulatedLoop
    from tests.simulation.processes import Process

INSTANT_S = 0.1
"""What happens is followed by a plan before that."""
MEMORY = Path("/dev/shm")


class ObservedState(ClusterState):
    """The engine's state; `observe(change)` is called before each change is applied, `settled()` after it."""

    observe: Callable[[Change], None] = staticmethod(lambda _: None)
    settled: Callable[[], None] = staticmethod(lambda: None)
    loading = True

    def apply_change(self, change: Change) -> None:
        if not self.loading:
            self.observe(change)
        super().apply_change(change)
        if not self.loading:
            self.settled()


class SharesAtOnce:
    """In place of the agent that hands GPU memory over: each worker that shares a GPU starts at once."""

    def takes_over(self, record: WorkerRecord) -> bool:
        return False

    def gives_up(self, worker: str) -> bool:
        return False

    def why_ended(self, worker: str) -> None:
        return None

    def views(self, node: str) -> tuple[()]:
        return ()

    def wake(self) -> None:
        """Nothing to look after."""

    def close(self) -> None:
        """Nothing is held."""


class SimulatedUse:
    """In place of the driver: a device is used if a job that has a process on it uses its GPUs then."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def measure(self) -> dict[str, GpuUse]:
        cluster, found = self._cluster, dict[str, bool]()
        for process in cluster.processes.all.values():
            job = cluster.state.jobs.get(process.worker.job_uid)
            for device in process.worker.devices if process.alive and job is not None else ():
                name = f"{process.worker.node}/{device}"
                uses = job is not None and cluster.history.uses(job.spec.name, cluster.loop.time())
                found[name] = found.get(name, False) or uses
        unmeasured = f"n0/{cluster.history.seed % 8}"
        return {name: GpuUse(used, 50.0 * used) for name, used in found.items() if name != unmeasured}


class SimulatedCluster:
    """The engine and its processes. `watch(cluster)` is called with each engine that was started."""

    def __init__(self, history: h.History, watch: Callable[[SimulatedCluster], None]) -> None:
        self.history, self._watch = history, watch
        self.loop = cast("SimulatedLoop", asyncio.get_running_loop())
        self.directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None))
        self.home = Home(self.directory)
        self.home.create()
        self.rng = random.Random(history.seed)
        self.processes = Processes(self.loop, self.rng)
        self.nodes = {
            f"n{i}": Node(
                name=f"n{i}",
                devices=tuple(Device(index=d) for d in range(gpus)),
                labels=history.labels_of(f"n{i}"),
                pool=history.pool_of(f"n{i}"),
            )
            for i, gpus in enumerate(history.nodes)
        }
        self._rules = {"reserve_after_s": history.reserve_after_s, "defragmentation": history.defragmentation}
        self._half_life_s = history.usage_half_life_s
        self.lost: set[str] = set()
        self.names = itertools.count(1)
        self.requests = 0
        self.requested: set[str] = set()  # jobs that a user stops, suspends or changes in the present request
        self.disturbed = False  # the nodes or a quota have changed since the last plan
        self.up = False
        self.loop.killed = self._killed
        self.start_engine()
        for project in history.projects:
            self.cluster.set_project(project)
        if history.idle is not None:
            self.cluster.set_policy(WorkloadPolicy(name="idle", idle=history.idle))
        self.loop.call_later(TICK_S, self._tick)

    # The engine

    def start_engine(self) -> None:
        """Start it from what is stored."""
        self.store = Store(self.home.database)
        nodes = self.store.load_nodes() or list(self.nodes.values())
        self.state = ObservedState(self.store, nodes, self._half_life_s, clock=self._clock, rules=self._rules)
        self.state.loading = False
        self.driver = Driver(self.home, self.state, runtime=self.processes)
        self.driver.sharing = SharesAtOnce()  # type: ignore[assignment]
        self.cluster = LocalCluster(self.home, self.store, self.state, self.driver, new_uid=self._uid)
        meter = GpuMeter(self.home, self.state, SimulatedUse(self))
        self.unused = UnusedJobs(meter, self.store, self.state, self.driver.decisions, self.loop)
        self.up = True
        self._watch(self)
        self.processes.engine_started(self.driver)
        self.driver.recover()
        self._tell_nodes()

    def stop_engine(self) -> None:
        """Kill it: nothing of it runs any more, and its file is as it was."""
        self.up = False
        self.processes.engine_stopped()
        self.unused.close()
        self.driver.close()
        self.loop.dead += [self.driver, self.cluster, self.state, self.unused]
        for uid in list(self.state.jobs):
            self.driver.membership.close(uid)
        self.store.close()

    def close(self) -> None:
        """Delete its files."""
        if self.up:
            self.stop_engine()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _killed(self) -> None:
        self.stop_engine()
        self.start_engine()

    def _clock(self, at_least: float) -> SteadyClock:
        return SteadyClock(at_least, lambda: EPOCH + self.loop.time(), self.loop.time)

    def _uid(self) -> str:
        return f"u{next(self.names):03}"

    def _tick(self) -> None:
        self.loop.call_later(TICK_S, self._tick)
        self.processes.trainings.tick()

    # What happens

    def play(self) -> float:
        """Schedule all that happens; return when the last of it does, in seconds."""
        at = 0.0
        for after_s, happening in self.history.happenings:
            at += after_s
            self.loop.call_later(at, self._happen, happening)
        return at

    def _happen(self, happening: h.Any_) -> None:
        if not self.up and not isinstance(happening, h.LoseNode):
            return
        with suppress(GpuQuotaError):  # a request that a user would see refused
            self._carry_out(happening)
        self.requested.clear()

    def _carry_out(self, happening: h.Any_) -> None:
        match happening:
            case h.Submit(spec, pace, steps, lease_s):
                self.processes.paces[spec.name] = Pace(*pace)
                lease = Lease(holder="nobody", duration_s=lease_s) if lease_s else None
                submitted = self.cluster.submit(SubmitJob(spec=spec, request_id=spec.name, lease=lease))
                if steps is not None:
                    self.processes.trainings.finished_steps[submitted.uid] = steps
            case h.SetQuota(project):
                self._disturb()
                self.cluster.set_project(project)
            case h.LoseNode(number, returns_after_s):
                self._lose_node(list(self.nodes)[number % len(self.nodes)], returns_after_s)
            case h.Restart(away_s, _):
                self.stop_engine()
                self.loop.call_later(away_s, self.start_engine)
            case h.Kill(asks):
                self.processes.asks = asks
            case h.Delete(chosen):
                self._delete(chosen)
            case h.Crash(number) | h.Silence(number) if alive := [p for p in self.processes.all.values() if p.alive]:
                self._fail(alive[number % len(alive)], happening)
            case h.Suspend(number) | h.Resume(number) | h.Update(number) if job := self._job(number):
                self._change(job, happening)

    def _delete(self, chosen: tuple[int, ...]) -> None:
        found = {job.uid: job for job in map(self._job, chosen) if job}
        self.requested = set(found)
        for project in {job.spec.project: None for job in found.values()}:
            names = [job.spec.name for job in found.values() if job.spec.project == project]
            self.cluster.stop_jobs(project, names, StopAction.DELETE)

    def _fail(self, process: Process, how: h.Crash | h.Silence) -> None:
        if isinstance(how, h.Crash):
            self.processes.end(process, how.code)
        else:
            self.processes.trainings.silence(process)

    def _change(self, job: JobRecord, how: h.Suspend | h.Resume | h.Update) -> None:
        self.requested = {job.uid}
        named = (job.spec.project, job.spec.name)
        match how:
            case h.Suspend():
                self.cluster.suspend_job(*named)
            case h.Resume():
                self.cluster.resume_job(*named)
            case h.Update(_, low, high, None):
                self.cluster.update_job(*named, JobUpdate(min_gpus=low, max_gpus=high))
            case h.Update(priority=priority):
                self.cluster.update_job(*named, JobUpdate(priority=priority))

    def _job(self, number: int) -> JobRecord | None:
        jobs = [job for job in self.state.jobs.values() if job.intent is not Intent.DELETE]
        return jobs[number % len(jobs)] if jobs else None

    def _lose_node(self, node: str, returns_after_s: float) -> None:
        if node in self.lost or len(self.lost) + 1 == len(self.nodes):
            return
        self.lost.add(node)
        self.processes.lose_node(node)
        self._tell_nodes()
        if returns_after_s:
            self.loop.call_later(returns_after_s, self._return_node, node)

    def _return_node(self, node: str) -> None:
        self.lost.discard(node)
        self._tell_nodes()

    def _disturb(self) -> None:
        """For the plan that follows, and for the next ones in this instant."""
        self.disturbed = True
        self.loop.call_later(INSTANT_S, self._calm)

    def _calm(self) -> None:
        self.disturbed = False

    def _tell_nodes(self) -> None:
        self._disturb()
        if self.up:
            self.driver.nodes_changed([n for name, n in self.nodes.items() if name not in self.lost], {})

    def alive_workers(self) -> Iterator[WorkerRecord]:
        """Yield the workers that may hold devices, as recorded."""
        return (record for record in self.state.workers.values() if record.alive)
