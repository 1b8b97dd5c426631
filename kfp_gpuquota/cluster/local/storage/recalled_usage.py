"""Computes projects' past over-quota usage from a cluster's history, after a restart of its daemon. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
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

    With the use of each project's users, as far as the entries name them.
    """
    held, used, until = (dict.fromkeys(projects, 0.0) for _ in range(3))

    def catch_up(name: str, at: float) -> None:
        borrowed = max(0.0, held[name] - projects[name].guaranteed)
        used[name] = decayed(used[name], borrowed, at - until[name], half_life_s)
        until[name] = max(at, until[name])

    users: dict[tuple[str, str], list[float]] = {}  # what each holds, has used, and until when that was counted

    def catch_up_user(user: list[float], at: float) -> None:
        user[1:] = decayed(user[1], max(0.0, user[0]), at - user[2], half_life_s), max(at, user[2])

    for event in history:
        if event.kind in _CHANGES:
            user = users.setdefault((event.project, event.user), [0.0, 0.0, 0.0])
            catch_up_user(user, event.at)
            user[0] += event.gpus
            for name in _with_departments(event.project, projects):
                catch_up(name, event.at)
                held[name] += event.gpus
    for name in projects:
        catch_up(name, now)
        mine = {who: user for (project, who), user in users.items() if project == name}
        for user in mine.values():
            catch_up_user(user, now)
        by_key = {key_of(name, who): user[1] for who, user in mine.items()}
        yield scheduler.UsageRecalled(name, used[name], now, users=by_key)


def _with_departments(name: str | None, projects: Mapping[str, Project]) -> Iterator[str]:
    while name is not None and name in projects:
        yield name
        name = projects[name].parent
