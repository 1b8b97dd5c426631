"""How long a controller that starts takes to its first plan on a large cluster: benchmarks/controller.py, case start.

The objects are made once, through the API server, which takes minutes. The etcd that holds them is kept in the cache
(~/.cache/gpuquota/benchmarks), and each later run begins with a copy of it.

Node heartbeats are neither sent nor expected: those of 10,000 nodes would occupy two cores.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import print_conditions, print_result
from kwok_bench import Bench, Controller, in_parallel, install, make_nodes, make_team, watching

from kfp_gpuquota.cluster.kubernetes.client.leader.leader_election import NAME, RETRY_S
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Lease
from kfp_gpuquota.errors import GpuQuotaError
from tools.devcluster import DevCluster, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path.home() / ".cache" / "gpuquota" / "benchmarks"
NAMESPACE = "gpuquota-system"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{NAME}"
LEASE_READ_EACH_S = 0.25
RUNNING_ON_EACH_NODE, OTHERS_ON_EACH_NODE = 8, 2


def bodies(nodes: int, gpus: int) -> Iterator[dict[str, Any]]:
    """On each node pods that hold all its GPUs, and some that ask for none; one GPU of all is free."""
    for number in range(nodes):
        for index in range(RUNNING_ON_EACH_NODE + OTHERS_ON_EACH_NODE):
            holds = index < min(gpus, RUNNING_ON_EACH_NODE) and (number or index)
            limits = {labels.GPU_RESOURCE: "1"} if holds else {}
            resources = {"limits": limits, "requests": {"cpu": "100m", "memory": "64Mi"}}
            yield {
                "metadata": {"name": f"run-{number}-{index}"},
                "spec": {
                    "nodeName": f"fake-{number}",
                    "containers": [{"name": "main", "image": "none", "resources": resources}],
                },
            }


async def seed(bench: Bench, nodes: int, gpus: int) -> None:
    """Make all objects."""
    await bench.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    await make_team(bench, "team-a", nodes * gpus // 2)
    await make_team(bench, "team-b", nodes * gpus // 2)
    with bench.cluster.frozen("kwok"), bench.cluster.frozen("kube-controller-manager"):
        await make_nodes(bench, nodes, gpus, ready=True)
        path = "/api/v1/namespaces/team-a/pods"
        began, made = time.perf_counter(), 0

        async def make(body: dict[str, Any]) -> None:
            nonlocal made
            await bench.api.call("POST", path, body)
            made += 1
            if made % 5000 == 0:
                print(f"{made} pods made, {made / (time.perf_counter() - began):.0f}/s", flush=True)

        await in_parallel(make, bodies(nodes, gpus))


async def seeded(nodes: int, gpus: int) -> Path:
    """The etcd that holds these objects, made where it is not there yet."""
    kept = CACHE / f"start-{nodes}-{gpus}"
    if kept.is_dir():
        return kept
    with tempfile.TemporaryDirectory(prefix="gpuquota-seed-") as folder:
        flags = {"etcd": ["--quota-backend-bytes=8589934592"]}
        cluster = DevCluster.start(Path(folder) / "cluster", Options(kwok_nodes=0, flags=flags))
        try:
            install(cluster)
            async with watching(cluster) as bench:
                await seed(bench, nodes, gpus)
        finally:
            cluster.stop()
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.copytree(cluster.layout.etcd, kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
    return kept


async def main(nodes: int, gpus: int) -> None:
    """The case, on a cluster that begins with the objects."""
    etcd = await seeded(nodes, gpus)
    with tempfile.TemporaryDirectory(prefix="gpuquota-bench-") as folder:
        flags = {"etcd": ["--quota-backend-bytes=8589934592"]}
        options = Options(kwok_nodes=0, flags=flags, etcd=str(etcd))
        cluster = DevCluster.start(Path(folder) / "cluster", options)
        try:
            print_conditions("controller", case="start", nodes=nodes, gpus_per_node=gpus)
            with cluster.frozen("kwok"), cluster.frozen("kube-controller-manager"):
                async with watching(cluster) as bench:
                    result = await start(bench, Path(folder) / "controller.log")
        finally:
            cluster.stop()
    print(f"load at the end: {os.getloadavg()[0]:.1f}")
    print_result(case="start", **result)


async def start(bench: Bench, log: Path) -> dict[str, Any]:
    """From the controller's start to the first pod that it sends off."""
    pods = len(bench.there)
    body = {
        "metadata": {"name": f"next-{time.time_ns()}"},
        "spec": {
            "schedulingGates": [{"name": labels.QUOTA_GATE}],
            "containers": [{"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}],
        },
    }
    names = await bench.create_all("team-b", [body])
    controller = Controller(bench.cluster.kubeconfig, log, "--leader-elect", f"--namespace={NAMESPACE}")
    lease = asyncio.create_task(longest_gap(bench))
    try:
        await bench.until_let_go(names)
        seconds = bench.let_go[names[0]] - controller.started
        await asyncio.sleep(2 * RETRY_S)  # the renewal that the first plan may have held up
        lease.cancel()
        gap = await lease
        return {
            "seconds": round(seconds, 2),
            "pods": pods,
            "peak_mib": controller.peak_mib(),
            "cpu_s": round(controller.cpu_s(), 1),
            "lease_late_s": round(max(0.0, gap - RETRY_S), 2),
        }
    finally:
        controller.stop()
        print(*log.read_text().splitlines()[-6:], sep="\n")


async def longest_gap(bench: Bench) -> float:
    """The longest time between two renewals of the Lease, in seconds, by what the holder wrote; until cancelled."""
    longest, before = 0.0, None
    try:
        while True:
            await asyncio.sleep(LEASE_READ_EACH_S)
            try:
                lease = await bench.api.read(LEASE, Lease)
            except GpuQuotaError:
                continue
            renewed = datetime.fromisoformat(lease.spec.renew_time or "").timestamp()
            longest = max(longest, renewed - before if before is not None else 0.0, time.time() - renewed)
            before = renewed
    except asyncio.CancelledError:
        return longest
