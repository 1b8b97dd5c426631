"""The memory agent of the embedded cluster: workers that share GPUs start when their part is free, and lend the rest.

It runs in the daemon, and only while a GPU is shared. The scheduler has already given a delayed worker its
place; what it waits for is memory that borrowers are giving back, or processes that are ending.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.share import limit_mib, request_mib
from kfp_gpuquota.api.wire import ShareView
from kfp_gpuquota.cluster.local.home import make_private
from kfp_gpuquota.errors import DeviceError
from kfp_gpuquota.fractions import Claim, Kill, Policy, Round
from kfp_gpuquota.fractions.agent import Agent, Share, code_of, explain, what_it_can_do
from kfp_gpuquota.fractions.devices import NvmlMemory, SimulatedMemory, simulate
from kfp_gpuquota.fractions.processes import worker_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kfp_gpuquota.api import Device, Node, Worker
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
    from kfp_gpuquota.fractions.devices import DeviceMemory

INTERVAL_S: Final = 0.1

log = logging.getLogger(__name__)


class Sharing:
    """One per daemon. `start` starts a delayed worker; `record_reason` stores the reason of an event."""

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        policy: Policy,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[WorkerRecord], None],
        record_reason: Callable[[JobRecord, Reason], None],
    ) -> None:
        self._home, self._state, self._loop = home, state, loop
        self._start, self._record_reason = start, record_reason
        self._policy = policy
        self._agent: Agent | None = None
        self._held: dict[str, WorkerRecord] = {}
        self._ended: dict[str, Reason] = {}
        self._reasons_before: dict[str, Reason | None] = {}
        self._rows: dict[tuple[str, str], ShareView] = {}
        self._next: asyncio.Handle | None = None

    def takes_over(self, record: WorkerRecord) -> bool:
        """Whether the worker shares a GPU, so that it is started from here, as soon as its part is free."""
        if record.worker.share >= 1 or not self._devices_of(record.worker):
            return False
        make_private(self._home.worker(record.worker.job_uid, record.worker.id) / "memory")
        self._held[record.worker.id] = record
        self._schedule(0.0)
        return True

    def gives_up(self, worker: str) -> bool:
        """Return whether the worker was delayed and need not be started any more."""
        record = self._held.pop(worker, None)
        if record is not None:
            self._reasons_before.pop(record.worker.job_uid, None)
        return record is not None

    def why_ended(self, worker: str) -> Reason | None:
        """Return why the worker's process was killed by the agent; None if it was not."""
        return self._ended.pop(worker, None)

    def views(self, node: str) -> tuple[ShareView, ...]:
        """The ledger of a node's shared devices, as of the last round."""
        return tuple(view for (on, _), view in sorted(self._rows.items()) if on.startswith(f"{node}/"))

    def wake(self) -> None:
        """Workers that share may have been adopted: look after them."""
        self._schedule(0.0)

    def close(self) -> None:
        """Release all resources; the limits that were sent stay."""
        if self._next:
            self._next.cancel()
        if self._agent:
            self._agent.close()

    # The rounds

    def _schedule(self, delay_s: float) -> None:
        if self._next:
            self._next.cancel()
        self._next = self._loop.call_later(delay_s, self._round)

    def _round(self) -> None:
        self._next = None
        shares = [self._share(record) for record in self._sharers()]
        if not shares:
            self._rows.clear()
            return
        try:
            done = self._running_agent().round(shares, time.monotonic())
        except (DeviceError, OSError) as error:
            log.error("GPU memory cannot be read, so no worker that shares a GPU starts: %s", error)
        else:
            self._note(done)
            self._start_ready(done)
            self._explain_held(shares, done)
        self._schedule(INTERVAL_S)

    def _sharers(self) -> list[WorkerRecord]:
        return [record for record in self._state.workers.values() if record.alive and record.worker.share < 1]

    def _running_agent(self) -> Agent:
        if self._agent is None:
            self._agent = Agent(self._memory(), worker_of, self._policy)
            log.info("the GPU memory agent %s", what_it_can_do(self._policy))
        return self._agent

    def _memory(self) -> DeviceMemory:
        simulated = [(node, device) for node, device in self._devices() if not device.uuid and device.memory_mib]
        if not simulated:
            return NvmlMemory()
        for node, device in simulated:
            simulate(simulated_directory(self._home, node.name, device.index), device.memory_mib)
        return SimulatedMemory({
            device_name(node, device): simulated_directory(self._home, node.name, device.index)
            for node, device in simulated
        })  # fmt: skip

    def _share(self, record: WorkerRecord) -> Share:
        worker = record.worker
        spec = self._state.jobs[worker.job_uid].spec
        node = self._state.nodes[worker.node]
        claims = tuple(
            Claim(
                workload=worker.id,
                device=device_name(node, device),
                request_mib=request_mib(spec, node.usable_mib(device)),
                limit_mib=limit_mib(spec, node.usable_mib(device)),
                priority=spec.effective_priority,
                since=worker.started_at,
                running=worker.id not in self._held,
            )
            for device in self._devices_of(worker)
        )
        return Share(claims, memory_directory(self._home, worker))

    def _note(self, done: Round) -> None:
        devices = {device_name(node, device): (node, device) for node, device in self._devices()}
        rows = {}
        for row in done.rows:
            job = self._state.jobs[self._state.workers[row.workload].worker.job_uid]
            node, device = devices[row.device]
            rows[f"{node.name}/{device.index:04}", row.workload] = ShareView(
                worker=row.workload,
                job=job.spec.name,
                project=job.spec.project,
                device=device.index,
                total_mib=device.memory_mib,
                used_mib=row.used_mib,
                request_mib=row.request_mib,
                limit_mib=row.limit_mib,
                granted_mib=row.granted_mib,
                listens=row.listens,
            )
        self._rows = rows
        for kill in done.kills:
            self._explain(kill)

    def _explain(self, kill: Kill) -> None:
        job = self._state.jobs[self._state.workers[kill.workload].worker.job_uid]
        other = job
        if kill.beneficiary:
            other = self._state.jobs[self._state.workers[kill.beneficiary].worker.job_uid]
        reason = Reason(
            code=code_of(kill),
            message=explain(kill, f"{other.spec.name} of project {other.spec.project}"),
            beneficiary=other.uid if kill.beneficiary else "",
            project=other.spec.project if kill.beneficiary else "",
            details={"over_mib": kill.over_mib, "pid": kill.process.pid},
        )
        self._record_reason(job, reason)
        if not kill.only_reported:
            self._ended[kill.workload] = reason

    def _start_ready(self, done: Round) -> None:
        for worker in done.ready:
            if record := self._held.pop(worker, None):
                job = record.worker.job_uid
                if job in self._reasons_before:
                    self._state.note_waiting(job, self._reasons_before.pop(job))
                self._start(record)

    def _explain_held(self, shares: Iterable[Share], done: Round) -> None:
        """Set the reason of each job whose worker has its devices and waits for their memory."""
        names = {device_name(node, device): f"GPU {device.index} of {node.name}" for node, device in self._devices()}
        for share in shares:
            record = self._held.get(share.claims[0].workload)
            if record is None:
                continue
            job = self._state.jobs[record.worker.job_uid]
            self._reasons_before.setdefault(job.uid, job.status.reason)
            causes = [self._shortage(claim, names[claim.device], done) for claim in share.claims]
            message = f"has its place, and waits for GPU memory: {'; '.join(causes)}"
            reason = Reason(code=ReasonCode.WAITS_FOR_GPU_MEMORY, message=message, project=job.spec.project)
            self._state.note_waiting(job.uid, reason)

    def _shortage(self, claim: Claim, device: str, done: Round) -> str:
        """Return what of the claim's request is in use by others, and by which jobs."""
        borrowers = [row for row in done.rows if row.device == claim.device and row.borrowed_mib]
        need = f"{show_mib(claim.request_mib)} of {device}"
        if not borrowers:
            return f"{need} are not free yet"
        jobs = (self._state.jobs[self._state.workers[row.workload].worker.job_uid].spec for row in borrowers)
        held = (
            f"job {spec.name} of project {spec.project} uses {show_mib(row.borrowed_mib)} above its request"
            for spec, row in zip(jobs, borrowers, strict=True)
        )
        return f"{need}, where {', '.join(held)}"

    def _devices_of(self, worker: Worker) -> list[Device]:
        """Return the worker's devices with known memory."""
        node = self._state.nodes[worker.node]
        return [device for device in node.devices if device.index in worker.devices and device.memory_mib]

    def _devices(self) -> Iterator[tuple[Node, Device]]:
        return ((node, device) for node in self._state.nodes.values() for device in node.devices)


def device_name(node: Node, device: Device) -> str:
    """Return the agent's name of the device."""
    return device.uuid or f"{node.name}/{device.index}"


def simulated_directory(home: Home, node: str, index: int) -> Path:
    """Return the directory of a simulated device's memory."""
    return home.root / "devices" / f"{node}-{index}"


def memory_directory(home: Home, worker: Worker) -> Path:
    """Return the directory of a worker's memory limit."""
    return home.worker(worker.job_uid, worker.id) / "memory"
