"""What is done on the page: jobs are submitted, also like others, stopped together, and quotas are changed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
import pytest

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Kind, Phase, Progress, Project, StopPolicy, Worker, WorkerPhase
from kfp_gpuquota.api.history import Report
from kfp_gpuquota.api.wire import StopAction
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.web.views.confirmation import losses
from kfp_gpuquota.web.views.quota import changed
from kfp_gpuquota.web.views.submission import Asked
from tests.polling import until
from tests.web.visitor import Tags

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster
    from tests.web.visitor import Answer, Visitor

HOSTILE = "\"'><img src=x onerror=alert(1)>"
SECRET = "hunter2"


@pytest.fixture
def token(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> str:
    """The token of the forms; there is a project with both GPUs."""
    embedded_cluster.project("team-a", 2)
    return visitor.form_token("/queue")


def text_of(answer: Answer) -> str:
    return " ".join(Tags(answer.text).text.split())


def fields_of(html: str) -> dict[str, str]:
    """Name and value of the fields of the form that submits, without its selects."""
    form = html[html.index('class="what-if"') :]
    command = re.search(r"<textarea[^>]*>\n([^<]*)</textarea>", form)
    assert command is not None
    inputs = {
        str(attributes["name"]): attributes.get("value") or ""
        for tag, attributes in Tags(form).tags
        if tag == "input" and "name" in attributes
    }
    return inputs | {"command": Tags(command[1]).text}


def audited(cluster: EmbeddedCluster, path: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in cluster.home.audit_file.read_text().splitlines()]
    return [line for line in lines if path in line["request"]]


def test_a_job_is_submitted_by_the_form_once_and_runs_as_one_of_the_command_line(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    form = {
        "token": token, "request": "r", "project": "team-a", "name": "made", "gpus": "1", "max_gpus": "2",
        "command": "sh -c 'pwd; exec sleep infinity'", "what-kind": "train",
    }  # fmt: skip
    for _ in range(2):  # a double click
        answer = visitor.post("/queue/submit", form)
        assert (answer.status, answer.headers["Location"]) == (303, f"{visitor.base}/jobs/team-a/made")
    spec = embedded_cluster.wait_for_phase("made", "Running").spec
    assert (spec.command, spec.gpus, spec.max_gpus) == (("sh", "-c", "pwd; exec sleep infinity"), 1, 2)
    assert spec.working_directory == str(Path.home())
    assert spec.environment["PATH"] == os.environ["PATH"]
    line = audited(embedded_cluster, "/queue/submit")[-1]
    assert (line["target"], line["status"], line["uid"]) == ("team-a/made", 303, os.geteuid())


REFUSED = (
    ("name", "Bad Name", "a name is 1 to 63 lower-case letters"),
    ("command", "", "it must name a program"),
    ("command", "sh -c 'x", "it must be as typed in a shell"),
    ("gpus", "1.5", "it must be a whole number of GPUs, or a part of one"),
    ("min_gpus", "2", "min_gpus"),
    ("gpus", "9", "the largest has 2 GPUs"),
    ("project", "nobody", "project 'nobody' does not exist"),
    ("name", "holder", "already has a job 'holder'; choose another name"),
)


def test_a_refused_job_is_shown_again_with_the_sentence_of_the_command_line(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.submit("holder")
    for field, value, message in REFUSED:
        form = {"project": "team-a", "name": "refused", "gpus": "1", "command": "sleep 1", field: value}
        answer = visitor.post("/queue/submit", {"token": token, **form})
        assert 400 <= answer.status < 500, (field, answer.text)
        refusal = re.search(r'id="refusal">([^<]*)', answer.text)
        assert refusal is not None
        assert message in Tags(refusal[1]).text
        assert fields_of(answer.text)["command"] == form["command"]
        assert audited(embedded_cluster, "/queue/submit")[-1]["status"] == answer.status
    assert [job.spec.name for job in embedded_cluster.client.list_jobs().jobs] == ["holder"]


def test_a_job_is_submitted_again_with_its_environment_which_the_page_never_shows(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    environment = {"PASSWORD": SECRET, "PATH": os.environ["PATH"]}
    embedded_cluster.submit("train-9", "sleep", "1000", environment=environment, priority=70, max_gpus=2)
    page = visitor.get("/jobs/team-a/train-9")
    link = re.search(r'href="([^"]*)">Submit again<', page.text)
    assert link is not None
    shown = visitor.get(link[1].removeprefix(visitor.base).partition("#")[0])
    assert SECRET not in page.text + shown.text
    assert "the values of 2 environment variables" in text_of(shown)
    fields = fields_of(shown.text)
    assert (fields["name"], fields["command"], fields["gpus"]) == ("train-10", "sleep 1000", "1")
    form = {**fields, "token": token, "project": "team-a", "what-kind": "train", "command": "sleep 2000"}
    assert visitor.post("/queue/submit", form).status == 303
    first, second = (embedded_cluster.job(name).spec for name in ("train-9", "train-10"))
    assert second == msgspec.structs.replace(first, name="train-10", command=("sleep", "2000"))


def test_what_is_typed_is_kept_also_if_it_is_long_or_the_job_before_is_deleted(visitor: Visitor, token: str) -> None:
    command = f"echo {'a' * 20_000}"
    form = {"project": "team-a", "name": "again", "gpus": "1", "command": command, "like": "team-a/deleted"}
    refused = visitor.post("/queue/submit", {**form, "token": token})
    assert refused.status == 404
    asked = visitor.get(f"/queue?{urlencode({**form, 'what-if': '1'})}")
    assert asked.status == 200
    for answer in (refused, asked):
        assert "project 'team-a' has no job 'deleted'" in text_of(answer)
        assert fields_of(answer.text)["command"] == command
    assert visitor.get("/queue?like=team-a/deleted").status == 404


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(name="j", project="p", command=("c",), gpu_fraction=0.25, gpu_fraction_limit=0.5),
        JobSpec(name="j", project="p", command=("c",), gpu_memory_mib=2500, gpu_devices=2),
        JobSpec(name="j", project="p", command=("sh", "-c", "a b\n\x1b[0m\n"), gpus=4, min_gpus=2, kind=Kind.TRAIN),
    ],
)
def test_a_form_that_is_not_changed_is_the_same_job(spec: JobSpec) -> None:
    job = Job(uid="u", spec=spec, status=JobStatus())

    class One:
        def job(self, _project: str, _name: str) -> Job:
            return job

        def jobs(self) -> tuple[Job, ...]:
            return (job,)

    asked = Asked.again(One(), "p/j")  # type: ignore[arg-type]
    assert asked.spec(spec) == msgspec.structs.replace(spec, name="j-2")
    with_gpus = msgspec.structs.replace(spec, name="j-2", gpus=8, min_gpus=None, **dict.fromkeys(SHARES))
    assert msgspec.structs.replace(asked_with(asked, gpus="8", min_gpus="").spec(spec)) == with_gpus


SHARES = ("gpu_fraction", "gpu_fraction_limit", "gpu_memory_mib", "gpu_devices")


def asked_with(asked: Asked, **changes: str) -> Asked:
    from dataclasses import replace  # noqa: PLC0415

    return replace(asked, **changes)  # type: ignore[arg-type]


def test_several_jobs_are_stopped_after_a_page_that_says_what_each_loses(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.project("team-b", 0)
    for name in ("one", "two"):
        embedded_cluster.submit(name)
    embedded_cluster.submit("waits", project="team-b")
    embedded_cluster.wait_for_phase("one", "Running")
    chosen = "token=" + token + "".join(f"&job={name}" for name in ("team-a/one", "team-a/two", "team-b/waits"))
    made = {"Content-Type": "application/x-www-form-urlencoded", "Origin": visitor.origin}
    page = visitor.send("POST", "/queue/confirm", f"{chosen}&action=suspend".encode(), made)
    text = text_of(page)
    assert "Suspend 3 jobs?" in text
    assert "It runs on 1 GPU, and started" in text
    assert "Nothing of it runs." in text
    assert embedded_cluster.job("one").status.phase == "Running", "nothing was asked for yet"
    assert not audited(embedded_cluster, "/queue/confirm"), "what only shows something has no line"
    answer = visitor.send("POST", "/queue/stop", f"{chosen}&action=suspend".encode(), made)
    assert answer.status == 303
    for name, project in (("one", "team-a"), ("two", "team-a"), ("waits", "team-b")):
        embedded_cluster.wait_for_phase(name, "Suspended", project)
    assert audited(embedded_cluster, "/queue/stop")[-1]["target"] == "suspend team-a/one,team-a/two,team-b/waits"
    left = visitor.send("POST", "/queue/stop", f"{chosen}&job=team-a/gone&action=delete".encode(), made)
    assert left.status == 400
    assert "no job 'gone'" in text_of(left)
    assert "In other projects: 1 stopped" in text_of(left)
    until(lambda: not embedded_cluster.client.list_jobs("team-b").jobs)
    assert len(embedded_cluster.client.list_jobs("team-a").jobs) == 2, "those of a project are stopped together or not"


def test_an_ended_job_keeps_no_other_from_being_suspended(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.submit("ended", "true")
    embedded_cluster.submit("runs")
    embedded_cluster.wait_for_phase("ended", "Succeeded")
    chosen = f"token={token}&action=suspend&job=team-a/ended&job=team-a/runs".encode()
    made = {"Content-Type": "application/x-www-form-urlencoded", "Origin": visitor.origin}
    assert "It has ended (Succeeded): nothing changes." in text_of(visitor.send("POST", "/queue/confirm", chosen, made))
    assert visitor.send("POST", "/queue/stop", chosen, made).status == 303
    embedded_cluster.wait_for_phase("runs", "Suspended")
    alone = visitor.post("/queue/stop", {"token": token, "action": "suspend", "job": "team-a/ended"})
    assert alone.status == 409
    assert "has ended (Succeeded)" in text_of(alone)


def test_a_confirmation_is_about_the_jobs_that_it_showed_and_no_later_ones_of_their_names(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.submit("one", "true")
    embedded_cluster.wait_for_phase("one", "Succeeded")
    page = visitor.get("/jobs/team-a/one/delete").text
    confirmed = {"token": token, "action": "delete", "job": re.findall(r'name="job" value="([^"]*)"', page)[0]}
    assert visitor.post("/queue/stop", confirmed).status == 303
    until(lambda: not embedded_cluster.client.list_jobs().jobs)
    assert visitor.post("/queue/stop", confirmed).status == 303, "a double click: it is deleted, as was confirmed"
    embedded_cluster.submit("one")
    stale = visitor.post("/queue/stop", confirmed)
    assert stale.status == 409
    assert "job 'one' of project 'team-a' is another one than the page showed" in text_of(stale)
    embedded_cluster.wait_for_phase("one", "Running")


def test_what_was_answered_to_a_form_has_an_address_that_leads_to_the_queue(visitor: Visitor, token: str) -> None:
    refused = visitor.post("/queue/submit", {"token": token, "project": "team-a", "name": "Bad"})
    assert refused.status == 422
    for path in ("submit", "confirm", "stop"):  # the filters, columns and colors of such a page lead there
        answer = visitor.get(f"/queue/{path}?sort=-job")
        assert (answer.status, answer.headers["Location"]) == (303, f"{visitor.base}/queue?sort=-job")


def test_one_job_is_confirmed_in_the_same_way_and_hostile_names_are_text(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.submit("one")
    for action in StopAction:
        assert f"{action.capitalize()} one?" in text_of(visitor.get(f"/jobs/team-a/one/{action}"))
    assert visitor.get("/jobs/team-a/one/resume").status == 404
    assert visitor.get("/jobs/team-a/none/delete").status == 404
    assert "no job is chosen" in text_of(visitor.post("/queue/confirm", {"token": token, "action": "delete"}))
    for path, form in (
        ("/queue/confirm", {"job": HOSTILE, "action": HOSTILE}),
        ("/queue/stop", {"job": f"team-a/{HOSTILE}", "action": "delete"}),
        ("/queue/submit", dict.fromkeys(("project", "name", "command", "gpus", "what-kind", "working_dir"), HOSTILE)),
        ("/teams/team-a/update", dict.fromkeys(("guaranteed", "limit", "parent", "stop_policy", "version"), HOSTILE)),
    ):
        answer = visitor.post(path, {"token": token, **form})
        assert 400 <= answer.status < 500, path
        assert "img" not in {tag for tag, _ in Tags(answer.text).tags}, path
        assert "img src=x" in Tags(answer.text).text, path


def test_every_form_needs_a_token_an_own_origin_and_a_cookie(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.submit("one")
    forms = {
        "/queue/submit": {"project": "team-a", "name": "x", "command": "true"},
        "/queue/confirm": {"job": "team-a/one", "action": "delete"},
        "/queue/stop": {"job": "team-a/one", "action": "delete"},
        "/teams/team-a/update": {"guaranteed": "0"},
    }
    cookie = visitor.cookie
    for path, form in forms.items():
        assert visitor.post(path, form).status == 403, path
        assert visitor.post(path, {**form, "token": "wrong"}).status == 403, path
        for origin in ("http://evil.example", "null", ""):
            assert visitor.post(path, {**form, "token": token}, Origin=origin).status == 403, (path, origin)
        visitor.cookie = ""
        assert visitor.post(path, {**form, "token": token}).status == 401, path
        assert visitor.get("/teams/team-a").status == 401
        visitor.cookie = cookie
        assert visitor.get(path).status in {303, 404, 405}, path
    assert [job.spec.name for job in embedded_cluster.client.list_jobs().jobs] == ["one"]
    assert embedded_cluster.client.get_project("team-a").project.guaranteed == 2
    assert [line["status"] for line in audited(embedded_cluster, "/queue/stop")] == [403] * 5 + [401]


def test_a_quota_is_changed_by_its_form_and_not_over_a_change_of_others(
    embedded_cluster: EmbeddedCluster, visitor: Visitor, token: str
) -> None:
    embedded_cluster.project("department", 4)
    shown = visitor.get("/teams/team-a")
    version = re.search(r'name="version" value="([^"]+)"', shown.text)
    assert version is not None
    form = {
        "token": token, "version": version[1].replace("&#34;", '"'), "guaranteed": "1.5", "limit": "2",
        "priority": "200", "weight": "0.5", "parent": "department",
    }  # fmt: skip
    assert visitor.post("/teams/team-a/update", form).status == 303
    wanted = Project(name="team-a", guaranteed=1.5, limit=2, priority=200, over_quota_weight=0.5, parent="department")
    assert embedded_cluster.client.get_project("team-a").project == wanted
    stale = visitor.post("/teams/team-a/update", {**form, "guaranteed": "0"})
    assert stale.status == 409
    assert "was changed by somebody else in the meantime" in text_of(stale)
    for policy in (StopPolicy.HOLD_AND_DRAIN, StopPolicy.NONE, StopPolicy.HOLD):
        assert visitor.post("/teams/team-a/update", {"token": token, "stop_policy": policy.value}).status == 303
        assert embedded_cluster.client.get_project("team-a").project.stop_policy is policy
    assert "It is held: none of its jobs starts" in text_of(visitor.get("/teams/team-a"))
    refused = visitor.post("/teams/team-a/update", {"token": token, "parent": "team-a"})
    assert "a project cannot be its own parent" in text_of(refused)
    statuses = [line["status"] for line in audited(embedded_cluster, "/teams/team-a/update")]
    assert statuses == [303, 409, 303, 303, 303, 422]
    assert visitor.get("/teams/nobody").status == 404


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"guaranteed": "x"}, "guaranteed is 'x', but it must be a number of GPUs"),
        ({"limit": "-1"}, "limit is -1"),
        ({"priority": "1.5"}, "priority is '1.5', but it must be a whole number"),
        ({"weight": "nan"}, "over_quota_weight"),
        ({"stop_policy": "x"}, "stop_policy is 'x', but it must be one of None, Hold, HoldAndDrain"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(form: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=re.escape(message)):
        changed(Project(name="p"), form)


RUNNING = JobStatus(
    phase=Phase.RUNNING, gpus=2, started_at=400.0,
    workers=(Worker(id="w", job_uid="u", index=0, node="n", devices=(0,), phase=WorkerPhase.RUNNING),),
)  # fmt: skip
REPORTS = [Report(500.0, 90, checkpoint_at=480.0), Report(900.0, 1100, checkpoint_at=480.0)]


@pytest.mark.parametrize(
    ("progress", "reports", "action", "sentences"),
    [
        (None, [], "delete", ["It runs on 2 GPUs, and started 10m ago.", "not saved is lost"]),
        (Progress(step=1100), [], "cancel", ["It loses all 1,100 steps: it has reported no checkpoint."]),
        (Progress(step=1100, checkpoint_at=480.0), [], "delete", ["It loses the steps since its last", "8m 40s ago"]),
        (Progress(step=1100, checkpoint_at=480.0), REPORTS, "delete", ["1,010 steps since its last checkpoint"]),
        (Progress(step=1100, checkpoint_at=480.0), REPORTS, "suspend", ["to save a checkpoint", "repeats 1,010 steps"]),
    ],
)
def test_what_a_job_loses_is_what_it_has_done_since_its_last_checkpoint(
    progress: Progress | None, reports: list[Report], action: str, sentences: list[str]
) -> None:
    status = msgspec.structs.replace(RUNNING, progress=progress)
    job = Job(uid="u", spec=JobSpec(name="j", project="p", command=("c",)), status=status)
    text = " ".join(losses(job, reports, 1000.0, StopAction(action)))
    for sentence in sentences:
        assert sentence in text
    ended = msgspec.structs.replace(job, status=JobStatus(phase=Phase.FAILED))
    assert list(losses(ended, reports, 1000.0, StopAction.CANCEL)) == ["It has ended (Failed): nothing changes."]
