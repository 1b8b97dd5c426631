"""What rank 0 tells the coordinator of its training."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

import pytest

from elastic_runtime.keeper import Keeper
from elastic_runtime.progress import Progress
from elastic_runtime.reporting import Reporter

if TYPE_CHECKING:
    from pathlib import Path


def test_progress_carries_the_throughput_of_the_size_the_job_has_now() -> None:
    told: list[dict[str, Any]] = []
    reporter = Reporter("", "worker", told.append, Progress(io.StringIO()))
    reporter.progress(0, 0, None, force=True)
    for workers in (1, 1, 1, 2):
        reporter.note_step(64, workers)
        reporter.progress(1, 0, None, force=True)
    assert [(said["workers"], said["throughput"] is not None) for said in told] == [
        (None, False),
        (1, False),
        (1, True),
        (1, True),
        (2, False),
    ]
    assert told[3]["throughput"] > 0


def test_progress_says_when_the_last_checkpoint_was_captured(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    reporter = Reporter("", "worker", told.append, Progress(io.StringIO()))
    reporter.progress(0, 0, None, force=True)
    Keeper(str(tmp_path), reporter, every_s=1e9, keep=1).save_now(7, dict)
    reporter.progress(7, 0, None, force=True)
    (path,) = tmp_path.glob("*.elastic")
    assert told[0]["checkpoint_at"] is None
    assert abs(told[1]["checkpoint_at"] - path.stat().st_mtime) < 60


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
    train(Reporter("", "worker", lambda _: None, Progress(terminal)))
    shown = terminal.getvalue()
    assert "step 3: 2 workers from here on (agreed, 2 ms)\n" in shown
    assert "epoch 0, 2 workers, loss 0.5" in shown
    assert ("100%" if tqdm else "step 4/4") in shown
    assert shown.endswith("\n")


def test_nothing_is_shown_where_nobody_looks() -> None:
    file, asked = io.StringIO(), io.StringIO()
    train(Reporter("", "worker", lambda _: None, Progress(file)))
    train(Reporter("", "worker", lambda _: None, Progress(asked, wanted=True)))
    train(Reporter("", "worker", lambda _: None, Progress(Terminal(), wanted=False)))
    assert file.getvalue() == ""
    assert asked.getvalue() != ""


def test_the_bar_moves_to_another_worker_with_rank_0() -> None:
    terminal = Terminal()
    reporter = Reporter("", "worker", lambda _: None, Progress(terminal))
    reporter.progress(1, 0, 4)
    reporter.line("resize", members=("a", "b"), rank=1, step=3, cause="recovered", pause_ms=2.4)
    assert terminal.getvalue().endswith("\n")
    assert "from here on" not in terminal.getvalue()
