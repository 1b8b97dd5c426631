"""Names as kubectl's users write them, labels, ports, commands, and tables on narrow terminals: pure parts."""

from __future__ import annotations

import pytest

from kfp_gpuquota.cli.arguments import parsers
from kfp_gpuquota.cli.arguments.names import job_name, job_names, resource
from kfp_gpuquota.cli.display.jsonpath import JsonPath
from kfp_gpuquota.cli.display.output import table
from kfp_gpuquota.cli.entry import HELP_FILE
from kfp_gpuquota.cli.jobs.forwarding import port_pair
from kfp_gpuquota.cli.jobs.submit import whole_command, without_bare_command
from kfp_gpuquota.cli.main import application
from kfp_gpuquota.cli.pipeline import with_unknown_project
from kfp_gpuquota.dsl.pipelines.check import Cluster, PipelineCheck
from kfp_gpuquota.errors import UsageError


@pytest.mark.parametrize("words", [["x", "y"], ["job", "x", "y"], ["jobs", "x", "y"], ["job/x", "jobs/y"]])
def test_jobs_are_named_as_kubectl_names_them(words: list[str]) -> None:
    assert job_names(words) == ["x", "y"]


def test_a_job_called_job_is_named_by_its_own_name() -> None:
    assert job_name(["job"]) == "job"
    assert job_name(["job/job"]) == "job"


def test_another_kind_of_thing_is_refused_where_a_job_is_meant() -> None:
    with pytest.raises(UsageError, match="'node/x' names a node, and this is about a job: write job/x"):
        resource("node/x", "job")
    with pytest.raises(UsageError, match="one job is described at a time"):
        job_name(["x", "y"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("1.5", 1.5), ("30s", 30.0), ("5m", 300.0), ("1h30m", 5400.0), ("0.5s", 0.5)]
)
def test_times_are_written_as_kubectl_has_them(text: str, seconds: float) -> None:
    assert parsers.seconds("timeout", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5y", "1h x", "1..5", "\u0663s"])
def test_another_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a time is written as"):
        parsers.seconds("timeout", text)


JOB = {
    "uid": "u",
    "spec": {"name": "a", "labels": {"x.y/z": "1"}},
    "status": {"workers": [{"node": "n0", "index": 0}, {"node": "n1", "index": 1}]},
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.items[*].spec.name}", "a a"),
        ("{.items[0]['uid']}{.items[-1].uid}", "uu"),
        ("{range .items[*]}{.spec.name}{'\\t'}{.uid}{\"\\n\"}{end}", "a\tu\na\tu\n"),
        ("{.items[0].status.workers[?(@.index>0)].node}", "n1"),
        ("{.items[?(@.spec.name=='b')].uid}", ""),
        ("{.items[0].status.workers[0:1].index}", "0"),
        ("{.items[0]..node}", "n0 n1"),
        (r"{.items[0].spec.labels.x\.y/z}", "1"),
        ("{.items[1:].spec.labels}", '{"x.y/z": "1"}'),
        (".items[0].spec.absent", ""),
        ("names: {$.items[*].spec.name}", "names: a a"),
    ],
)
def test_a_jsonpath_selects_as_kubectl_s_does(template: str, text: str) -> None:
    assert JsonPath(template).of([JOB, JOB]) == text


@pytest.mark.parametrize("template", ["{.a", "{.a|b}", "{end}", "{range .items[*]}", "{.a[?(b)]}", "{'a}", "{.a[x]}"])
def test_a_jsonpath_that_cannot_be_read_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="which is not understood"):
        JsonPath(template)
    with pytest.raises(UsageError, match="no field 'metadata' here; there are uid, spec, status"):
        JsonPath("{.metadata.name}").of(JOB)


def test_a_line_is_cut_to_the_terminal_and_a_script_gets_all_of_it() -> None:
    rows = [["x", "a reason that is longer than the terminal is wide"]]
    cut = table(("JOB", "REASON"), rows, width=30)
    assert cut.splitlines()[1] == "x     a reason that is longer…"
    assert "wide" in table(("JOB", "REASON"), rows)
    assert table(("JOB", "REASON"), rows, headers=False).startswith("x ")


def test_a_sentence_without_space_beside_its_row_stands_below_it() -> None:
    rows = [["a-job-with-a-name", "Pending", "why it waits, in several words"], ["b", "Running", ""]]
    assert table(("JOB", "STATUS", "REASON"), rows, width=40).splitlines() == [
        "JOB                 STATUS",
        "  REASON",
        "a-job-with-a-name   Pending",
        "  why it waits, in several words",
        "b                   Running",
    ]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["x", "--command", "--", "sleep", "1"], ["x", "--", "sleep", "1"]),
        (["x", "--command", "-g", "1"], ["x", "-g", "1"]),
        (["x", "--command"], ["x"]),
        (["x", "--command", "sleep", "--args", "1"], ["x", "--command", "sleep", "--args", "1"]),
        (["x", "--", "tool", "--command", "--deep"], ["x", "--", "tool", "--command", "--deep"]),
    ],
)
def test_command_without_a_value_is_left_out(words: list[str], left: list[str]) -> None:
    assert without_bare_command(words) == left


def test_a_command_may_be_given_as_runai_takes_it() -> None:
    assert whole_command([], "sleep", ["infinity"]) == ("sleep", "infinity")
    assert whole_command([], "python train.py", ["--lr", "1"]) == ("python", "train.py", "--lr", "1")
    with pytest.raises(UsageError, match="choose one"):
        whole_command(["sleep"], "sleep", [])
    with pytest.raises(UsageError, match="--args is given without --command"):
        whole_command([], None, ["infinity"])


def test_ports_are_written_as_for_kubectl() -> None:
    assert (port_pair("8888"), port_pair("9000:8888")) == ((8888, 8888), (9000, 8888))
    for text in ("0", "x", "70000", ":1", "1:", "-1"):
        with pytest.raises(UsageError, match="it must be PORT or LOCAL:REMOTE"):
            port_pair(text)


def test_the_stored_help_is_that_of_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it differs, run this with COLUMNS=80, into kfp_gpuquota/cli/help.txt:
    python -c 'from kfp_gpuquota.cli.main import application; application()(["--help"], "gpuquota")'
    """
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        application()(prog_name="gpuquota", args=["--help"])
    with open(HELP_FILE) as file:  # noqa: PTH123
        assert capsys.readouterr().out == file.read()


def test_a_project_that_does_not_exist_is_a_problem_of_a_pipeline_whose_steps_name_their_own() -> None:
    found = PipelineCheck(pipeline="p", routed=(), unrouted=(), problems=())
    cluster = Cluster(projects={}, nodes=())
    (problem,) = with_unknown_project(found, "nosuch", cluster).problems
    assert problem.startswith("--project is nosuch, and there is no such project")
    assert with_unknown_project(found, "", cluster) == found
    assert with_unknown_project(found, "nosuch", None) == found
