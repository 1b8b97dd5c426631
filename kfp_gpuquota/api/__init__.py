"""The vocabulary: projects, nodes, jobs, workers and reasons, as plain typed structs that check themselves.

Belongs here: types that packages exchange, store or send over the wire; validation; JSON Schema.
Does not: decisions (scheduler, membership) and anything that does I/O.
"""

from kfp_gpuquota.api.affinity import (
    NodeTerm,
    Operator,
    Requirement,
    Taint,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from kfp_gpuquota.api.job import (
    ExpectedStart,
    Job,
    JobSpec,
    JobStatus,
    Kind,
    MeasuredSize,
    Occurrence,
    Phase,
    Progress,
    Resize,
)
from kfp_gpuquota.api.node import Device, Node
from kfp_gpuquota.api.project import Order, PoolQuota, Project, StopPolicy
from kfp_gpuquota.api.reason import Reason, ReasonCode
from kfp_gpuquota.api.worker import Worker, WorkerPhase

__all__ = [
    "Device",
    "ExpectedStart",
    "Job",
    "JobSpec",
    "JobStatus",
    "Kind",
    "MeasuredSize",
    "Node",
    "NodeTerm",
    "Occurrence",
    "Operator",
    "Order",
    "Phase",
    "PoolQuota",
    "Progress",
    "Project",
    "Reason",
    "ReasonCode",
    "Requirement",
    "Resize",
    "StopPolicy",
    "Taint",
    "TaintEffect",
    "Toleration",
    "TolerationOperator",
    "Worker",
    "WorkerPhase",
]
