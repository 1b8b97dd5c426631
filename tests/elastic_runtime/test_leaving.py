"""A worker that was let go ends at once, but not before the script's own last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.effort import soaked
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import atexit, sys
atexit.register(print, "registered before")
import torch
from elastic_runtime.process.process_exit import leave
atexit.register(print, "registered after")

class AfterAtexit:
    def __del__(self):
        sys.__stdout__.write("torn down\\n")

kept = AfterAtexit()
try:
    leave(143)
finally:
    print("finally")
"""

FAILING = """
from elastic_runtime.process.process_exit import leave
try:
    leave(0)
finally:
    raise RuntimeError("the last words failed")
"""

ORPHANED = """
import multiprocessing, os, signal, sys, time
from elastic_runtime.data.dataloader import begin_loader_process

def load(worker):
    while os.getppid() == worker:
        time.sleep(0.001)
    begin_loader_process(print, 7, served=False)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=load, args=(os.getpid(),), daemon=True).start()
    os.kill(os.getpid(), signal.SIGKILL)
"""

SERVED = """
import os, signal
import torch
from torch.utils.data import DataLoader, TensorDataset
import elastic_runtime

if __name__ == "__main__":
    job = elastic_runtime.init(progress=False)
    model = torch.nn.Linear(1, 1)
    data = TensorDataset(torch.zeros(8, 1))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="forkserver")
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in job.steps(3):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_everything_a_script_relies_on_runs_and_the_teardown_does_not() -> None:
    done = run(SCRIPT)
    assert done.stdout.splitlines() == ["finally", "registered after", "registered before"]
    assert (done.stderr, done.returncode) == ("", 143)


def test_an_error_of_the_script_while_it_leaves_is_told() -> None:
    done = run(FAILING)
    assert "RuntimeError: the last words failed" in done.stderr
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(ORPHANED, id="that-begins-after-it"),
        pytest.param(SERVED, id="of-a-fork-server", marks=soaked),
    ],
)
def test_a_loader_process_ends_with_its_killed_worker(tmp_path: Path, what: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(what)
    reader, writer = os.pipe()  # at its end when the last process that could write to it has exited
    worker = subprocess.Popen([sys.executable, str(script)], stdout=writer)
    os.close(writer)
    assert worker.wait(TIMEOUT_S) == -signal.SIGKILL
    with os.fdopen(reader) as output:
        assert output.read() == ""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """The script, to its end."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
