"""The page of one project: its quota, and the forms that change it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Project, StopPolicy
from kfp_gpuquota.api.project import stopped_by, version_of
from kfp_gpuquota.api.quantity import as_number, gpu_quota, whole_number
from kfp_gpuquota.errors import InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.web.source import Source

STOPS: Final = {
    StopPolicy.HOLD: ("Hold", "Nothing of it starts or grows; what runs goes on, at its size."),
    StopPolicy.HOLD_AND_DRAIN: (
        "Drain",
        "Nothing of it starts, and what runs is stopped after it has saved a checkpoint, and waits. Sessions, and "
        "others that cannot be preempted, run until they end.",
    ),
    StopPolicy.NONE: ("Resume", "Its jobs start again."),
}
"""What each stop policy is called as a command, and what it does."""

ELSEWHERE: Final = "Quotas are not changed on this page; use: gpuquota project set {}"


def project_of(source: Source, name: str) -> Project:
    """Return a project. Raises NotFoundError."""
    found = next((view.project for view in source.projects() if view.project.name == name), None)
    if found is None:
        raise NotFoundError(f"project {name!r} does not exist, or you may not see it")
    return found


def changed(before: Project, form: Mapping[str, str]) -> Project:
    """Return the project with the fields that the form has. Raises InvalidFieldError."""
    given: dict[str, Any] = {}
    text = {name: value.strip() for name, value in form.items()}
    if "guaranteed" in text:
        given["guaranteed"] = gpu_quota("guaranteed", text["guaranteed"])
    if "limit" in text:
        given["limit"] = None if text["limit"] in {"", "none"} else gpu_quota("limit", text["limit"])
    if "priority" in text:
        given["priority"] = whole_number("priority", text["priority"], "")
    if "weight" in text:
        given["over_quota_weight"] = _weight(text["weight"])
    if "parent" in text:
        given["parent"] = text["parent"] or None
    if "stop_policy" in text:
        given["stop_policy"] = _stop_policy(text["stop_policy"])
    return msgspec.structs.replace(before, **given)


def values(source: Source, name: str) -> dict[str, Any]:
    """Return what the page shows. Raises NotFoundError."""
    project = project_of(source, name)
    projects = {view.project.name: view.project for view in source.projects()}
    parents = dict.fromkeys([*projects, *filter(None, [project.parent])])  # the user may not see its own parent
    by = stopped_by(project, projects.get)
    return {
        "project": project,
        "version": version_of(project),
        "guaranteed": as_number(project.guaranteed),
        "limit": "" if project.limit is None else as_number(project.limit),
        "parents": [("", "none"), *((each, each) for each in parents if each != name)],
        "stops": [(policy.value, *words) for policy, words in STOPS.items() if policy is not project.stop_policy],
        "stopped_by": by,
    }


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidFieldError("weight", text, "it must be a number, such as 1 or 0.5") from None


def _stop_policy(text: str) -> StopPolicy:
    try:
        return StopPolicy(text)
    except ValueError:
        raise InvalidFieldError("stop_policy", text, f"it must be one of {', '.join(StopPolicy)}") from None
