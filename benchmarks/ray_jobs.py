"""Short jobs on a Ray cluster of four raylets with two GPUs each, with the daemon killed (-9) three times.

    python benchmarks/ray_jobs.py [--jobs 500]

The first kill comes when a quarter of the jobs has been submitted, the others when a half and three quarters have
ended. Every job appends its number to one file: lost counts those that are not there or did not succeed, doubled those
that are there more than once. seconds: from the first submission to the end of the last job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from common import print_conditions, print_result

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop, start_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.server.cluster_api import ClusterApi

RAYLETS = 4
GPUS = 2
POLL_S = 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500, help="how many jobs (default 500)")
    jobs = parser.parse_args().jobs
    print_conditions(f"short jobs on Ray, {RAYLETS} raylets of {GPUS} slots, 3 kills of the daemon", jobs=jobs)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, on_raylets(Path(root)) as (client, home):
        begin = time.perf_counter()
        run_with_kills(client, home, Path(root) / "tally", jobs)
        seconds = round(time.perf_counter() - begin, 1)
        lost, doubled = counted(client, Path(root) / "tally", jobs)
    print_result(jobs=jobs, lost=lost, doubled=doubled, seconds=seconds)


@contextlib.contextmanager
def on_raylets(root: Path) -> Iterator[tuple[ClusterApi, Home]]:
    """A Ray cluster, and this project's cluster on it with its home in `root`, for one project with all GPUs."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (takes a second)

    from kfp_gpuquota.cluster.ray.config import RayConfig  # noqa: PLC0415 (only with Ray)

    shape = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**shape, "num_gpus": 0})
    with contextlib.ExitStack() as ends:
        ends.callback(cluster.shutdown)
        for _ in range(RAYLETS):
            cluster.add_node(wait=False, num_gpus=GPUS, **shape)
        cluster.wait_for_nodes()
        home = Home(root / "home")
        start_with(
            home, ClusterConfig(ray=RayConfig(address=cluster.address, node_directory=str(node_directory(home))))
        )
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        ends.callback(await_stop, home)
        ends.callback(client.stop_cluster)
        client.create_project(Project(name="team", guaranteed=RAYLETS * GPUS))
        yield client, home


def node_directory(home: Home) -> Path:
    """The directory in which the nodes keep their jobs' files."""
    return home.root / "nodes"


def run_with_kills(client: ClusterApi, home: Home, tally: Path, jobs: int) -> None:
    """Submit the jobs and wait until all have ended; meanwhile the daemon is killed three times."""
    for number in range(jobs):
        command = ("sh", "-c", f"echo {number} >> {tally}; sleep 0.1")
        client.submit(JobSpec(name=f"short-{number}", project="team", command=command, working_directory="/"))
        if number == jobs // 4:
            kill(client, home)
    for share in (0.5, 0.75):
        await_ended(client, int(jobs * share))
        kill(client, home)
    await_ended(client, jobs)


def kill(client: ClusterApi, home: Home) -> None:
    """End the daemon with SIGKILL; the next request starts another one."""
    ended = sum(job.status.phase.final for job in client.list_jobs("team").jobs)
    os.kill(client.health().pid, signal.SIGKILL)
    await_stop(home)
    print(f"killed the daemon after {ended} jobs", flush=True)


def await_ended(client: ClusterApi, count: int) -> None:
    """Return when so many jobs have ended."""
    while sum(job.status.phase.final for job in client.list_jobs("team").jobs) < count:
        time.sleep(POLL_S)


def counted(client: ClusterApi, tally: Path, jobs: int) -> tuple[int, int]:
    """Return how many jobs were lost, and how many ran more than once."""
    starts = Counter(tally.read_text().split())
    succeeded = sum(job.status.phase == "Succeeded" for job in client.list_jobs("team").jobs)
    return jobs - min(len(starts), succeeded), sum(count > 1 for count in starts.values())


if __name__ == "__main__":
    main()
