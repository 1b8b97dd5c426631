"""What the pages show of a real cluster, first render and stream."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import pipeline_labels
from kfp_gpuquota.api.job import ExpectedStart
from kfp_gpuquota.web.rendering import expected
from tests.web.visitor import Tags

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster
    from tests.web.visitor import Visitor


@pytest.fixture
def waiting(embedded_cluster: EmbeddedCluster) -> EmbeddedCluster:
    """Both GPUs are held by team-a, one of them borrowed; two jobs of team-b wait."""
    embedded_cluster.project("department", 2)
    embedded_cluster.project("team-a", 1, parent="department")
    embedded_cluster.project("team-b", 0, parent="department", limit=1)
    embedded_cluster.submit("holder", gpus=2)
    embedded_cluster.wait_for_phase("holder", "Running")
    embedded_cluster.submit("first", project="team-b")
    embedded_cluster.submit("second", project="team-b")
    embedded_cluster.wait_for("second", lambda job: job.status.reason is not None, "team-b")
    return embedded_cluster


def text_of(visitor: Visitor, address: str) -> str:
    return " ".join(Tags(visitor.get(address).text).text.split())


def test_teams_shows_departments_before_their_projects_and_who_borrows(
    waiting: EmbeddedCluster, visitor: Visitor
) -> None:
    text = text_of(visitor, "/teams")
    assert text.index("department") < text.index("team-a") < text.index("team-b")
    assert "2 held of 2 guaranteed" in text
    assert "borrows 1 GPU" in text
    assert "team-a" not in text_of(visitor, "/teams?namespace=team-b").partition("Show")[2]


def test_the_queue_shows_why_a_job_waits_its_place_and_what_comes_before_it(
    waiting: EmbeddedCluster, visitor: Visitor
) -> None:
    text = text_of(visitor, "/queue")
    reason = waiting.job("second", "team-b").status.reason
    assert reason is not None
    assert reason.message in text
    assert "It is number 2 of 2 that wait in its project, after first." in text
    assert "3 jobs, of which 2 wait." in text


def test_the_queue_is_filtered(waiting: EmbeddedCluster, visitor: Visitor) -> None:
    everything = {"first", "second", "holder"}
    for query, shown in {
        "namespace=team-b": {"first", "second"},
        "project=team-a": {"holder"},
        "state=waiting&word=SEC": {"second"},
        "state=running": {"holder"},
        "kind=build": set[str](),
        "state=ended": set[str](),
        "page=9": set[str](),
        "selector=!team": everything,
        "selector=team": set[str](),
        "selector=team~a": set[str](),
        "page=-1&kind=none&state=none": everything,
    }.items():
        table = visitor.get(f"/queue?{query}").text.partition("<tbody")[2].partition("</tbody>")[0]
        assert {name for name in everything if f">{name}<" in table} == shown, query


def test_a_selector_that_cannot_be_read_is_named(waiting: EmbeddedCluster, visitor: Visitor) -> None:
    assert "selector is 'team~a', but a label's key is" in text_of(visitor, "/queue?selector=team~a")


def test_what_if_answers_in_sentences_and_submits_nothing(waiting: EmbeddedCluster, visitor: Visitor) -> None:
    asked = "/queue?what-if=1&what-kind=build&gpus=1&project="
    assert "It would start" in text_of(visitor, asked + "team-a")
    assert "It would wait" in text_of(visitor, asked + "team-b")
    assert "does not exist" in text_of(visitor, asked + "nobody")
    assert "it must be a whole number" in text_of(visitor, "/queue?what-if=1&project=team-a&gpus=x")
    assert len(waiting.client.list_jobs().jobs) == 3


def test_pipelines_shows_the_steps_of_each_run_the_newest_run_first(
    embedded_cluster: EmbeddedCluster, visitor: Visitor
) -> None:
    assert "No run of a pipeline has a step here." in text_of(visitor, "/pipelines")
    embedded_cluster.project("team-a", 2)
    for run, task in (("run-1", "prepare"), ("run-1", "train"), ("run-2", "train")):
        labels = {pipeline_labels.RUN: run, pipeline_labels.TASK: task}
        embedded_cluster.submit(f"{task}-{run}", labels=labels)
    embedded_cluster.submit("of-no-run")
    embedded_cluster.wait_for_phase("train-run-1", "Running")
    text = text_of(visitor, "/pipelines?project=team-a")
    assert "2 runs." in text
    assert text.index("run-2 team-a") < text.index("run-1 team-a") < text.index("prepare") < text.rindex("train-run-1")
    assert "of-no-run" not in text
    assert re.search(r"traintrain-run-1Running1waited \d+s, ran \d+s", text)
    assert "No run" in text_of(visitor, "/pipelines?namespace=team-b")
    embedded_cluster.project("team-b", 0)
    labels = {pipeline_labels.RUN: "run-1", pipeline_labels.TASK: "evaluate"}
    embedded_cluster.submit("evaluate-run-1", project="team-b", labels=labels)
    text = text_of(visitor, "/pipelines?project=team-b")
    assert "1 run." in text
    assert "run-1 team-a, team-b" in text
    assert text.index("prepare") < text.index("evaluate")
    page = visitor.get("/jobs/team-b/evaluate-run-1")
    assert "evaluate of run-1" in " ".join(Tags(page.text).text.split())
    assert f'href="{visitor.base}/pipelines?project=team-b#run-run-1"' in page.text


def test_the_http_api_is_described_on_the_page(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    del embedded_cluster
    assert f'href="{visitor.base}/openapi.json"' in visitor.get("/teams").text
    described = json.loads(visitor.get("/openapi.json").text)
    assert described["openapi"] == "3.1.0"
    assert "/v1/jobs" in described["paths"]
    visitor.cookie = ""
    assert visitor.get("/openapi.json").status == 401


def test_nodes_shows_what_runs_on_each_gpu_and_since_when_one_is_idle(
    waiting: EmbeddedCluster, visitor: Visitor
) -> None:
    assert text_of(visitor, "/nodes").count("holder team-a") == 2
    waiting.client.suspend_job("team-a", "holder")
    waiting.client.suspend_job("team-b", "second")
    waiting.wait_for_phase("first", "Running", "team-b")
    assert "idle for" in text_of(visitor, "/nodes")
    assert "1 GPU is idle." in text_of(visitor, "/nodes")


def test_a_stream_sends_what_changed_and_after_its_id_only_what_is_newer(
    waiting: EmbeddedCluster, visitor: Visitor
) -> None:
    page = visitor.get("/queue").text
    after = page.partition('data-after="')[2].partition('"')[0]
    with visitor.stream(f"/queue?after={after}") as stream:
        waiting.client.delete_job("team-b", "first")
        message = stream.until("the only one that waits")
    assert set(message.data["lists"]) <= {"jobs"}
    with visitor.stream("/queue", message.id) as stream:
        waiting.client.suspend_job("team-b", "second")
        parts = stream.until("Suspended").data["parts"]
    uid = waiting.job("second", "team-b").uid
    assert f"job-{uid}" in json.dumps(stream.seen[-1].data)
    assert "holder" not in json.dumps(parts)


def test_a_job_page_shows_size_events_and_workers_and_that_it_was_deleted(
    waiting: EmbeddedCluster, visitor: Visitor
) -> None:
    text = text_of(visitor, "/jobs/team-a/holder")
    for shown in ("Running", "GPUs held 2 GPUs", "worker started 0 (+2)", "2 GPUs", "sleep infinity"):
        assert shown in text
    with visitor.stream("/jobs/team-a/holder") as stream:
        waiting.client.delete_job("team-a", "holder")
        assert "This job was deleted" in json.dumps(stream.until("This job was deleted").data)
    assert visitor.get("/jobs/team-a/holder").status == 404


def test_a_log_follows_is_searched_and_downloaded(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 1)
    gate = embedded_cluster.home.root / "go"
    script = f"printf 'one\\n\\033[31mtwo\\033[0m <b>\\n'; until [ -e {gate} ]; do sleep 0.02; done; echo three"
    embedded_cluster.submit("talker", "sh", "-c", script)
    with visitor.stream("/jobs/team-a/talker/log") as stream:
        first = stream.until("two")
        assert first.data == "one\ntwo <b>\n"
        gate.touch()
        last = stream.until("three")
        assert last.data == "three\n"
        assert [message.kind for message in stream.messages()] == ["end"]
    with visitor.stream("/jobs/team-a/talker/log", first.id) as stream:
        assert next(stream.messages()).data == "three\n"
    assert "two &lt;b&gt;" in visitor.get("/jobs/team-a/talker/log").text
    found = visitor.get("/jobs/team-a/talker/log?q=TWO").text
    assert "1 line has" in found
    assert "three" not in found.partition('id="log"')[2]
    whole = visitor.get("/jobs/team-a/talker/log.txt")
    assert whole.text == "one\n\x1b[31mtwo\x1b[0m <b>\nthree\n"
    assert whole.headers["Content-Disposition"] == 'attachment; filename="talker.log"'
    assert visitor.get("/jobs/team-a/talker/log?worker=99").status == 404


def test_an_expected_start_within_one_minute_is_one_time() -> None:
    noon = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
    starts = {
        (0, 59): "at about 2026-11-25 12:00 UTC",
        (0, 60): "between 2026-11-25 12:00 and 12:01 UTC",
        (0, 86400): "between 2026-11-25 12:00 and 2026-11-26 12:00 UTC",
    }
    for (earliest_s, latest_s), shown in starts.items():
        assert expected(ExpectedStart(earliest=noon + earliest_s, latest=noon + latest_s)) == shown
