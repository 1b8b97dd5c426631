"""Rank 0's progress reports to the coordinator."""

from __future__ import annotations

import importlib
import io
import math
from typing import TYPE_CHECKING, Any

import pytest

from elastic_runtime.errors import SettingsError
from elastic_runtime.plan.position import Position
from elastic_runtime.process.progress_bar import Progress
from elastic_runtime.process.reporting import Reporter
from elastic_runtime.process.timing import StepClock
from elastic_runtime.sharded.checkpoint_schedule import ReplicatedCheckpoints
from tests.security.other_user import as_root
from tests.security.test_full_machine import small_disk

if TYPE_CHECKING:
    from pathlib import Path


def test_progress_carries_the_throughput_of_the_size_the_job_has_now() -> None:
    received: list[dict[str, Any]] = []
    reporter = Reporter("", "worker", lambda _, **output: received.append(output), Progress(io.StringIO()))
    reporter.progress(0, 0, None, force=True)
    for workers in (1, 1, 1, 2):
        reporter.note_step(64, workers)
        reporter.progress(1, 0, None, force=True)
    assert [(output["workers"], output["throughput"] is not None) for output in received] == [
        (None, False),
        (1, False),
        (1, True),
        (1, True),
        (2, False),
    ]
    assert received[3]["throughput"] > 0


def test_a_figure_that_is_no_number_is_sent_as_text_until_it_is_one_again() -> None:
    received: list[dict[str, Any]] = []
    reporter = Reporter("", "worker", lambda _, **output: received.append(output), Progress(io.StringIO()))
    for loss in (1.0, math.nan, -math.inf, 2.0):
        reporter.metrics(1, {"loss": loss, "accuracy": 0.5})
        reporter.progress(1, 0, None, force=True)
    assert [(output["metrics"].get("loss"), output["not_finite"]) for output in received] == [
        (1.0, {}),
        (None, {"loss": "nan"}),
        (None, {"loss": "-inf"}),
        (2.0, {}),
    ]
    assert all(output["metrics"]["accuracy"] == 0.5 for output in received)


def test_progress_says_when_the_last_checkpoint_was_captured(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    reporter = Reporter("", "worker", lambda _, **output: received.append(output), Progress(io.StringIO()))
    reporter.progress(0, 0, None, force=True)
    ReplicatedCheckpoints(str(tmp_path), reporter, every_s=1e9, keep=1).save_now(Position(step=7), dict)
    reporter.progress(7, 0, None, force=True)
    (path,) = tmp_path.glob("*.elastic")
    assert received[0]["checkpoint_at"] is None
    assert abs(received[1]["checkpoint_at"] - path.stat().st_mtime) < 60


def test_a_worker_that_the_others_wait_for_knows_it() -> None:
    """Three steps: this worker takes 3 s for its part, the others 1 s, and 0.5 s pass until the sum is there."""
    now = 0.0
    clock = StepClock(lambda: now)
    clock.summed(0.0)
    for _ in range(3):
        now += 3
        assert clock.ready() == 3
        now += 0.5
        clock.summed((3 + 1 + 1) / 3)
    times = clock.take()
    assert times is not None
    assert (times.steps, times.step_ms, times.wait_ms) == (3, 3500, 500)
    assert times.slowness == pytest.approx(1.8)
    assert clock.take() is None


def test_a_change_of_size_begins_the_comparison_anew() -> None:
    now = 0.0
    clock = StepClock(lambda: now)
    clock.summed(0.0)
    now = 5.0
    clock.restart()
    assert clock.ready() == 0.0
    clock.summed(9.9)
    assert clock.take() is None


def test_a_full_disk_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter("/dev/full", "worker", lambda _, **__: None, Progress(io.StringIO()))
    reporter.metrics(1, {"loss": 0.5})
    reporter.metrics(2, {"loss": 0.5})
    assert [record.message for record in caplog.records] == [
        "ELASTIC_REPORT_FILE cannot be written to any more ([Errno 28] No space left on device); training continues "
        "without it"
    ]


@as_root
def test_a_worker_that_starts_while_no_inode_is_left_trains_without_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "size=64k,nr_inodes=2") as disk:
        (disk / "last").touch()
        reporter = Reporter(str(disk / "report"), "worker", lambda _, **__: None, Progress(io.StringIO()))
        reporter.metrics(1, {"loss": 0.5})
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["ELASTIC_REPORT_FILE cannot be opened"]


def test_a_report_file_in_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="ELASTIC_REPORT_FILE '/nowhere/r' cannot be opened"):
        Reporter("/nowhere/r", "worker", lambda _, **__: None, Progress(io.StringIO()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(reporter: Reporter) -> None:
    """Grows from one to two workers at step 3 of 4."""
    for step in range(5):
        reporter.note_step(8, 1 if step < 3 else 2)
        reporter.metrics(step, {"loss": 0.5})
        if step == 3:
            reporter.line("resize", members=("a", "b"), rank=0, step=3, cause="agreed", pause_ms=2.4)
        reporter.progress(step, 0, 4)
    reporter.close()


@pytest.mark.parametrize("tqdm", [True, False])
def test_a_terminal_shows_how_far_the_training_is_and_each_change_of_size(
    tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tqdm:
        monkeypatch.setitem(importlib.sys.modules, "tqdm", None)  # type: ignore[attr-defined]
    terminal = Terminal()
    train(Reporter("", "worker", lambda _, **__: None, Progress(terminal)))
    shown = terminal.getvalue()
    assert "step 3: 2 workers from here on (agreed, 2 ms)\n" in shown
    assert "epoch 0, 2 workers, loss 0.5" in shown
    assert ("100%" if tqdm else "step 4/4") in shown
    assert shown.endswith("\n")


def test_nothing_is_shown_where_nobody_looks() -> None:
    file, asked = io.StringIO(), io.StringIO()
    train(Reporter("", "worker", lambda _, **__: None, Progress(file)))
    train(Reporter("", "worker", lambda _, **__: None, Progress(asked, wanted=True)))
    train(Reporter("", "worker", lambda _, **__: None, Progress(Terminal(), wanted=False)))
    assert file.getvalue() == ""
    assert asked.getvalue() != ""


def test_the_bar_moves_to_another_worker_with_rank_0() -> None:
    terminal = Terminal()
    reporter = Reporter("", "worker", lambda _, **__: None, Progress(terminal))
    reporter.progress(1, 0, 4)
    reporter.line("resize", members=("a", "b"), rank=1, step=3, cause="recovered", pause_ms=2.4)
    assert terminal.getvalue().endswith("\n")
    assert "from here on" not in terminal.getvalue()
