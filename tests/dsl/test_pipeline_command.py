"""`gpuquota pipeline`, as people use it: a process, its output, its exit code."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Phase
from kfp_gpuquota.dsl.pipelines.source import load
from tests import forked, programs
from tests.cli.conftest import PROGRAM, Cli
from tests.dsl.kfp_server import COOKIE, TOKEN, kfp_server
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

GOLDEN = Path(__file__).parent / "golden"

TWO_STEPS = """
from kfp import dsl
import kfp_gpuquota as gpuquota

@gpuquota.component(gpus=1, base_image="python:3.11", install_kfp_package=False)
def double(x: int) -> int:
    if x < 0:
        raise ValueError("too small")
    return 2 * x

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def text(x: int) -> str:
    return f"<{x}>"

@dsl.pipeline(name="two-steps")
def two_steps(x: int, name: str = "") -> str:
    return text(x=double(x=x).output).output

print("imported")
"""


@pytest.fixture
def cli(embedded_cluster: EmbeddedCluster, tmp_path: Path) -> Cli:
    embedded_cluster.project("team-a", 1)
    cli = Cli(embedded_cluster)
    cli.environment["HOME"] = str(tmp_path)  # KFP's client keeps a file there
    return cli


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two_steps.py"
    path.write_text(TWO_STEPS)
    return path


def _offline(*words: str | Path, **environment: str) -> tuple[int, str, str]:
    """A command where no cluster runs."""
    ended = forked.run(programs.gpuquota, "pipeline", *map(str, words), environment=environment)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("command", ["route", "check", "run"])
def test_every_help_text_shows_its_examples_line_by_line(command: str) -> None:
    _, shown, _ = _offline(command, "--help", COLUMNS="80")
    examples = shown.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) >= 2
    assert all(line.startswith("    gpuquota ") and f" pipeline {command} " in line for line in examples)


def test_routing_a_compiled_pipeline_prints_it_as_kfp_writes_it(tmp_path: Path) -> None:
    golden = GOLDEN / "sizes.yaml"
    assert _offline("route", golden, "-p", "team-b", HOME=str(tmp_path)) == (0, golden.read_text(), "")


def test_routing_into_a_file_says_what_was_routed(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "routed.yaml"
    code, output, _ = _offline("route", file, "-p", "team-b", "-o", out, HOME=str(tmp_path))
    assert (code, output) == (0, f"{out}: 1 step routed: double\n")
    code, output, _ = _offline("check", out, HOME=str(tmp_path))
    assert (code, output.splitlines()[1].split()) == (0, ["double", "team-b", "1", "1", "1", "train"])


def test_a_check_without_a_cluster_starts_none(file: Path, tmp_path: Path) -> None:
    code, output, errors = _offline("check", file, "-p", "team-b", HOME=str(tmp_path))
    assert (code, errors) == (0, "imported\n")
    assert output.splitlines() == [
        "STEP     PROJECT   GPUS   MIN   MAX   KIND",
        "double   team-b       1     1     1   train",
        "1 step without GPUs, not routed: text",
        "quotas were not checked: no cluster runs here; start it with: gpuquota cluster start",
        "no problems in pipeline two-steps, as far as can be checked without quotas and projects",
    ]
    assert list(tmp_path.iterdir()) == [file]


def test_a_check_says_which_cluster_did_not_answer(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    there = {"GPUQUOTA_URL": "unix:///nowhere/socket", "GPUQUOTA_TOKEN_FILE": str(tmp_path / "token")}
    code, output, _ = _offline("check", GOLDEN / "sizes.yaml", HOME=str(tmp_path), **there)
    assert (code, output.splitlines()[-2]) == (
        0,
        "quotas were not checked: the cluster at unix:///nowhere/socket does not answer",
    )


def test_a_check_shows_quotas_and_ends_with_2_when_something_is_wrong(cli: Cli) -> None:
    cli("project set team-a --limit 1")
    answer = cli.run("pipeline", "check", str(GOLDEN / "sizes.yaml"))
    assert answer.code == 2
    lines = answer.out.splitlines()
    assert lines[1].split() == ["train", "team-a", "1", "1", "2", "train", "1", "1"]
    assert [line.partition(",")[0] for line in lines if line.startswith("problem: ")] == [
        "problem: step 'train-2': gpus is 4",
        "problem: step 'train-3': gpus is 2",
    ]
    found = json.loads(cli.run("pipeline", "check", str(GOLDEN / "sizes.yaml"), "-o", "json").out)
    assert [step["quota"]["limit"] for step in found["routed"]] == [1, 1, 1]
    assert len(found["problems"]) == 2


def test_a_pipeline_runs_here_and_its_outputs_are_shown(cli: Cli, file: Path, tmp_path: Path) -> None:
    output = cli("pipeline", "run", str(file), "-p", "team-a", "--arg", "x=21", "--root", str(tmp_path / "root"))
    assert output.splitlines()[-1] == "Output: <42>"
    (job,) = cli.cluster.client.list_jobs("team-a").jobs
    assert job.status.phase is Phase.SUCCEEDED
    assert (tmp_path / "root").is_dir()


def test_a_pipeline_that_somebody_compiled_runs_here(cli: Cli, file: Path, tmp_path: Path) -> None:
    compiled = tmp_path / "compiled.yaml"
    cli("pipeline", "route", str(file), "-o", str(compiled))
    root = str(tmp_path / "root")
    output = cli("pipeline", "run", str(compiled), "--local", "-p", "team-a", "-a", "x=3", "--root", root)
    assert output.splitlines()[-1] == "Output: <6>"


def test_a_pipeline_that_fails_ends_with_1_and_a_sentence(cli: Cli, file: Path, tmp_path: Path) -> None:
    answer = cli.run("pipeline", "run", str(file), "-p", "team-a", "-a", "x=-1", "--root", str(tmp_path / "root"))
    assert answer.code == 1
    assert "[0] ValueError: too small" in answer.out
    assert answer.err.splitlines()[-1] == (
        "Error: Pipeline 'two-steps' finished with status FAILURE. Inner task failed: 'double'."
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "told to stop"]
)
def test_a_run_that_is_interrupted_cancels_its_job(cli: Cli, tmp_path: Path, number: int, code: int) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(TWO_STEPS.replace("if x < 0:", "import time\n    time.sleep(600)\n    if x < 0:"))
    process = subprocess.Popen(
        [PROGRAM, "pipeline", "run", str(slow), "-p", "team-a", "-a", "x=1", "--root", str(tmp_path / "root")],
        env=cli.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    assert any("training with" in line for line in process.stdout)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "Traceback" in errors) == (code, False), errors
    (job,) = cli.cluster.client.list_jobs("team-a").jobs
    cli.cluster.wait_for_phase(job.spec.name, Phase.CANCELLED)


def test_a_run_is_submitted_to_a_kfp_server(cli: Cli, file: Path) -> None:
    with kfp_server() as (url, runs):
        output = cli("pipeline", "run", str(file), "--host", url, "-n", "team-b", "-p", "team-b", "--arg", "x=3")
    assert output.splitlines()[-1] == f"run run-1 submitted to {url}"
    (run,) = runs
    assert (run["display_name"], run["runtime_config"]["parameters"]) == ("two-steps", {"x": 3})
    container = run["pipeline_spec"]["deploymentSpec"]["executors"]["exec-double"]["container"]
    assert {"name": "GPUQUOTA_PROJECT", "value": "team-b"} in container["env"]


def test_a_kfp_server_that_refuses_or_is_not_there_gets_a_sentence(cli: Cli) -> None:
    pipeline = str(GOLDEN / "lightweight.yaml")
    with kfp_server() as (url, _):
        refused = cli.run("pipeline", "run", pipeline, "--host", url, "-a", "epochs=0")
    assert (refused.code, refused.err) == (2, f"Error: the KFP server at {url} refuses the run: 400 Bad Request\n")
    gone = cli.run("pipeline", "run", pipeline, "--host", url)
    assert (gone.code, gone.err) == (
        1,
        f"Error: the KFP server at {url} does not answer: [Errno 111] Connection refused\n",
    )


def test_on_a_server_with_several_users_a_run_goes_to_its_projects_profile(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    pipeline = str(GOLDEN / "lightweight.yaml")
    known = (["--token-file", str(tmp_path / "token")], ["--existing-token", TOKEN], ["--cookie", COOKIE])
    with kfp_server(several_users=True) as (url, runs):
        for who in known:
            cli("pipeline", "run", pipeline, "--host", url, "-p", "team-a", "-a", "epochs=1", *who)
    assert len(runs) == len(known)


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ("", "redirects to a login page; authenticate with --token-file FILE, --existing-token TOKEN or --cookie"),
        ("--existing-token wrong", "requires authentication (401); authenticate with --token-file FILE"),
        ("--header Cookie=wrong", "redirects to a login page"),
        ("--header x", "--header is 'x', but it must be NAME=VALUE"),
        ("--token-file /no/such", "cannot read --token-file '/no/such': No such file or directory"),
        (
            f"--existing-token {TOKEN} -n team-b",
            "the run is in namespace 'team-b', but some of its steps name project 'team-a'",
        ),
    ],
)
def test_whom_a_server_with_several_users_does_not_let_in_gets_a_sentence(cli: Cli, options: str, output: str) -> None:
    pipeline = str(GOLDEN / "lightweight.yaml")
    with kfp_server(several_users=True) as (url, _):
        refused = cli.run("pipeline", "run", pipeline, "--host", url, "-a", "epochs=1", *options.split())
    assert refused.code == 2
    assert output in refused.err
    assert "Traceback" not in refused.err


def test_another_profile_is_refused_with_what_to_do(cli: Cli, file: Path) -> None:
    with kfp_server(several_users=True) as (url, _):
        command = ("pipeline", "run", str(file), "--host", url, "-p", "team-b", "-a", "x=1", "--existing-token", TOKEN)
        refused = cli.run(*command)
    assert (refused.code, "in namespace 'team-b' (403); a run belongs to a Profile's namespace" in refused.err) == (
        2,
        True,
    )


def test_what_is_no_kfp_server_gets_a_sentence(cli: Cli, tmp_path: Path) -> None:
    class Page(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>the dashboard</html>")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        refused = cli.run("pipeline", "run", str(GOLDEN / "lightweight.yaml"), "--host", url, "-a", "epochs=1")
        server.shutdown()
    assert (refused.code, f"the server at {url} is not a KFP server" in refused.err) == (2, True)


MISTAKES = [
    ("check nothing.py", "cannot read 'nothing.py': No such file or directory"),
    ("check .", "cannot read '.': Is a directory"),
    ("check binary.yaml", "cannot read 'binary.yaml': it is not text"),
    ("check text.yaml", "text.yaml is not a compiled pipeline; compile one with: kfp dsl compile"),
    ("check syntax.py", "syntax.py cannot be imported: SyntaxError: "),
    ("check missing.py", "missing.py cannot be imported: ModuleNotFoundError: No module named 'no_such' (line 2)"),
    ("check script.py", "script.py exits when it is imported (line 3); move its main program under: if __name__"),
    ("check none.py", "none.py defines no pipeline: put @dsl.pipeline above a function of it"),
    ("check twice.py", "component 'f' is decorated with @gpuquota.component twice"),
    ("check two.py", "two.py defines 2 pipelines; choose one with --pipeline: first, second"),
    ("check two.py --pipeline third", "two.py defines no pipeline 'third'; it has: first, second"),
    ("check two.py --pipeline first -p Team_A", "project is 'Team_A', but a name is"),
    ("check text.yaml --pipeline first", "--pipeline chooses among the pipelines of a Python file"),
    ("route two.py --pipeline first -o no/such/place", "cannot write 'no/such/place': No such file or directory"),
    ("run two.py --pipeline first --local --host http://x", "--local, --host and --kubeflow are places to run at"),
    ("run two.py --pipeline first", "the pipeline needs x; add: --arg x=VALUE"),
    ("run two.py --pipeline first -a x=a", "--arg x is 'a', but the pipeline declares a whole number"),
    ("run two.py --pipeline first -a x=1", "step 'f': it names no project; add --project PROJECT"),
    ("run two.py --pipeline first -a x=1 -p nobody", "step 'f': project 'nobody' does not exist; create it with"),
    ("run two.py --pipeline second -p team-a", "step 'f': gpus is 99, but one worker runs on one node"),
]

DEFINED = """
from kfp import dsl
import kfp_gpuquota as gpuquota

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def f(x: int):
    pass
"""
ONE = """
@dsl.pipeline(name="one")
def first(x: int):
    gpuquota.set_gpus(f(x=x), 1)
"""
OTHER = """
@dsl.pipeline(name="other")
def second():
    gpuquota.set_gpus(f(x=1), 99)
    gpuquota.set_gpus(f(x=2), 98)
"""


def test_a_mistake_gets_one_sentence_the_code_2_and_nothing_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, text in {
        "text.yaml": "hello",
        "syntax.py": "def",
        "missing.py": "\nimport no_such",
        "script.py": "import sys\n\nsys.exit('usage')",
        "none.py": DEFINED,
        "twice.py": DEFINED + "gpuquota.component(gpus=1)(gpuquota.component(gpus=1)(f))",
        "two.py": DEFINED + ONE + OTHER,
    }.items():
        (tmp_path / name).write_text(text)
    for command, sentence in MISTAKES:
        answer = cli.run("pipeline", *command.split(), cwd=tmp_path)
        assert (answer.code, answer.out, len(answer.err.splitlines())) == (2, "", 1), (command, answer)
        assert sentence in answer.err, command
    assert cli.cluster.client.list_jobs().jobs == ()


def test_a_file_is_loaded_without_bytecode_beside_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert load(file).name == "two-steps"
    assert not (file.parent / "__pycache__").exists()


def test_a_pipeline_is_chosen_by_its_variable_or_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(DEFINED + ONE + OTHER)
    for name in ("first", "one"):
        assert _offline("check", tmp_path / "two.py", "--pipeline", name, "-p", "a", HOME=str(tmp_path))[0] == 0


def test_a_variable_goes_before_another_pipelines_own_name(tmp_path: Path) -> None:
    named_alike = DEFINED + ONE + "one = gpuquota.pipeline(project='team-b')(first)\n"
    (tmp_path / "two.py").write_text(named_alike)
    code, output, _ = _offline("check", tmp_path / "two.py", "--pipeline", "one", "-o", "json", HOME=str(tmp_path))
    assert (code, json.loads(output)["routed"][0]["project"]) == (0, "team-b")


def test_a_prompt_of_several_lines_may_be_a_default(tmp_path: Path) -> None:
    prompt = 'prompt: str = "You are:\\n- brief\\nroot: cause"'
    (tmp_path / "one.py").write_text(DEFINED + ONE.replace("x: int", f"x: int, {prompt}"))
    assert _offline("check", tmp_path / "one.py", "-p", "a", HOME=str(tmp_path))[0] == 0


def test_a_file_finds_what_lies_beside_it_and_may_have_the_name_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(DEFINED)
    (tmp_path / "torch.py").write_text("from steps import *" + ONE)
    assert _offline("check", tmp_path / "torch.py", "-p", "a", HOME=str(tmp_path))[0] == 0


def test_without_kfp_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    """Hide kfp from the interpreter; everything else is unchanged."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['kfp'] = None\n")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = [PROGRAM, "pipeline", "check", str(GOLDEN / "sizes.yaml")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "Error: this needs kfp, which is not installed here; install it with: pip install 'kfp-gpuquota[kfp]'\n"
    )


def test_no_other_command_imports_kfp() -> None:
    program = "import sys, kfp_gpuquota.cli.main; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'typer'" in loaded
    assert not [name for name in ("'kfp'", "'yaml'", "'google'", "'kubernetes'") if name in loaded]
