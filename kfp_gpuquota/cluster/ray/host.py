"""The actor on a worker's node: holds its GPUs for Ray, starts its shim, and renews its lease.

Runs on every node, so the package must be installed there. One actor has one worker at a time. The shim and its worker
outlive the actor; another actor finds them in the worker's directory.

A lease is renewed only with proof that Ray's head counts this node as alive: the lease then ends `silence_s` after the
moment at which the head was asked. An actor that is cut off from the head renews nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import ray

from kfp_gpuquota.cluster.local.home import Home, write_private
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.environment import INHERITED
from kfp_gpuquota.cluster.local.workers.runtime import read_from
from kfp_gpuquota.cluster.ray import runtime_environments
from kfp_gpuquota.cluster.ray.messages import Figures, Task
from kfp_gpuquota.errors import StateFileError
from kfp_gpuquota.fractions.activity import NvmlActivity, SimulatedActivity, busy, devices_of, use_of
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

RENEWALS: Final = 6
"""In the time after which a lease ends."""
ABANDONED_S: Final = 300.0
"""An actor without a worker ends when no bridge has called it for so long."""
GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE: Final = "CUDA_DEVICE_ORDER"

NEVER: Final = "never"
RUNNING: Final = "running"
ENDED: Final = "ended"
NOT_STARTED: Final = "not-started"


class StaleCallerError(Exception):
    """A bridge that has a successor asked for something."""


class WorkerHost:
    """The actor of one worker. `gpus` is how many it holds; 0: a node's agent, which stops workers and reads files."""

    def __init__(self, silence_s: float, gpus: int) -> None:
        self._silence_s, self._gpus = silence_s, gpus
        self._epoch = 0
        self._shims: shims.Shims | None = None
        self._directories: dict[str, Path] = {}
        self._ends: dict[str, asyncio.Future[int]] = {}
        self._lost: dict[str, str] = {}
        self._begun: dict[str, asyncio.Future[str]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._called_at = time.monotonic()
        self._activity: NvmlActivity | None = None

    async def hello(self, epoch: int) -> dict[str, Any]:
        """Obey this bridge from now on, and no earlier one; returns what the actor is and has."""
        self._check(epoch)
        running = [worker for worker, end in self._ends.items() if not end.done()]
        return {"version": __version__, "gpus": self._gpus, "worker": running[0] if running else ""}

    async def ensure(self, epoch: int, wanted: dict[str, Any], *, start: bool) -> tuple[str, int, str]:
        """Start or adopt the worker, or with `start` false prevent it; returns (state, pid or exit code, why)."""
        self._check(epoch)
        task = msgspec.convert(wanted, Task)
        directory = self._directories[task.worker] = Path(task.directory)
        if task.worker in self._ends:
            return self._state(task.worker)
        try:
            Home(Path(task.root)).create()
        except StateFileError as error:
            return NOT_STARTED, 0, error.message
        match self._tracked().adopt(task.worker, directory):
            case shims.Found.NEVER_STARTED if start:
                return await self._start(task, directory)
            case shims.Found.NEVER_STARTED:
                return (NEVER if shims.prevent(directory) else NOT_STARTED), 0, "it is being started"
            case shims.Found.RUNNING:
                self._expect(task.worker)
                await self._renew()
                if self._gpus and _assigned(directory) != os.environ.get(GPUS_VARIABLE, ""):
                    self._lost[task.worker] = "its actor ended, and Ray gave its GPUs to other work"
                    self._tracked().kill(task.worker)
                return self._state(task.worker)
            case _:
                return ENDED, shims.exit_code(directory), self._why_lost(task.worker)

    async def wait_end(self, worker: str) -> tuple[int, str]:
        """Return the worker's exit code when it has ended, and why it was lost ("": its own end)."""
        return await asyncio.shield(self._ends[worker]), self._why_lost(worker)

    async def release(self, worker: str) -> str:
        """Drop the records of a worker that has ended; returns the error that ended it, if it reported one."""
        directory = self._directories.get(worker)
        error = shims.last_error(directory) if directory is not None else ""
        for found in (self._ends, self._directories, self._lost):
            found.pop(worker, None)
        return error

    async def use(self, worker: str) -> tuple[bool | None, tuple[Figures, ...]] | None:
        """Return what the worker's GPUs did since the last call: whether one was used, and the figures of each.

        None if that is not known. CUDA is taken to number GPUs of one model as the bus does, which is good enough
        for a chart, but not to say that one is unused.
        """
        directory = self._directories.get(worker)
        if directory is None or not self._gpus:
            return None
        if self._activity is None:
            self._activity = await asyncio.to_thread(NvmlActivity)
        if not self._activity.devices:
            simulated = SimulatedActivity({worker: directory}).measure().get(worker)
            return None if simulated is None else (simulated.busy, (simulated[1:],) * self._gpus)
        measured = await asyncio.to_thread(self._activity.measure)
        in_order, visible = os.environ.get(ORDER_VARIABLE, "") == "PCI_BUS_ID", _assigned(directory)
        used = use_of(visible, self._activity.devices, busy(measured), bus_order=in_order)
        names = devices_of(visible, self._activity.devices, bus_order=in_order or self._activity.alike)
        figures = tuple(measured[name][1:] for name in names if name in measured)
        if len(figures) == len(names) > 0:
            return used, figures
        return None if used is None else (used, ())

    async def stop(self, worker: str, *, kill: bool) -> None:
        """SIGKILL now, or SIGTERM and SIGKILL after the worker's grace period."""
        (self._tracked().kill if kill else self._tracked().terminate)(worker)

    async def read_log(self, directory: str, offset: int) -> tuple[bytes, int]:
        """(A piece of the log in a worker's directory, where it begins)."""
        return await asyncio.to_thread(read_from, Path(directory) / "log", offset)

    async def remove(self, directory: str) -> None:
        """Delete a directory."""
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def running(self, jobs: str) -> tuple[str, ...]:
        """Return the workers that run below a directory."""
        return tuple(await asyncio.to_thread(list, shims.without_record(Path(jobs), ())))

    async def end(self, workers: Sequence[str]) -> None:
        """Kill workers by their processes' environment."""
        for worker in workers:
            await asyncio.to_thread(shims.end_leftovers, worker)

    # Inside

    def _check(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleCallerError
        self._epoch = epoch
        self._called_at = time.monotonic()
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._keep_renewing())

    def _tracked(self) -> shims.Shims:
        if self._shims is None:
            self._shims = shims.Shims(self)
        return self._shims

    async def _start(self, task: Task, directory: Path) -> tuple[str, int, str]:
        try:
            _create_files(task)
            self._expect(task.worker)
            self._begun[task.worker] = asyncio.get_running_loop().create_future()
            await self._renew_first()
            self._tracked().start(task.worker, directory, self._command(task))
        except OSError as error:
            self._ends.pop(task.worker, None)
            return NOT_STARTED, 0, str(error)
        failure = await self._begun[task.worker]
        del self._begun[task.worker]
        if failure:
            self._ends.pop(task.worker, None)
            return NOT_STARTED, 0, failure
        return self._state(task.worker)

    def _command(self, task: Task) -> shims.WorkerCommand:
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment = runtime_environments.inside(task.runtime_env, environment | task.environment)
        environment[GPUS_VARIABLE] = os.environ.get(GPUS_VARIABLE, "")
        return shims.WorkerCommand(
            command=task.command,
            environment=environment,
            working_directory=runtime_environments.directory(task.runtime_env, task.working_directory),
            grace_period_s=task.grace_period_s,
            open_files=task.open_files,
            log_limit=task.log_limit,
            lease_s=self._silence_s,
        )

    def _state(self, worker: str) -> tuple[str, int, str]:
        directory = self._directories[worker]
        end = self._ends[worker]
        if end.done():
            return ENDED, end.result(), self._why_lost(worker)
        return RUNNING, shims.process_id(directory) or 0, ""

    def _why_lost(self, worker: str) -> str:
        if shims.lease_ended(self._directories[worker]):
            return f"its node was cut off from the Ray cluster, or had no actor for it, for {self._silence_s:g} s"
        return self._lost.get(worker, "")

    def _expect(self, worker: str) -> None:
        self._ends[worker] = asyncio.get_running_loop().create_future()

    # As `ShimEvents`

    def worker_started(self, worker: str) -> None:
        """Answer the worker's start."""
        self._begin(worker, "")

    def worker_ended(self, worker: str, code: int) -> None:
        """Answer who waits for the worker's end."""
        self._begin(worker, "")
        if (end := self._ends.get(worker)) and not end.done():
            end.set_result(code)

    def worker_not_started(self, worker: str, why: str) -> None:
        """Answer the worker's start with what prevented it."""
        self._begin(worker, why)

    def _begin(self, worker: str, failure: str) -> None:
        if (begun := self._begun.get(worker)) and not begun.done():
            begun.set_result(failure)

    # Leases

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / RENEWALS)
            if any(not end.done() for end in self._ends.values()):
                self._called_at = time.monotonic()
                with contextlib.suppress(Exception):
                    await self._renew()
            elif time.monotonic() - self._called_at > ABANDONED_S:
                os._exit(0)  # its daemon is away, and would hold the GPUs for nothing

    async def _renew_first(self) -> None:
        if not await self._renew():
            raise OSError("Ray's head does not count this node as alive")

    async def _renew(self) -> bool:
        """Renew the leases of all workers that run; returns whether the head counts this node as alive."""
        asked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        if not await asyncio.to_thread(_is_alive):
            return False
        for worker, end in list(self._ends.items()):
            if not end.done():
                write_private(self._directories[worker] / "lease", f"{asked_at + self._silence_s:.3f}")
        return True


def _is_alive() -> bool:
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())


def _assigned(directory: Path) -> str:
    """The GPUs that the worker was started with."""
    spec = msgspec.json.decode((directory / "spec.json").read_bytes())
    return str(spec["environment"].get(GPUS_VARIABLE, ""))


def _create_files(task: Task) -> None:
    for directory in (task.directory, *task.directories):
        Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, text in task.files.items():
        write_private(Path(path), text)


__all__ = ["ENDED", "NEVER", "NOT_STARTED", "RUNNING", "StaleCallerError", "WorkerHost"]
