"""Checkpoints are whole or not there, fall back when damaged, and continue the training to the bit."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import elastic_runtime
from elastic_runtime.errors import CheckpointError, SettingsError, StateError
from elastic_runtime.plan.position import Position
from elastic_runtime.process.progress_bar import Progress
from elastic_runtime.process.reporting import Reporter
from elastic_runtime.sharded import files
from elastic_runtime.sharded.checkpoint_schedule import ReplicatedCheckpoints
from elastic_runtime.state import checkpoint
from tests.elastic_runtime.training import Plan, train
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

STATE = {"weight": torch.arange(6.0).view(2, 3), "lr": 0.1, "steps": [torch.tensor(3), None]}


def test_a_state_is_read_back_as_it_was(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), 7, STATE)
    step, state = files.load_newest(str(tmp_path)) or (0, {})
    assert step == 7
    assert torch.equal(state["weight"], STATE["weight"])  # type: ignore[arg-type]
    assert state["steps"][0] == 3
    assert state["lr"] == 0.1


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 20, 3, 100):
        checkpoint.save(str(tmp_path), step, STATE, keep=2)
    assert [path.name for path in checkpoint.checkpoints(str(tmp_path))] == [
        "checkpoint-000000000100.elastic",
        "checkpoint-000000000020.elastic",
    ]


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "garbage"])
def test_a_damaged_newest_one_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(str(tmp_path), 1, STATE)
    newest = checkpoint.save(str(tmp_path), 2, STATE)
    whole = newest.read_bytes()
    flipped = whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:]
    newest.write_bytes({"cut": whole[:-20], "flipped": flipped, "emptied": b"", "garbage": b"x" * 999}[damage])
    assert (files.load_newest(str(tmp_path)) or (0,))[0] == 1
    assert "falling back to the one before" in caplog.text


def test_a_writer_killed_at_any_instant_leaves_a_whole_newest_one(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from elastic_runtime.state import checkpoint\n"
        "for step in range(1, 10**6):\n"
        "    checkpoint.save(sys.argv[1], step, {'w': torch.full((50_000,), float(step))})\n"
        "    print(step, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    output = [int(writer.stdout.readline()) for _ in range(5)][-1]
    writer.kill()
    writer.wait()
    step, state = files.load_newest(str(tmp_path)) or (0, {})
    assert step >= output
    assert state["w"].unique().tolist() == [float(step)]


def test_another_models_checkpoint_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    plan = Plan(epochs=1, options={"checkpoint_every_s": 1e-9})
    train(plan, 0, tmp_path, None)
    monkeypatch.setattr("tests.elastic_runtime.training.FEATURES", 13)
    with pytest.raises(StateError, match="another model"):
        train(plan, 0, tmp_path, None)


def test_a_directory_that_cannot_be_written_to_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "file" / "checkpoints"))
    with pytest.raises(CheckpointError, match="cannot be made"):
        elastic_runtime.init()


@pytest.mark.parametrize("options", [{"checkpoint_every_s": 0}, {"keep_checkpoints": 0}])
def test_intervals_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="keep_checkpoints"):
        elastic_runtime.init(**options)


def test_what_a_killed_writer_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000000000003.partial-4711").write_bytes(b"half")
    (tmp_path / "checkpoint-000000000009.partial-4712").write_bytes(b"being written")
    path = checkpoint.save(str(tmp_path), 5, {"step": 5})
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "checkpoint-000000000009.partial-4712"]


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setattr(os, "fsync", full)
    train(Plan(epochs=1, options={"checkpoint_every_s": 1e-9}), 0, tmp_path, None)
    assert (tmp_path / "final-0.pt").exists()
    assert "No space left" in caplog.text
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_file_system_that_syncs_no_directories_has_as_many_checkpoints_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sync = os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    for step in range(5):
        checkpoint.save(str(tmp_path), step, {"step": step})
    assert [path.name[-9:-8] for path in checkpoint.checkpoints(str(tmp_path))] == ["4", "3"]
    assert not caplog.text


def test_sigterm_saves_and_the_next_run_ends_as_an_undisturbed_one(
    tmp_path: Path, forked_python: tuple[str, ...]
) -> None:
    """Alone: killed in the middle of an epoch, started again, and the same to the bit."""
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    undisturbed.mkdir()
    disturbed.mkdir()
    train(Plan(), 0, undisturbed, None)
    code = (
        "import sys, pathlib, time; from tests.elastic_runtime import training\n"
        "class Gate:\n"
        "    def pass_through(self, index, step):\n"
        "        print(step, flush=True)\n"
        "        time.sleep(0.005 * 2 ** max(0, step - 16) if len(sys.argv) > 2 else 0)\n"  # it cannot end before
        "training.train(training.Plan(), 0, pathlib.Path(sys.argv[1]), Gate())\n"
    )
    environment = {
        **os.environ,
        "ELASTIC_CHECKPOINT_DIR": str(disturbed / "checkpoints"),
        "ELASTIC_REPORT_FILE": str(disturbed / "report.jsonl"),
    }
    command = [*forked_python, "-c", code, str(disturbed)]
    first = subprocess.Popen([*command, "first"], env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while int(first.stdout.readline()) < 17:
        pass
    first.send_signal(signal.SIGTERM)
    first.stdout.read()
    assert first.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0
    expected, got = (torch.load(d / "final-0.pt") for d in (undisturbed, disturbed))
    for name, value in expected["model"].items():
        assert torch.equal(value, got["model"][name])
    events = [json.loads(line)["event"] for line in (disturbed / "report.jsonl").read_text().splitlines()]
    assert [event for event in events if event != "steps"] == ["checkpoint", "left", "restored", "finished"]


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = ReplicatedCheckpoints(
        "", Reporter("", "w", lambda _, **__: None, Progress(io.StringIO())), every_s=1.0, keep=1
    )
    assert checkpoints.save_soon(Position(step=1), dict, lambda _: False)
    checkpoints.save_now(Position(step=1), dict)
    checkpoints.settle()
    assert list(tmp_path.iterdir()) == []


STUCK = """
import os, pathlib, random, sys, time
from tests.elastic_runtime import training

stuck = pathlib.Path(sys.argv[1], "stuck")

class Gate:
    first = True
    def pass_through(self, index, step):
        if step == 17 and not self.first and not stuck.exists():  # the second micro-batch: buffers have changed
            stuck.touch()
            print("stuck", flush=True)
            time.sleep(1000)
        self.first = step != 17

random.seed(4)
training.train(training.Plan(normalise=True, mixed=True), 0, pathlib.Path(sys.argv[1]), Gate())
"""


def test_sigterm_saves_though_the_loop_is_in_a_step_that_does_not_end(
    tmp_path: Path, forked_python: tuple[str, ...]
) -> None:
    """The state of the step's beginning, with the buffers and random streams of that time."""
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    undisturbed.mkdir()
    disturbed.mkdir()
    random.seed(4)
    train(Plan(normalise=True, mixed=True), 0, undisturbed, None)
    environment = {**os.environ, "ELASTIC_CHECKPOINT_DIR": str(disturbed / "checkpoints")}
    command = [*forked_python, "-c", STUCK, str(disturbed)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "stuck\n"
    first.send_signal(signal.SIGTERM)
    until(lambda: checkpoint.checkpoints(str(disturbed / "checkpoints")), "a checkpoint")
    first.kill()
    first.wait()
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0
    expected, got = (torch.load(d / "final-0.pt") for d in (undisturbed, disturbed))
    assert got["sha256"] == expected["sha256"]


def _say_and_sleep(running: Event) -> None:
    running.set()
    time.sleep(1000)


def test_a_process_that_the_script_forked_ends_by_sigterm_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what an earlier test of this process has left
    job = elastic_runtime.init(global_batch_size=4)
    fork = multiprocessing.get_context("fork")
    running = fork.Event()
    child = fork.Process(target=_say_and_sleep, args=(running,), daemon=True)
    try:
        job._member._preemption.soft = True  # type: ignore[union-attr]
        child.start()
        assert running.wait(TIMEOUT_S)
        child.terminate()
        child.join(TIMEOUT_S)
        still = child.exitcode is None and Path(f"/proc/{child.pid}/status").read_text()  # with its masks of signals
        assert child.exitcode == -signal.SIGTERM, still
    finally:
        child.kill()
        signal.signal(signal.SIGTERM, before)
