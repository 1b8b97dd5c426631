"""Every route of a shared cluster, asked by every kind of user: the table says who may; a new route needs a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.api.wire import Health
from kfp_gpuquota.cluster.local.shared.guard import HIDDEN, PRIVATE_REASONS
from kfp_gpuquota.server.app import build_app
from tests.shared.people import MARKS
from tests.shared.test_jobs_of_users import job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.shared.conftest import SharedCluster, Users

pytestmark = MARKS

EVERYBODY: Final = ("anna", "ben", "cleo", "dora")
MEMBERS: Final = ("anna", "ben", "dora")
OWNER: Final = ("anna", "dora")
ADMINS: Final = ("dora",)
NOBODY: Final = ()
PERSONS: Final = (*EVERYBODY, "eve")

PROJECT, JOB = "/v1/projects/{project}", "/v1/projects/{project}/jobs/{job}"
MAY: Final = {
    ("GET", "/v1/health"): EVERYBODY,
    ("GET", "/v1/openapi.json"): EVERYBODY,
    ("GET", "/metrics"): EVERYBODY,
    ("GET", "/v1/projects"): EVERYBODY,
    ("GET", PROJECT): EVERYBODY,
    ("GET", "/v1/policies"): EVERYBODY,
    ("GET", "/v1/nodes"): EVERYBODY,
    ("GET", "/v1/usage"): EVERYBODY,
    ("GET", "/v1/usage/holders"): EVERYBODY,
    ("GET", "/v1/gpu-use"): EVERYBODY,
    ("GET", "/v1/events"): EVERYBODY,
    ("GET", "/v1/jobs"): EVERYBODY,
    ("GET", JOB): EVERYBODY,
    ("POST", "/v1/what-if"): EVERYBODY,
    ("POST", "/v1/jobs"): MEMBERS,
    ("GET", f"{JOB}/logs"): OWNER,
    ("DELETE", JOB): OWNER,
    ("POST", f"{JOB}/cancel"): OWNER,
    ("POST", f"{JOB}/suspend"): OWNER,
    ("POST", f"{JOB}/resume"): OWNER,
    ("POST", f"{JOB}/update"): OWNER,
    ("POST", f"{JOB}/lease"): OWNER,
    ("POST", f"{PROJECT}/stop-jobs"): OWNER,
    ("POST", "/v1/projects"): ADMINS,
    ("PUT", PROJECT): ADMINS,
    ("DELETE", PROJECT): ADMINS,
    ("POST", f"{PROJECT}/members"): ADMINS,
    ("PUT", "/v1/policies/{policy}"): ADMINS,
    ("DELETE", "/v1/policies/{policy}"): ADMINS,
    ("GET", "/v1/debug/state"): ADMINS,
    ("POST", "/v1/page"): NOBODY,
    ("POST", "/v1/shutdown"): ADMINS,  # last
}
ALLOWED: Final = {200, 201, 204, 409}
"""409: by the state of the job or the project, which only those learn who may."""
WRITTEN_AFTER: Final = ("/lease", "/what-if")
REFUSED: Final = {0, 401, 403, 404}
"""No connection, no token, no right, nothing there (the page)."""


def routes() -> set[tuple[str, str]]:
    """Return method and path of all routes but those of memberships, which have tokens of their own."""
    health = Health(version="", pid=0, home="", started_at=0.0)
    app = build_app(None, token="", health=health, on_shutdown=lambda: None)  # type: ignore[arg-type]
    found = ((route.method, route.resource.canonical) for route in app.router.routes() if route.resource)
    return {(method, path) for method, path in found if method != "HEAD"}


def body_of(method: str, path: str, person: str, name: str) -> object:
    """Return a body that would be accepted."""
    if (method, path) == ("POST", "/v1/jobs"):
        return job(f"by-{person}", "true")[2]
    return {
        "/v1/projects": {"name": f"of-{person}"},
        PROJECT: {"name": "vision", "guaranteed": 1},
        f"{PROJECT}/members": {"add": []},
        f"{PROJECT}/stop-jobs": {"names": [name], "action": "cancel"},
        "/v1/policies/{policy}": {"name": "mine", "gpu_fraction_limit": {"most": 0.5}},
        f"{JOB}/update": {"priority": 3},
        f"{JOB}/lease": {"holder": "somebody", "duration_s": 60},
        "/v1/what-if": {},
    }.get(path)  # fmt: skip


def requests_of(person: str) -> Iterator[tuple[str, str, object]]:
    """Yield a request for each route, each about another one of anna's jobs."""
    for number, (method, path) in enumerate(MAY):
        name = f"job-{number}-{person}"
        target = path.format(project="vision", job=name, policy="mine")
        yield method, target, None if method == "GET" else body_of(method, path, person, name)


def test_each_route_has_a_line_that_says_who_may_use_it() -> None:
    assert set(MAY) == routes()


def test_each_user_may_use_the_routes_that_the_table_allows_and_no_others(
    shared_cluster: SharedCluster, users: Users
) -> None:
    about_jobs = [number for number, (_, path) in enumerate(MAY) if path.startswith((JOB, f"{PROJECT}/stop"))]
    names = [f"job-{number}-{person}" for number in about_jobs for person in PERSONS]
    submitted = users.anna.ask(shared_cluster.socket, [job(name, gpus=2) for name in names])
    assert {status for status, _ in submitted} == {201}
    wrong = []
    for person in ("eve", "cleo", "ben", "anna", "dora"):
        answers = getattr(users, person).ask(shared_cluster.socket, requests_of(person))
        for route, (status, answer) in zip(MAY, answers, strict=True):
            if (status in REFUSED) == (person in MAY[route]) or status not in REFUSED | ALLOWED:
                wrong.append((person, route, status, answer))
            if status == 0:
                assert "Permission denied" in answer
    assert not wrong
    lines = [(line, json.loads(line)) for line in shared_cluster.home.audit_file.read_text().splitlines()]
    refused = [line for line, entry in lines if entry["status"] == 403]
    assert refused
    assert not [line for line in refused if line.endswith(" }")], "what is refused takes none of the reserved space"
    begun = [line for line, entry in lines if entry["status"] < 300 and not entry["request"].endswith(WRITTEN_AFTER)]
    assert len(begun) > len(names)
    assert not [line for line in begun if not line.endswith(" }")], "a change's line is there before the change"


def test_of_a_job_of_another_user_nothing_is_shown_but_what_explains_the_queue(
    shared_cluster: SharedCluster, users: Users
) -> None:
    secret = {"environment": {"TOKEN": "hunter2"}, "working_directory": "/hunter2", "labels": {"secret": "hunter2"}}
    users.anna.ask(shared_cluster.socket, [job("hers", "sh", "-c", "echo hunter2; exit 3", **secret)])
    shared_cluster.wait_for_phase("hers", "Failed", "vision")
    looks = [("GET", "/v1/jobs", None), ("GET", "/v1/projects/vision/jobs/hers", None), ("GET", "/v1/events", None)]
    looks += [("GET", "/v1/jobs?selector=secret", None), ("GET", "/v1/nodes", None), ("GET", "/v1/usage", None)]
    looks += [("GET", "/v1/usage/holders", None)]
    for person in (users.ben, users.cleo):
        answers = person.ask(shared_cluster.socket, looks)
        assert "hunter2" not in str(answers)
        (_, listed), (_, shown), (_, events), (_, selected), *_ = answers
        assert listed["jobs"] == [shown]
        assert selected["jobs"] == []
        assert (shown["owner"], shown["spec"]["name"], shown["spec"]["gpus"]) == (users.anna.name, "hers", 1)
        assert (shown["status"]["phase"], shown["spec"]["command"]) == ("Failed", list(HIDDEN))
        assert "exit code" not in str(events)
    ((_, own),) = users.anna.ask(shared_cluster.socket, looks[1:2])
    assert own["spec"]["environment"] == {"TOKEN": "hunter2"}
    assert own["status"]["exit_code"] is not None


def test_each_reason_is_either_the_schedulers_or_private() -> None:
    words_of_jobs = {"user", "worker-failed", "worker-ended", "lease-ended"}
    assert {code.value for code in PRIVATE_REASONS} == words_of_jobs
    assert len(ReasonCode) == 38, "decide whether the new reason holds words of the job's programs or its owner"


def test_a_request_id_of_another_user_does_not_answer_with_that_users_job(
    shared_cluster: SharedCluster, users: Users
) -> None:
    hers, his = job("hers", environment={"TOKEN": "hunter2"})[2], job("his")[2]
    his["request_id"] = hers["request_id"]
    users.anna.ask(shared_cluster.socket, [("POST", "/v1/jobs", hers)])
    ((status, answer),) = users.ben.ask(shared_cluster.socket, [("POST", "/v1/jobs", his)])
    assert (status, answer["spec"]["name"], answer["owner"]) == (201, "his", users.ben.name)


def test_refusals_say_what_to_do(shared_cluster: SharedCluster, users: Users) -> None:
    users.anna.ask(shared_cluster.socket, [job("hers")])
    path = "/v1/projects/vision/jobs/hers"
    answers: list[tuple[int, Any]] = users.cleo.ask(
        shared_cluster.socket,
        [job("mine"), ("DELETE", path, None), ("POST", "/v1/projects", {"name": "mine"}), ("POST", "/v1/page", None)],
    )
    assert [answer["error"]["message"] for _, answer in answers] == [
        f"{users.cleo.name} is not a member of project 'vision'; ask an administrator for: gpuquota project set vision "
        f"--member {users.cleo.name}",
        f"job 'hers' is one of {users.anna.name}; only {users.anna.name} and administrators may delete it",
        "only administrators of this cluster may create projects; ask one of them, or root",
        "a cluster that several users share has no web page, since a browser does not show whose it is; use gpuquota "
        "list -w, top and explain",
    ]


def test_the_audit_log_has_the_user_of_each_change_whatever_it_says_of_itself(
    shared_cluster: SharedCluster, users: Users
) -> None:
    users.anna.ask(shared_cluster.socket, [job("hers", environment={"USER": "root"})])
    users.cleo.ask(shared_cluster.socket, [("DELETE", "/v1/projects/vision/jobs/hers", None)])
    lines = shared_cluster.home.audit_file.read_text().splitlines()[-2:]
    for person, line, status in zip((users.anna, users.cleo), lines, (201, 403), strict=True):
        assert f'"uid":{person.uid},"user":"{person.name}"' in line
        assert f'"status":{status}' in line
