"""What a command costs as a process against a real API server, beside `python -c pass` of the same interpreter.

    python benchmarks/cli_kubernetes.py [--jobs 1000] [--times 15]

list_s: `kubectl gpuquota list` with so many ElasticJobs (bar: 1.2 s); projects_s: `kubectl gpuquota project list`;
each is the median of a command's wall times. list_cpu_s is that of its CPU times, which say more on a busy
machine.
`PYTHONPATH` may name a folder with another version of the package kubernetes.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import print_conditions, print_result

from kfp_gpuquota.api import JobSpec, Project
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTAS
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection
from tools.devcluster import DevCluster

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = str(Path(sys.executable).with_name("kubectl-gpuquota"))
COMMANDS = {
    "bare": [sys.executable, "-c", "pass"],
    "list": [PROGRAM, "list", "-p", "team"],
    "projects": [PROGRAM, "project", "list"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--times", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        cluster = DevCluster.start(Path(root) / "cluster")
        try:
            submit(cluster, options.jobs)
            environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "GPUQUOTA_HOME": root}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles modules when it installs them
            print_conditions("commands on Kubernetes", jobs=options.jobs, times=options.times)
            measure(environment, 1)  # which compiles
            print_result(**measure(environment, options.times))
        finally:
            cluster.stop()


def submit(cluster: DevCluster, jobs: int) -> None:
    """Create the kinds, a quota and the jobs, which no controller starts."""
    for definition in custom_resource_definitions():
        name = definition["metadata"]["name"]
        cluster.api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", definition)
    cluster.api.until_served(QUOTAS)
    cluster.api.until_served("/apis/gpuquota.dev/v1alpha1/elasticjobs")
    cluster.make_namespace("team")
    client = KubernetesClient(Connection.open(str(cluster.kubeconfig)), image="trainer:1")
    client.create_project(Project(name="team", guaranteed=2))
    for number in range(jobs):
        client.submit(JobSpec(name=f"job-{number}", project="team", command=("python", "train.py")))


def measure(environment: Mapping[str, str], times: int) -> dict[str, float]:
    """Return the medians in seconds; commands and the bare interpreter take turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(times):
        for name, command in COMMANDS.items():
            taken[name].append(took(command, environment))
    wall, cpu = ({name: statistics.median(each[i] for each in taken[name]) for name in COMMANDS} for i in (0, 1))
    return {
        "list_s": round(wall["list"], 3),
        "list_best_s": round(min(taken["list"])[0], 3),
        "list_cpu_s": round(cpu["list"], 3),
        "projects_s": round(wall["projects"], 3),
        "bare_s": round(wall["bare"], 3),
    }


def took(command: list[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a process, in seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, cpu_s


if __name__ == "__main__":
    main()
