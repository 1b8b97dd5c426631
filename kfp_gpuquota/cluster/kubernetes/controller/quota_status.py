"""Builds a GpuQuota's status, as it is to be written. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import StopPolicy
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import Built
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.conditions import with_condition
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuotaStatus
from kfp_gpuquota.cluster.kubernetes.quota.promises import promises_of

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import UnusedWorkload


def quota_status(
    snapshot: Snapshot,
    name: str,
    conditions: dict[str, tuple[Condition, ...]],
    unused: tuple[UnusedWorkload, ...] = (),
) -> Built | None:
    """Return a GpuQuota's status; None if it was deleted. `conditions` are the previous conditions, by name.

    `unused` is what is counted of the team's workloads whose GPUs are unused.
    """
    quota = snapshot.quotas.get(name)
    if quota is None:
        conditions.pop(name, None)
        return None
    held, project = snapshot.held(name), snapshot.projects.get(name)
    refused = snapshot.refused_quotas.get(name, "")
    accepted = Condition("Accepted", "True", "Valid", "it is in effect")
    if refused:
        kept = "the last valid one stays in effect" if project is not None else "no quota is in effect"
        accepted = Condition("Accepted", "False", "Invalid", f"{refused}; {kept}")
    known = with_condition(conditions.get(name, quota.status.conditions), accepted, time.time())
    stopped = _active(snapshot, name)
    if stopped.status == "False" or any(one.type == stopped.type for one in known):
        known = with_condition(known, stopped, time.time())
    conditions[name] = known
    status = GpuQuotaStatus(
        gpus=held.gpus,
        borrowed=held.borrowed,
        requested=held.requested,
        waiting=held.waiting,
        conditions=known,
        promises=promises_of(snapshot.state, name),
        usage=snapshot.borrowed.of(name),
        unused=unused,
    )
    body = {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": name},
        "status": {"gpus": 0, "borrowed": 0, "waiting": 0, **msgspec.to_builtins(status)},
    }
    path = paths.quota(name)
    return Built(
        path, name, body, (accepted.status, accepted.message, stopped.message, status.promises, _warnings(unused))
    )


def _warnings(unused: tuple[UnusedWorkload, ...]) -> tuple[tuple[str, float | None], ...]:
    """Return the warnings that hold: a controller that is killed after one must find it."""
    return tuple((one.uid, one.warned_at) for one in unused if one.warned_at is not None)


def _active(snapshot: Snapshot, name: str) -> Condition:
    """Return the condition in Kueue's words for a queue whose jobs start, or that has a stop policy."""
    queue = next(iter(snapshot.state.queues_of(name)), None)
    if queue is None or queue.halt is StopPolicy.NONE:
        return Condition("Active", "True", "Ready", "jobs can start")
    return Condition("Active", "False", "Stopped", f"stop policy {queue.halt} of {queue.halted_by.name}")
