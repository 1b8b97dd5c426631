"""Which waiting job could start on idle GPUs: found by trying every node for every worker, without the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.api import JobSpec, Node, Reason
    from tests.simulation.histories import History

from tests.simulation.histories import row_of, type_of

Free = dict[str, dict[int, float]]
"""The free part of each device, by node and index."""


def free_devices(nodes: Mapping[str, Node], held: list[tuple[str, tuple[int, ...], float]]) -> Free:
    """Return what `held` (node, devices, share of each) leaves of the ready nodes."""
    free: Free = {name: {d.index: 1.0 for d in node.devices} for name, node in nodes.items() if node.ready}
    for node, devices, share in held:
        for device in devices:
            if node in free and device in free[node]:
                free[node][device] -= share
    return free


def left_for(uid: str, spec: JobSpec, free: Free, waiting: Mapping[str, Reason], history: History) -> Free:
    """Return what is free for a job in its node pool, besides what is kept for others as their reasons say."""
    if uid in waiting and "behind" in waiting[uid].details:
        return {}
    named = (reason.details.get("reserved_nodes", "") for other, reason in waiting.items() if other != uid)
    kept = {node for nodes in named for node in str(nodes).split(", ")}
    usable = (node for node in free if node not in kept and history.pool_of(node) == spec.node_pool)
    return {node: free[node] for node in usable}


def fits(spec: JobSpec, free: Free, *, workers: int | None = None, beside: str = "") -> bool:
    """Return whether so many workers, else the fewest with which the job starts, can be placed at the same time.

    `beside`: a node on which the job runs. All workers of a job that accepts some types of GPUs have one type. Workers
    of a job with segments are in whole ones, each in one row.
    """
    share = spec.share_of(0)
    workers = workers or spec.smallest // spec.worker_gpus
    usable = [node for node, devices in free.items() if devices]
    if spec.segment is not None:
        types = ((type_of(beside),) if beside else spec.gpu_types) or (None,)
        return any(_segments(usable, one, spec, free) * spec.segment >= workers for one in types)
    if not spec.gpu_types:
        return _place(usable, workers, spec.worker_gpus, share, free)
    types = (type_of(beside),) if beside else spec.gpu_types
    return any(
        _place([node for node in usable if type_of(node) == one], workers, spec.worker_gpus, share, free)
        for one in types
    )


def _segments(nodes: list[str], type_: str | None, spec: JobSpec, free: Free) -> int:
    """Return how many segments fit on nodes of the type, or of any."""
    assert spec.segment is not None
    rows: dict[str, int] = {}
    for node in nodes:
        if type_ in {None, type_of(node)}:
            room = _capacity(free[node], spec.worker_gpus, spec.share_of(0))
            rows[row_of(node)] = rows.get(row_of(node), 0) + room
    return sum(room // spec.segment for room in rows.values())


def _place(nodes: list[str], workers: int, devices: int, share: float, free: Free) -> bool:
    """Workers are alike, and nodes do not influence each other: what fits on each node can be added up."""
    return sum(_capacity(free[node], devices, share) for node in nodes) >= workers


def _capacity(devices: Mapping[int, float], wanted: int, share: float) -> int:
    """Return how many workers fit on a node, each on `wanted` different devices."""
    if share >= 1:
        return sum(left >= 1 - 1e-9 for left in devices.values()) // wanted
    slots = [int((left + 1e-9) // share) for left in devices.values()]
    count = 0
    while sum(slot > 0 for slot in slots) >= wanted:
        slots.sort(reverse=True)
        slots = [slot - 1 if i < wanted else slot for i, slot in enumerate(slots)]
        count += 1
    return count
