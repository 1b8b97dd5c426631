"""The daemon's side of a cluster on Ray: a `WorkerRuntime` that sends everything to the bridge.

The bridge may end at any time, and the Ray cluster may be away: then another bridge is started, again and again, and
is sent every worker that is followed. Actors, shims and workers go on meanwhile. Nodes count as lost only when a
connected bridge says that they left, and their workers only when the fence has passed (`nodes.Fence`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.runtime import refuse_limits
from kfp_gpuquota.cluster.local.workers.sharing import device_name
from kfp_gpuquota.cluster.ray import messages
from kfp_gpuquota.cluster.ray.bridge_output import copy_without_native_stacks, ended_by
from kfp_gpuquota.cluster.ray.membership import serving
from kfp_gpuquota.cluster.ray.messages import NODE_ID
from kfp_gpuquota.cluster.ray.nodes import (
    ADDRESS,
    Fence,
    Steady,
    as_node,
    node_name,
    taken_slots,
    used_elsewhere,
)
from kfp_gpuquota.cluster.ray.workers import checkpoints_of, node_home, task_of
from kfp_gpuquota.errors import ClusterStartError, InvalidFieldError, NotFoundError
from kfp_gpuquota.fractions.activity import GpuUse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

    from kfp_gpuquota.api import JobSpec, Node, Worker
    from kfp_gpuquota.cluster.local.driver import Settings
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.workers.runtime import Reports
    from kfp_gpuquota.cluster.ray.config import RayConfig
    from kfp_gpuquota.cluster.ray.workers import Coordinates
    from kfp_gpuquota.engine.records import JobRecord
    from kfp_gpuquota.server.membership.service import MembershipService

FIRST_CONNECT_S: Final = 90.0
CONNECT_S: Final = 15.0
"""A cluster that ran already serves after this time, connected or not."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 15.0
LOG_S: Final = 15.0
USED_AFTER_S: Final = 1.5
OUTPUT_S: Final = 2.0
SILENT_S: Final = 4.0
"""The nodes are read twice a second."""

log = logging.getLogger(__name__)


class RayRuntime:
    """One per daemon. `recorded` are the nodes that an earlier daemon recorded."""

    def __init__(
        self,
        home: Home,
        config: RayConfig,
        cluster: str,
        recorded: Iterable[Node],
        settings: Settings,
    ) -> None:
        self._home, self._config, self._cluster = home, config, cluster
        self._there = node_home(config, cluster)
        self._settings = settings
        self.nodes = {node.name: msgspec.structs.replace(node, ready=False) for node in recorded}
        self._names = {node.labels[NODE_ID]: node.name for node in self.nodes.values()}
        self.connected: messages.Connected | None = None
        self._seen: tuple[messages.RayNode, ...] = ()
        self._reports: Reports | None = None
        self._coordinates: Coordinates | None = None
        self._follows: dict[str, messages.Follow] = {}
        self._devices: dict[str, Worker] = {}
        self._signals: dict[str, messages.Signal] = {}
        self._pids: dict[str, int] = {}
        self._cannot_run: dict[str, str] = {}
        self._last_errors: dict[str, str] = {}
        self._tracked: Collection[str] | None = None
        self._fence = Fence(config.silence_s, tracked={node.labels[NODE_ID] for node in self.nodes.values()})
        self._used: dict[str, Steady] = {}
        self._link: messages.Link | None = None
        self._numbers = itertools.count(1)
        self._logs: dict[int, asyncio.Future[messages.LogRead]] = {}
        self._tried = asyncio.Event()
        self._use: dict[str, messages.UseMeasured] = {}
        self._failure = ""
        self._heard = 0.0  # when the nodes were last read, on the monotonic clock
        self._running: asyncio.Task[None] | None = None

    async def connect(self, timeout_s: float) -> None:
        """Start the bridge, and have it started again whenever it ends. Raises ClusterStartError at first failure."""
        self._running = asyncio.get_running_loop().create_task(self._keep_connected())
        try:
            await asyncio.wait_for(self._tried.wait(), timeout_s)
        except TimeoutError:
            self._failure = f"Ray at {self._config.address!r} was not reached within {timeout_s:g} s"
        if self._failure:
            raise ClusterStartError(self._failure)
        if self.connected and not any(node.gpus for node in self._seen):
            raise ClusterStartError(
                f"the Ray cluster at {self.connected.address} has no GPUs; start its nodes with: "
                "ray start --num-gpus N (also where CPU slots are to stand for GPUs)"
            )
        self._update_nodes()

    @contextlib.asynccontextmanager
    async def serving(self, reports: Reports, service: MembershipService) -> AsyncIterator[None]:
        """Report to `reports` from now on, and serve the membership to workers on other machines."""
        here = self.connected.here if self.connected else ""
        async with serving(service, here, self._config.port, self._home.root / "membership.json") as coordinates:
            self._reports, self._coordinates = reports, coordinates
            yield

    def close(self) -> None:
        """End the bridge; actors and workers go on."""
        self._reports = None
        if self._running:
            self._running.cancel()
        if self._link:
            self._link.close()

    def problem(self) -> str:
        """Return why Ray cannot be used at present; "" if it can."""
        if self.connected is None:
            return f"Ray is not connected ({self._failure or 'connecting'})"
        silent_s = time.monotonic() - self._heard
        if silent_s <= SILENT_S:
            return ""
        since = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - silent_s))
        return f"Ray's head has not answered since {since}: running jobs go on, and none is started"

    # WorkerRuntime

    def check(self, spec: JobSpec) -> None:
        """Raise InvalidFieldError for no GPU or a part of one, and for limits on memory and CPU."""
        refuse_limits(spec, "this cluster runs on Ray, whose processes have one cgroup on each node")
        if not spec.gpus:
            raise InvalidFieldError(
                "gpus", 0, "this cluster runs on Ray, which has its own queue for work without GPUs",
                hint="use: ray job submit",
            )  # fmt: skip
        if spec.shared:
            field = "gpu_fraction" if spec.gpu_fraction is not None else "gpu_memory_mib"
            raise InvalidFieldError(
                field, getattr(spec, field), "this cluster runs on Ray, where a worker holds whole GPUs",
                hint="ask for whole GPUs with -g",
            )  # fmt: skip

    def start(self, job: JobRecord, worker: Worker) -> None:
        """Start the worker on its node."""
        self._follow(job, worker, start=True)

    def adopt(self, job: JobRecord, worker: Worker, *, wanted: bool) -> shims.Found:
        """Query the worker's state on its node."""
        if worker.id in self._follows and not wanted:
            self.terminate(worker.id)
        else:
            self._follow(job, worker, start=wanted)
        return shims.Found.ASKED

    def prevent(self, worker: Worker) -> bool:  # noqa: ARG002 (the protocol's)
        """Nothing: `adopt` does it."""
        return False

    def terminate(self, worker: str) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        self._signal(messages.Signal(worker))

    def kill(self, worker: str) -> None:
        """Send SIGKILL to the worker."""
        self._signal(messages.Signal(worker, kill=True))

    def watches(self, worker: str) -> bool:
        """Whether the bridge follows the worker."""
        return worker in self._follows

    def exit_code(self, worker: Worker) -> int:  # noqa: ARG002 (the protocol's)
        """Nothing that is asked for: `adopt` never returns ENDED."""
        return shims.EXIT_SHIM_LOST

    def ended_at(self, worker: Worker) -> float | None:  # noqa: ARG002 (the protocol's)
        """Return None: nodes report an end, and not its time."""
        return None

    def why_ended(self, spec: JobSpec, worker: Worker) -> Reason | None:  # noqa: ARG002 (the protocol's)
        """Return why the worker could not run, if Ray said so: no limits of the machine are enforced."""
        why = self._cannot_run.pop(worker.id, "")
        return Reason(code=ReasonCode.WORKER_FAILED, message=why) if why else None

    def last_error(self, worker: Worker) -> str:
        """Return what the worker wrote on its node."""
        return self._last_errors.pop(worker.id, "")

    def process_id(self, worker: Worker) -> int | None:
        """Return the process id on the worker's node."""
        return self._pids.get(worker.id)

    def end_unrecorded(self, tracked: Collection[str]) -> None:
        """End unrecorded workers when the bridge is next connected."""
        self._tracked = tracked
        self._send(messages.ListWorkers(str(self._there.jobs)))

    async def read_log(self, worker: Worker, offset: int) -> tuple[bytes, int]:
        """Read the log on the worker's node. Raises NotFoundError where that is not possible."""
        if worker.node not in self.nodes:
            raise NotFoundError(f"the log of worker {worker.index} is on {worker.node}, which has left the Ray cluster")
        number = next(self._numbers)
        answer = self._logs[number] = asyncio.get_running_loop().create_future()
        directory = str(self._there.worker(worker.job_uid, worker.id))
        self._send(messages.ReadLog(number, worker.id, self._node_id(worker.node), directory, offset))
        try:
            read = await asyncio.wait_for(answer, LOG_S)
        except TimeoutError:
            read = messages.LogRead(number, why=f"Ray did not answer within {LOG_S:g} s")
        finally:
            del self._logs[number]
        if read.why:
            raise NotFoundError(f"the log of worker {worker.index} on {worker.node} cannot be read: {read.why}")
        return read.text, read.begin

    def remove_job(self, uid: str) -> None:
        """Delete the job's files here and on all nodes."""
        self._home.remove_job(uid)
        self._send(messages.RemoveFiles(str(self._there.job(uid))))
        self._send(messages.RemoveFiles(checkpoints_of(self._config, self._home, uid)))

    def measure(self) -> dict[str, GpuUse]:
        """Return what the workers' GPUs did, as reported since the last call, and ask their actors again."""
        reported, self._use = self._use, {}
        if self._devices:
            self._send(messages.MeasureUse(tuple(self._devices)))
        found: dict[str, GpuUse] = {}
        for one in reported.values():
            if (worker := self._devices.get(one.worker)) is not None:
                node = self.nodes[worker.node]
                names = [device_name(node, device) for device in node.devices if device.index in worker.devices]
                figures = one.figures or ((0.0, None),) * len(names)
                found |= {name: GpuUse(one.used, *each) for name, each in zip(names, figures, strict=False)}
        return found

    # To the bridge

    def _follow(self, job: JobRecord, worker: Worker, *, start: bool) -> None:
        assert self._coordinates is not None, "serve() comes first"
        task = task_of(
            job,
            worker,
            there=self._there,
            checkpoints=checkpoints_of(self._config, self._home, job.uid),
            coordinates=self._coordinates,
            token=self._home.job_token_file(job.uid).read_text(),
            open_files=self._settings.open_files,
            log_limit=self._settings.log_limit,
        )
        follow = messages.Follow(task, self._node_id(worker.node), len(worker.devices), start)
        self._follows[worker.id], self._devices[worker.id] = follow, worker
        self._send(follow)

    def _signal(self, signal: messages.Signal) -> None:
        if signal.worker in self._follows:
            self._signals[signal.worker] = signal
            self._send(signal)

    def _send(self, message: messages.ToBridge) -> None:
        """Send it; without a bridge nothing, for the next one is sent all that still matters."""
        if self._link is not None:
            self._link.send(message)

    def _node_id(self, name: str) -> str:
        return self.nodes[name].labels[NODE_ID]

    # The bridge

    async def _keep_connected(self) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            await self._run_bridge()
            self._failure = self._failure or "its process ended"
            self._tried.set()
            if self.connected is not None:
                self.connected = None
                backoff.reset()
            pause_s = backoff.next_s()
            log.error("Ray is not connected (%s); tried again in %g s", self._failure, pause_s)
            await asyncio.sleep(pause_s)
            self._failure = ""

    async def _run_bridge(self) -> None:
        """Run one bridge until it ends."""
        ours, theirs = socket.socketpair()
        described = f"{socket.gethostname()}:{self._home.root}"
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kfp_gpuquota.cluster.ray.bridge"),
                *(msgspec.json.encode(self._config).decode(), self._cluster, described, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                cwd="/",
            )
        link = await messages.Link.over(ours)
        assert process.stderr is not None, "it is a pipe"
        copying = asyncio.create_task(copy_without_native_stacks(process.stderr, sys.stderr.buffer))
        try:
            async for message in link.receive(messages.FromBridge):
                self._on_message(message, link)
            await asyncio.wait({copying}, timeout=OUTPUT_S)  # it ends with the process, which has closed the link
            self._failure = self._failure or ended_by(await process.wait())
        finally:
            self._link = None
            link.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            copying.cancel()

    def _on_message(self, message: messages.FromBridge, link: messages.Link) -> None:
        match message:
            case messages.Connected():
                self._on_connected(message, link)
            case messages.Failed():
                self._failure = message.why
            case messages.NodesSeen():
                self._heard = time.monotonic()
                self._seen = message.nodes
                self._on_nodes()
            case messages.NodesUnchanged():
                self._heard = time.monotonic()
                self._on_nodes()
            case messages.WorkersFound():
                self._on_found(message)
            case messages.UseMeasured():
                self._on_use(message)
            case messages.LogRead():
                if (answer := self._logs.get(message.number)) and not answer.done():
                    answer.set_result(message)
            case _:
                self._on_worker(message)

    def _on_connected(self, connected: messages.Connected, link: messages.Link) -> None:
        log.warning("connected to Ray %s at %s", connected.version, connected.address)
        self.connected, self._link, self._heard = connected, link, time.monotonic()
        for message in (*self._follows.values(), *self._signals.values()):
            link.send(message)
        if self._tracked is not None:
            link.send(messages.ListWorkers(str(self._there.jobs)))

    def _on_use(self, measured: messages.UseMeasured) -> None:
        if (before := self._use.get(measured.worker)) is not None and before.used:
            measured = msgspec.structs.replace(measured, used=True)
        self._use[measured.worker] = measured

    def _on_found(self, found: messages.WorkersFound) -> None:
        tracked = self._tracked or ()
        if unrecorded := tuple(worker for worker in found.workers if worker not in tracked):
            log.error("workers %s run, but no job of this cluster has them: they are ended", ", ".join(unrecorded))
            self._send(messages.EndWorkers(found.node_id, unrecorded))

    def _on_worker(
        self,
        message: messages.WorkerStarted | messages.WorkerEnded | messages.WorkerNotStarted | messages.WorkerLost,
    ) -> None:
        worker, reports = message.worker, self._reports
        if worker not in self._follows or reports is None:
            return
        if isinstance(message, messages.WorkerStarted):
            self._pids[worker] = message.pid
            reports.worker_started(worker)
            return
        self._forget(worker)
        match message:
            case messages.WorkerEnded():
                if message.why:
                    self._cannot_run[worker] = message.why
                if message.error:
                    self._last_errors[worker] = message.error
                reports.worker_ended(worker, message.code)
            case messages.WorkerNotStarted():
                reports.worker_not_started(worker, message.why)
            case messages.WorkerLost():
                reports.worker_lost(worker, message.why)

    def _forget(self, worker: str) -> None:
        for found in (self._follows, self._devices, self._signals, self._pids):
            found.pop(worker, None)

    # Nodes

    def _on_nodes(self) -> None:
        self._tried.set()
        now = asyncio.get_running_loop().time()
        self._update_nodes()
        with_workers = {
            self._node_id(worker.node): self.nodes[worker.node].labels[ADDRESS] for worker in self._devices.values()
        }
        self._fence.observe(self._seen, with_workers, now)
        self._used = {node.id: self._used[node.id] for node in self._seen if node.id in self._used}
        self._lose(self._fence.passed(now))
        if self._reports is not None:
            held_back = self._fence.held_back
            ready = [
                as_node(node, self._name(node), ready=node.id not in held_back) for node in self._seen if node.gpus
            ]
            taken = {self._name(node): self._taken(node, now) for node in self._seen}
            self._reports.nodes_changed(ready, {name: slots for name, slots in taken.items() if slots})

    def _update_nodes(self) -> None:
        """Keep every node that has or had a name here: workers are recorded by it."""
        self.nodes |= {(name := self._name(node)): as_node(node, name) for node in self._seen if node.gpus}

    def _name(self, node: messages.RayNode) -> str:
        """Return the node's name; one that an earlier daemon recorded stays, since workers are recorded by it."""
        return self._names.setdefault(node.id, node_name(node))

    def _taken(self, node: messages.RayNode, now: float) -> tuple[int, ...]:
        steady = self._used.setdefault(node.id, Steady(USED_AFTER_S))
        held = {index for w in self._devices.values() if self._node_id(w.node) == node.id for index in w.devices}
        return taken_slots(node, steady.update(used_elsewhere(node), now), held)

    def _lose(self, passed: Collection[str]) -> None:
        """Report the workers of nodes on which nothing runs any more."""
        for worker in [worker for worker, follow in self._follows.items() if follow.node_id in passed]:
            node = self._devices[worker].node
            self._send(messages.Forget(worker))
            self._forget(worker)
            if self._reports is not None:
                self._reports.worker_lost(worker, f"node {node} has left the Ray cluster")
