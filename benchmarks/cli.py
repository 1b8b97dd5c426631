"""What a command costs as a process, beside `python -c pass` of the same interpreter.

    python benchmarks/cli.py [--jobs 1000] [--times 15]

Commands and the bare interpreter take turns, so that all see the same machine. help_ratio: `gpuquota --help` (bar: 6),
list_ratio: `gpuquota list` with so many jobs (bar: 12), submit_ratio: `gpuquota submit` (bar: 10); each is the median
of a command's times over that of the interpreter. typer_ratio: the same of a typer program with one empty command.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
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

PROGRAM = str(Path(sys.executable).with_name("gpuquota"))
BARE = [sys.executable, "-c", "pass"]
EMPTY = "import typer; app = typer.Typer(); app.command()(lambda: None); app(args=[], standalone_mode=False)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--times", type=int, default=15)
    options = parser.parse_args()
    print_conditions("commands as processes", jobs=options.jobs, times=options.times)
    with tempfile.TemporaryDirectory() as root:
        home = Home(Path(root) / "home")
        start_with(home, ClusterConfig(gpus_per_node=1, cpu_slots=True))
        client = connect({"GPUQUOTA_HOME": str(home.root)})
        try:
            queue_jobs(client, options.jobs)
            environment = {**os.environ, "GPUQUOTA_HOME": str(home.root)}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles modules when it installs them
            measure(environment, 1, "first")  # which compiles
            figures = measure(environment, options.times, "more")
        finally:
            client.stop_cluster()
            await_stop(home)
    print_result(**figures)


def queue_jobs(client: ClusterApi, jobs: int) -> None:
    """Jobs that wait behind one that holds the only GPU, for as long as this process runs."""
    client.create_project(Project(name="team", guaranteed=1))
    holder = f"while [ -e /proc/{os.getpid()} ]; do sleep 1; done"
    client.submit(JobSpec(name="holder", project="team", command=("sh", "-c", holder)))
    for number in range(jobs - 1):
        client.submit(JobSpec(name=f"job-{number}", project="team", command=("true",)))


def measure(environment: dict[str, str], times: int, submitted: str) -> dict[str, float]:
    """Return median times over the interpreter's; jobs are named after `submitted`."""
    seconds: dict[str, list[float]] = {"bare": [], "help": [], "typer": [], "list": [], "submit": []}
    for number in range(times):
        submit = [PROGRAM, "submit", f"{submitted}-{number}", "-p", "team", "--", "true"]
        for name, command in (
            ("bare", BARE),
            ("help", [PROGRAM, "--help"]),
            ("typer", [sys.executable, "-c", EMPTY]),
            ("list", [PROGRAM, "list"]),
            ("submit", submit),
        ):
            seconds[name].append(took(command, environment))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    print({name: f"{median * 1e3:.1f} ms" for name, median in medians.items()})
    ratios = {
        f"{name}_ratio": round(medians[name] / medians["bare"], 2) for name in ("help", "list", "submit", "typer")
    }
    return {**ratios, "bare_ms": round(medians["bare"] * 1e3, 1)}


def took(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of a process, in seconds."""
    begin = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
