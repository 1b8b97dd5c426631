"""The ids of ElasticJobs' workers: the job's uid and the worker's index, as in the embedded cluster."""

from __future__ import annotations

from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import bounded_number


def worker_id(job_uid: str, index: int) -> str:
    """As the embedded cluster calls them."""
    return f"{job_uid}-{index}"


def index_of(worker: str) -> int:
    """Of a worker by its id."""
    return bounded_number(worker.rpartition("-")[2]) or 0
