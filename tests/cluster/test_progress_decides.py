"""What trainings report reaches the scheduler, and decides: real trainings, real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster

TRAINING = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import elastic_runtime

job = elastic_runtime.init(global_batch_size=4, checkpoint_every_s=float(sys.argv[1]))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=4)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for epoch in job.epochs(10**9):
    for (x,) in loader:
        job.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path: Path, forked_python: tuple[str, ...]) -> tuple[str, ...]:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    return (*forked_python, str(path))


def progressed(job: Job, *, saved: bool) -> bool:
    progress = job.status.progress
    if progress is None or not progress.throughput or progress.workers != 1:
        return False
    return progress.checkpoint_at is not None or not saved


def test_of_two_equal_trainings_the_one_with_the_fresh_checkpoint_gives_way(
    embedded_cluster: EmbeddedCluster, script: tuple[str, ...]
) -> None:
    """Without checkpoints it would be the younger one."""
    embedded_cluster.project("team-a", 0)
    embedded_cluster.project("team-b", 1)
    embedded_cluster.submit("old", *script, "0.2")
    embedded_cluster.submit("young", *script, "1e9")
    embedded_cluster.wait_for("old", lambda job: progressed(job, saved=True))
    embedded_cluster.wait_for("young", lambda job: progressed(job, saved=False))
    embedded_cluster.submit("owner", project="team-b")
    embedded_cluster.wait_for_phase("owner", "Running", "team-b")
    assert embedded_cluster.job("old").status.evictions == 1
    assert embedded_cluster.job("young").status.evictions == 0


def test_a_daemon_that_starts_again_still_knows_who_saved_last(
    embedded_cluster: EmbeddedCluster, script: tuple[str, ...]
) -> None:
    embedded_cluster.project("team-a", 0)
    embedded_cluster.project("team-b", 1)
    embedded_cluster.submit("old", *script, "0.2")
    embedded_cluster.submit("young", *script, "1e9")
    embedded_cluster.wait_for("old", lambda job: progressed(job, saved=True))
    embedded_cluster.wait_for("young", lambda job: progressed(job, saved=False))
    embedded_cluster.kill_daemon()
    embedded_cluster.submit("owner", project="team-b")
    embedded_cluster.wait_for_phase("owner", "Running", "team-b")
    assert embedded_cluster.job("old").status.evictions == 1
