"""What `gpuquota describe` shows of a project or a node. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api import Order
from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.project import run_times_of
from kfp_gpuquota.api.quantity import as_number, show_mib
from kfp_gpuquota.cli.display.output import table
from kfp_gpuquota.cli.display.project_table import (
    shown_cpu,
    shown_memory,
    shown_pools,
    shown_stop_policy,
)
from kfp_gpuquota.cli.display.tables import job_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfp_gpuquota.api import Job, Project, Taint
    from kfp_gpuquota.api.wire import NodeView, ProjectView


def described_project(view: ProjectView, jobs: Sequence[Job], find: Callable[[str], Project | None]) -> str:
    """Return its quotas, what it holds, and its jobs that have not ended; `find` returns a project above it."""
    project = view.project
    facts: list[tuple[str, object]] = [
        ("guaranteed", project.guaranteed),
        ("limit", "none" if project.limit is None else project.limit),
        ("allocated", view.allocated),
        ("borrowed", view.over_quota),
        ("lent", view.lent),
        ("requested", view.requested),
        ("priority", project.priority),
        ("weight", project.over_quota_weight),
        ("parent", project.parent or ""),
        ("cpu", shown_cpu(project)),
        ("memory", shown_memory(project)),
        ("node pools", shown_pools(project)),
        ("time of jobs", run_times_of(project)),
        ("order", "" if project.order is Order.FAIR else project.order.value),
        ("reserves after", "" if project.reserve_after_s is None else text_of(project.reserve_after_s)),
        ("stop policy", shown_stop_policy(project, find)),
        ("members", ", ".join(view.members or ())),
    ]
    parts = [table(("PROJECT", project.name), [(name, value) for name, value in facts if value != ""])]
    if jobs:
        parts.append(job_table(jobs))
    return "\n\n".join(parts)


def _shown_taint(taint: Taint) -> str:
    return f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}"


def described_node(view: NodeView) -> str:
    """Return its state, and a line for each of its GPUs with the workers that hold it."""
    node = view.node
    facts: list[tuple[str, object]] = [
        ("status", "ready" if node.ready else "not ready"),
        ("pool", node.pool),
        ("labels", ", ".join(f"{key}={value}" for key, value in sorted(node.labels.items()))),
        (
            "taints",
            ", ".join(map(_shown_taint, node.taints)),
        ),
        ("cpu", "" if node.cpu is None else f"{node.cpu:g}"),
        ("memory", "" if node.memory_mib is None else show_mib(node.memory_mib)),
    ]
    parts = [table(("NODE", node.name), [(name, value) for name, value in facts if value != ""])]
    rows = [
        (
            device.index,
            device.model,
            show_mib(device.memory_mib) if device.memory_mib else "",
            as_number(view.used.get(device.index, 0.0)),
            ", ".join(view.held.get(device.index, ())),
        )
        for device in node.devices
    ]
    if rows:
        parts.append(table(("DEVICE", "MODEL", "MEMORY", "IN USE", "WORKERS"), rows))
    others = [
        (
            one.name,
            one.type,
            as_number(one.counts_as),
            one.count,
            one.in_use,
            ", ".join(f"{pod or 'no pod'} ({amount or 'shared'})" for pod, amount in sorted(one.held.items())),
        )
        for one in view.resources
    ]
    if others:
        parts.append(table(("RESOURCE", "TYPE", "COUNTS AS", "COUNT", "IN USE", "PODS"), others))
    return "\n\n".join(parts)
