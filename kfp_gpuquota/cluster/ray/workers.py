"""The files and the environment of a worker on a node (docs/contracts.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.environment import LOOPBACK
from kfp_gpuquota.cluster.ray.messages import Task

if TYPE_CHECKING:
    from kfp_gpuquota.api import Worker
    from kfp_gpuquota.cluster.ray.config import RayConfig
    from kfp_gpuquota.engine.records import JobRecord


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the membership service for workers: its base URL, and the authority's certificate (PEM)."""

    url: str
    authority: str

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        host = urlsplit(self.url).hostname or ""
        return host == "::1" or host.startswith("127.")


def node_home(config: RayConfig, cluster: str) -> Home:
    """Return the directory of this cluster on every node. Directly below /tmp, where no other user can replace it."""
    return Home(Path(config.node_directory or f"/tmp/gpuquota-ray-{os.geteuid()}-{cluster}"))  # noqa: S108


def checkpoints_of(config: RayConfig, home: Home, uid: str) -> str:
    """Return where the job's checkpoints are."""
    if config.checkpoint_directory:
        return str(Path(config.checkpoint_directory) / uid)
    return str(home.checkpoints(uid))


def task_of(
    job: JobRecord,
    worker: Worker,
    *,
    there: Home,
    checkpoints: str,
    coordinates: Coordinates,
    token: str,
    open_files: int = 0,
    log_limit: int = 0,
) -> Task:
    """Return the worker as its node needs it. `there` is the directory on the node."""
    directory = there.worker(job.uid, worker.id)
    token_file, authority_file = directory / "token", directory / "ca.crt"
    environment = {
        "PYTHONUNBUFFERED": "1",
        **job.spec.environment,
        **({"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK} if coordinates.on_loopback else {}),
        "JOB_NAME": job.spec.name,
        "JOB_UUID": job.uid,
        "POD_INDEX": str(worker.index),
        "RUNAI_NUM_OF_GPUS": f"{worker.gpus:g}",
        "ELASTIC_COORDINATOR": join(f"{coordinates.url}/v1/membership", job.uid),
        "ELASTIC_TOKEN_FILE": str(token_file),
        "ELASTIC_CA_FILE": str(authority_file),
        "ELASTIC_WORKER_ID": worker.id,
        "ELASTIC_CHECKPOINT_DIR": checkpoints,
        "ELASTIC_REPORT_FILE": str(directory / "report.jsonl"),
        "ELASTIC_ERROR_FILE": str(directory / shims.ERROR_FILE),
    }
    return Task(
        worker=worker.id,
        root=str(there.root),
        directory=str(directory),
        files={str(token_file): token, str(authority_file): coordinates.authority},
        directories=(checkpoints,),
        command=job.spec.command,
        environment=environment,
        working_directory=job.spec.working_directory or str(there.job(job.uid)),
        grace_period_s=job.spec.grace_period_s,
        open_files=open_files,
        log_limit=log_limit,
        runtime_env=job.spec.runtime_env,
    )
