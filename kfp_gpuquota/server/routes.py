"""The routes under /v1, as one table: the handlers, the OpenAPI document and the tests all read it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Job, Project
from kfp_gpuquota.api.history import GPU_USE_KEPT_S, DeviceUse, GpuHours, HeldHours
from kfp_gpuquota.api.label_selector import parse_selector, selects
from kfp_gpuquota.api.policy import WorkloadPolicy
from kfp_gpuquota.api.validation import check_range
from kfp_gpuquota.api.wire import (
    EventList,
    JobList,
    JobUpdate,
    Lease,
    LogChunk,
    MembersChange,
    NodeView,
    Outlook,
    ProjectView,
    StopJobs,
    SubmitJob,
    Supposition,
)
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler.dump import StateDump
from kfp_gpuquota.server.audit import Writing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kfp_gpuquota.server.cluster_api import Backend

MAX_WAIT_S: Final = 60.0
MAX_PAGE: Final = 10_000
DEFAULT_USAGE_S: Final = 30 * 86_400.0
MAX_USAGE_S: Final = 400 * 86_400.0


@dataclass(frozen=True)
class Request:
    """One request, decoded: variables of the path, of the query, the body, and the version it is meant for."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any = None
    if_match: str = ""

    @property
    def timeout_s(self) -> float:
        """Return the seconds that a long-poll may wait."""
        return self.seconds("timeout_s", 0.0, MAX_WAIT_S)

    def seconds(self, name: str, default: float, most: float) -> float:
        """Return a time of the query in seconds."""
        value = self._number(name, default)
        check_range(name, value, 0, most, "s")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number of the query, None where it is not given."""
        if name not in self.query:
            return None
        value = self._number(name, 0)
        if value != int(value) or not 0 <= value < 1 << 62:
            raise InvalidFieldError(name, self.query[name], "it must be a whole number from 0 up")
        return int(value)

    def _number(self, name: str, default: float) -> float:
        text = self.query.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            raise InvalidFieldError(name, text, "it must be a number") from None
        if value in {float("inf"), float("-inf")} or value != value:
            raise InvalidFieldError(name, text, "it must be a finite number")
        return value


@dataclass(frozen=True)
class Route:
    """One operation. `body` and `answer` are struct types; None is an empty body, `bytes` plain text."""

    method: str
    path: str
    summary: str
    handler: Callable[[Backend, Request], Awaitable[object]]
    body: type | None = None
    answer: Any = None
    query: Mapping[str, str] = field(default_factory=dict)
    created: bool = False
    audit: Writing = Writing.FIRST


async def _list_projects(backend: Backend, _request: Request) -> object:
    return backend.list_projects()


async def _create_project(backend: Backend, request: Request) -> object:
    return backend.create_project(request.body)


async def _get_project(backend: Backend, request: Request) -> object:
    return backend.get_project(request.path["project"])


async def _set_project(backend: Backend, request: Request) -> object:
    if request.body.name != request.path["project"]:
        raise InvalidFieldError("name", request.body.name, f"the path names project {request.path['project']!r}")
    return backend.set_project(request.body, if_match=request.if_match)


async def _change_members(backend: Backend, request: Request) -> object:
    return backend.change_members(request.path["project"], request.body)


async def _delete_project(backend: Backend, request: Request) -> object:
    backend.delete_project(request.path["project"])
    return None


async def _list_policies(backend: Backend, _request: Request) -> object:
    return backend.list_policies()


async def _set_policy(backend: Backend, request: Request) -> object:
    if request.body.name != request.path["policy"]:
        raise InvalidFieldError("name", request.body.name, f"the path names policy {request.path['policy']!r}")
    return backend.set_policy(request.body)


async def _delete_policy(backend: Backend, request: Request) -> object:
    backend.delete_policy(request.path["policy"])
    return None


async def _list_nodes(backend: Backend, _request: Request) -> object:
    return backend.list_nodes()


async def _submit(backend: Backend, request: Request) -> object:
    return backend.submit(request.body)


async def _list_jobs(backend: Backend, request: Request) -> object:
    query = request.query
    limit = request.integer("limit")
    if limit is not None:
        check_range("limit", limit, 1, MAX_PAGE, "jobs")
    wanted = parse_selector(query.get("selector", ""))
    listed = await backend.list_jobs(
        query.get("project", ""), request.integer("after"), request.timeout_s, limit=limit, page=query.get("page", "")
    )
    if not wanted:
        return listed
    jobs = tuple(job for job in listed.jobs if selects(wanted, job.spec.labels))
    return msgspec.structs.replace(listed, jobs=jobs)


async def _get_job(backend: Backend, request: Request) -> object:
    return backend.get_job(request.path["project"], request.path["job"])


async def _cancel_job(backend: Backend, request: Request) -> object:
    return backend.cancel_job(request.path["project"], request.path["job"])


async def _delete_job(backend: Backend, request: Request) -> object:
    backend.delete_job(request.path["project"], request.path["job"])
    return None


async def _stop_jobs(backend: Backend, request: Request) -> object:
    backend.stop_jobs(request.path["project"], request.body.names, request.body.action)
    return None


async def _suspend_job(backend: Backend, request: Request) -> object:
    return backend.suspend_job(request.path["project"], request.path["job"])


async def _resume_job(backend: Backend, request: Request) -> object:
    return backend.resume_job(request.path["project"], request.path["job"])


async def _update_job(backend: Backend, request: Request) -> object:
    return backend.update_job(request.path["project"], request.path["job"], request.body)


async def _renew_lease(backend: Backend, request: Request) -> object:
    backend.renew_lease(request.path["project"], request.path["job"], request.body)
    return None


async def _read_log(backend: Backend, request: Request) -> object:
    return await backend.read_log(
        request.path["project"],
        request.path["job"],
        request.query.get("worker", ""),
        request.integer("offset") or 0,
        request.timeout_s,
    )


async def _what_if(backend: Backend, request: Request) -> object:
    return backend.what_if(request.body)


async def _gpu_use(backend: Backend, request: Request) -> object:
    return backend.gpu_use(request.seconds("since_s", GPU_USE_KEPT_S, GPU_USE_KEPT_S))


async def _gpu_hours(backend: Backend, request: Request) -> object:
    return backend.gpu_hours(request.seconds("since_s", DEFAULT_USAGE_S, MAX_USAGE_S))


async def _held_hours(backend: Backend, request: Request) -> object:
    return backend.held_hours(request.seconds("since_s", DEFAULT_USAGE_S, MAX_USAGE_S))


async def _debug_state(backend: Backend, _request: Request) -> object:
    return backend.debug_state()


async def _events(backend: Backend, request: Request) -> object:
    return await backend.events(request.integer("after") or 0, request.timeout_s)


_STOPS: Final = Writing.RESERVED
_JOB: Final = "/v1/projects/{project}/jobs/{job}"
_AFTER: Final = "answer only when the revision is no longer this one"
_TIMEOUT: Final = f"wait at most so many seconds (up to {MAX_WAIT_S:g}) for something new"
_WAIT: Final = {"after": _AFTER, "timeout_s": _TIMEOUT}
_USAGE: Final = {"since_s": f"of the last so many seconds (up to {MAX_USAGE_S:.0f}); else {DEFAULT_USAGE_S:.0f}"}
_LISTED: Final = {
    "project": "only this one's",
    "selector": "only those with these labels, as Kubernetes' label selectors: team in (a,b),!old",
    "limit": f"at most so many (up to {MAX_PAGE}); the answer's next_page leads to the others",
    "page": "the next_page of the answer before",
    **_WAIT,
}

ROUTES: Final = (
    Route("GET", "/v1/projects", "List projects", _list_projects, answer=tuple[ProjectView, ...]),
    Route("POST", "/v1/projects", "Create a project", _create_project, Project, ProjectView, created=True),
    Route("GET", "/v1/projects/{project}", "One project", _get_project, answer=ProjectView),
    Route("PUT", "/v1/projects/{project}", "Create or change a project", _set_project, Project, ProjectView),
    Route("POST", "/v1/projects/{project}/members", "Change members", _change_members, MembersChange, ProjectView),
    Route("DELETE", "/v1/projects/{project}", "Delete an empty project", _delete_project, audit=_STOPS),
    Route("GET", "/v1/policies", "List policies", _list_policies, answer=tuple[WorkloadPolicy, ...]),
    Route("PUT", "/v1/policies/{policy}", "Create or change a policy", _set_policy, WorkloadPolicy, WorkloadPolicy),
    Route("DELETE", "/v1/policies/{policy}", "Delete a policy", _delete_policy),
    Route("GET", "/v1/nodes", "List nodes", _list_nodes, answer=tuple[NodeView, ...]),
    Route("POST", "/v1/jobs", "Submit a job", _submit, SubmitJob, Job, created=True),
    Route("GET", "/v1/jobs", "List jobs", _list_jobs, answer=JobList, query=_LISTED),
    Route("GET", _JOB, "One job", _get_job, answer=Job),
    Route("DELETE", _JOB, "Stop a job and forget it", _delete_job, audit=_STOPS),
    Route("POST", "/v1/projects/{project}/stop-jobs", "Stop several jobs at once", _stop_jobs, StopJobs, audit=_STOPS),
    Route("POST", f"{_JOB}/cancel", "Stop a job", _cancel_job, answer=Job, audit=_STOPS),
    Route("POST", f"{_JOB}/suspend", "Stop a job and keep it out of the queue", _suspend_job, answer=Job, audit=_STOPS),
    Route("POST", f"{_JOB}/resume", "Put a suspended job back into the queue", _resume_job, answer=Job),
    Route("POST", f"{_JOB}/update", "Change a job's size bounds or priority", _update_job, JobUpdate, Job),
    Route("POST", f"{_JOB}/lease", "Keep a job alive", _renew_lease, Lease, audit=Writing.AFTER),
    Route(
        "GET",
        f"{_JOB}/logs",
        "A piece of a worker's log",
        _read_log,
        answer=LogChunk,
        query={"worker": "its id or index", "offset": "from this byte on", "timeout_s": _TIMEOUT},
    ),
    Route(
        "POST",
        "/v1/what-if",
        "What would happen, without doing it",
        _what_if,
        Supposition,
        Outlook,
        audit=Writing.AFTER,
    ),
    Route(
        "GET",
        "/v1/gpu-use",
        "Use and memory of each GPU over time",
        _gpu_use,
        answer=tuple[DeviceUse, ...],
        query={"since_s": f"of the last so many seconds (up to {GPU_USE_KEPT_S:.0f})"},
    ),
    Route(
        "GET",
        "/v1/usage",
        "GPU-hours of each project",
        _gpu_hours,
        answer=tuple[GpuHours, ...],
        query=_USAGE,
    ),
    Route(
        "GET",
        "/v1/usage/holders",
        "GPU-hours of each user and type of GPU",
        _held_hours,
        answer=tuple[HeldHours, ...],
        query=_USAGE,
    ),
    Route("GET", "/v1/debug/state", "What the planner sees", _debug_state, answer=StateDump),
    Route("GET", "/v1/events", "The cluster's history", _events, answer=EventList, query=_WAIT),
)


def decode_body(raw: bytes) -> object:
    """Return the body's JSON. It is decoded here, once, before anything is done. Raises InvalidFieldError."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidFieldError("body", raw[:60].decode(errors="replace"), "it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFieldError("body", raw[:60].decode(errors="replace"), f"it must be JSON: {error}") from None


def convert_body(route: Route, body: object) -> object:
    """Return the decoded body as the route's struct. Raises InvalidFieldError that names the field."""
    try:
        return msgspec.convert(body, type=route.body)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        path = where.rstrip("`").lstrip(".")
        raise InvalidFieldError(path or "body", _value_at(body, path), message) from None
    except RecursionError:
        raise InvalidFieldError("body", str(body)[:60], "it is nested too deeply") from None


def target_of(body: object) -> str:
    """Return project and name that a decoded body names, or several names, for the audit log."""
    spec = body.get("spec") if isinstance(body, dict) else None
    named = spec if isinstance(spec, dict) and spec.get("name") else body if isinstance(body, dict) else {}
    names = named.get("names")
    name = ",".join(map(str, names)) if isinstance(names, list) else named.get("name")
    return "/".join(text for text in (named.get("project"), name) if isinstance(text, str) and text)


def _value_at(value: Any, path: str) -> object:
    """Return the body's value at a path like `spec.command[0]`, for the error message."""
    for step in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(step) if isinstance(value, list) else step]
        except (KeyError, IndexError, TypeError, ValueError):
            break
    return value
