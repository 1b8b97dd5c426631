"""What a cluster refuses at once, because waiting would not help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.api import JobSpec, Node, Project


def check_fits(spec: JobSpec, project: Project, nodes: Sequence[Node]) -> None:
    """Raises InvalidFieldError for a job that could not start even on an empty cluster."""
    if project.limit is not None and spec.smallest > project.limit:
        raise InvalidFieldError(
            "gpus",
            spec.smallest,
            f"project {project.name!r} may hold at most {project.limit} GPUs",
            hint=f"ask for less, or raise its limit: gpuquota project set {project.name} --limit {spec.smallest}",
        )
    if spec.node is not None and all(node.name != spec.node for node in nodes):
        names = ", ".join(node.name for node in nodes)
        raise InvalidFieldError("node", spec.node, f"the cluster's nodes are {names}")
    allowed = [len(node.devices) for node in nodes if spec.node in (None, node.name)]
    if spec.worker_gpus > max(allowed, default=0):
        raise InvalidFieldError(
            "gpus",
            spec.worker_gpus,
            f"one worker runs on one node, and the largest has {max(allowed, default=0)} GPUs",
            hint="make it elastic, or give gpus_per_worker, so that it may use several nodes",
        )
    most = sum(count // spec.worker_gpus for count in allowed) * spec.worker_gpus
    if spec.smallest > most:
        raise InvalidFieldError("gpus", spec.smallest, f"the cluster has room for {most} GPUs of such a job at most")
