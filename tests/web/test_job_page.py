"""The page of a job: what its trainings reported, over other jobs', and how it ended."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Phase
from kfp_gpuquota.api.history import Report
from kfp_gpuquota.api.time_spent import Activity
from kfp_gpuquota.errors import ConflictError, NotFoundError
from kfp_gpuquota.web.views import logs
from kfp_gpuquota.web.views.figures import Run, View, figure_charts
from kfp_gpuquota.web.views.job import Ending, facts

if TYPE_CHECKING:
    from kfp_gpuquota.web.source import Source
    from tests.conftest import EmbeddedCluster
    from tests.web.visitor import Visitor

FAILS = """
import sys, time
for i in range(40):
    print("line", i)
sys.exit("RuntimeError: <b>out of memory</b>")
"""


def job(name: str, project: str = "team-a", phase: Phase = Phase.RUNNING) -> Job:
    spec = JobSpec(name=name, project=project, command=("true",))
    return Job(uid=f"uid-{name}", spec=spec, status=JobStatus(phase=phase, submitted_at=1.0))


class Named:
    """A source of jobs by name."""

    def __init__(self, *jobs: Job) -> None:
        self.named = {(one.spec.project, one.spec.name): one for one in jobs}

    def job(self, project: str, name: str) -> Job:
        if (project, name) not in self.named:
            raise NotFoundError(f"project {project!r} has no job {name!r}; see what it has")
        return self.named[project, name]

    async def read_log(self, *_: Any) -> Any:
        raise ConflictError("you may not read it")


def view_of(source: Named, **query: str) -> View:
    return View.of(query, "team-a", cast("Source", source))


def test_what_a_job_does_that_was_just_submitted_is_a_sentence_of_its_own() -> None:
    waits = job("waits", phase=Phase.PENDING)
    status = msgspec.structs.replace(waits.status, counted_until=2.0, spent={Activity.ROOM: 0.1})
    assert dict(facts(msgspec.structs.replace(waits, status=status)))["Time spent"] == "now waiting for room"


def test_jobs_are_compared_by_name_or_project_and_those_that_do_not_exist_are_named() -> None:
    source = Named(job("b"), job("c", "team-b"))
    found = view_of(source, compare="b, team-b/c, nothing, b")
    assert found.others == (("team-a", "b"), ("team-b", "c"))
    assert found.problems == ("project 'team-a' has no job 'nothing'",)
    assert found.x == "step"
    assert view_of(source).x == "time"
    many = Named(*(job(f"j-{i}") for i in range(6)))
    found = view_of(many, compare=",".join(f"j-{i}" for i in range(6)))
    assert len(found.others) == 4
    assert "the first 4" in found.problems[0]


def test_charts_have_a_line_for_each_run_over_steps_or_time() -> None:
    mine = Run(job("a"), [Report(100.0, 0, {"loss": 4.0}), Report(160.0, 10, {"loss": 2.0})])
    other = Run(job("b"), [Report(900.0, 0, {"loss": 5.0}), Report(990.0, 20, {"loss": 1.0, "acc": 0.5})])
    by_step = {one.title: one for one in figure_charts([mine, other], View(x="step"))}
    assert list(by_step) == ["loss", "acc"]
    assert [line.xs for line in by_step["loss"].lines] == ["0 300", "0 600"]
    assert [line.name for line in by_step["acc"].lines] == ["team-a/b"]
    by_time = {one.title: one for one in figure_charts([mine, other], View(x="time"))}
    assert [line.at for line in by_time["loss"].lines] == ["0 60", "0 90"]
    assert by_time["step"].lines[0].values == "0 10"
    assert list(figure_charts([Run(job("a"), [])], View())) == []


def test_the_noise_scale_has_a_chart_where_it_is_reported() -> None:
    reports = [Report(float(i), i, {"gain": 1.5}, noise_scale=2048.0 if i else None) for i in range(3)]
    charts = {chart.title: chart for chart in figure_charts([Run(job("a"), reports)], View())}
    assert charts["noise scale (samples)"].lines[0].values == "2048 2048"
    assert charts["gain"].latest == "1.5"
    unmeasured = [Report(float(i), i, {"loss": 1.0}) for i in range(3)]
    assert "noise scale (samples)" not in {chart.title for chart in figure_charts([Run(job("a"), unmeasured)], View())}


def test_a_figure_that_is_no_longer_reported_is_a_gap() -> None:
    """A library of an earlier release does not send a figure that has become NaN, and goes on with the others."""
    reports = [Report(float(i), i, {"loss": 1.0, "acc": 0.1} if i < 3 else {"acc": 0.2}) for i in range(6)]
    loss, *_ = figure_charts([Run(job("a"), reports)], View())
    assert loss.note == "no number now: 3 of 6 reports"
    assert len(loss.gaps) == 1
    late = Run(job("a"), [Report(0.0, 0, {}), Report(1.0, 1, {"loss": 1.0})]).points(
        lambda r: r.metrics.get("loss"), "time"
    )
    assert late == [(1.0, 1.0)]
    assert math.isnan(Run(job("a"), reports).points(lambda r: r.metrics.get("loss"), "step")[-1][1])


def test_a_figure_that_is_no_number_from_the_beginning_has_a_chart_that_says_so() -> None:
    reports = [Report(float(i), i, {"acc": 0.1}, not_finite={"loss": "inf" if i else "nan"}) for i in range(3)]
    charts = {chart.title: chart for chart in figure_charts([Run(job("a"), reports)], View())}
    assert charts["loss"].note == "inf now: 3 of 3 reports"


def test_a_log_that_may_not_be_read_leaves_out_the_last_lines() -> None:
    ending = Ending(cast("Source", Named(job("a", phase=Phase.FAILED))), "team-a", "a")
    asyncio.run(ending.look())
    assert ending.text == ""


def test_a_failed_job_shows_its_last_lines_its_times_and_its_command_as_it_is_typed(
    embedded_cluster: EmbeddedCluster, visitor: Visitor
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("fails", "python3", "-c", FAILS, max_restarts=0)
    with visitor.stream("/jobs/team-a/fails") as stream:
        embedded_cluster.wait_for_phase("fails", "Failed")
        assert "line 39" in json.dumps(stream.until("Its last lines").data)
    html = visitor.get("/jobs/team-a/fails").text
    assert "RuntimeError: &lt;b&gt;out of memory" in html
    assert "line 9\n" not in html
    assert "data-ago" in html
    assert "python3 -c &#39;" in html
    assert 'class="problem" role="alert">x is &#39;y&#39;' in visitor.get("/jobs/team-a/fails?x=y").text


def test_the_logs_of_all_workers_are_searched(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 2)
    embedded_cluster.submit("two", "sh", "-c", "echo found $$; echo other", gpus=2, gpus_per_worker=1)
    embedded_cluster.wait_for_phase("two", "Succeeded")
    address = "/jobs/team-a/two/log?worker=all"
    html = visitor.get(f"{address}&q=FOUND").text
    assert "2 lines have" in html
    shown = html.partition('id="log"')[2]
    assert "worker 0 | found" in shown
    assert "worker 1 | found" in shown
    assert "other" not in shown
    assert "worker 1 | other" in visitor.get(address).text
    assert "data-follow" not in visitor.get(address).text


@pytest.mark.parametrize(("text", "lines"), [(b"a\nb\n", ["w a", "w b"]), (b"cut\nb", ["w b"])])
def test_a_line_that_may_be_cut_is_left_out(text: bytes, lines: list[str]) -> None:
    most = 5 if text.startswith(b"cut") else 100
    assert logs._lines(text, most, "", "w ") == lines
