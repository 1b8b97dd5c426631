"""A real API server with fake nodes to measure a controller on, and what happens there by its metrics and /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import MERGE_PATCH, Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import from_file
from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.convert.nodes import is_ready
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node, Page, Pod
from tools.devcluster.fake_nodes import fake_node
from tools.devcluster.processes import read_pid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from tools.devcluster import DevCluster

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kwok")
WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE"}
PARALLEL = 16
DEADLINE_S = 600.0
QUIET_S = 5.0
QUIET_WRITES_PER_S = 4
REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
TAGS = re.compile(r'(verb|resource|subresource)="([^"]*)"')


@dataclass
class Bench:
    """One cluster, a connection to it, and the state of its pods from the watch."""

    api: Connection
    cluster: DevCluster
    bound: dict[str, float] = field(default_factory=dict)  # "namespace/name" -> time of the watch event
    let_go: dict[str, float] = field(default_factory=dict)  # likewise, of no gate being left
    there: dict[str, str] = field(default_factory=dict)  # uid -> path
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def saw(self, pod: Pod) -> None:
        """A pod is as given."""
        name, now = f"{pod.metadata.namespace}/{pod.metadata.name}", time.perf_counter()
        self.there[pod.metadata.uid] = f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}"
        if not pod.spec.scheduling_gates:
            self.let_go.setdefault(name, now)
            self.changed.set()
        if pod.spec.node_name and name not in self.bound:
            self.bound[name] = now
            self.changed.set()

    def lost(self, uid: str) -> None:
        """Handle the deletion of a pod."""
        self.there.pop(uid, None)
        self.changed.set()

    async def until_bound(self, names: Iterable[str]) -> None:
        """Return when all of these are bound."""
        missing = set(names)
        async with asyncio.timeout(DEADLINE_S):
            while missing := {name for name in missing if name not in self.bound}:
                self.changed.clear()
                await self.changed.wait()

    async def until_let_go(self, names: Iterable[str]) -> None:
        """Return when none of these has a gate any more."""
        missing = set(names)
        async with asyncio.timeout(DEADLINE_S):
            while missing := {name for name in missing if name not in self.let_go}:
                self.changed.clear()
                await self.changed.wait()

    async def empty(self) -> None:
        """End all pods at once; returns when there is none."""
        now = {"gracePeriodSeconds": 0}
        await in_parallel(lambda path: self.api.call("DELETE", path, now), list(self.there.values()))
        async with asyncio.timeout(DEADLINE_S):
            while self.there:
                self.changed.clear()
                await self.changed.wait()

    async def create_all(self, namespace: str, bodies: list[dict[str, Any]]) -> list[str]:
        """Create pods as fast as possible; their names."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        await in_parallel(lambda body: self.api.call("POST", path, body), bodies)
        return [f"{namespace}/{body['metadata']['name']}" for body in bodies]

    def cpu_s(self, controller: Controller | None) -> dict[str, float]:
        """CPU time that each program has used so far; the generator is this one."""
        used = {"generator": time.process_time()}
        for program in PROGRAMS:
            if (pid := read_pid(self.cluster.layout.pid_file(program))) is not None:
                used[program] = cpu_s(pid)
        return used if controller is None else {**used, "controller": controller.cpu_s()}

    async def writes(self) -> Counter[str]:
        """All writes that the API server has answered so far, but for leases, by verb and resource."""
        counts: Counter[str] = Counter()
        for tags, count in REQUESTS.findall((await self.api.call("GET", "/metrics")).decode()):
            found = dict(TAGS.findall(tags))
            if found["verb"] in WRITES and found["resource"] != "leases":
                counts[f"{found['verb']} {found['resource']}/{found['subresource']}"] += int(float(count))
        return counts


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def in_parallel(action: Callable[[Any], Awaitable[Any]], items: Iterable[Any]) -> None:
    """`action(item)` for all items, PARALLEL at a time."""
    pending = iter(items)

    async def work() -> None:
        for item in pending:
            await action(item)

    await asyncio.gather(*(work() for _ in range(PARALLEL)))


async def make_nodes(bench: Bench, count: int, gpus: int, *, ready: bool = False) -> None:
    """Create this number of nodes; `ready` ones need no heartbeats."""

    async def make(number: int) -> None:
        body = fake_node(f"fake-{number}", gpus)
        if ready:
            body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        await bench.api.call("POST", "/api/v1/nodes", body)
        if ready:  # the API server taints each node that is new
            path = f"/api/v1/nodes/fake-{number}"
            await bench.api.call("PATCH", path, {"spec": {"taints": None}}, content_type=MERGE_PATCH)

    await in_parallel(make, range(count))


async def until_settled(bench: Bench) -> None:
    """Return when every node is Ready and without taints: new nodes have some for a while."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            nodes = (await bench.api.read("/api/v1/nodes", Page[Node])).items or []
            if all(is_ready(node) and not node.spec.taints for node in nodes):
                return
            await asyncio.sleep(1)


async def until_quiet(bench: Bench) -> None:
    """Return when the rate of writes is low.

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

    def __init__(self, kubeconfig: Path, log: Path, *options: str) -> None:
        self.started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes", f"--kubeconfig={kubeconfig}", *options],
                cwd=REPOSITORY,
                stderr=output,
            )

    def peak_mib(self) -> float:
        """The most memory it ever had, resident."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return round(int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024, 1)

    def pss_mib(self) -> float:
        """The memory that it and its planner have now; a page that both share counts once."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rollups = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in (pid, *children)]
        return round(sum(int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0]) for text in rollups) / 1024, 1)

    def cpu_s(self) -> float:
        """CPU time used so far, with its planner's."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(cpu_s(one) for one in (pid, *map(int, children)))

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


@contextlib.asynccontextmanager
async def watching(cluster: DevCluster) -> AsyncIterator[Bench]:
    """A bench whose watch runs."""
    async with Connection(from_file(cluster.kubeconfig)) as api:
        bench = Bench(api, cluster)
        reflector = Reflector(api, "/api/v1/pods", Pod, changed=bench.saw, deleted=bench.lost)
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        try:
            yield bench
        finally:
            task.cancel()


def install(cluster: DevCluster) -> None:
    """The objects' definitions; returns when the API server serves them."""
    cluster.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "manifests" / "crds" / "crds.yaml"))
    cluster.kubectl("wait", "--for=condition=Established", "crd/gpuquotas.gpuquota.dev", "--timeout=30s")
