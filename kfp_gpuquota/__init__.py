"""GPU quotas for Kubeflow Pipelines: decorate a step, and it runs when its team's quota says so.

    import kfp_gpuquota as gpuquota

Everything below is imported on first use: the cluster's daemon and the step's launcher start in milliseconds because
they never import kfp, which takes half a second.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in `typing`, whose import alone would double the time of starting a program
if TYPE_CHECKING:
    from kfp_gpuquota.cluster.connect import connect
    from kfp_gpuquota.cluster.submission import JobHandle, get_job, submit
    from kfp_gpuquota.dsl.component import component, set_gpus
    from kfp_gpuquota.dsl.pipeline import pipeline
    from kfp_gpuquota.dsl.pipelines.route import route_pipeline
    from kfp_gpuquota.errors import GpuQuotaError

__all__ = [
    "GpuQuotaError",
    "JobHandle",
    "component",
    "connect",
    "get_job",
    "pipeline",
    "route_pipeline",
    "set_gpus",
    "submit",
]

_HOMES = {
    "JobHandle": "kfp_gpuquota.cluster.submission",
    "get_job": "kfp_gpuquota.cluster.submission",
    "submit": "kfp_gpuquota.cluster.submission",
    "GpuQuotaError": "kfp_gpuquota.errors",
    "component": "kfp_gpuquota.dsl.component",
    "connect": "kfp_gpuquota.cluster.connect",
    "pipeline": "kfp_gpuquota.dsl.pipeline",
    "route_pipeline": "kfp_gpuquota.dsl.pipelines.route",
    "set_gpus": "kfp_gpuquota.dsl.component",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found  # the next access does not come here
    return found


def __dir__() -> list[str]:
    return __all__
