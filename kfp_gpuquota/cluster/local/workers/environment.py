"""The environment variables of a worker (docs/contracts.md)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.annotations import LIMIT_VARIABLE
from kfp_gpuquota.api.share import compute_variables, limit_text
from kfp_gpuquota.cluster.local.devices import environment_of, threads_per_slot
from kfp_gpuquota.cluster.local.workers import shims
from kfp_gpuquota.cluster.local.workers.sharing import memory_directory, simulated_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.api import Device, JobSpec, Node, Worker
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.engine.records import JobRecord

# What a worker may inherit from the daemon's environment. A job must define all other variables itself, or it would
# depend on the shell in which the cluster was started.
INHERITED: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")

LOGIN: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
"""Of a job that runs as another user; its shim adds what that user's account has (HOME, USER, LOGNAME, SHELL)."""
OF_THE_MACHINE: Final = ("LANG", "LC_ALL", "TZ")

LOOPBACK: Final = "lo"
"""All workers are on this machine, so their ports are on no other interface."""


def worker_environment(home: Home, job: JobRecord, worker: Worker, nodes: Mapping[str, Node]) -> dict[str, str]:
    """All of it. The job's own variables win over inherited ones and over hints, never over identity."""
    held = tuple(device for device in nodes[worker.node].devices if device.index in worker.devices)
    hints = environment_of(held, threads_per_slot(tuple(nodes.values())))
    if not held:  # a job without GPUs has the cores that it asked for
        hints = {**hints, "OMP_NUM_THREADS": str(max(1, int(job.spec.cpu or 1)))}
    if job.owner is None:
        files, directory = home.job(job.uid), home.worker(job.uid, worker.id)
        base, report = _of_the_daemon(INHERITED), directory / "report.jsonl"
        error = {"ELASTIC_ERROR_FILE": str(directory / shims.ERROR_FILE)}
    else:  # root opens nothing in the owner's directory, so that an error's line is only in the log
        files, base, error = home.owners(job.uid), LOGIN | _of_the_daemon(OF_THE_MACHINE), {}
        report = files / f"report-{worker.id}.jsonl"
    return {
        **base,
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in hints.items() if name != "CUDA_VISIBLE_DEVICES"},
        **job.spec.environment,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "CUDA_VISIBLE_DEVICES": hints["CUDA_VISIBLE_DEVICES"],
        "JOB_NAME": job.spec.name,
        "JOB_UUID": job.uid,
        "POD_INDEX": str(worker.index),
        "RUNAI_NUM_OF_GPUS": f"{worker.gpus:g}",
        **_memory_limit(job.spec),
        **compute_variables(job.spec.gpu_compute),
        **_sharing(home, worker, held),
        "ELASTIC_COORDINATOR": home.coordinator_url(job.uid),
        "ELASTIC_TOKEN_FILE": str(files / home.job_token_file(job.uid).name),
        "ELASTIC_WORKER_ID": worker.id,
        "ELASTIC_CHECKPOINT_DIR": str(files / home.checkpoints(job.uid).name),
        "ELASTIC_REPORT_FILE": str(report),
        **error,
    }


def _of_the_daemon(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _sharing(home: Home, worker: Worker, held: tuple[Device, ...]) -> dict[str, str]:
    """Return the variables for the memory limit and for simulated devices (docs/fractions.md)."""
    found = {}
    if worker.share < 1 and any(device.memory_mib for device in held):
        found["ELASTIC_MEMORY_DIR"] = str(memory_directory(home, worker))
    if simulated := [device for device in held if device.memory_mib and not device.uuid]:
        directories = (str(simulated_directory(home, worker.node, device.index)) for device in simulated)
        found["ELASTIC_SIMULATED_DEVICES"] = ":".join(directories)
    return found


def _memory_limit(spec: JobSpec) -> dict[str, str]:
    """Return the limit on each device: a part if it requested one, bytes if it requested memory."""
    return {LIMIT_VARIABLE: limit_text(spec)} if spec.shared else {}
