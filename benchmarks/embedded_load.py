"""A thousand short jobs at once on 4 nodes of 10 slots, with the daemon killed (-9) on the way.

    python benchmarks/embedded_load.py [--jobs 1000] [--kills 5]

Every job appends its name to one file: a name that is missing is a lost job, one that is there twice a doubled
one.
seconds: from the first submission to the end of the last job. peak_mib: the daemon's largest resident set. list_ms,
help_ms: `gpuquota list` with all these jobs, and `gpuquota --help`, each as a process, median of 5. idle_percent: CPU
of the idle daemon, in percent of one core over 10 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
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
    from kfp_gpuquota.server.client import Client

IDLE_S = 10.0
PROGRAM = str(Path(sys.executable).with_name("gpuquota"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    print_conditions("embedded cluster under load, 4 nodes of 10 slots", jobs=options.jobs, kills=options.kills)
    with tempfile.TemporaryDirectory() as root:
        home = Home(Path(root) / "home")
        start_with(home, ClusterConfig(nodes=4, gpus_per_node=10))
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        try:
            figures = measure(client, home, Path(root) / "tally", options.jobs, options.kills)
        finally:
            client.stop_cluster()
            await_stop(home)
    print_result(**figures)


def measure(client: Client, home: Home, tally: Path, jobs: int, kills: int) -> dict[str, object]:
    """Run the load, then look at what is left."""
    client.create_project(Project(name="team", guaranteed=40))
    watcher = Watcher(home, jobs, kills)
    begin = time.perf_counter()
    watcher.start()
    for number in range(jobs):
        command = ("sh", "-c", f"echo {number} >> {tally}; sleep 0.1")
        client.submit(JobSpec(name=f"job-{number}", project="team", command=command, working_directory="/"))
    print(f"submitted in {time.perf_counter() - begin:.1f} s")
    watcher.join()
    seconds = time.perf_counter() - begin
    counted = Counter(tally.read_text().split())
    succeeded = sum(job.status.phase == "Succeeded" for job in client.list_jobs().jobs)
    environment = {**os.environ, "GPUQUOTA_HOME": str(home.root)}
    return {
        "seconds": round(seconds, 1),
        "lost": jobs - min(len(counted), succeeded),
        "doubled": sum(count > 1 for count in counted.values()),
        "peak_mib": round(watcher.peak_mib, 1),
        "kills": watcher.killed,
        "list_ms": timed([PROGRAM, "list", "-A"], environment),
        "help_ms": timed([PROGRAM, "--help"], environment),
        "idle_percent": idle_percent(client),
    }


class Watcher(threading.Thread):
    """Kills the daemon at even distances, notes its size, ends when all jobs have."""

    def __init__(self, home: Home, jobs: int, kills: int) -> None:
        super().__init__(daemon=True)
        self.client = connect({"GPUQUOTA_HOME": str(home.root)})
        self.jobs, self.kills, self.home = jobs, kills, home
        self.killed, self.peak_mib = 0, 0.0

    def run(self) -> None:
        """Until every job has ended."""
        ended = 0
        while ended < self.jobs:
            time.sleep(0.5)
            ended = sum(job.status.phase.final for job in self.client.list_jobs().jobs)
            pid = self.client.health().pid
            self.peak_mib = max(self.peak_mib, peak_mib(pid))
            if self.killed < self.kills and ended * (self.kills + 1) >= self.jobs * (self.killed + 1) * 0.9:
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
                print(f"killed the daemon after {ended} jobs")


def peak_mib(pid: int) -> float:
    """The process's largest resident set so far; 0 when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Median wall time of a command as a process, in ms."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begin)
    return round(statistics.median(seconds) * 1e3, 1)


def idle_percent(client: Client) -> float:
    """CPU time of the daemon while nobody asks for anything."""
    pid = client.health().pid
    before = cpu_seconds(pid)
    time.sleep(IDLE_S)
    return round((cpu_seconds(pid) - before) / IDLE_S * 100, 3)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from the scheduler's own clock (ns)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
