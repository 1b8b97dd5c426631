"""A thousand short jobs at once on 4 nodes of 10 slots, with the daemon killed (-9) on the way.

    python benchmarks/embedded_load.py [--jobs 1000] [--kills 5]
    python benchmarks/embedded_load.py --queued 10000 [--projects 20]

Every job appends its name to one file: a name that is missing is a lost job, one that is there twice a doubled
one.
seconds: from the first submission to the end of the last job. peak_mib: the daemon's largest resident set. list_ms,
help_ms: `gpuquota list` with all these jobs, and `gpuquota --help`, each as a process, median of 5. idle_percent: CPU
of the idle daemon, in percent of one core over 10 s.

With --queued all GPUs are held, and so many jobs wait in the projects. submit_per_s: submissions of one client after
another, each durable when it is answered. list_first_ms: until `gpuquota list -A` has printed its first line,
list_all_ms: until `gpuquota list -A -o json` has ended, explain_ms: `gpuquota explain` of the last job; medians of 5.
arrival_ms: from the answer to a submission until the job's reason is there, median of 20 that come a
tenth of a second apart. restart_s: from the daemon's
kill (-9) until it has answered again.
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
    from kfp_gpuquota.server.cluster_api import ClusterApi

IDLE_S = 10.0
GPUS = 40
HOLD_POLL_S = 1
ARRIVAL_S = 0.1
PROGRAM = str(Path(sys.executable).with_name("gpuquota"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--queued", type=int, default=0)
    parser.add_argument("--projects", type=int, default=20)
    options = parser.parse_args()
    conditions = {"jobs": options.jobs, "kills": options.kills}
    if options.queued:
        conditions = {"queued": options.queued, "projects": options.projects}
    print_conditions("embedded cluster under load, 4 nodes of 10 slots", **conditions)
    with tempfile.TemporaryDirectory() as root:
        home, hold = Home(Path(root) / "home"), Path(root) / "hold"
        hold.touch()
        start_with(home, ClusterConfig(nodes=4, gpus_per_node=10, cpu_slots=True))
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        try:
            if options.queued:
                figures = measure_queue(client, home, hold, options.queued, options.projects)
            else:
                figures = measure(client, home, Path(root) / "tally", options.jobs, options.kills)
        finally:
            client.stop_cluster()
            await_stop(home)
            hold.unlink()
            time.sleep(2 * HOLD_POLL_S)  # running jobs end by themselves, and no daemon starts waiting ones
    print_result(**figures)


def measure(client: ClusterApi, home: Home, tally: Path, jobs: int, kills: int) -> dict[str, object]:
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


def measure_queue(client: ClusterApi, home: Home, hold: Path, queued: int, projects: int) -> dict[str, object]:
    """Hold all GPUs, queue jobs, and look at what is slow with many of them."""
    names = [f"team-{number:04}" for number in range(projects)]
    for name in names:
        client.create_project(Project(name=name, guaranteed=max(1, GPUS // projects)))
    for number in range(GPUS):
        client.submit(holding(hold, f"holder-{number}", names[number % projects]))
    begin = time.perf_counter()
    for number in range(queued):
        client.submit(holding(hold, f"job-{number}", names[number % projects]))
    submitting_s = time.perf_counter() - begin
    print(f"submitted in {submitting_s:.1f} s")
    environment = {**os.environ, "GPUQUOTA_HOME": str(home.root)}
    last = (f"job-{queued - 1}", "-p", names[(queued - 1) % projects])
    return {
        "submit_per_s": round(queued / submitting_s, 1),
        "list_first_ms": first_line_ms([PROGRAM, "list", "-A"], environment),
        "list_all_ms": timed([PROGRAM, "list", "-A", "-o", "json"], environment),
        "explain_ms": timed([PROGRAM, "explain", *last], environment),
        "arrival_ms": arrival_ms(client, hold, names[0]),
        "peak_mib": round(peak_mib(client.health().pid), 1),
        "restart_s": restart_s(client),
    }


def holding(hold: Path, name: str, project: str) -> JobSpec:
    """A job that holds its GPU while a file is there."""
    command = ("sh", "-c", f"while [ -e {hold} ]; do sleep {HOLD_POLL_S}; done")
    return JobSpec(name=name, project=project, command=command, working_directory="/")


def first_line_ms(command: list[str], environment: dict[str, str]) -> float:
    """Median time until a command has printed its first line, in ms."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            assert program.stdout.readline()
            seconds.append(time.perf_counter() - begin)
            program.stdout.read()
    return round(statistics.median(seconds) * 1e3, 1)


def arrival_ms(client: ClusterApi, hold: Path, project: str) -> float:
    """Median time until a job that was submitted has been planned, in ms."""
    seconds = []
    for number in range(20):
        client.submit(holding(hold, f"arrival-{number}", project))
        begin = time.perf_counter()
        while client.get_job(project, f"arrival-{number}").status.reason is None:
            pass
        seconds.append(time.perf_counter() - begin)
        time.sleep(ARRIVAL_S)
    return round(statistics.median(seconds) * 1e3, 1)


def restart_s(client: ClusterApi) -> float:
    """From the kill of the daemon until another one has answered."""
    pid = client.health().pid
    begin = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while client.health().pid == pid:
        time.sleep(0.01)
    return round(time.perf_counter() - begin, 2)


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


def idle_percent(client: ClusterApi) -> float:
    """Return the CPU time of the daemon without requests."""
    pid = client.health().pid
    before = cpu_seconds(pid)
    time.sleep(IDLE_S)
    return round((cpu_seconds(pid) - before) / IDLE_S * 100, 3)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from the scheduler's own clock (ns)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
