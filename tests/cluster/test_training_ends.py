"""How real trainings end in the embedded cluster, and what their jobs make of it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster

TRAINING = """
import os, pathlib, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import elastic_runtime

torch.set_num_threads(1)
gate = pathlib.Path(sys.argv[2])
job = elastic_runtime.init(global_batch_size=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=4)
model, optimizer, loader = job.prepare(model, optimizer, loader)
first = os.environ["POD_INDEX"] == "0"
for epoch in job.epochs(10**9):
    for (x,) in loader:
        job.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if gate.exists() and sys.argv[1] == "in the loop" and first:
            sys.exit(3)
    if job.all_reduce(torch.tensor(float(gate.exists()))) > 0:
        break
sys.exit(3 if first else 0)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def submit(
    embedded_cluster: EmbeddedCluster, forked_python: tuple[str, ...], tmp_path: Path, gate: Path
) -> Callable[..., None]:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    embedded_cluster.project("team-a", 2)

    def submit(where: str, workers: int) -> None:
        command = (*forked_python, str(path), where, str(gate))
        embedded_cluster.submit("train", *command, gpus=workers, gpus_per_worker=1, grace_period_s=60.0)
        embedded_cluster.wait_for("train", lambda job: trains(job, workers))

    return submit


def trains(job: Job, workers: int) -> bool:
    progress = job.status.progress
    return progress is not None and progress.step > 0 and progress.workers == workers


@pytest.mark.parametrize("where", ["in the loop", "after it"])
def test_a_worker_that_ends_with_an_exit_code_of_its_own_fails_the_job_though_another_ends_well(
    embedded_cluster: EmbeddedCluster, submit: Callable[..., None], gate: Path, where: str
) -> None:
    submit(where, 2)
    gate.touch()
    status = embedded_cluster.wait_for_phase("train", "Failed").status
    assert status.exit_code == 3
    assert status.reason is not None
    assert status.reason.message == "worker 0 ended with exit code 3, after its training had ended"


def test_a_training_whose_only_worker_is_told_to_go_by_somebody_else_goes_on_with_another(
    embedded_cluster: EmbeddedCluster, submit: Callable[..., None]
) -> None:
    submit("after it", 1)
    (worker,) = embedded_cluster.job("train").status.workers
    before = embedded_cluster.job("train").status.progress
    assert worker.pid
    assert before is not None
    os.kill(worker.pid, signal.SIGTERM)

    def another_goes_on(job: Job) -> bool:
        progress, others = job.status.progress, [w for w in job.status.workers if w.id != worker.id]
        return bool(others) and progress is not None and progress.step > before.step + 20 and others[0].rank == 0

    status = embedded_cluster.wait_for("train", another_goes_on).status
    assert (status.phase, status.restarts) == ("Running", 0)
