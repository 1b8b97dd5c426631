"""What the agent of one node costs, and how soon an owner has its memory back.

    python benchmarks/gpu_fractions.py [--devices 8] [--processes 200] [--rounds 200]

cpu_ms: CPU time of one round (sample, attribute, decide) over simulated devices that many real processes use;
node_cpu_ms: of the agent of a Kubernetes node.
demand_ms: from an owner's arrival until its request is free, with a borrower that listens every 20 ms and an agent
that samples every 100 ms: the median of ten.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import msgspec
from common import print_conditions, print_result

from elastic_runtime.process.simulated_memory import create_device
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing.node_agent import AgentOptions, NodeAgent
from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import NAMESPACE
from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote, written
from kfp_gpuquota.fractions import Claim, Policy, Process
from kfp_gpuquota.fractions.agent import Agent, Share, UsageMessage, read_limit
from kfp_gpuquota.fractions.devices import SimulatedMemory
from kfp_gpuquota.fractions.processes import identify, worker_of

if TYPE_CHECKING:
    from collections.abc import Callable

TOTAL_MIB = 80_000
INTERVAL_S = 0.1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print_conditions("GPU fractions, one node's agent", **vars(options))
    with tempfile.TemporaryDirectory() as directory:
        cpu_ms, node_ms = round_cost(Path(directory), options.devices, options.processes, options.rounds)
    with tempfile.TemporaryDirectory() as directory:
        demand_ms = [demand(Path(directory) / str(i)) * 1000 for i in range(10)]
    print_result(
        cpu_ms=round(statistics.median(cpu_ms), 2),
        cpu_ms_max=round(max(cpu_ms), 2),
        node_cpu_ms=round(statistics.median(node_ms), 2),
        demand_ms=round(statistics.median(demand_ms), 1),
        demand_ms_max=round(max(demand_ms), 1),
    )


def round_cost(root: Path, devices: int, processes: int, rounds: int) -> tuple[list[float], list[float]]:
    """CPU milliseconds of each round: of the agent alone, and of a Kubernetes node's."""
    sleepers = [subprocess.Popen(["sleep", "600"], env={"ELASTIC_WORKER_ID": f"worker-{i}"}) for i in range(processes)]
    try:
        directories = {str(i): root / str(i) for i in range(devices)}
        for path in directories.values():
            create_device(path, TOTAL_MIB)
        shares = []
        for number, sleeper in enumerate(sleepers):
            device, name = str(number % devices), f"worker-{number}"
            (root / name).mkdir()
            enter(directories[device], identify(sleeper.pid), 100)
            part = TOTAL_MIB // (processes // devices + 1)
            claim = Claim(workload=name, device=device, request_mib=part, limit_mib=TOTAL_MIB)
            shares.append(Share((claim,), root / name))
        agent = Agent(SimulatedMemory(directories), worker_of, Policy())
        agent.round(shares, time.monotonic())
        alone = [cpu_of(lambda: agent.round(shares, time.monotonic())) for _ in range(rounds)]
        return alone, asyncio.run(node_cost(directories, [claim for share in shares for claim in share.claims], rounds))
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


class Silent:
    """An API server that takes what is written and never answers."""

    async def call(self, *_: object, **_more: object) -> bytes:
        """Wait until the call is cancelled."""
        await asyncio.Event().wait()
        return b""


async def node_cost(directories: dict[str, Path], claims: list[Claim], rounds: int) -> list[float]:
    """Measure the same for the agent of a Kubernetes node, which reads the sharing pods from reservations."""
    silent: Any = Silent()
    agent = NodeAgent(silent, AgentOptions(node="node-0"), SimulatedMemory(directories), worker_of)
    for device in directories:
        agent.put(reservation(device, [claim for claim in claims if claim.device == device]))
    agent.round()
    return [cpu_of(agent.round) for _ in range(rounds)]


def reservation(device: str, claims: list[Claim]) -> Pod:
    """The pod that holds a device, and names its sharers."""
    notes = [
        ShareNote(
            ticket=f"{claim.workload}@0",
            pod=f"team/{claim.workload}",
            uid=claim.workload,
            since=0.0,
            gpus=(device,),
            gpu_memory_mib=claim.request_mib,
            gpu_memory_limit_mib=claim.limit_mib,
        )
        for claim in claims
    ]
    annotations = {labels.RESERVES_ON: "node-0", labels.SHARERS: written(notes)}
    named = {"name": f"gpu-{device}", "namespace": NAMESPACE, "uid": device, "labels": {labels.RESERVES: device}}
    output = [{"name": "report", "state": {"terminated": {"exitCode": 0, "message": device}}}]
    status = {"phase": "Running", "initContainerStatuses": output}
    return msgspec.convert({"metadata": {**named, "annotations": annotations}, "status": status}, Pod)


def cpu_of(act: Callable[[], object]) -> float:
    """CPU milliseconds of one call."""
    began = time.process_time()
    act()
    return (time.process_time() - began) * 1000


def enter(device: Path, process: Process | None, mib: int) -> None:
    """Let the process hold memory."""
    assert process is not None
    (device / "processes" / f"{process.pid}-{process.start}").write_text(str(mib))


def demand(root: Path) -> float:
    """Seconds from the owner's arrival until it may start."""
    create_device(root / "0", TOTAL_MIB)
    (root / "trainer").mkdir()
    stop = Event()
    borrower = Thread(target=follow, args=(root, stop))
    borrower.start()
    agent = Agent(SimulatedMemory({"0": root / "0"}), lambda _: "trainer", Policy())
    request = TOTAL_MIB // 4
    trainer = Share(
        (Claim(workload="trainer", device="0", request_mib=request, limit_mib=TOTAL_MIB),), root / "trainer"
    )
    while read_limit(root / "trainer") != TOTAL_MIB:
        agent.round([trainer], time.monotonic())
        time.sleep(INTERVAL_S / 10)
    owner = Claim(
        workload="owner", device="0", request_mib=TOTAL_MIB - request, limit_mib=TOTAL_MIB - request, running=False
    )
    began = time.monotonic()
    while "owner" not in agent.round([trainer, Share((owner,), root)], time.monotonic()).ready:
        time.sleep(INTERVAL_S)
    took = time.monotonic() - began
    stop.set()
    borrower.join()
    return took


def follow(root: Path, stop: Event) -> None:
    """A listener: every 20 ms it follows its limit, and uses all of it."""
    process = identify(os.getpid())
    usage = root / "trainer" / "usage.json"
    while not stop.wait(0.02):
        limit = read_limit(root / "trainer")
        enter(root / "0", process, limit or 0)
        usage.with_suffix(".new").write_bytes(msgspec.json.encode(UsageMessage(follows_mib=limit)))
        usage.with_suffix(".new").replace(usage)


if __name__ == "__main__":
    main()
