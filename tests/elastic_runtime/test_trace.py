"""The timeline of a job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from elastic_runtime.trace import draw, main, read

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_timeline_shows_who_trained_when_and_what_each_change_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"members": ["w0", "w1"], "generation": 2, "step": 40, "cause": "agreed"}
    first = [
        {"event": "resize", "at": 100, "members": ["w0"], "generation": 1, "step": 0, "cause": "join", "pause_ms": 9},
        {"event": "checkpoint", "at": 104, "step": 20},
        {"event": "resize", "at": 105, "pause_ms": 2.5, "phases_ms": {"meet": 1, "state": 1.5}, **both},
        {"event": "steps", "at": 106, "steps": 10, "step_ms": 20.0, "wait_ms": 8.0, "slowness": 0.6},
        {"event": "steps", "at": 107, "steps": 30, "step_ms": 24.0, "wait_ms": 12.0, "slowness": 0.6},
        {"event": "finished", "at": 110, "step": 90},
    ]
    received = {"pause_ms": 4.25, "phases_ms": {"meet": 4.1, "state": 0.1}}
    second = [{"event": "resize", "at": 105, **received, **both}, {"event": "left", "at": 107, "step": 60}]
    for worker, rows in (("w0", first), ("w1", second)):
        lines = [json.dumps({"worker": worker, **row}) for row in rows]
        (tmp_path / worker).write_text("\n".join([*lines, '{"cut off']))
    assert main([str(tmp_path / "w0"), str(tmp_path / "w1")]) == 0
    shown = draw(read([str(tmp_path / "w0"), str(tmp_path / "w1")]), width=11)
    assert shown.splitlines()[1:3] == ["w0  |===c|====.", "w1       |=x"]
    printed = capsys.readouterr().out
    assert "5.00 s  generation 2: 2 workers at step 40, agreed, pause 4.2 ms (meet 4.1, state 1.5)" in printed
    assert "w0      23.0 ms a step, of which 11.0 waiting; its own part 0.60 times the mean" in printed


def test_files_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere/report.jsonl"]) == 2
    assert "ELASTIC_REPORT_FILE" in capsys.readouterr().err
    assert main([]) == 2
