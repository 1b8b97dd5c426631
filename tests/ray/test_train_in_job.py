"""ElasticTorchTrainer in a job of this project's cluster: the quota decides the size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray")

from tests.polling import until
from tests.ray.train_loops import STEPS_PER_EPOCH, train

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

EPOCHS = 20


@pytest.mark.slow
def test_a_training_borrows_what_is_idle_and_gives_it_back_at_the_end_of_a_step(
    embedded_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    script = (sys.executable, "-m", "tests.ray.fit_in_job", str(tmp_path), str(EPOCHS))
    root = str(Path(__file__).parents[2])
    embedded_cluster.submit("ray", *script, gpus=1, min_gpus=1, max_gpus=2, cool_down_s=0, working_directory=root)
    steps = tmp_path / "steps"
    until((tmp_path / "pid-1").exists, "a second worker")
    embedded_cluster.submit("urgent", project="team-b", gpus=1)
    embedded_cluster.wait_for_phase("urgent", "Running", project="team-b")
    (tmp_path / "go").touch()
    embedded_cluster.wait_for_phase("ray", "Succeeded")

    assert [int(line) for line in steps.read_text().split()] == list(range(EPOCHS * STEPS_PER_EPOCH))
    ended = json.loads((tmp_path / "result").read_text())
    assert ended["value"] == train({"directory": "", "epochs": EPOCHS, "alone": True})
    assert ended["metrics"]["epoch"] == EPOCHS - 1
    assert ended["metrics"]["workers"] == 1
    assert ended["path"].endswith(f"checkpoint_{EPOCHS * STEPS_PER_EPOCH:09d}_0")
