"""From submit to a spawned worker, and to being listed, on a warm and idle embedded cluster.

    python benchmarks/submit_latency.py [--jobs 50] [--ray [--short-jobs 500]]

spawn_ms: from the moment before the client's submit to the moment at which the shim wrote down that the worker's
process exists (process.json). list_ms: from the same moment until a list that holds the job has been received.

With --ray the cluster runs on a Ray cluster of four raylets on this machine, with actors that are warm. Then so many
short jobs are submitted, and the daemon is killed three times meanwhile; lost and doubled count jobs that did not run,
and that ran more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import milliseconds, print_conditions, print_result

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop, start_with

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=50, help="how many submissions (default 50)")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster")
    parser.add_argument("--short-jobs", type=int, default=500, help="with --ray: how many while the daemon is killed")
    given = parser.parse_args()
    if given.ray:
        on_ray(given.jobs, given.short_jobs)
    else:
        embedded(given.jobs)


def embedded(jobs: int) -> None:
    """On one machine."""
    print_conditions("submit latency, embedded cluster, one node of 2 slots", jobs=jobs)
    with tempfile.TemporaryDirectory() as root:
        home = Home(Path(root) / "home")
        start_with(home, ClusterConfig(gpus_per_node=2))
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        try:
            client.create_project(Project(name="team", guaranteed=2))
            pairs = [measure(client, home.jobs, f"job-{number}") for number in range(jobs + 3)][3:]
        finally:
            client.stop_cluster()
            await_stop(home)
    print_result(**shown(pairs), jobs=jobs)


def on_ray(jobs: int, short_jobs: int) -> None:
    """On four raylets with two GPUs each."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (only here)

    from kfp_gpuquota.cluster.ray.config import RayConfig  # noqa: PLC0415

    shape = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**shape, "num_gpus": 0})
    for _ in range(4):
        cluster.add_node(wait=False, num_gpus=2, **shape)
    cluster.wait_for_nodes()
    print_conditions("submit latency, Ray cluster, 4 raylets of 2 slots, warm actors", jobs=jobs, short_jobs=short_jobs)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        home = Home(Path(root) / "home")
        nodes = Path(root) / "home" / "nodes"
        start_with(home, ClusterConfig(ray=RayConfig(address=cluster.address, node_directory=str(nodes))))
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        try:
            client.create_project(Project(name="team", guaranteed=8))
            pairs = [measure(client, nodes / "jobs", f"job-{number}") for number in range(jobs + 3)][3:]
            latency = shown(pairs)
            begin = time.perf_counter()
            lost, doubled = run_with_kills(client, home, Path(root) / "runs", short_jobs)
            print(f"{short_jobs} short jobs, 3 kills of the daemon: {time.perf_counter() - begin:.0f} s")
        finally:
            client.stop_cluster()
            await_stop(home)
            cluster.shutdown()
    print_result(**latency, jobs=jobs, short_jobs=short_jobs, lost=lost, doubled=doubled)


def run_with_kills(client: Client, home: Home, runs: Path, count: int) -> tuple[int, int]:
    """(how many jobs did not run, how many ran more than once), with the daemon killed at each quarter."""
    runs.mkdir()
    for number in range(count):
        command = ("sh", "-c", f"echo x >> {runs}/{number}")
        client.submit(JobSpec(name=f"short-{number}", project="team", command=command))
        if number and number % (count // 4) == 0:
            os.kill(client.health().pid, signal.SIGKILL)
            await_stop(home)
    listed = client.list_jobs("team")
    while not all(job.status.phase.final for job in listed.jobs):
        listed = client.list_jobs("team", after=listed.revision, timeout_s=5.0)
    counts = [len((runs / str(n)).read_text().split()) if (runs / str(n)).exists() else 0 for n in range(count)]
    failed = sum(job.status.phase != "Succeeded" for job in listed.jobs)
    return max(failed, sum(each == 0 for each in counts)), sum(each > 1 for each in counts)


def shown(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Print the figures; returns their medians, in milliseconds."""
    spawn, listed = milliseconds([spawn for spawn, _ in pairs]), milliseconds([listed for _, listed in pairs])
    print(f"spawned: {spawn}\nlisted:  {listed}")
    return {"spawn_ms": spawn["median"], "list_ms": listed["median"]}


def measure(client: Client, jobs: Path, name: str) -> tuple[float, float]:
    """(seconds until the process, seconds until the list) of one job; returns when the job has ended."""
    begin_wall, begin = time.time(), time.perf_counter()
    job = client.submit(JobSpec(name=name, project="team", command=("true",)))
    found = any(listed.uid == job.uid for listed in client.list_jobs("team").jobs)
    listed_s = time.perf_counter() - begin
    assert found, "the job is not listed"
    while not client.get_job("team", name).status.phase.final:
        time.sleep(0.005)
    worker = client.get_job("team", name).status.workers[0]
    process = json.loads((jobs / job.uid / "workers" / worker.id / "process.json").read_text())
    client.delete_job("team", name)
    return process["at"] - begin_wall, listed_s


if __name__ == "__main__":
    main()
