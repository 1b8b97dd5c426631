"""The command line as people with other habits use it: kubectl's forms, Run:ai's, and a notebook's Python.

One cluster serves all tests of this file, so each uses names of its own.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kfp_gpuquota
from kfp_gpuquota.api import Phase
from kfp_gpuquota.cli.arguments.completion import complete_job, complete_kind, complete_node, complete_project
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.errors import InvalidFieldError, JobFailedError, NotFoundError
from kfp_gpuquota.server.cluster_api import follow_log
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection
from tests import forked, programs
from tests.cli.conftest import PROGRAM, Cli
from tests.cli.habit_table import HABITS, SUBMITTED
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("habits")
COMPLETED = {
    "get n": ["nodes"],
    "get jobs complete": ["complete-me"],
    "describe node n": ["node-0"],
    "wait x --for Ru": ["Running"],
    "submit x --node n": ["node-0"],
    "get jobs -o js": ["json", "jsonpath="],
}
"""Words behind `gpuquota`, and what Tab offers then."""

SLEEP = ("--", "sleep", "infinity")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """Four simulated GPUs of 16 GiB; a team that may hold all of them."""
    config = ClusterConfig(gpus_per_node=4, gpu_memory_mib=16384)
    with running_cluster(tmp_path_factory.mktemp("habits") / "home", config) as cluster:
        cli = Cli(cluster)
        cli("project create team-a --guaranteed 4")
        cli("project create team-b --guaranteed 0")
        assert cli("project set team-a") == "project team-a is used from now on\n"
        yield cli


def test_runai_s_own_form_of_a_command_runs(team: Cli) -> None:
    team("submit", "runai1", "-g", "0.1", "--command", "printf", "--args", "%s-%s", "--args", "a", "--args", "b")
    team("wait runai1")
    assert team("logs runai1") == "a-b"
    team("submit", "runai2", "-g", "0.1", "--command", "--", "echo", "as before")
    team("wait runai2")
    assert team("logs runai2") == "as before\n"


def test_kubectl_s_forms_show_what_list_and_describe_show(team: Cli) -> None:
    team("submit", "forms1", "-g", "0.1", "-l", "team=vision", *SLEEP)
    team("submit", "forms2", "-g", "0.1", "-l", "team=speech", *SLEEP)
    assert team("get jobs -l team=vision -o name") == "job/forms1\n"
    assert team("list -l team=vision -o name") == "job/forms1\n"
    assert [line.split()[0] for line in team("get jobs -l team --no-headers").splitlines()] == ["forms1", "forms2"]
    assert json.loads(team("get job/forms1 -o json"))["spec"]["labels"] == {"team": "vision"}
    assert team("get nodes -o name") == "node/node-0\n"
    assert team("get projects --no-headers").split()[0] == "team-a"
    assert team("describe job forms1").splitlines()[0].split() == ["JOB", "forms1"]
    assert team("explain job/forms1").startswith("forms1 is ")
    assert "there is no job 'nothing'" in team.run("get job nothing").err
    assert "there are no 'pods'" in team.run("get pods").err
    listed = team("get", "jobs", "--show-labels", "-l", "team in (vision, speech),!other")
    assert [line.split()[-1] for line in listed.splitlines()] == ["LABELS", "team=vision", "team=speech"]
    assert team("describe project team-a").splitlines()[0].split() == ["PROJECT", "team-a"]
    assert "forms1" in team("describe node/node-0") + team("describe project/team-a")
    assert json.loads(team("describe node node-0 -o json"))["node"]["name"] == "node-0"
    assert "there is no node 'x'" in team.run("describe node x").err
    assert team("wait forms1 --for Running --timeout=10s") == ""
    assert team("exec -it forms1 -- echo beside") == "beside\n"
    assert team("delete job forms1") == "job forms1 deleted\n"
    assert team("delete jobs -l team=speech") == "job forms2 deleted\n"
    assert team("delete forms1 --ignore-not-found") == ""


def test_each_habit_has_its_outcome(team: Cli) -> None:
    """The same table is tried on Kubernetes, in tests/kubernetes/test_client.py."""
    for words in SUBMITTED:
        team(*words)
    for habit in HABITS:
        habit.check(lambda words: team.run(*words))


def test_a_cancelled_job_stays_listed_with_its_log(team: Cli) -> None:
    team("submit", "cancelled", "-g", "0.1", "--", "sh", "-c", "echo began; sleep infinity")
    team("wait cancelled --for Running")
    assert team("cancel job/cancelled") == "job cancelled cancelled\n"
    assert "cancelled" in team.run("wait cancelled").err
    assert team("get job cancelled --no-headers").split()[3] == "Cancelled"
    assert "has no job 'other'" in team.run("cancel other").err


def test_all_jobs_of_a_project_are_deleted_at_once(team: Cli) -> None:
    for name in ("all1", "all2"):
        team("submit", name, "-p", "team-b", "-g", "0.1", *SLEEP)
    assert team("delete --all -p team-b") == "job all1 deleted\njob all2 deleted\n"
    again = team.run("delete --all -p team-b")
    assert (again.code, again.err) == (0, "project team-b has no such job: nothing to delete\n")
    assert "name the jobs" in team.run("delete --all x -p team-b").err


def test_events_tell_the_story_of_a_job(team: Cli) -> None:
    team("submit", "story", "-g", "0.1", "--", "true")
    team("wait story")
    kinds = [line.split()[1] for line in team("events story --no-headers").splitlines()]
    assert kinds[:3] == ["job-submitted", "job-started", "worker-started"]
    assert kinds[-1] == "job-ended"
    assert [event["job"] for event in json.loads(team("get events -o json"))][-1] == "story"


def test_a_list_longer_than_a_page_is_complete(team: Cli) -> None:
    for number in range(5):
        team.cluster.submit(f"page-{number}", "true", project="team-b", gpu_fraction=0.1)
    pages = [[job.spec.name for job in listed.jobs] for listed in team.cluster.client.job_pages("team-b", 2)]
    assert pages == [["page-0", "page-1"], ["page-2", "page-3"], ["page-4"]]
    listed = team("list -p team-b --no-headers").splitlines()
    assert [line.split()[0] for line in listed] == [f"page-{number}" for number in range(5)]


def test_a_job_is_updated_while_it_runs_and_shrinks_to_its_new_maximum(team: Cli) -> None:
    team("submit", "update1", "-g", "1", "--max-gpus", "3", "--cool-down", "0", "--grace-period", "1", *SLEEP)
    team.await_gpus("team-a", update1=3)
    assert team("update update1 --max-gpus 2 --priority 60") == "job update1 updated\n"
    assert json.loads(team("update update1 --priority 70 -o json"))["spec"]["priority"] == 70
    team.await_gpus("team-a", update1=2)
    rows = [line.split() for line in team("top --gpus").splitlines() if "update1" in line]
    assert [(row[2], row[3], row[4]) for row in rows] == [("update1", "team-a", "whole")] * 2
    devices = ",".join(sorted(row[1] for row in rows))
    assert [line.split()[-2] for line in team("list -o wide").splitlines() if "update1" in line] == [devices]
    first = team("events update1 --timestamps --no-headers").split()[0]
    assert abs(datetime.fromisoformat(first).timestamp() - time.time()) < 3600
    described = team("describe update1")
    assert "priority 70" in described
    assert "shrunk to its new maximum of 2 GPUs" in described
    team("update update1 --max-gpus 3")
    team.await_gpus("team-a", update1=3)
    assert "--min-gpus is 2, but it cannot exceed the requested 1 GPU" in team.run("update update1 --min-gpus 2").err
    assert "name what to change" in team.run("update update1").err
    team("delete update1")


def test_a_job_that_becomes_elastic_by_an_update_is_warned_about(team: Cli) -> None:
    team("submit", "plain1", "-g", "0.1", *SLEEP)
    assert team.run("update plain1 --priority 60").err == ""
    team("submit", "plain2", "-g", "1", *SLEEP)
    assert "has to use elastic_runtime" in team.run("update plain2 --max-gpus 2").err
    team("delete plain1 plain2")


def test_jobs_without_gpus_wait_for_cpus(team: Cli) -> None:
    cpus = team.cluster.client.list_nodes()[0].node.cpu
    assert cpus is not None
    team(
        "submit", "cpu1", "-g", "0", "--cpu", f"{cpus:g}", "--", "sh", "-c", "echo [$CUDA_VISIBLE_DEVICES]; sleep 1000"
    )
    team("wait cpu1 --for Running")
    assert team("list -o wide --no-headers -l !x").count("cpu1") == 1
    team("submit", "cpu2", "-g", "0", "--", "true")
    team.cluster.wait_for("cpu2", lambda job: job.status.reason is not None)
    assert "CPU" in team("explain cpu2")
    assert team.job("cpu1", "team-a")["status"]["gpus"] == 0
    assert team("logs cpu1") == "[]\n"
    team("delete cpu1")
    assert team.run("wait cpu2").code == 0
    assert "the job asks for no GPU" in team.run("submit x -g 0 --max-gpus 2 -- true").err


def test_run_ends_with_the_exit_status_of_its_command(team: Cli) -> None:
    answer = team.run("run", "-g", "0.1", "--name", "run1", "--", "sh", "-c", "echo out; exit 3")
    assert (answer.code, answer.out) == (3, "out\n")


def test_an_interrupted_run_cancels_its_job(team: Cli) -> None:
    program = subprocess.Popen(
        [PROGRAM, "run", "-g", "0.1", "--name", "run2", "--", "sh", "-c", "echo begun; sleep 1000"],
        env=team.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.terminate()
    assert program.wait(TIMEOUT_S) == 130
    assert team.run("wait run2").code == 1
    assert team.job("run2", "team-a")["status"]["phase"] == "Cancelled"


def test_python_submits_waits_and_reads_the_log(team: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUQUOTA_HOME", str(team.cluster.home.root))
    job = kfp_gpuquota.submit([sys.executable, "-c", "print('from a notebook')"], gpus=0.1)
    assert job.wait(timeout_s=TIMEOUT_S).phase is Phase.SUCCEEDED
    assert job.logs() == "from a notebook\n"
    assert "".join(job.follow_logs()) == "from a notebook\n"
    assert job.name.startswith("python")
    failing = kfp_gpuquota.submit("sh -c 'exit 4'", name="failing", gpu_memory="1Gi", labels={"a": "b"})
    with pytest.raises(JobFailedError, match="has ended as failed with exit code 4"):
        failing.wait(timeout_s=TIMEOUT_S)
    assert kfp_gpuquota.get_job("failing").job().spec.gpu_memory_mib == 1024
    later = kfp_gpuquota.submit(
        "true", gpus=0.1, begin=timedelta(hours=1), after=[job, "any:failing"], max_runtime="2h"
    )
    spec, queued = later.job().spec, time.time()
    assert (spec.after, spec.max_runtime_s) == ((job.name, "any:failing"), 7200)
    assert spec.begin_at is not None
    assert 3500 < spec.begin_at - queued < 3601
    later.delete()
    failing.delete()
    with pytest.raises(NotFoundError):
        kfp_gpuquota.get_job("failing")
    for given, sentence in (
        ({"begin": "22:00"}, "begin is '22:00', but it must be a datetime, or a timedelta from now"),
        ({"gpus": "2"}, "gpus is '2', but it must be of type int"),
        ({"gpus": 2.5}, "gpus is 2.5, but it must be of type int"),
        ({"name": 3}, "name is 3, but it must be of type str"),
        ({"max_runtime": "soon"}, "max_runtime is 'soon', but a time is written as"),
    ):
        with pytest.raises(InvalidFieldError, match=sentence):
            kfp_gpuquota.submit(["true"], **given)


def test_names_are_completed_by_the_cluster_that_runs(
    team: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    team("submit", "complete-me", "-g", "0.1", *SLEEP)
    monkeypatch.setenv("GPUQUOTA_HOME", str(team.cluster.home.root))
    assert complete_job("complete") == ["complete-me"]
    assert complete_job("job/complete") == ["job/complete-me"]
    assert complete_project("team-") == ["team-a", "team-b"]
    assert complete_node("node") == ["node-0"]
    assert complete_kind("jobs/complete") == ["jobs/complete-me"]
    for words, completed in COMPLETED.items():
        line = {"COMP_WORDS": f"gpuquota {words}", "COMP_CWORD": str(len(words.split(" ")))}
        shell = {**team.environment, **line, "_GPUQUOTA_COMPLETE": "complete_bash"}
        assert forked.run(programs.gpuquota, environment=shell).stdout.split() == completed
    monkeypatch.setenv("GPUQUOTA_HOME", str(tmp_path / "none"))
    assert complete_job("") == []
    assert not (tmp_path / "none").exists(), "completion starts no cluster"


def test_the_limit_variable_is_honoured_as_on_pods(team: Cli) -> None:
    variable = "RUNAI_GPU_MEMORY_LIMIT"
    team("submit", "limit1", "-g", "0.25", "-e", f"{variable}=0.8", *SLEEP)
    assert "0.25 of a GPU, up to 0.8 while it is idle" in team("describe limit1")
    team("submit", "limit2", "--gpu-memory", "2500", "-e", f"{variable}=4Gi", *SLEEP)
    spec = team.job("limit2", "team-a")["spec"]
    assert (spec["gpu_memory_mib"], spec["gpu_memory_limit_mib"]) == (2500, 4096)
    for options, why in (
        (("-g", "0.25", "-e", f"{variable}=4G"), f"{variable} is '4G', but it must be a number"),
        (("-g", "0.25", "--gpu-limit", "0.5", "-e", f"{variable}=0.8"), "the request itself gives another limit"),
        (("-g", "0.25", "-e", f"{variable}=0.1"), "it must be between --gpus, which is 0.25, and 1"),
        (("-g", "1", "-e", f"{variable}=0.9"), "it limits a share of a GPU, and the job asks for whole ones"),
    ):
        refused = team.run("submit", "limit3", *options, *SLEEP)
        assert (refused.code, why in refused.err) == (2, True), refused


def test_use_is_shown_against_request_and_limit(team: Cli) -> None:
    team("submit", "used", "--gpu-memory", "4Gi", "--gpu-memory-limit", "8Gi", *SLEEP)
    team.cluster.wait_for_phase("used", "Running")
    lines = team("describe used").splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("DEVICE "))
    assert lines[row].split() == ["DEVICE", "NODE", "USED", "REQUEST", "LIMIT", "MAY", "USE", "NOW"]
    assert lines[row + 1].split()[2:5] == ["0.0Gi", "4.0Gi", "8.0Gi"]
    figures = metrics(team)
    mine = 'project="team-a",job="used",worker="' + team.job("used", "team-a")["status"]["workers"][0]["id"]
    assert any(line.startswith("gpuquota_gpu_memory_limit_mib{" + mine) and line.endswith(" 8192") for line in figures)
    assert 'gpuquota_guaranteed_gpus{project="team-a"} 4' in figures


def metrics(team: Cli) -> list[str]:
    """The lines of GET /metrics."""
    connection = UnixConnection(team.cluster.home.socket_file, 10.0)
    token = team.cluster.home.token_file.read_text()
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
    with connection.getresponse() as response:
        assert response.status == 200
        return response.read().decode().splitlines()


REFUSED = [
    ("submit x --gpu-memory 20G -- true", "--gpu-memory is 20G, but the largest GPU has 16384 MiB (16Gi)"),
    ("submit x --gpu-memory 20000000000 -- true", "write 19074Mi where bytes are meant, or 20000000000Mi"),
    ("submit x --interactive --elastic -- true", "--interactive is given, but an interactive session has one size; "
     "leave out --min-gpus and --max-gpus"),
    ("submit x", "no COMMAND is given, but it must name a program; add: -- COMMAND ARGS"),
    ("submit x --working-dir /nonexistent -- true", "--working-dir is /nonexistent, but there is no such directory"),
    ("project delete nosuch", "project 'nosuch' does not exist; see them with: gpuquota project list"),
    ("logs update1 --previous -f", "leave out --worker and --follow"),
    ("port-forward x", "name a port of the job"),
    ("submit -g 1 -- sleep 5", "the job has no name: gpuquota submit NAME ... -- sleep 5"),
    ("list -l a=b,", "--selector is 'a=b,', but it has a comma at its end"),
    ("delete -l a>b", "which compares whole numbers"),
    ("cluster start --gpus -1", "--gpus is -1, but it must be at least 1 GPU"),
    ("wait x --timeout soon", "a time is written as 30, 30s, 5m or 1h30m"),
]  # fmt: skip


def test_a_refused_value_is_named_as_it_was_typed(team: Cli) -> None:
    for command, sentence in REFUSED:
        answer = team.run(command)
        assert (answer.code, sentence in answer.err) == (2, True), (command, answer)


def test_a_program_that_is_not_there_is_named_and_so_is_what_it_printed(team: Cli) -> None:
    submitted = team.run("submit", "absent", "-g", "0.1", "--", "no-such-program")
    assert "this machine has no program 'no-such-program'" in submitted.err
    team("submit", "prints", "-g", "0.1", "--", "sh", "-c", "seq 9; echo last; exit 3")
    team.run("wait prints")
    assert team("explain prints").splitlines()[1:6] == ["  6", "  7", "  8", "  9", "  last"]


def test_a_terminal_without_unicode_shows_escapes(team: Cli) -> None:
    team("submit", "latin", "-g", "0.1", "--", "sh", "-c", "echo '\u2026'; exit 3")
    team.run("wait latin")
    environment = {**team.environment, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [PROGRAM, "explain", "latin"], env=environment, capture_output=True, encoding="latin-1", check=False
    )
    assert "\n  \\u2026\n" in done.stdout, done


def test_output_that_cannot_be_written_is_one_sentence(team: Cli) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [PROGRAM, "list"], env=team.environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_standard_streams_may_be_closed(team: Cli) -> None:
    for closed in (">&-", "<&- >&- 2>&-"):
        command = ["sh", "-c", f'exec "$0" list {closed}', PROGRAM]
        done = subprocess.run(command, env=team.environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), closed


def test_a_directory_that_cannot_be_is_one_sentence(team: Cli) -> None:
    bare = {name: value for name, value in team.environment.items() if name != "GPUQUOTA_HOME"}
    for changed, sentence in (
        ({"XDG_STATE_HOME": "/dev/null/x"}, "cannot write the cluster's directory /dev/null/x/gpuquota"),
        ({"GPUQUOTA_HOME": "here"}, "GPUQUOTA_HOME is 'here', but it must be an absolute path"),
    ):
        done = subprocess.run([PROGRAM, "list"], env={**bare, **changed}, capture_output=True, text=True, check=False)
        assert done.returncode in {1, 2}
        assert done.stderr.startswith(f"Error: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1


def test_the_configured_project_that_is_deleted_is_no_longer_configured(team: Cli) -> None:
    team("project create gone --guaranteed 0")
    team("config project gone")
    assert "it was the project to work in" in team.run("project delete gone").err
    assert team.run("list").code == 0
    team("config project team-a")
    team("project create gone2 --guaranteed 0")
    team("config project gone2")
    team.cluster.client.delete_project("gone2")
    answer = team.run("list")
    assert "the configured project 'gone2' does not exist any more; choose another one with" in answer.err
    team("config project team-a")


def test_a_shell_beside_a_job_and_a_port_of_it(team: Cli) -> None:
    local = free_port()
    serve = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
        "c = s.accept()[0]; c.sendall(b'hello'); c.close(); s.accept()"
    )
    team("submit", "server", "-g", "0.1", "--", sys.executable, "-c", serve)
    following = follow_log(connect({"GPUQUOTA_HOME": str(team.cluster.home.root)}), "team-a", "server")
    remote = int(next(following))
    forwarding = subprocess.Popen(
        [PROGRAM, "port-forward", "server", f"{local}:{remote}"],
        env=team.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert forwarding.stdout is not None
        assert forwarding.stdout.readline() == f"forwarding 127.0.0.1:{local} -> {remote}\n"
        with socket.create_connection(("127.0.0.1", local)) as connection:
            assert connection.recv(100) == b"hello"
    finally:
        forwarding.kill()
        forwarding.communicate()
    line = [PROGRAM, "bash", "server"]
    typed = "echo $JOB_NAME; exit 5"
    shell = subprocess.run(line, env=team.environment, input=typed, capture_output=True, text=True, check=False)
    assert (shell.returncode, shell.stdout) == (5, "server\n")


def test_attach_ends_with_the_status_of_the_job(team: Cli) -> None:
    team("submit", "attached", "-g", "0.1", "--", "sh", "-c", "echo mine; exit 6")
    answer = team.run("attach attached")
    assert (answer.code, answer.out) == (6, "mine\n")


def test_the_log_before_a_restart_is_at_hand(team: Cli) -> None:
    marker = team.cluster.home.root / "restarted"
    script = f"test -e {marker} && exec sleep 1000; echo first run; touch {marker}; exec sleep 1000"
    team("submit", "again", "-g", "0.1", "--grace-period", "1", "--", "sh", "-c", script)
    following = follow_log(team.cluster.client, "team-a", "again")
    assert next(following) == b"first run\n"
    team("suspend again")
    assert team.run("wait again --for suspended --timeout 60").code == 0
    assert "was not started again" in team.run("logs again --previous").err
    team("resume again")
    team.cluster.wait_for("again", lambda job: job.status.phase == "Running" and job.status.workers[0].index == 1)
    answer = team.run("logs again")
    assert answer.out == ""
    assert "see what it printed before with: gpuquota logs again -p team-a --previous" in answer.err
    assert team("logs again --previous") == "first run\n"


def test_a_running_cluster_takes_on_another_shape_and_keeps_its_jobs(team: Cli) -> None:
    team("submit", "shaped", "-g", "0.1", *SLEEP)
    before = team.cluster.wait_for_phase("shaped", "Running").status.workers[0].pid
    shape = ("--gpu-memory", "16Gi")
    refused = team.run("cluster", "start", "--gpus", "1", "--nodes", "1", *shape)
    if refused.code:  # one of the jobs of this file is on another GPU
        assert refused.err.startswith("Error: the cluster keeps its shape: a worker still runs on GPUs [")
    assert "5 GPUs" in team("cluster", "start", "--gpus", "5", *shape)
    assert team.cluster.wait_for_phase("shaped", "Running").status.workers[0].pid == before
