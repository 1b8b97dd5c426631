"""`gpuquota submit --follow`: a job's log and exit status as those of a command."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import PROGRAM
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


@pytest.fixture
def team(cli: Cli) -> Cli:
    """On one node of 2 slots, with a project to work in."""
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    return cli


@pytest.mark.parametrize(
    ("code", "end"), [(0, "job x succeeded after"), (3, "job x failed with exit code 3: worker 0")]
)
def test_the_log_is_shown_and_the_jobs_exit_status_is_the_commands(team: Cli, code: int, end: str) -> None:
    answer = team.run("submit", "x", "-f", "--", "sh", "-c", f"echo one; echo two >&2; exit {code}")
    assert (answer.code, answer.out) == (code, "one\ntwo\n")
    first, *_, last = answer.err.splitlines()
    assert first.startswith("job x submitted to project team-a")
    assert last.startswith(end)


def follow(team: Cli, *command: str) -> subprocess.Popen[str]:
    """A job x of this command is submitted, and its log is followed."""
    return subprocess.Popen(
        [PROGRAM, "submit", "x", "-f", "--", *command],
        env=team.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_that_waits_says_why_and_goes_on_once_it_has_started(team: Cli) -> None:
    team("submit", "hog", "-g", "2", "--", "sleep", "infinity")
    team.await_gpus("team-a", hog=2)
    following = follow(team, "echo", "mine")
    assert following.stderr is not None
    assert following.stderr.readline().startswith("job x submitted")
    assert following.stderr.readline().startswith("waiting: needs 1 GPU; ")
    team("delete hog")
    out, err = following.communicate(timeout=TIMEOUT_S)
    assert (following.returncode, out) == (0, "mine\n")
    assert "job x succeeded" in err


def test_an_interrupt_ends_the_following_and_not_the_job(team: Cli) -> None:
    following = follow(team, "sh", "-c", "echo here; sleep infinity")
    assert following.stdout is not None
    assert following.stdout.readline() == "here\n"
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=TIMEOUT_S)
    assert following.returncode == 130
    assert "job x goes on; follow it again with: gpuquota logs x -p team-a -f; stop it with: gpuquota delete x" in err
    assert team.job("x", "team-a")["status"]["phase"] == "Running"


def test_a_job_that_is_deleted_ends_the_following_with_1(team: Cli) -> None:
    following = follow(team, "sh", "-c", "echo here; sleep infinity")
    assert following.stdout is not None
    assert following.stdout.readline() == "here\n"
    team("delete x")
    _, err = following.communicate(timeout=TIMEOUT_S)
    assert following.returncode == 1
    assert "Traceback" not in err


def test_a_log_is_no_record(team: Cli) -> None:
    answer = team.run("submit x -f -o json -- true")
    assert answer.code == 2
    assert "choose one of them" in answer.err
