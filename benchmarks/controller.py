"""The Kubernetes controller on a real API server with fake nodes, everything on this machine.

    python benchmarks/controller.py --case fill|gang|single|reclaim|start|idle [--nodes 500] [--gpus 8]

fill:    4,000 one-GPU pods created as fast as possible, until all are bound
gang:    one group of 512 pods, until all are bound
single:  one pod at a time on a cluster that runs 3,600; from its creation to bound; 20 times, each time beside a pod
         that is kube-scheduler's alone (`alone_ms`, and the median of their differences, `more_ms`)
reclaim: all GPUs of 250 nodes held by one team's pods, another submits 1,000 within its quota, until all are bound
start:   how long a controller that starts takes to its first plan, on 5,000 nodes and 40,000 running pods
idle:    CPU of the controller over 60 s on a cluster that runs 3,600 pods and where nothing happens

`writes_per_pod` are all writes of the API server during the case, whoever made them (the generator's one creation a
pod, the controller's, kube-scheduler's binding and KWOK's status), by its own metrics.

`controller_ms_per_pod` is CPU time of the controller during the case.

With --alone the pods are not gated and no controller runs: what kube-scheduler alone takes, to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import milliseconds, print_conditions, print_result
from kfp_gpuquota.cluster.kubernetes import labels
from kfp_gpuquota.cluster.kubernetes.connection import MERGE_PATCH, Connection
from kfp_gpuquota.cluster.kubernetes.kubeconfig import from_file
from kfp_gpuquota.cluster.kubernetes.nodes import is_ready
from kfp_gpuquota.cluster.kubernetes.objects import Node, Page, Pod
from kfp_gpuquota.cluster.kubernetes.watch import Reflector
from tools.devcluster import DevCluster, Options
from tools.devcluster.fake_nodes import fake_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

REPOSITORY = Path(__file__).parents[1]
WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE"}
PARALLEL = 16
DEADLINE_S = 600.0
QUIET_S = 5.0
QUIET_WRITES_PER_S = 4
REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
TAGS = re.compile(r'(verb|resource|subresource)="([^"]*)"')


@dataclass
class Bench:
    """One cluster, a connection to it, and what the watch has told of its pods."""

    api: Connection
    cluster: DevCluster
    bound: dict[str, float] = field(default_factory=dict)  # "namespace/name" -> when the watch told
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def saw(self, pod: Pod) -> None:
        """A pod is as given."""
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        if pod.spec.node_name and name not in self.bound:
            self.bound[name] = time.perf_counter()
            self.news.set()

    async def until_bound(self, names: Iterable[str]) -> None:
        """Return when all of these are bound."""
        missing = set(names)
        async with asyncio.timeout(DEADLINE_S):
            while missing := {name for name in missing if name not in self.bound}:
                self.news.clear()
                await self.news.wait()

    async def create_all(self, namespace: str, bodies: list[dict[str, Any]]) -> list[str]:
        """Create pods as fast as possible; their names."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        await in_parallel(lambda body: self.api.call("POST", path, body), bodies)
        return [f"{namespace}/{body['metadata']['name']}" for body in bodies]

    async def writes(self) -> Counter[str]:
        """All writes that the API server has answered so far, but for leases, by verb and resource."""
        counts: Counter[str] = Counter()
        for tags, count in REQUESTS.findall((await self.api.call("GET", "/metrics")).decode()):
            found = dict(TAGS.findall(tags))
            if found["verb"] in WRITES and found["resource"] != "leases":
                counts[f"{found['verb']} {found['resource']}/{found['subresource']}"] += int(float(count))
        return counts


async def in_parallel(action: Callable[[Any], Awaitable[Any]], items: Iterable[Any]) -> None:
    """`action(item)` for all items, PARALLEL at a time."""
    pending = iter(items)

    async def work() -> None:
        for item in pending:
            await action(item)

    await asyncio.gather(*(work() for _ in range(PARALLEL)))


GATED = {"schedulingGates": [{"name": labels.QUOTA_GATE}]}


def pod(name: str, group: str = "", size: int = 0, node: str = "", *, gated: bool = True) -> dict[str, Any]:
    """A one-GPU pod, gated as the webhook would gate it."""
    return {
        "metadata": {
            "name": name,
            "labels": {labels.POD_GROUP: group} if group else {},
            "annotations": {labels.POD_GROUP_SIZE: str(size)} if group else {},
        },
        "spec": {
            **({"nodeName": node} if node else GATED if gated else {}),
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}],
        },
    }


async def make_nodes(bench: Bench, options: argparse.Namespace, *, ready: bool = False) -> None:
    """The case's nodes; `ready` ones need nobody who says so."""

    async def make(number: int) -> None:
        body = fake_node(f"fake-{number}", options.gpus)
        if ready:
            body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        await bench.api.call("POST", "/api/v1/nodes", body)
        if ready:  # the API server taints each node that is new
            path = f"/api/v1/nodes/fake-{number}"
            await bench.api.call("PATCH", path, {"spec": {"taints": None}}, content_type=MERGE_PATCH)

    await in_parallel(make, range(options.nodes))


async def until_settled(bench: Bench) -> None:
    """Return when every node is Ready and without taints: new nodes have some for a while."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            nodes = (await bench.api.read("/api/v1/nodes", Page[Node])).items or []
            if all(is_ready(node) and not node.spec.taints for node in nodes):
                return
            await asyncio.sleep(1)


async def until_quiet(bench: Bench) -> None:
    """Return when hardly anybody writes any more.

    KWOK follows with the pods' statuses, and on a busy machine nodes for which it was late lose a taint again.
    """
    before = await bench.writes()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await asyncio.sleep(QUIET_S)
            now = await bench.writes()
            if (now - before).total() < QUIET_WRITES_PER_S * QUIET_S:
                return
            before = now


async def make_team(bench: Bench, name: str, guaranteed: int) -> None:
    """A namespace with a quota, in which pods can be created."""
    await bench.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    quota = {"apiVersion": labels.API_VERSION, "kind": "GpuQuota", "metadata": {"name": name}}
    await bench.api.call("POST", f"/apis/{labels.API_VERSION}/gpuquotas", {**quota, "spec": {"guaranteed": guaranteed}})
    async with asyncio.timeout(30):
        while "default" not in (await bench.api.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts")).decode():
            await asyncio.sleep(0.05)


class Controller:
    """The controller as a process of its own."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self.started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes", f"--kubeconfig={kubeconfig}"],
                cwd=REPOSITORY,
                stderr=output,
            )

    def peak_mib(self) -> float:
        """The most memory it ever had, resident."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return round(int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024, 1)

    def cpu_s(self) -> float:
        """CPU time used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Stop it in its tracks."""
        self._process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait(30)


async def fill(bench: Bench, count: int) -> dict[str, Any]:
    """As the case says."""
    started = time.perf_counter()
    names = await bench.create_all("team-a", [pod(f"fill-{i}") for i in range(count)])
    await bench.until_bound(names)
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 2), "pods_per_s": round(count / seconds), "pods": count}


async def gang(bench: Bench, count: int) -> dict[str, Any]:
    """As the case says."""
    started = time.perf_counter()
    names = await bench.create_all("team-a", [pod(f"gang-{i}", "gang", count) for i in range(count)])
    await bench.until_bound(names)
    return {"seconds": round(time.perf_counter() - started, 2), "pods": count}


async def single(bench: Bench, rounds: int) -> dict[str, Any]:
    """As the case says."""
    await fill(bench, 3600)
    await until_quiet(bench)
    gated, alone = [], []
    for i in range(rounds):
        gated.append(await one(bench, pod(f"single-{i}")))
        alone.append(await one(bench, pod(f"alone-{i}", gated=False)))
    more = statistics.median(ours - theirs for ours, theirs in zip(gated, alone, strict=True))
    return {
        "latency_ms": milliseconds(gated),
        "alone_ms": milliseconds(alone),
        "more_ms": round(1000 * more, 1),
        "pods": 2 * rounds,
    }


async def one(bench: Bench, body: dict[str, Any]) -> float:
    """Seconds from a pod's creation to bound."""
    started = time.perf_counter()
    names = await bench.create_all("team-a", [body])
    await bench.until_bound(names)
    seconds = bench.bound[names[0]] - started
    await asyncio.sleep(0.2)
    return seconds


async def reclaim(bench: Bench, gpus: int, count: int) -> dict[str, Any]:
    """As the case says."""
    held = await bench.create_all("team-a", [pod(f"held-{i}") for i in range(gpus)])
    await bench.until_bound(held)
    await until_quiet(bench)
    started = time.perf_counter()
    names = await bench.create_all("team-b", [pod(f"back-{i}") for i in range(count)])
    await bench.until_bound(names)
    return {"seconds": round(time.perf_counter() - started, 2), "pods": count}


async def run_case(bench: Bench, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Nodes, teams, the controller and the case."""
    gpus = options.nodes * options.gpus
    await bench.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "gpuquota-system"}})
    await make_team(bench, "team-a", gpus // 2)
    await make_team(bench, "team-b", gpus // 2)
    if options.case == "start":
        with bench.cluster.frozen("kwok"), bench.cluster.frozen("kube-controller-manager"):
            return await start(bench, options, log)
    await make_nodes(bench, options)
    await until_settled(bench)
    if options.alone:
        GATED.clear()
    controller = Controller(bench.cluster.kubeconfig, log)
    if options.alone:
        controller.pause()
    try:
        await bench.until_bound(await bench.create_all("team-a", [pod("first")]))
        await bench.api.call("DELETE", "/api/v1/namespaces/team-a/pods/first")
        before, cpu_before = await bench.writes(), controller.cpu_s()
        result = await measure(bench, controller, options.case, gpus)
        writes, cpu_s = await bench.writes() - before, controller.cpu_s() - cpu_before
        print("writes:", dict(writes.most_common(8)))
        result["writes_per_pod"] = round(writes.total() / max(1, writes["POST pods/"]), 2)
        made = writes["POST pods/"]  # those that fill the cluster first, too
        result["controller_ms_per_pod"] = round(1000 * cpu_s / max(1, made), 2)
        return {**result, "peak_mib": controller.peak_mib(), "controller_cpu_s": controller.cpu_s()}
    finally:
        controller.stop()


async def measure(bench: Bench, controller: Controller, case: str, gpus: int) -> dict[str, Any]:
    """One of the cases that a running controller is there for."""
    if case == "fill":
        return await fill(bench, min(gpus, 4000))
    if case == "gang":
        return await gang(bench, min(gpus, 512))
    if case == "reclaim":
        return await reclaim(bench, gpus, gpus // 2)
    if case == "single":
        return await single(bench, 20)
    return await idle(bench, controller)


async def idle(bench: Bench, controller: Controller) -> dict[str, Any]:
    """As the case says."""
    await fill(bench, 3600)
    await until_quiet(bench)
    before = controller.cpu_s()
    await asyncio.sleep(60)
    return {"idle_percent": round((controller.cpu_s() - before) / 60 * 100, 2), "pods": 3600}


async def start(bench: Bench, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """As the case says: the pods are bound by their creator, so that they need no scheduler.

    Nobody sends the nodes' heartbeats, nor waits for them: 5,000 nodes' would keep two cores busy.
    """
    await make_nodes(bench, options, ready=True)
    running = options.nodes * options.gpus - 1
    path = "/api/v1/namespaces/team-a/pods"
    bodies = (pod(f"run-{i}", node=f"fake-{i // options.gpus}") for i in range(running))
    await in_parallel(lambda body: bench.api.call("POST", path, body), bodies)
    await asyncio.sleep(5)
    names = await bench.create_all("team-b", [pod("next")])
    controller = Controller(bench.cluster.kubeconfig, log)
    try:
        await bench.until_bound(names)
        seconds = bench.bound[names[0]] - controller.started
        return {"seconds": round(seconds, 2), "pods": running, "peak_mib": controller.peak_mib()}
    finally:
        controller.stop()


@contextlib.asynccontextmanager
async def watching(cluster: DevCluster) -> AsyncIterator[Bench]:
    """A bench whose watch runs."""
    async with Connection(from_file(cluster.kubeconfig)) as api:
        bench = Bench(api, cluster)
        reflector = Reflector(api, "/api/v1/pods", Pod, changed=bench.saw, gone=lambda _: None)
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        try:
            yield bench
        finally:
            task.cancel()


async def main(options: argparse.Namespace) -> None:
    """One case on a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="gpuquota-bench-") as folder:
        cluster = DevCluster.start(Path(folder) / "cluster", Options(kwok_nodes=0))
        try:
            install(cluster)
            print_conditions("controller", case=options.case, nodes=options.nodes, gpus_per_node=options.gpus)
            async with watching(cluster) as bench:
                result = await run_case(bench, options, Path(folder) / "controller.log")
        finally:
            cluster.stop()
    print(f"load at the end: {os.getloadavg()[0]:.1f}")
    print_result(case=options.case, **result)


def install(cluster: DevCluster) -> None:
    """The objects' definitions; returns when the API server serves them."""
    made = subprocess.run(
        [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes.crds"], cwd=REPOSITORY, capture_output=True, check=True
    )
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=made.stdout.decode())
    cluster.kubectl("wait", "--for=condition=Established", "crd/gpuquotas.gpuquota.dev", "--timeout=30s")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["fill", "gang", "single", "reclaim", "start", "idle"], default="fill")
    parser.add_argument("--nodes", type=int, default=0, help="by default as the case says")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--alone", action="store_true", help="kube-scheduler alone")
    options = parser.parse_args()
    options.nodes = options.nodes or {"reclaim": 250, "start": 5000}.get(options.case, 500)
    return options


if __name__ == "__main__":
    asyncio.run(main(parse()))
