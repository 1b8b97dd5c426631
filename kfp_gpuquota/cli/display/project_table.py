"""Projects as a table: quotas, and what is held, borrowed, lent and surplus. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.project import run_times_of, stopped_by
from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.cli.display.output import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.api.wire import ProjectView


def project_table(views: tuple[ProjectView, ...], *, wide: bool = False, headers: bool = True) -> str:
    """Return quotas and holdings: LENT is what others hold of a guarantee, SURPLUS what is held above requests.

    STOP POLICY is a column if a project has one.
    """
    columns = ["PROJECT", "GUARANTEED", "LIMIT", "ALLOCATED", "BORROWED", "LENT", "REQUESTED", "SURPLUS"]
    more = ["PRIORITY", "WEIGHT", "PARENT", "CPU", "MEMORY", "NODE POOLS", "TIME", "ORDER"] if wide else []
    projects = {view.project.name: view.project for view in views}
    policies = [shown_stop_policy(project, projects.get) for project in projects.values()]
    stopped = wide or any(policies)
    more += ["STOP POLICY"] if stopped else []
    rows = (
        [
            *_row(view),
            *(_wide_row(view) if wide else []),
            *([policy] if stopped else []),
        ]
        for view, policy in zip(views, policies, strict=True)
    )
    return table(columns + more, rows, headers=headers)


def _row(view: ProjectView) -> list[object]:
    project = view.project
    limit = "none" if project.limit is None else project.limit
    amounts = (view.allocated, view.over_quota, view.lent, view.requested, view.surplus)
    return [project.name, project.guaranteed, limit, *amounts]


def _wide_row(view: ProjectView) -> list[object]:
    project = view.project
    return [
        project.priority,
        project.over_quota_weight,
        project.parent,
        shown_cpu(project),
        shown_memory(project),
        shown_pools(project),
        run_times_of(project),
        project.order.value,
    ]


def shown_cpu(project: Project) -> str:
    """Return the quotas of CPU cores: "4 of at most 8"."""
    return _both([None if value is None else f"{value:g}" for value in (project.guaranteed_cpu, project.limit_cpu)])


def shown_memory(project: Project) -> str:
    """Return the quotas of main memory: "16Gi of at most 32Gi"."""
    sizes = (project.guaranteed_memory_mib, project.limit_memory_mib)
    return _both([None if mib is None else show_mib(mib) for mib in sizes])


def shown_pools(project: Project) -> str:
    """Return the quotas by node pool: "h100: 8 of at most 16, t4: 4"."""
    pools = project.pools.items()
    return ", ".join(
        f"{name}: {_both([str(q.guaranteed), None if q.limit is None else str(q.limit)])}" for name, q in pools
    )


def shown_stop_policy(project: Project, find: Callable[[str], Project | None]) -> str:
    """Return the stop policy that applies to its jobs: "Hold", or "Hold (vision)" of one above it; "" if they start."""
    by = stopped_by(project, find)
    if by is None:
        return ""
    return by.stop_policy.value + ("" if by.name == project.name else f" ({by.name})")


def _both(amounts: list[str | None]) -> str:
    """Return guaranteed and limit: "4 of at most 8"; nothing where there is no quota."""
    guaranteed, limit = amounts
    if limit is None:
        return guaranteed or ""
    return f"at most {limit}" if guaranteed is None else f"{guaranteed} of at most {limit}"
