"""A separate cluster for an example: in its own directory, with its teams, removed when the example ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.api import Project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop, start_with
from kfp_gpuquota.errors import ConflictError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kfp_gpuquota.server.client import Client


@contextlib.contextmanager
def own_cluster(directory: Path, teams: Mapping[str, int], gpus: int) -> Iterator[Client]:
    """A cluster of `gpus` GPUs in `directory`, which is emptied before, and `teams` with what each is guaranteed.

    Every process started meanwhile finds it by $GPUQUOTA_HOME. At the end none of its processes is left.
    """
    home = Home(directory / "cluster")
    os.environ["GPUQUOTA_HOME"] = str(home.root)
    with alone(directory):
        shut_down(home)  # of a run before that was killed
        shutil.rmtree(directory, ignore_errors=True)
        yield from served(home, teams, gpus)


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """One run at a time in `directory`. ConflictError where there is one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(f"another run uses {directory}; wait for its end, or run this one elsewhere") from error
        yield


def served(home: Home, teams: Mapping[str, int], gpus: int) -> Iterator[Client]:
    """The cluster from its start to its end."""
    try:
        start_with(home, ClusterConfig(gpus_per_node=gpus, cpu_slots=True))
        client = connect()
        for team, guaranteed in teams.items():
            client.create_project(Project(name=team, guaranteed=guaranteed))
        yield client
    finally:
        shut_down(home)


def end_with_its_steps(process: subprocess.Popen[Any]) -> None:
    """End a pipeline that was started in its own session, if it still runs, and return when all its processes exited.

    A step's launcher that outlived the cluster would start it again.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def shut_down(home: Home) -> None:
    """Delete all jobs of a cluster, wait until they are deleted, and stop it."""
    if not home.is_locked():
        return
    client = connect({"GPUQUOTA_HOME": str(home.root)})
    listed = client.list_jobs()
    for job in listed.jobs:
        client.delete_job(job.spec.project, job.spec.name)
    while listed.jobs:
        listed = client.list_jobs(after=listed.revision, timeout_s=1.0)
    client.stop_cluster()
    await_stop(home)
