"""Admission: rejects jobs at submission that could never start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.affinity import GPU_PRODUCT, keeps_off
from kfp_gpuquota.api.quantity import as_number, show_gpus, show_mib
from kfp_gpuquota.api.share import refuse_small_share
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.api import JobSpec, Node, Project


def check_fits(spec: JobSpec, project: Project, nodes: Sequence[Node]) -> None:
    """Raise InvalidFieldError for a job that could not start even on an empty cluster."""
    _check_limits(spec, project, nodes)
    allowed = _allowed(spec, nodes)
    _check_share(spec, allowed)
    _check_node_size(spec, allowed)
    most = sum(spec.workers_of(len(node.devices)) for node in allowed) * spec.worker_gpus
    if spec.smallest > most:
        rule = f"the cluster has room for {show_gpus(most)} of such a job at most"
        raise InvalidFieldError("gpus", spec.smallest, rule)


def _check_limits(spec: JobSpec, project: Project, nodes: Sequence[Node]) -> None:
    share = spec.share_of(max((node.gpu_memory_mib for node in nodes), default=0))
    asked = as_number(spec.smallest * min(share, 1.0))
    most = project.quota_in(spec.node_pool).limit
    if most is not None and asked > most:
        where = f" of node pool {spec.node_pool}" if spec.node_pool else ""
        option = f"--pool {spec.node_pool}=GUARANTEED:LIMIT" if spec.node_pool else f"--limit {spec.smallest}"
        raise InvalidFieldError(
            "gpus",
            asked,
            f"project {project.name!r} may hold at most {show_gpus(most)}{where}",
            hint=f"ask for less, or raise its limit: gpuquota project set {project.name} {option}",
        )
    workers = spec.workers_of(spec.smallest)
    amounts = (
        ("cpu", spec.cpu, project.limit_cpu, "CPUs"),
        ("memory_mib", spec.memory_mib, project.limit_memory_mib, "MiB of memory"),
    )
    for field, need, limit, unit in amounts:
        if need is not None and limit is not None and workers * need > limit:
            rule = f"project {project.name!r} may hold at most {limit:g} {unit}"
            raise InvalidFieldError(field, as_number(workers * need), rule, hint="ask for less, or raise its limit")


def _allowed(spec: JobSpec, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that the job may use. Raises InvalidFieldError where there are none."""
    if spec.node is not None and all(node.name != spec.node for node in nodes):
        names = ", ".join(node.name for node in nodes)
        raise InvalidFieldError("node", spec.node, f"the cluster's nodes are {names}")
    pooled = [node for node in nodes if node.pool == spec.node_pool]
    if not pooled:
        pools = ", ".join(sorted({node.pool for node in nodes if node.pool})) or "none"
        raise InvalidFieldError("node_pool", spec.node_pool, f"no node is in it; the cluster's node pools: {pools}")
    allowed = [node for node in pooled if spec.node in (None, node.name)]
    if not allowed:
        raise InvalidFieldError("node", spec.node, f"it is not in node pool {spec.node_pool!r}")
    selected = [node for node in allowed if spec.node_selector.items() <= node.labels.items()]
    if allowed and not selected:
        raise InvalidFieldError("node_selector", spec.node_selector, "no node has these labels")
    terms = spec.node_affinity
    if spec.gpu_types and selected:
        typed = [node for node in selected if node.labels.get(GPU_PRODUCT) in spec.gpu_types]
        if not typed:
            types = ", ".join(sorted({node.labels[GPU_PRODUCT] for node in selected if GPU_PRODUCT in node.labels}))
            rule = f"the types of the cluster's GPUs, by the label {GPU_PRODUCT}, are: {types or 'none'}"
            raise InvalidFieldError("gpu_types", ",".join(spec.gpu_types), rule)
        selected = typed
    admitted = [node for node in selected if not terms or any(term.admits(node.name, node.labels) for term in terms)]
    if selected and not admitted:
        raise InvalidFieldError("node_affinity", [str(term) for term in terms], "no node satisfies any of its terms")
    tolerated = [node for node in admitted if keeps_off(node.taints, spec.tolerations) is None]
    if admitted and not tolerated:
        taint = keeps_off(admitted[0].taints, spec.tolerations)
        raise InvalidFieldError(
            "tolerations", [str(t) for t in spec.tolerations], f"node {admitted[0].name} has the taint {taint}"
        )
    return tolerated


def _check_share(spec: JobSpec, nodes: Sequence[Node]) -> None:
    largest = max((node.gpu_memory_mib for node in nodes), default=0)
    for field in ("gpu_memory_mib", "gpu_memory_limit_mib"):
        mib = getattr(spec, field)
        if mib is not None and not largest:
            raise InvalidFieldError(
                field, mib, "this cluster's nodes do not report the memory of their GPUs",
                hint="ask for a fraction of a GPU, or simulate memory: gpuquota cluster start --gpu-memory 16G",
            )  # fmt: skip
        if mib is not None and mib > largest:
            raise InvalidFieldError(field, mib, f"the largest GPU has {largest} MiB ({show_mib(largest)})")
    if spec.shared and nodes:
        smallest = min((node.gpu_memory_mib for node in nodes if node.gpu_memory_mib), default=0)
        least = min(node.smallest_share for node in nodes)
        refuse_small_share(spec.gpu_fraction, spec.gpu_memory_mib, least, smallest)


def _check_node_size(spec: JobSpec, nodes: Sequence[Node]) -> None:
    """Raise InvalidFieldError for a worker that fits on no node, since a worker runs on one node."""
    most = max((len(node.devices) for node in nodes), default=0)
    if spec.worker_gpus > most:
        split = "make it elastic, or give gpus_per_worker, so that it may use several nodes"
        raise InvalidFieldError(
            "gpu_devices" if spec.shared else "gpus",
            spec.worker_gpus,
            f"one worker runs on one node, and the largest has {show_gpus(most)}",
            hint="" if spec.shared else split,
        )
    for field, unit in (("cpu", "cores"), ("memory_mib", "MiB")):
        need, have = getattr(spec, field), [getattr(node, field) for node in nodes]
        if need is not None and None not in have and need > max(have, default=0):
            largest = max(have, default=0)
            raise InvalidFieldError(field, need, f"one worker runs on one node, and the largest has {largest:g} {unit}")
