"""Ids of ElasticJobs' workers: the job's uid and the worker's index, as in the local cluster."""

from __future__ import annotations

from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import bounded_number


def worker_id(job_uid: str, index: int) -> str:
    """Return the worker's id."""
    return f"{job_uid}-{index}"


def index_of(worker: str) -> int:
    """Return the index of the worker with this id."""
    return bounded_number(worker.rpartition("-")[2]) or 0
