"""The examples, run as a new user runs them."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.wire import Event, EventKind
from tests.cli.conftest import PROGRAM
from tests.conftest import kill_processes_of, processes_of
from tests.effort import soaked
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import EmbeddedCluster

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("timeline")


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    yield
    kill_processes_of(tmp_path)  # of an example that failed, or took too long


def _nothing_stays(folder: Path) -> None:
    """Processes of a run are reaped a moment after it ends."""
    until(lambda: not list(processes_of(folder)), lambda: list(processes_of(folder)))


def _worker_event(at: float, project: str, gpus: int) -> Event:
    kind = EventKind.WORKER_STARTED if gpus > 0 else EventKind.WORKER_GONE
    return Event(revision=0, at=at, kind=kind, project=project, worker="w", gpus=gpus)


def test_the_timeline_counts_what_workers_hold_and_nothing_else(timeline: Any) -> None:
    events = [
        _worker_event(1.0, "team-a", 1),
        _worker_event(2.0, "team-a", 1),
        Event(revision=0, at=2.5, kind=EventKind.JOB_RESIZED, project="team-a", gpus=-1),
        _worker_event(3.0, "team-a", -1),
        _worker_event(4.0, "team-b", 1),
        _worker_event(4.5, "team-c", 1),
    ]
    assert timeline.gpus_held(events, ["team-a", "team-b"]) == (
        [1.0, 2.0, 3.0, 4.0],
        {"team-a": [1, 2, 1, 1], "team-b": [0, 0, 0, 1]},
    )


@pytest.mark.slow
@pytest.mark.parametrize("example", ["finetune_trainer.py", "finetune_accelerate.py"])
def test_hugging_faces_libraries_fine_tune_while_the_size_changes(
    embedded_cluster: EmbeddedCluster, tmp_path: Path, example: str
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / example), "--epochs=25"],
        env=embedded_cluster.environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    output = []
    for line in process.stdout:
        output.append(line)
        if "gpuquota: step" in line and not embedded_cluster.client.list_jobs("team-b").jobs:
            embedded_cluster.submit("session", project="team-b", kind="build")
    assert process.wait() == 0, "".join(output)
    assert "gpuquota: shrunk from 2 to 1 GPUs" in "".join(output), "".join(output)
    assert "steps lost: 0" in "".join(output), "".join(output)
    assert float(output[-1].removeprefix("accuracy: ")) > 0.6


@pytest.mark.slow
@soaked
def test_the_digits_pipeline_trains_through_the_quota(embedded_cluster: EmbeddedCluster, tmp_path: Path) -> None:
    embedded_cluster.project("team-a", 2)
    command = [sys.executable, str(EXAMPLES / "digits_pipeline.py"), "--project=team-a", "--epochs=4"]
    ended = subprocess.run(
        command, env=embedded_cluster.environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert float(ended.stdout.rsplit("accuracy: ", 1)[1]) > 0.9
    assert "warning" not in ended.stdout
    (job,) = embedded_cluster.client.list_jobs().jobs
    assert (job.spec.project, job.status.phase, job.spec.largest) == ("team-a", Phase.SUCCEEDED, 2)


def _pipeline_run(example: str, *words: str) -> list[str]:
    return [PROGRAM, "pipeline", "run", str(EXAMPLES / example), "-p", "team-a", "--root", "root", *words]


@pytest.mark.slow
def test_a_training_program_in_a_container_component_is_elastic(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    embedded_cluster.project("team-a", 1)
    command = _pipeline_run("container_training.py", "--arg", "epochs=2")
    ended = subprocess.run(
        command, env=embedded_cluster.environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "Output: 67274"
    assert "[0] epoch 1: loss" in ended.stdout
    assert "warning" not in ended.stdout
    (job,) = embedded_cluster.client.list_jobs().jobs
    assert {worker.rank for worker in job.status.workers} >= {0}


@pytest.mark.slow
def test_a_notebooks_session_keeps_its_gpu_and_what_was_left_in_it_is_the_steps_output(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    process = subprocess.Popen(
        _pipeline_run("notebook_step.py"),
        env={**embedded_cluster.environment, "GPUQUOTA_PROJECT": "team-a"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    end = next(line for line in process.stdout if "the session ends by:" in line).partition("by:  ")[2]
    (session,) = embedded_cluster.client.list_jobs("team-a").jobs
    assert (session.spec.kind, session.status.phase) == ("build", Phase.RUNNING)
    embedded_cluster.submit("theirs", gpus=2, project="team-b", priority=99)
    embedded_cluster.wait_for("theirs", lambda job: job.status.reason is not None, "team-b")
    assert embedded_cluster.job("theirs", "team-b").status.phase is Phase.PENDING
    directory = Path(end.split()[-1]).parent
    written = ["sh", "-c", f"echo $RUNAI_NUM_OF_GPUS > {directory}/notes.txt; {end}"]
    subprocess.run(
        [PROGRAM, "exec", "-p", "team-a", session.spec.name, "--", *written],
        env=embedded_cluster.environment,
        check=True,
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output.splitlines()[-1]) == (0, "Output: ['notes.txt']")
    assert [path.read_text() for path in (tmp_path / "root").rglob("notes.txt")] == ["1\n"]


@pytest.mark.slow
def test_four_pipelines_share_the_gpus_of_two_teams(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "four_pipelines.py")]
    environment = {**os.environ, "COLUMNS": "100"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ended.stdout.splitlines() if "│" in line]
    table = {name: (float(waited.split()[0]), sizes, back) for name, waited, _, sizes, _, back in cells}
    assert sorted(table) == ["a-first", "a-second", "b-first", "b-second"]
    _, sizes, gave_back = table["a-first"]
    assert (sizes.startswith("2 → 1"), gave_back) == (True, "1 to team-b"), ended.stdout
    assert set(sorted(table, key=lambda name: table[name][0])[2:]) == {"a-second", "b-second"}, ended.stdout
    _nothing_stays(tmp_path)


@pytest.mark.slow
@soaked
def test_interrupted_four_pipelines_leave_no_process_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "four_pipelines.py")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert any("training with" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    _nothing_stays(tmp_path)


@pytest.mark.slow
def test_the_quickstart_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for promise in ("accuracy: 0.9", "steps lost: 0", "2 → 1", "1 → 2", "timeline: "):
        assert promise in ended.stdout
    picture = Path(ended.stdout.split("timeline: ")[1].splitlines()[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    _nothing_stays(tmp_path)


@pytest.mark.slow
def test_an_interrupted_quickstart_leaves_no_process_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "quickstart.py")], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert any("training with" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert (process.returncode, "everything is stopped" in output) == (130, True)
    _nothing_stays(tmp_path)
