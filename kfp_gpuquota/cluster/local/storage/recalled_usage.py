"""Computes projects' past over-quota usage from a cluster's history, after a restart of its daemon. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.project import path_of
from kfp_gpuquota.api.wire import EventKind
from kfp_gpuquota.scheduler.state.usage import decayed, key_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.api.wire import Event

_CHANGES = (EventKind.WORKER_STARTED, EventKind.WORKER_GONE)


def recalled(
    history: Iterable[Event], projects: Mapping[str, Project], now: float, half_life_s: float
) -> Iterator[scheduler.UsageRecalled]:
    """Yield one event for each project and department, computed with its present quota for all of the history.

    With the use of each project's users. The history names no node pools: what is guaranteed counts in all of them.
    """
    held, used, until = (dict.fromkeys(projects, 0.0) for _ in range(3))

    def catch_up(name: str, at: float) -> None:
        borrowed = max(0.0, held[name] - projects[name].guaranteed_in_all)
        used[name] = decayed(used[name], borrowed, at - until[name], half_life_s)
        until[name] = max(at, until[name])

    changes = [event for event in history if event.kind in _CHANGES]
    for event in changes:
        for name in _with_departments(event.project, projects):
            catch_up(name, event.at)
            held[name] += event.gpus
    users = _used_by_users(changes, now, half_life_s)
    for name in projects:
        catch_up(name, now)
        yield scheduler.UsageRecalled(name, used[name], now, users=users.get(name, {}))


def changes_of(history: Iterable[Event], projects: Mapping[str, Project]) -> dict[str, float]:
    """Return when each project and department last gained or lost a worker, in seconds since the epoch."""
    found: dict[str, float] = {}
    for event in history:
        if event.kind in _CHANGES:
            for name in _with_departments(event.project, projects):
                found[name] = max(event.at, found.get(name, 0.0))
    return found


def _used_by_users(changes: Iterable[Event], now: float, half_life_s: float) -> dict[str, dict[str, float]]:
    """Return what users have used, by project and the key of their name.

    A worker counts as its user's from its start to its end by the entry of its start: earlier versions named no user,
    and the oldest entries are deleted.
    """
    users: dict[tuple[str, str], list[float]] = {}  # what each holds, has used, and until when that was counted
    running: dict[tuple[str, str], list[float]] = {}  # the user of each worker, by job and name

    def catch_up(user: list[float], at: float) -> None:
        user[1:] = decayed(user[1], max(0.0, user[0]), at - user[2], half_life_s), max(at, user[2])

    for event in changes:
        worker = event.job_uid, event.worker
        if event.kind is EventKind.WORKER_STARTED:
            running[worker] = users.setdefault((event.project, event.user), [0.0, 0.0, 0.0])
        if (user := running.get(worker)) is not None:
            catch_up(user, event.at)
            user[0] += event.gpus
        if event.kind is EventKind.WORKER_GONE:
            running.pop(worker, None)
    found: dict[str, dict[str, float]] = {}
    for (project, name), user in users.items():
        catch_up(user, now)
        found.setdefault(project, {})[key_of(project, name)] = user[1]
    return found


def _with_departments(name: str, projects: Mapping[str, Project]) -> list[str]:
    return [each.name for each in path_of(projects[name], projects.get)] if name in projects else []
