"""From submit to a spawned worker, and to being listed, on a warm and idle embedded cluster.

    python benchmarks/submit_latency.py [--jobs 50] [--ray]

spawn_ms: from the moment before the client's submit to the moment at which the shim wrote down that the worker's
process exists (process.json). list_ms: from the same moment until a list that holds the job has been received.

With --ray the cluster runs on a Ray cluster of four raylets on this machine, with actors that are warm.
"""

from __future__ import annotations

import argparse
import json
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
    from kfp_gpuquota.server.cluster_api import ClusterApi


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=50, help="how many submissions (default 50)")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster")
    given = parser.parse_args()
    if given.ray:
        on_ray(given.jobs)
    else:
        embedded(given.jobs)


def embedded(jobs: int) -> None:
    """On one machine."""
    print_conditions("submit latency, embedded cluster, one node of 2 slots", jobs=jobs)
    with tempfile.TemporaryDirectory() as root:
        home = Home(Path(root) / "home")
        start_with(home, ClusterConfig(gpus_per_node=2, cpu_slots=True))
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        try:
            client.create_project(Project(name="team", guaranteed=2))
            pairs = [measure(client, home.jobs, f"job-{number}") for number in range(jobs + 3)][3:]
        finally:
            client.stop_cluster()
            await_stop(home)
    print_result(**shown(pairs), jobs=jobs)


def on_ray(jobs: int) -> None:
    """On four raylets with two GPUs each."""
    from ray_jobs import GPUS, RAYLETS, node_directory, on_raylets  # noqa: PLC0415 (only here)

    print_conditions(f"submit latency, Ray cluster, {RAYLETS} raylets of {GPUS} slots, warm actors", jobs=jobs)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, on_raylets(Path(root)) as (client, home):
        directory = node_directory(home) / "jobs"
        pairs = [measure(client, directory, f"job-{number}") for number in range(jobs + 3)][3:]
    print_result(**shown(pairs), jobs=jobs)


def shown(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Print the figures; returns their medians, in milliseconds."""
    spawn, listed = milliseconds([spawn for spawn, _ in pairs]), milliseconds([listed for _, listed in pairs])
    print(f"spawned: {spawn}\nlisted:  {listed}")
    return {"spawn_ms": spawn["median"], "list_ms": listed["median"]}


def measure(client: ClusterApi, jobs: Path, name: str) -> tuple[float, float]:
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
