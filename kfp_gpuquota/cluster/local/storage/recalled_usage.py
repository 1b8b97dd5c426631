"""Computes projects' past over-quota usage from a cluster's history, after a restart of its daemon. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.scheduler.state.usage import decayed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.api.wire import Event

_CHANGES = (EventKind.WORKER_STARTED, EventKind.WORKER_GONE)


def recalled(
    history: Iterable[Event], projects: Mapping[str, Project], now: float, half_life_s: float
) -> Iterator[scheduler.UsageRecalled]:
    """Yield one event for each project and department, computed with its present quota for all of the history."""
    held, used, until = (dict.fromkeys(projects, 0.0) for _ in range(3))

    def catch_up(name: str, at: float) -> None:
        borrowed = max(0.0, held[name] - projects[name].guaranteed)
        used[name] = decayed(used[name], borrowed, at - until[name], half_life_s)
        until[name] = max(at, until[name])

    for event in history:
        if event.kind in _CHANGES:
            for name in _with_departments(event.project, projects):
                catch_up(name, event.at)
                held[name] += event.gpus
    for name in projects:
        catch_up(name, now)
        yield scheduler.UsageRecalled(name, used[name], now)


def _with_departments(name: str | None, projects: Mapping[str, Project]) -> Iterator[str]:
    while name is not None and name in projects:
        yield name
        name = projects[name].parent
