"""How a worker takes its leave of the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.membership.coordinator_client import Coordinator
from elastic_runtime.membership.environment import Environment
from tests.membership.test_service import Recorder
from tests.polling import TIMEOUT_S, until
from tests.standalone_coordinator import StandaloneCoordinator

FINISHED = {"worker": "w0", "event": "TrainingFinished", "step": 7}


def serve(recorder: Recorder, directory: Path) -> StandaloneCoordinator:
    coordinator = StandaloneCoordinator(recorder)
    coordinator.__enter__()
    coordinator.call(lambda service: service.open("job", "secret", first_generation=2, running=["w0"]))
    (directory / "address").write_text(coordinator.url("job"))
    return coordinator


def client(directory: Path, standing: list[dict[str, Any]], ordered: threading.Event) -> Coordinator:
    (directory / "token").write_text("secret")
    environment = Environment(worker_id="w0", coordinator=f"@{directory}/address", token_file=str(directory / "token"))
    return Coordinator(environment, lambda _: ordered.set(), lambda: standing, lambda _: None)


def test_what_a_worker_says_last_is_heard_though_the_coordinator_is_away_when_it_ends(tmp_path: Path) -> None:
    recorder, ordered = Recorder(), threading.Event()
    trains = {"worker": "w0", "event": "WorkerReconnected", "generation": 1, "members": ["w0"], "step": 6}
    standing = [trains]
    first = serve(recorder, tmp_path)
    worker = client(tmp_path, standing, ordered)
    worker.start()
    assert ordered.wait(TIMEOUT_S)
    first.__exit__(None, None, None)
    standing.append(FINISHED)
    worker.send("TrainingFinished", step=7)
    leaving = threading.Thread(target=worker.close, args=(60.0,))
    leaving.start()
    second = serve(recorder, tmp_path)
    try:
        leaving.join(TIMEOUT_S)
        assert not leaving.is_alive(), "the end of the request was never answered"
        assert ("finished", "w0", 7) in recorder.rows
    finally:
        second.__exit__(None, None, None)


def test_a_worker_ends_though_the_coordinator_stays_away(tmp_path: Path) -> None:
    (tmp_path / "address").write_text("http://127.0.0.1:9/v1/membership/job")  # no server listens there
    worker = client(tmp_path, [{"worker": "w0", "event": "WorkerJoined"}], threading.Event())
    worker.start()
    worker.close(timeout_s=0.1)
    until(lambda: not worker._reader.is_alive() and not worker._writer.is_alive(), "the end of its threads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("", 2, "UsageError: the script called elastic_runtime.init() and ended without a step"),
        ("sys.exit(75)", 75, ""),
    ],
)
def test_a_clusters_worker_that_never_began_the_loop_fails_and_says_why(end: str, code: int, words: str) -> None:
    """An interpreter of its own: the exit code is set while it ends. One that the script asks for stays."""
    environment = {
        **os.environ,
        "ELASTIC_COORDINATOR": "http://127.0.0.1:9/job",
        "ELASTIC_WORKER_ID": "w0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    script = f"import sys, elastic_runtime; job = elastic_runtime.init(); print('trained', job.is_leader); {end}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout) == (code, "trained False\n")
    assert words in done.stderr
    assert ("UsageError" in done.stderr) == bool(words)
