"""What rank 0 tells the coordinator of its training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_runtime.keeper import Keeper
from elastic_runtime.reporting import Reporter

if TYPE_CHECKING:
    from pathlib import Path


def test_progress_carries_the_throughput_of_the_size_the_job_has_now() -> None:
    told: list[dict[str, Any]] = []
    reporter = Reporter("", "worker", told.append)
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
    reporter = Reporter("", "worker", told.append)
    reporter.progress(0, 0, None, force=True)
    Keeper(str(tmp_path), reporter, every_s=1e9, keep=1).save_now(7, dict)
    reporter.progress(7, 0, None, force=True)
    (path,) = tmp_path.glob("*.elastic")
    assert told[0]["checkpoint_at"] is None
    assert abs(told[1]["checkpoint_at"] - path.stat().st_mtime) < 60
