"""Workers train on through whatever happens to the controller's processes, and no quota is ever exceeded.

On the real API server, with processes of their own for the controllers and the membership's shards, and the real client
of `elastic_runtime` for each worker. An observer watches the pods all the while.
"""

from __future__ import annotations

import random
import re
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.admission import server
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import service as membership_service
from tests import forked, programs
from tests.kubernetes.controlled import LEASE, Controlled, Process
from tests.kubernetes.faulty_proxy import FaultyProxy
from tests.kubernetes.installation import NAMESPACE
from tests.kubernetes.running_workers import Observer, RunningWorkers
from tests.polling import TIMEOUT_S, until
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

SHARDS = 2
JOB_SIZE = 5
PAUSED_S = 20.0
SLOW_S = 180.0
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


class Shard:
    """A membership shard on its port, as a StatefulSet keeps it."""

    def __init__(self, cluster: DevCluster, log: Path) -> None:
        self.port, self._cluster, self._log = free_port(), cluster, log
        self.process: forked.Program | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as output:
            self.process = forked.Program(
                programs.membership_shard,
                f"--kubeconfig={self._cluster.kubeconfig}",
                f"--port={self.port}",
                stdout=output.fileno(),
                stderr=output.fileno(),
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class World:
    """Two controllers, each behind a proxy of its own, two shards, workers that train, and the observer."""

    def __init__(self, cluster: DevCluster, folder: Path, stack: ExitStack, workers: int) -> None:
        self.cluster, self._folder, self._stack = cluster, folder, stack
        self.controlled = Controlled(cluster, folder)
        self.shards = [Shard(cluster, folder / f"shard-{i}.log") for i in range(SHARDS)]
        self.controlled.arguments = [
            "--leader-elect",
            f"--membership-shards={','.join(shard.url for shard in self.shards)}",
        ]
        self.proxies: dict[int, FaultyProxy] = {}  # by process id
        self.replicas: list[Process] = []
        self.numbers = iter(range(10_000))
        stack.callback(self._end)
        self.controlled.add_nodes(2 + workers // 8, gpus=8)
        self.plain = self.controlled.team("plain", guaranteed=2, limit=2)
        self.team = self.controlled.team("jobs", guaranteed=workers, limit=workers)
        self.observer = Observer(cluster, {self.plain: 2, self.team: workers})
        self.workers = RunningWorkers(cluster, folder)
        for shard in self.shards:
            shard.start()
        self.keep_replicas()
        self._train(workers)

    def _train(self, workers: int) -> None:
        for number in range(workers // JOB_SIZE):
            self.controlled.job(self.team, f"job{number}", gpus=JOB_SIZE, gpusPerWorker=1, gracePeriodSeconds=5)

        def running() -> bool:
            pods = self.controlled.pods(self.team).values()
            return len([pod for pod in pods if pod["status"].get("phase") == "Running"]) == workers

        self.controlled.wait(running, self.controlled.log, SLOW_S)
        for pod in self.controlled.pods(self.team).values():
            self.workers.start(pod)
        self.controlled.wait(self.workers.trained, self._said, SLOW_S)
        for number in range(workers // JOB_SIZE):
            path = f"/apis/gpuquota.dev/v1alpha1/namespaces/{self.team}/elasticjobs/job{number}"
            self.controlled.until(path, lambda job: len(job["status"].get("ranks", ())) == JOB_SIZE, SLOW_S)

    def _said(self) -> str:
        shards = "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("shard-*.log")))
        return f"{self.controlled.log()[-6000:]}\n{shards}"

    # Processes

    def keep_replicas(self) -> None:
        """Start controllers until there are two, as a Deployment does."""
        self.replicas = [one for one in self.replicas if one.poll() is None]
        while len(self.replicas) < 2:
            folder = self._folder / f"proxy-{next(self.numbers)}"
            folder.mkdir()
            proxy = self._stack.enter_context(FaultyProxy(self.cluster, folder, 0.0, 1))
            self.controlled.kubeconfig = proxy.kubeconfig
            process = self.controlled.start()
            self.proxies[process.pid] = proxy
            self.replicas.append(process)

    def leader(self) -> Process:
        """The replica that leads, by the log of each."""

        def found() -> Process | None:
            holder = self.cluster.api.get(LEASE)["spec"]["holderIdentity"]
            for process, log in self._logs():
                if process.poll() is None and re.search(rf"{re.escape(holder)} leads", log):
                    return process
            return None

        return until(found, self._said, SLOW_S)

    def _logs(self) -> Iterator[tuple[Process, str]]:
        for number, process in enumerate(self.controlled.processes):
            yield process, (self._folder / f"controller-{number}.log").read_text()

    def stop_all(self) -> None:
        """End every process of ours, as an uninstall does."""
        for process in self.replicas:
            process.terminate()
        for process in self.replicas:
            process.wait(TIMEOUT_S)
        for shard in self.shards:
            shard.kill()

    def start_all(self) -> None:
        """Start every process again."""
        for shard in self.shards:
            shard.start()
        self.keep_replicas()

    # What must hold

    def settle(self) -> None:
        """Check that a leader works: a pod is admitted and ends. All workers are present, without errors."""
        name = f"after-{next(self.numbers)}"
        path = self.controlled.pod(self.plain, name)
        self.controlled.until(path, lambda pod: pod["spec"].get("nodeName"), SLOW_S)
        self.cluster.api.delete(path, 0)
        self.check()

    def check(self) -> None:
        assert not self.observer.wrong, (self.observer.wrong, self._said())
        assert not self.workers.refused(), (self.workers.refused(), self._said())

    def _end(self) -> None:
        self.observer.stop()
        if hasattr(self, "workers"):
            self.workers.stop()
        for shard in self.shards:
            if shard.process is not None:
                shard.kill()
        self.controlled.close()


@pytest.fixture(scope="module")
def world(
    system_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[World]:
    with ExitStack() as stack:
        workers = int(pytestconfig.getoption("--workers"))
        yield World(system_cluster, tmp_path_factory.mktemp("failover"), stack, workers)
    if system_cluster.api.exists(LEASE):
        system_cluster.api.delete(LEASE)


def leader_killed(world: World) -> None:
    before = world.workers.orders()
    world.leader().kill()
    world.settle()
    assert world.workers.orders() == before  # their connections are not the leader's


def leader_paused(world: World) -> None:
    leader = world.leader()
    proxy = world.proxies[leader.pid]
    leader.send_signal(signal.SIGSTOP)
    try:
        time.sleep(PAUSED_S)  # how long it is paused is what is tested
        world.settle()
        kept = [world.controlled.pod(world.plain, f"kept-{next(world.numbers)}") for _ in range(3)]  # 2 may start
        world.controlled.wait(lambda: len(world.controlled.bound(world.plain)) == 2, world._said, SLOW_S)
        proxy.writes.clear()
    finally:
        leader.send_signal(signal.SIGCONT)  # it reads the changes, and must not write about them
    assert leader.wait(TIMEOUT_S) == 3
    assert not proxy.writes
    for path in kept:
        world.cluster.api.delete(path, 0)


def leader_partitioned(world: World) -> None:
    leader = world.leader()
    world.proxies[leader.pid].cut(off=True)
    try:
        assert leader.wait(TIMEOUT_S) == 3
        world.settle()
    finally:
        world.proxies[leader.pid].cut(off=False)


def shard_killed(world: World) -> None:
    before = world.workers.orders()
    for shard in world.shards:
        shard.kill()
    for shard in world.shards:
        shard.start()
    world.controlled.wait(lambda: world.workers.heard_since(before), world._said, SLOW_S)


def authority_issued_again(world: World) -> None:
    before = world.workers.orders()
    world.stop_all()
    world.cluster.api.delete(f"{SECRETS}/{server.SECRET}")
    world.start_all()
    world.controlled.wait(lambda: world.workers.heard_since(before), world._said, SLOW_S)


def secrets_deleted(world: World) -> None:
    for name in (server.SECRET, membership_service.SECRET):
        world.cluster.api.delete(f"{SECRETS}/{name}")
    for name in (server.SECRET, membership_service.SECRET):
        until(lambda name=name: world.cluster.api.exists(f"{SECRETS}/{name}"), name, SLOW_S)  # type: ignore[misc]
    before = world.workers.orders()
    world.leader().kill()
    for shard in world.shards:
        shard.kill()
        shard.start()
    world.controlled.wait(lambda: world.workers.heard_since(before), world._said, SLOW_S)


def installed_again(world: World) -> None:
    before = world.workers.orders()
    world.stop_all()
    world.cluster.api.delete(LEASE)  # it is deleted with the namespace; the keys are in another one
    world.check()
    world.start_all()
    world.controlled.wait(lambda: world.workers.heard_since(before), world._said, SLOW_S)


FAULTS = [
    leader_killed,
    leader_paused,
    leader_partitioned,
    shard_killed,
    authority_issued_again,
    secrets_deleted,
    installed_again,
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_no_worker_ends_and_no_quota_is_exceeded_whatever_happens_to_our_processes(
    world: World, pytestconfig: pytest.Config, seed: int
) -> None:
    count = min(len(FAULTS), int(pytestconfig.getoption("--failovers")))
    for fault in random.Random(seed).sample(FAULTS, count):
        fault(world)
        world.keep_replicas()
        world.settle()
