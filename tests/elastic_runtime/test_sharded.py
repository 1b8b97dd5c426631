"""FSDP2 trainings grow, shrink and are cut short; each sample counts once, and the model is the single worker's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runtime import sharded_files
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_training import train
from tests.elastic_runtime.training import Plan
from tests.patience import until

PLAN = Plan(body=train)


def undisturbed(plan: Plan, directory: Path) -> dict[str, Any]:
    """What one process gets that does not shard anything."""
    threads = torch.get_num_threads()
    train(replace(plan, options={**plan.options, "sharded": ""}), 0, directory, None)
    torch.set_num_threads(threads)
    result: dict[str, Any] = torch.load(directory / "final-0.pt")
    return result


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(PLAN, tmp_path_factory.mktemp("reference"))


def test_a_sharded_job_grows_shrinks_and_is_replaced_and_holds_its_part_only(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.hold_at(12)
        cluster.wait_for_size(3)
        cluster.wait_until_at(12, 0, 1, 2)
        cluster.target(0, 1, 2, 3)
        cluster.wait_until_prepared(0, 1, 2, 3)
        cluster.target(1, 3)
        cluster.wait_until_prepared(1, 3)
        cluster.hold_at(20)
        cluster.wait_for_size(2)
        cluster.wait_for_end(0, 2)
        assert all(commit.lost_steps == 0 for commit in cluster.commits)
        cluster.let_go()
        cluster.wait_for_end(1, 3)
        cluster.check_result(reference)
    rows = [json.loads(line) for path in tmp_path.glob("consumed-*") for line in path.read_text().splitlines()]
    assert {row["workers"] for row in rows} == {2, 3}
    for part, whole in (row["held"] for row in rows):
        assert 0 < part < 0.53 * whole
    assert all(part < 0.36 * whole for part, whole in (row["held"] for row in rows if row["workers"] == 3))


def report(directory: Path, index: int, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / f"report-{index}.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def test_a_lost_shard_takes_all_back_to_the_last_checkpoint_and_says_so(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    plan = replace(PLAN, options={"checkpoint_every_s": 1e-9})
    with Cluster(tmp_path, plan, checkpoints=True) as cluster:
        cluster.start(0, 1, 2)
        until(lambda: sharded_files.whole_ones(f"{tmp_path}/checkpoints"), "a whole checkpoint")
        cluster.kill("w1")
        cluster.hold_at(20)
        commit = cluster.wait_for_size(2)
        cluster.let_go()
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)
        logs = cluster.logs()
    back = report(tmp_path, 0, "restored")[0]["step"]
    assert commit.lost_steps == 5 - back
    assert f"back to checkpoint-{back:012d}-" in logs
    assert f"{5 - back} steps are repeated" in logs


def test_a_lost_shard_without_a_checkpoint_ends_the_job_with_the_remedy(tmp_path: Path) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1, 2)
        cluster.kill("w2")
        cluster.let_go()
        for worker in ("w0", "w1"):
            cluster.processes[worker].join(60)
            assert cluster.processes[worker].exitcode == 1, cluster.logs()
        assert "there is no checkpoint; set ELASTIC_CHECKPOINT_DIR" in cluster.logs()


def test_an_evicted_sharded_job_saves_and_goes_on_at_another_size_and_unsharded(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN, checkpoints=True) as cluster:
        cluster.start(0, 1)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.hold_at(10)
        cluster.target(2, 3, 4)
        cluster.wait_until_at(10, 2, 3, 4)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(2, 3, 4)
        cluster.plan = replace(PLAN, options={"sharded": ""})
        cluster.target(5)
        cluster.wait_for_end(5)
        cluster.check_result(reference)


def test_the_example_learns_and_saves_the_whole_model(tmp_path: Path) -> None:
    script = Path("examples/train_sharded.py").resolve()
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines()]
    assert losses[-1] < losses[0] / 2
    assert torch.load(tmp_path / "model.pt")["blocks.3.0.weight"].shape == (64, 64)
