"""Each command, its formats, its help, and its messages for mistakes."""

from __future__ import annotations

import io
import json
import re
import subprocess
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from msgspec.structs import replace

import kfp_gpuquota.version
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.cli.jobs.logs import last_of
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.storage.database import stored_config
from kfp_gpuquota.fractions import Policy
from tests import forked, programs
from tests.cli.conftest import PROGRAM
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli

COMMANDS = [
    "submit", "run", "update", "what-if", "list", "get", "events", "describe", "explain", "logs", "top", "suspend",
    "resume", "wait", "delete", "exec", "bash", "attach", "port-forward", "cluster start", "cluster stop",
    "cluster status", "project create", "project set", "project list", "project delete", "config project",
]  # fmt: skip


@pytest.fixture
def team(cli: Cli) -> Cli:
    cli("project create team-a --guaranteed 1 --limit 1")
    cli("config project team-a")
    return cli


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_text_has_an_example_that_begins_with_the_command(command: str) -> None:
    done = forked.run(programs.gpuquota, *command.split(), "--help")
    assert "Example" in done.stdout
    examples = done.stdout.partition("Example")[2].splitlines()[1:]
    assert examples[0].strip().startswith(f"gpuquota {command}"), "one to a line"


def test_the_version_is_that_of_the_package() -> None:
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gpuquota {kfp_gpuquota.version.__version__}\n"


MISTAKES = [
    ("submit x -g -1 -- true", "--gpus is -1, but it must be at least 1 GPU"),
    ("project create x --guaranteed -5", "--guaranteed is -5, but it must be between 0 and 1000000 GPUs"),
    ("submit x -g 2.5 -- true", "--gpus is 2.5, but it must be a whole number of GPUs"),
    ("submit x -g 2 -- true", "project 'team-a' may hold at most 1 GPU; ask for less, or raise its limit"),
    ("submit x -g 1 --min-gpus 2 -- true", "--min-gpus is 2, but it cannot exceed the requested 1 GPU"),
    ("submit x_y -- true", "a name is 1 to 63 lower-case letters"),
    ("submit taken -- true", "already has a job 'taken'; choose another name, or delete it first"),
    ("submit x", "no COMMAND is given, but it must name a program; add: -- COMMAND ARGS"),
    ("submit x -p nobody -- true", "create it with: gpuquota project create nobody --guaranteed N"),
    ("submit x -e NAME -- true", "a variable is given as NAME=VALUE"),
    ("submit x --rehearse", "--rehearse needs the command, after --"),
    ("submit x --rehearse -- no-such-program", "'no-such-program' cannot be started here"),
    ("submit x --node node-9 -- true", "the cluster's nodes are node-0"),
    ("describe nothing", "project 'team-a' has no job 'nothing'; see what it has with: gpuquota list"),
    ("delete taken nothing", "has no job 'nothing', and nothing was deleted"),
    ("list -p nobody", "project 'nobody' does not exist"),
    ("project create team-a --guaranteed 1", "change it with: gpuquota project set team-a"),
    ("project create x --guaranteed 2 --limit 1", "--limit is 1, but it must be at least the guaranteed 2 GPUs"),
    ("project create x --limit many", "--limit is many, but it must be a number of GPUs, such as 4 or 0.5"),
    ("project create x --parent nobody", "project 'nobody' does not exist"),
    ("project delete team-a", "still has 1 job; delete what it has first"),
    ("project set nobody --guaranteed 1", "project 'nobody' does not exist"),
    ("config project nobody", "project 'nobody' does not exist"),
    ("wait taken --for Flying", "there is no status 'Flying'; there are Pending"),
    ("exec taken -- no-such-program", "cannot run 'no-such-program'"),
    ("top --gpus --since 3h", "--since is 3h, but it must be more than 0 and at most 2h: no more is kept"),
    ("top --gpus --since 0s", "it must be more than 0 and at most 2h"),
    ("top --gpus --since never", "a time is written as 30, 30s, 5m or 1h30m"),
    ("top --since 1h", "--since is the time of --gpus, without --watch and --plot"),
    ("top --gpus --since 1h -w", "--since is the time of --gpus, without --watch and --plot"),
    (
        "project set team-a --order oldest",
        "--order is oldest, but it must be one of fair, fair-users, shortest, strict",
    ),
    ("project set team-a --min-runtime 2d", "--min-runtime is 2d, but it must be between 0 and 86400 s"),
    ("project set team-a --reserve-after 2d", "--reserve-after is 2d, but it must be between 0 and 86400 s"),
    (f"submit x -l user={'x' * 254} -- sleep 1", "a label's key and value are up to 253 printable characters"),
    ("list --colour", "No such option"),
    ("fly", "No such command"),
]


def test_a_mistake_gets_one_sentence_the_code_2_and_changes_nothing(team: Cli) -> None:
    team("submit", "taken", "--", "sleep", "infinity")
    team.await_gpus("team-a", taken=1)
    before = team.cluster.client.list_jobs()
    for command, sentence in MISTAKES:
        answer = team.run(command)
        assert (answer.code, answer.out) == (2, ""), command
        assert sentence in answer.err, command
    assert team.cluster.client.list_jobs() == before


def test_a_job_whose_rehearsal_fails_is_not_submitted(team: Cli) -> None:
    refused = team.run("submit", "bad", "--rehearse", "--", "sh", "-c", "exit $((ELASTIC_REHEARSE + 2))")
    assert refused.code == 3
    assert "the rehearsal ended with exit code 3; nothing was submitted" in refused.err
    team("submit", "good", "--rehearse", "-e", "A=1", "--", "sh", "-c", "exit $((A - 1))")
    assert [job["spec"]["name"] for job in json.loads(team("list -o json"))] == ["good"]


def test_without_a_project_the_error_says_how_to_set_one(cli: Cli) -> None:
    answer = cli.run("submit", "x", "--", "true")
    assert answer.code == 2
    assert "set it once: gpuquota config project PROJECT" in answer.err


@pytest.mark.parametrize("what", ["jobs", "projects", "nodes"])
def test_lists_are_the_same_in_json_and_yaml(team: Cli, what: str) -> None:
    team("submit", "x", "--", "true")
    team("wait x")
    as_json, as_yaml = team(f"list {what} -o json"), team(f"list {what} -o yaml")
    assert json.loads(as_json) == yaml.safe_load(as_yaml) != []


def test_a_job_runs_in_the_directory_and_with_the_path_of_the_shell(team: Cli, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    team.environment["PATH"] = f"{here}:{team.environment['PATH']}"
    team.environment["SECRET"] = "s3cret"
    team.run("submit", "x", "-e", "MINE=1", "--", "sh", "-c", "pwd; echo $PATH $MINE $SECRET", cwd=here)
    team("wait x")
    pwd, variables = team("logs x").splitlines()
    assert pwd == str(here)
    assert variables.startswith(f"{here}:")
    assert variables.endswith(" 1")


def test_an_admin_is_told_when_more_is_guaranteed_than_there_is(team: Cli) -> None:
    assert team.run("project create team-b --guaranteed 1").err == "", "2 of 2 GPUs are"
    output = "note: 4 GPUs are guaranteed to all projects together, and the cluster has 2\n"
    assert team.run("project set team-b --guaranteed 3").err == output
    assert team.run("project create team-c --parent team-b --guaranteed 1").err == output, "a part of its department's"
    assert team.run("project set team-b --guaranteed 1").err == ""


def test_wait_ends_with_the_fate_of_the_job(team: Cli) -> None:
    team("submit", "good", "--", "true")
    assert team.run("wait good").code == 0
    team("submit", "bad", "--", "sh", "-c", "exit 3")
    answer = team.run("wait bad")
    failed = "job bad has failed: worker 0 ended with exit code 3\n"
    assert (answer.code, answer.err) == (1, f"{failed}what it printed: gpuquota logs bad -p team-a\n")
    assert "what it printed: gpuquota logs bad -p team-a" in team("explain bad")
    assert "what it printed" not in team("explain good")


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [("no-such-program", 127, "No such file or directory"), ("/etc/passwd", 126, "Permission denied")],
)
def test_a_command_that_cannot_run_fails_its_job_with_the_shells_code(
    team: Cli, command: str, code: int, why: str
) -> None:
    team("submit", "x", "--", command)
    answer = team.run("wait x")
    failed, printed = answer.err.splitlines()
    assert failed.startswith(f"job x has failed: worker 0 ended with exit code {code}: cannot run ['{command}'] in ")
    assert failed.endswith(f": {why}")
    assert (answer.code, printed) == (1, "what it printed: gpuquota logs x -p team-a")


def test_wait_gives_up_when_its_time_is_over(team: Cli) -> None:
    team("submit", "long", "--", "sleep", "infinity")
    answer = team.run("wait long --timeout 0.2")
    assert answer.code == 1
    assert "when the time is over" in answer.err
    assert team.run("wait long --for running --timeout 20").code == 0


def test_exec_sees_the_workers_environment_and_passes_its_exit_code(team: Cli) -> None:
    team("submit", "x", "-e", "MINE=1", "--", "sleep", "infinity")
    team.await_gpus("team-a", x=1)
    answer = team.run("exec", "x", "--", "sh", "-c", "echo $JOB_NAME $MINE; exit 4")
    assert (answer.code, answer.out) == (4, "x 1\n")


def test_describe_shows_workers_and_every_change_of_size(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit", "x", "-g", "1", "--elastic", "--", "sleep", "infinity")
    cli.await_gpus("team-a", x=2)
    cli("submit", "y", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", x=1, y=1)
    shown = cli("describe x")
    assert "1 GPU, elastic from 1 to 2" in shown
    assert "shrunk from 2 to 1 GPUs" in shown
    assert "node-0" in shown


def test_suspend_and_resume(team: Cli) -> None:
    team("submit", "x", "--grace-period", "1", "--", "sleep", "infinity")
    team.await_gpus("team-a", x=1)
    assert team("suspend x") == "job x suspended\n"
    assert team.run("wait x --for suspended --timeout 20").code == 0
    assert team("resume x") == "job x resumed\n"
    team.await_gpus("team-a", x=1)


def test_the_next_command_starts_a_cluster_that_was_stopped_and_adopts_its_jobs(team: Cli) -> None:
    team("submit", "x", "--", "sleep", "infinity")
    team.await_gpus("team-a", x=1)
    assert team("cluster stop") == "the cluster has stopped; still running: x\n"
    assert team.run("cluster status").code == 1
    assert "Running" in team("list")
    assert "1 of 2 GPUs" in team("cluster status")


def test_a_cluster_of_another_shape_does_not_lose_running_jobs(team: Cli) -> None:
    team("submit", "x", "--", "sleep", "infinity")
    team.await_gpus("team-a", x=1)
    team("cluster stop")
    answer = team.run("cluster start --gpus-per-node 1 --nodes 1")
    held = team.job("x", "team-a")["status"]["workers"][0]["devices"]
    assert (answer.code == 0) == (held == [0])


def test_a_rule_that_is_changed_leaves_the_shape_and_the_other_rules(team: Cli) -> None:
    """With `--reserve-after` alone a cluster of several nodes had one node."""
    team("cluster start --nodes 2 --gpus-per-node 3 --keep-ended-jobs 7 --no-moves")
    before = stored_config(team.cluster.home.database)
    team("cluster start --reserve-after 60 --lend-silent")
    policy = Policy(lend_silent=True)
    after = replace(before, reserve_after_s=60.0, memory_policy=policy)
    assert stored_config(team.cluster.home.database) == after
    assert "2 with 6 GPUs" in team("cluster status")
    team("cluster start --gpus 2")
    assert stored_config(team.cluster.home.database) == replace(after, nodes=1, gpus_per_node=2)
    team("cluster", "start", "--defragment", "Mon-Fri 22:00-06:00 Europe/Berlin", "--defragment-budget", "300")
    rule = Defragmentation(window="Mon-Fri 22:00-06:00", time_zone="Europe/Berlin", budget_gpu_minutes=300.0)
    assert stored_config(team.cluster.home.database).defragmentation == rule
    team("cluster start --defragment-per-gpu 5")
    rule = replace(rule, max_gpu_minutes_per_gpu=5.0)
    assert stored_config(team.cluster.home.database).defragmentation == rule
    team("cluster start --defragment none")
    refused = team.run("cluster start --defragment 22:00")
    assert refused.code == 2
    assert "--defragment is 22:00, but a window is written as 22:00-06:00" in refused.err
    team("cluster start --moves --no-lend-silent --reserve-after 1800")
    assert stored_config(team.cluster.home.database) == ClusterConfig(gpus_per_node=2, keep_ended_jobs=7)


def test_top_shows_projects_nodes_and_jobs(team: Cli) -> None:
    team("submit", "x", "--", "sleep", "infinity")
    team.await_gpus("team-a", x=1)
    shown = team("top")
    assert all(word in shown for word in ("team-a", "node-0", "Running"))


def test_top_for_programs_has_all_three_lists(team: Cli) -> None:
    team("submit", "x", "--", "sleep", "infinity")
    team.await_gpus("team-a", x=1)
    shown = json.loads(team("top -o json"))
    assert [job["spec"]["name"] for job in shown["jobs"]] == ["x"]
    assert [view["project"]["name"] for view in shown["projects"]] == ["team-a"]
    assert shown["nodes"][0]["used"] == {"0": 1.0}


@pytest.mark.parametrize(
    ("what", "then"),
    [("projects", "team-a,1,1,1,0,0,1"), ("nodes", "node-0,ready,2,1,1,cpu-slot"), ("nodes -o json", '"0",1.0')],
)
def test_what_is_watched_is_shown_again_when_a_job_changes_it(team: Cli, what: str, then: str) -> None:
    watching = subprocess.Popen(
        [PROGRAM, "list", *what.split(), "-w"], env=team.environment, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert watching.stdout is not None
        watching.stdout.readline()
        team("submit", "x", "--", "sleep", "infinity")
        assert any(re.sub(r"[\s:]+", ",", line).strip(",").startswith(then) for line in watching.stdout)
    finally:
        watching.kill()
        watching.communicate()


def test_a_command_is_described_as_a_shell_would_take_it(team: Cli) -> None:
    team("submit", "x", "--", "sh", "-c", "echo 'a b'; exit 0")
    assert """sh -c 'echo '"'"'a b'"'"'; exit 0'""" in team("describe x")


def test_the_log_of_a_job_that_has_not_started_says_why(team: Cli) -> None:
    team("submit", "x", "--", "sleep", "infinity")
    team("submit", "y", "--", "true")
    answer = team.run("logs y")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err.startswith("job y has not started and is pending: needs 1 GPU; ")


def test_the_log_begins_with_its_last_lines_where_that_is_asked_for(team: Cli) -> None:
    team("submit", "x", "--", "printf", r"one\ntwo\nthree\nfour")
    team("wait x")
    assert team("logs x --tail 2") == "three\nfour"
    assert team("logs x --tail 1 -f") == "four"
    assert team("logs x --tail 9") == "one\ntwo\nthree\nfour"
    assert team("logs x --tail 0") == ""


@given(pieces=st.lists(st.sampled_from([b"a", b"\n", b"bc\r", b"d\ne\n"])), lines=st.integers(0, 9))
def test_the_last_lines_are_found_in_whatever_pieces_a_log_comes(pieces: list[bytes], lines: int) -> None:
    kept = b""
    for piece in pieces:
        kept = last_of(kept + piece, lines)
    whole = io.BytesIO(b"".join(pieces)).readlines()
    assert kept == b"".join(whole[len(whole) - min(lines, len(whole)) :])


def test_all_that_have_ended_are_deleted_at_once_and_nothing_else(team: Cli) -> None:
    for name in ("x", "y"):
        team("submit", name, "--", "true")
    team("wait x y")
    team("submit", "z", "--", "sleep", "infinity")
    assert team("delete --ended") == "job x deleted\njob y deleted\n"
    assert [line.split()[0] for line in team("list").splitlines()] == ["JOB", "z"]
    assert team("delete --ended") == ""
    assert "name the jobs, or give --ended" in team.run("delete").err
    assert team.run("delete z --ended").code == 2


def test_logs_follow_the_job_from_one_worker_to_the_next(cli: Cli, tmp_path: Path) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    gate = tmp_path / "gate"
    script = f"echo worker $POD_INDEX; while [ ! -e {gate} ]; do sleep 0.02; done; echo end of $POD_INDEX"
    cli("submit", "x", "-g", "1", "--elastic", "--grace-period", "1", "--", "sh", "-c", script)
    cli.await_gpus("team-a", x=2)
    following = subprocess.Popen(
        [PROGRAM, "logs", "x", "-f"], env=cli.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert following.stdout is not None
    assert following.stdout.readline() == "worker 0\n"
    cli("suspend x")
    cli.run("wait x --for suspended --timeout 20")
    cli("resume x")
    assert following.stdout.readline().startswith("worker ")
    gate.touch()
    out, err = following.communicate(timeout=TIMEOUT_S)
    assert "end of" in out
    assert "goes on:" in err
