"""The tree of queues: sets their quotas, and moves a queue with its totals to another parent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api import Order, StopPolicy
from kfp_gpuquota.api.quantity import MIB
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler.state.model import BOUNDLESS, GPU, MILLI, NOTHING, UNLIMITED, Amount, Queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Project


def set_quota(queue: Queue, project: Project) -> None:
    """Set the queue's quota to the project's quota in its node pool."""
    if queue.pool:
        quota = project.quota_in(queue.pool)
        queue.deserved, queue.limit = _amount(quota.guaranteed, None, None), _amount(quota.limit, None, None)
    else:
        queue.deserved = _amount(project.guaranteed, project.guaranteed_cpu, project.guaranteed_memory_mib)
        queue.limit = _amount(project.limit, project.limit_cpu, project.limit_memory_mib)
    queue.stop_policy, queue.order = project.stop_policy, project.order
    queue.min_run_time_s, queue.reserve_after_s = project.min_runtime_s or 0.0, project.reserve_after_s
    queue.priority, queue.weights, queue.exists = project.priority, (project.over_quota_weight,) * 3, True


def remove_quota(queue: Queue) -> None:
    """Remove the queue's quota, and its place in the tree: it is as if it had never had one."""
    graft(queue, None)
    queue.priority, queue.weights, queue.exists = 100, (1.0,) * 3, False
    queue.stop_policy, queue.order = StopPolicy.NONE, Order.FAIR
    queue.min_run_time_s, queue.reserve_after_s = 0.0, None
    _bound_missing(queue)


def _bound_missing(queue: Queue) -> None:
    """Set the limits of a queue without a quota: none for those below it; its own jobs do not start (quota.py)."""
    if not queue.exists:
        queue.deserved = queue.limit = BOUNDLESS if queue.children else NOTHING


def _amount(gpus: float | None, cpu: float | None, memory_mib: int | None) -> Amount:
    given = ((gpus, GPU), (cpu, MILLI), (memory_mib, MIB))
    return Amount(*(UNLIMITED if value is None else round(value * unit) for value, unit in given))


def subtree(queue: Queue) -> Iterator[Queue]:
    """Yield the queue and all below it."""
    yield queue
    for child in queue.children.values():
        yield from subtree(child)


def graft(queue: Queue, parent: Queue | None) -> None:
    """Move the queue below another parent, with the totals of its subtree. Raises InvalidFieldError for a cycle."""
    if parent is not None and queue in parent.path:
        raise InvalidFieldError("parent", parent.name, f"it is itself below {queue.name!r}")
    for above in queue.path[1:]:
        _add_totals(above, queue, -1)
    if queue.parent is not None:
        del queue.parent.children[queue.name]
        _bound_missing(queue.parent)
    queue.parent = parent
    if parent is not None:
        parent.children[queue.name] = queue
        _bound_missing(parent)
    _set_path(queue)
    for above in queue.path[1:]:
        _add_totals(above, queue, 1)


def _set_path(queue: Queue) -> None:
    queue.path = (queue, *(queue.parent.path if queue.parent is not None else ()))
    for child in queue.children.values():
        _set_path(child)


def _add_totals(above: Queue, queue: Queue, sign: int) -> None:
    for name in ("held", "leaving", "lent", "fixed", "requested"):
        total, part = getattr(above, name), getattr(queue, name)
        for r in range(3):
            total[r] += sign * part[r]
