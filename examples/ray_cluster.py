"""Two teams on a Ray cluster of two nodes, all on this machine: one borrows, the other one gets its GPUs back.

    pip install 'kfp-gpuquota[quickstart,ray]'
    python examples/ray_cluster.py

A training of team-a starts with the GPU that it is guaranteed, and grows to all four while team-b is idle: its workers
run on both nodes. Then team-b submits two jobs, and the training gives back two GPUs at the end of a step, without a
restart. GPUs are simulated here, by `ray start --num-gpus 2`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from own_cluster import shut_down
from ray.cluster_utils import Cluster

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import start_with
from kfp_gpuquota.cluster.ray.config import RayConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.server.cluster_api import ClusterApi

SCRIPT = Path(__file__).with_name("train_digits.py")


def main() -> None:
    """Run it, and print what happens."""
    with ray_cluster(nodes=2, gpus=2) as address, cluster_on(address) as client:
        train = (sys.executable, str(SCRIPT), "--epochs", "100000")
        client.submit(
            JobSpec(name="train", project="team-a", command=train, gpus=1, min_gpus=1, max_gpus=4, cool_down_s=0)
        )
        job = wait_for(client, "train", lambda job: workers_of(job) == 4)
        print(f"train holds {job.status.gpus} GPUs on {len({w.node for w in job.status.workers})} nodes", flush=True)
        for name in ("urgent-1", "urgent-2"):
            client.submit(JobSpec(name=name, project="team-b", command=("sleep", "infinity")))
        job = wait_for(client, "train", lambda job: workers_of(job) == 2 and job.status.gpus == 2)
        for change in job.status.resizes:
            print(
                f"train: {change.from_gpus} -> {change.to_gpus} GPUs at step {change.step}, {change.lost_steps} steps "
                f"lost, pause {change.pause_ms} ms: {change.reason.message}"
            )
        print("restarts:", job.status.restarts)


def workers_of(job: Job) -> int:
    """Return with how many workers the job trains."""
    return job.status.progress.workers or 0 if job.status.progress else 0


def wait_for(client: ClusterApi, name: str, condition: Callable[[Job], bool]) -> Job:
    """Return the job as soon as the condition holds for it."""
    revision = None
    while True:
        listed = client.list_jobs("team-a", after=revision, timeout_s=10.0)
        revision = listed.revision
        job = next(job for job in listed.jobs if job.spec.name == name)
        if condition(job):
            return job
        if job.status.phase.final:
            sys.exit(f"{name} ended too early: {job.status.reason}")


@contextlib.contextmanager
def ray_cluster(nodes: int, gpus: int) -> Iterator[str]:
    """Start a head and nodes with simulated GPUs; gives the address."""
    shape = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**shape, "num_gpus": 0})
    try:
        for _ in range(nodes):
            cluster.add_node(wait=False, num_gpus=gpus, **shape)
        cluster.wait_for_nodes()
        print(f"Ray runs at {cluster.address}: {nodes} nodes with {gpus} GPUs each", flush=True)
        yield str(cluster.address)
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def cluster_on(address: str) -> Iterator[ClusterApi]:
    """Start this project's cluster on Ray, with two teams: what `gpuquota cluster start --ray ADDRESS` does."""
    with tempfile.TemporaryDirectory(prefix="gpuquota-", ignore_cleanup_errors=True) as directory:
        home = Home(Path(directory) / "cluster")
        os.environ["GPUQUOTA_HOME"] = str(home.root)
        try:
            start_with(home, ClusterConfig(ray=RayConfig(address=address, node_directory=str(home.root / "nodes"))))
            client = connect()
            client.create_project(Project(name="team-a", guaranteed=1))
            client.create_project(Project(name="team-b", guaranteed=2))
            yield client
        finally:
            shut_down(home)


if __name__ == "__main__":
    main()
