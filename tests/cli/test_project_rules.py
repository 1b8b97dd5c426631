"""What an administrator sets of a project besides its quota: whether its jobs start, and for how long they may run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import JobSpec, Project, StopPolicy
from kfp_gpuquota.api.durations import seconds, text_of
from kfp_gpuquota.api.project import with_run_time
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

HELD = "project team-a is held by an administrator, so that none of its jobs starts (stop policy Hold)"


@pytest.mark.parametrize("duration_s", [0.5, 1, 59.25, 60, 5400, 86_400, 90_061, 31_536_000])
def test_a_length_of_time_is_shown_as_it_is_read(duration_s: float) -> None:
    assert seconds(text_of(duration_s)) == duration_s


@pytest.mark.parametrize(
    ("rules", "given", "expected"),
    [
        ({}, None, None),
        ({"default_runtime_s": 60}, None, 60),
        ({"max_runtime_s": 90}, None, 90),
        ({"default_runtime_s": 60, "max_runtime_s": 90}, None, 60),
        ({"default_runtime_s": 60, "max_runtime_s": 90}, 90, 90),
        ({"default_runtime_s": 60}, 120, 120),
    ],
)
def test_a_job_without_a_run_time_has_the_default_or_else_the_longest(
    rules: dict[str, Any], given: float | None, expected: float | None
) -> None:
    spec = JobSpec(name="x", project="a", command=("x",), max_runtime_s=given)
    assert with_run_time(spec, Project(name="a", **rules)).max_runtime_s == expected


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"default_runtime_s": 0.5}, "default_runtime_s is 0.5"),
        ({"max_runtime_s": float("nan")}, "max_runtime_s is nan"),
        ({"default_runtime_s": 61, "max_runtime_s": 60}, "it must be at most max_runtime_s, which is 60"),
    ],
)
def test_run_times_that_no_job_can_have_are_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidFieldError, match=words):
        Project(name="a", **rules)


def test_a_project_is_held_and_drained_also_by_the_next_daemon_and_resumed(cli: Cli) -> None:
    cli("project create team-a --guaranteed 1")
    cli("config project team-a")
    cli("submit", "train", "-g", "1", "--grace-period", "1", "--", "sleep", "infinity")
    cli("submit", "notebook", "-g", "1", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", train=1, notebook=1)
    assert cli("project hold team-a") == "project team-a is held: none of its jobs starts\n"
    cli("submit", "next", "-g", "1", "--", "sleep", "infinity")
    assert cli("explain next") == f"next is pending with 0 GPUs: {HELD}\n"
    assert "STOP POLICY" in cli("project list")
    assert "Hold" in cli("describe project team-a")
    cli.cluster.kill_daemon()
    assert cli("explain next") == f"next is pending with 0 GPUs: {HELD}\n"
    cli.await_gpus("team-a", train=1, notebook=1, next=0)
    cli("project drain team-a")
    cli.await_gpus("team-a", train=0, notebook=1, next=0)
    cli.cluster.kill_daemon()
    why = "none of its jobs starts (stop policy HoldAndDrain)"
    assert cli("explain train").splitlines()[0].endswith(why)
    assert "project team-a is drained (stop policy HoldAndDrain)" in cli("explain train")
    assert "held (begin, after, array, project)" in cli("describe train")
    cli("project resume team-a")
    cli.await_gpus("team-a", train=1, notebook=1, next=0)
    (view,) = json.loads(cli("project list -o json"))
    assert view["project"]["stop_policy"] == StopPolicy.NONE.value


def test_a_project_below_a_held_one_is_shown_as_held_and_is_not_resumed_alone(cli: Cli) -> None:
    cli("project create vision --guaranteed 1")
    cli("project create team-a --guaranteed 1 --parent vision")
    cli("project hold vision")
    told = cli("project resume team-a")
    assert told == (
        "project team-a has no stop policy any more, but vision above it has Hold: none of its jobs starts until: "
        "gpuquota project resume vision\n"
    )
    rows = dict(line.split(maxsplit=1) for line in cli("project list").splitlines())
    assert rows["team-a"].endswith("Hold (vision)")
    assert "Hold (vision)" in cli("describe project team-a")
    cli("project drain team-a")
    assert "HoldAndDrain" in cli("describe project team-a"), "the strictest one applies"
    assert cli("project resume vision") == "project vision is resumed: its jobs start again\n"


def test_jobs_get_the_time_of_their_project_and_no_longer_one(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2 --default-time 1h --max-time 90m")
    cli("config project team-a")
    told = cli("submit", "usual", "-g", "1", "--", "sleep", "infinity")
    assert "its maximum run time is 1h: the default of project team-a" in told
    told = cli("submit", "sweep", "-g", "1", "--array", "0-1", "--", "true")
    assert told.count("its maximum run time is 1h: the default of project team-a") == 1
    assert "1h" in cli("describe usual").partition("maximum run time")[2].splitlines()[0]
    refused = cli.run("submit", "long", "-g", "1", "--time", "2h", "--", "true")
    assert refused.err.strip() == "Error: --time is 2h, but project 'team-a' allows at most 1h30m"
    cli("submit", "longest", "-g", "1", "--time", "90m", "--", "true")
    described = cli("describe project team-a")
    assert described.partition("time of jobs")[2].splitlines()[0].strip() == "1h by default, at most 1h30m"
    assert "--default-time is 2h, but it must be at most" in cli.run("project set team-a --default-time 2h").err
    cli("project set team-a --default-time none --max-time none")
    assert cli.job("usual", "team-a")["spec"]["max_runtime_s"] == 3600, "a submitted job keeps its own"


def test_a_project_is_taken_out_of_its_department(cli: Cli) -> None:
    cli("project create vision --guaranteed 2")
    cli("project create team-a --guaranteed 1 --parent vision")
    cli("project set team-a --parent none")
    views = json.loads(cli("project list -o json"))
    assert [view["project"].get("parent") for view in views] == [None, None]
    cli("project delete vision")


def test_a_department_is_not_bounded_below_what_the_projects_in_it_hold(cli: Cli) -> None:
    cli("project create vision --guaranteed 2 --limit 2")
    cli("project create team-a --guaranteed 2")
    cli("submit", "notebook", "-p", "team-a", "-g", "1", "--interactive", "--", "sleep", "infinity")
    cli("submit", "train", "-p", "team-a", "-g", "1", "--", "sleep", "infinity")
    cli.await_gpus("team-a", notebook=1, train=1)
    cli("project create small --limit 1")
    for words, sentence in (
        ("team-a --parent small", "with project 'team-a', its department 'small' would hold 1 GPU in jobs that cannot"),
        ("small --guaranteed 1 --limit 1", ""),
        ("team-a --parent small", "its department 'small' would hold 2 GPUs, more than the limit 1"),
        ("team-a --parent vision", ""),
        ("vision --guaranteed 0", "project 'vision' holds 1 GPU in jobs that cannot be preempted, more than the new"),
        ("vision --guaranteed 1 --limit 1", "project 'vision' holds 2 GPUs, more than the new limit 1"),
        ("vision --parent small", "with project 'vision', its department 'small' would hold 2 GPUs"),
        ("team-a --guaranteed 1 --parent vision", ""),
    ):
        answer = cli.run(f"project set {words}")
        assert (answer.code, sentence in answer.err) == (2 if sentence else 0, True), (words, answer)


def test_a_project_is_as_before_where_its_members_cannot_be_changed(cli: Cli) -> None:
    assert cli.run("project create team-x --guaranteed 1 --member root").code == 2
    assert "team-x" not in cli("project list -o json")
    cli("project create team-x --guaranteed 1")
    assert cli.run("project set team-x --guaranteed 2 --member root").code == 2
    assert json.loads(cli("project list -o json"))[0]["project"]["guaranteed"] == 1
