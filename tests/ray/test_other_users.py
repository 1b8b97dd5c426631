"""A machine with hostile local users, and this project's cluster on Ray: what another user reaches of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.ray.conftest import log_of
from tests.security.other_user import as_root, open_to_everybody, run, start
from tests.security.test_training_under_attack import INTRUDE, STEPS, TRAINING, WATCH

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@as_root
def test_another_user_neither_takes_part_in_a_training_on_ray_nor_reaches_its_files(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """Ports of gloo and of the membership service, files and sockets of the daemon and of the workers' nodes."""
    script, gate = tmp_path / "training.py", tmp_path / "gate"
    script.write_text(TRAINING)
    open_to_everybody(cluster.home.root)
    with start(WATCH, 120) as intruder:
        command = (sys.executable, str(script), str(gate), "0")
        cluster.submit("train", *command, gpus=2, gpus_per_worker=1)
        cluster.wait_for("train", lambda job: job.status.progress is not None and job.status.progress.step > 0)
        found = [path for path in cluster.home.root.rglob("*") if not path.is_symlink()]
        assert any("nodes" in path.parts for path in found), "the node's directory is below the home here"
        assert run(INTRUDE, cluster.home.root, *found) == "ended"
        gate.touch()
        job = cluster.wait_for("train", lambda job: job.status.phase.final)
        intruder.kill()
    assert job.status.phase == "Succeeded", job.status
    assert job.status.generation == 1, "connections that are part of no pair end no generation"
    assert f"weight {float(-STEPS)} after {STEPS}" in log_of(cluster, "train")
