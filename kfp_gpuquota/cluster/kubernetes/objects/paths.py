"""Paths of this project's objects in the API server."""

from __future__ import annotations

from typing import Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.objects import labels

GROUP: Final = f"/apis/{labels.API_VERSION}"
JOBS: Final = f"{GROUP}/elasticjobs"
QUOTAS: Final = f"{GROUP}/gpuquotas"
QUOTA_POLICIES: Final = f"{GROUP}/quotapolicies"
WORKLOAD_POLICIES: Final = f"{GROUP}/workloadpolicies"


def jobs_of(namespace: str) -> str:
    """Return the path of a namespace's ElasticJobs; of all with ""."""
    return join(GROUP, "namespaces", namespace, "elasticjobs") if namespace else JOBS


def job(namespace: str, name: str) -> str:
    """Return the path of an ElasticJob."""
    return join(GROUP, "namespaces", namespace, "elasticjobs", name)


def quota(name: str) -> str:
    """Return the path of a GpuQuota."""
    return join(QUOTAS, name)


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the DNS names by which programs of the cluster reach a Service."""
    return (f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local")
