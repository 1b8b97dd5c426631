"""A real Ray cluster of several raylets on one machine, and this project's cluster on it; started once."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.ray.config import RayConfig
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import EmbeddedCluster

pytest.importorskip("ray")

os.environ.setdefault("RAY_worker_niceness", "0")
"""Ray's 15 leaves its workers a tenth of a core while other tests run beside them."""

STORE_BYTES = 80 << 20
FEW_PROCESSES = {
    "object_store_memory": STORE_BYTES,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
"""Arguments of a node without Ray's dashboard, its collector of logs and its autoscaler."""
SILENCE_S = 20.0
WARM_S = 5.0


class RayCluster:
    """A head without GPUs and CPUs, and raylets with fake GPUs; `everywhere` are arguments of all of them."""

    def __init__(self, **everywhere: Any) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 (takes a second)

        # `shutdown_at_exit` also makes the kernel end Ray's processes with this one, however it ends.
        self.cluster = Cluster(shutdown_at_exit=True)
        self.raylets: list[Any] = []
        self._everywhere = everywhere

    def start(self, *gpus: int, **head: Any) -> None:
        """Start the head with more arguments, and a raylet for each number of GPUs."""
        self.cluster.add_node(**{**self._shape(0), **head})
        self.raylets = [self.cluster.add_node(wait=False, **self._shape(each)) for each in gpus]
        self.cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return str(self.cluster.address)

    def add(self, gpus: int) -> Any:
        """Start another raylet."""
        return self.cluster.add_node(**self._shape(gpus))

    def kill(self, raylet: Any) -> None:
        """End a raylet with SIGKILL."""
        self.cluster.remove_node(raylet, allow_graceful=False)

    def close(self) -> None:
        """End all raylets and the head."""
        self.cluster.shutdown()

    def _shape(self, gpus: int) -> dict[str, Any]:
        return {"num_cpus": 0, "num_gpus": gpus, **FEW_PROCESSES, **self._everywhere}


@contextlib.contextmanager
def ray_nodes(*gpus: int, head_gpus: int = 0, port: int | None = None) -> Iterator[RayCluster]:
    """A Ray cluster whose raylets have these numbers of GPUs, and whose head listens on `port`."""
    cluster = RayCluster()
    try:
        cluster.start(*gpus, num_gpus=head_gpus, **({} if port is None else {"gcs_server_port": port}))
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def cluster_on(nodes: RayCluster, **more: object) -> Iterator[EmbeddedCluster]:
    """This project's cluster on a Ray cluster, in a directory of its own, for team-a and team-b."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        options = {"silence_s": SILENCE_S, "warm_s": WARM_S, "node_directory": str(root / "home" / "nodes"), **more}
        config = ClusterConfig(ray=RayConfig(address=nodes.address, **options))  # type: ignore[arg-type]
        with running_cluster(root / "home", config) as cluster:
            yield cluster


@pytest.fixture(scope="package", autouse=True)
def _own_sigterm() -> Iterator[None]:
    """Ray's nodes and drivers handle this process's SIGTERM; tests after those on Ray have its own handler again."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="package")  # not longer: Ray's client, idle among other tests, was seen to hang in its next call
def nodes() -> Iterator[RayCluster]:
    """Two raylets with two GPUs each."""
    with ray_nodes(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def shared_cluster(nodes: RayCluster) -> Iterator[EmbeddedCluster]:
    """This project's cluster on these raylets, with two teams."""
    with cluster_on(nodes) as cluster:
        cluster.project("team-a", 2)
        cluster.project("team-b", 2)
        yield cluster


@pytest.fixture
def cluster(shared_cluster: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """The shared cluster; the test's jobs are deleted at its end."""
    yield shared_cluster
    for job in shared_cluster.client.list_jobs().jobs:
        shared_cluster.client.delete_job(job.spec.project, job.spec.name)
    until(lambda: not shared_cluster.client.list_jobs().jobs, "jobs are deleted")


def log_of(cluster: EmbeddedCluster, name: str, project: str = "team-a") -> str:
    """The log of a job's worker, through the API."""
    text, offset = b"", 0
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        chunk = cluster.client.read_log(project, name, offset=offset, timeout_s=1.0)
        text, offset = text + chunk.text, chunk.next_offset
        if not chunk.more:
            break
    return text.decode()


def wait_for_nodes(cluster: EmbeddedCluster, count: int) -> None:
    """Return when so many nodes are ready."""
    until(lambda: sum(view.node.ready for view in cluster.client.list_nodes()) == count, "nodes")
