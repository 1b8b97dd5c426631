"""The examples, run as a newcomer runs them."""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.wire import Event, EventKind

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("timeline")


def _left_after(seconds: float, part: str) -> list[str]:
    """Command lines of processes that still belong to a run when they have had time to be reaped."""
    deadline = time.monotonic() + seconds
    while (left := _command_lines(part)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _command_lines(part: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if part in line]


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


def test_the_quickstart_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for promise in ("accuracy: 0.9", "steps lost: 0", "2 → 1", "1 → 2", "timeline: "):
        assert promise in ended.stdout
    picture = Path(ended.stdout.split("timeline: ")[1].splitlines()[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not _left_after(5.0, str(tmp_path))


def test_an_interrupted_quickstart_leaves_no_process_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "quickstart.py")], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert any("training with" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert (process.returncode, "everything is stopped" in said) == (130, True)
    assert not _left_after(5.0, str(tmp_path))
