"""A training by Trainer changes its size: a joined worker, or a new rank 0, has the state of Trainer and callbacks."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from elastic_runtime.integrations.transformers import ElasticTrainer
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.test_trainer import DATA, Small, arguments
from tests.elastic_runtime.training import Gate, Plan, trained_alone
from tests.forked import preload
from tests.polling import TIMEOUT_S
from tools.devcluster.layout import free_port

preload("elastic_runtime.integrations.transformers", __name__)

SCRIPT = """
import os, pathlib, sys
from tests.elastic_runtime import test_trainer_resizing
from tests.elastic_runtime.training import Plan

test_trainer_resizing.train(Plan(), int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), None)
"""
EVALUATIONS = 5  # evaluations: the training stops early at step 5 * (1 + 5)


class Passing(TrainerCallback):
    """Each step waits for the gate."""

    def __init__(self, index: int, gate: Gate | None) -> None:
        self._index, self._gate = index, gate

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._gate:
            self._gate.pass_through(self._index, state.global_step)


def train(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(1)
    asked: dict[str, Any] = {"lr_scheduler_type": "linear", "num_train_epochs": 50, "logging_steps": 5}
    asked |= {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "loss", "greater_is_better": False}
    asked |= {"save_strategy": "steps", "save_steps": 10, "disable_tqdm": False}
    stopping = EarlyStoppingCallback(early_stopping_patience=EVALUATIONS, early_stopping_threshold=10.0)
    trainer = ElasticTrainer(
        model=Small(),
        args=arguments(directory / "saved", **asked),
        train_dataset=DATA,
        eval_dataset=DATA[:20],
        callbacks=[Passing(index, gate), stopping],
        global_batch_size=20,
    )
    trainer.train()
    trainer.save_model(str(directory / f"model-{index}"))
    history = [row for row in trainer.state.log_history if "eval_loss" in row]
    found = {"step": trainer.job.position.step, "rank": trainer.job.rank, "leads": trainer.is_world_process_zero()}
    (directory / f"report-{index}.json").write_text(
        json.dumps(
            {**found, "evaluated": [row["step"] for row in history], "losses": [r["eval_loss"] for r in history]}
        )
    )
    model: Any = trainer.model
    torch.save({"model": model.state_dict(), "step": found["step"], "lr": 0.0}, directory / f"final-{index}.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained_alone(train, Plan(), tmp_path_factory.mktemp("alone"))


def test_it_stops_early_at_the_same_step_on_all_whoever_came_and_was_lost(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    with Cluster(tmp_path, replace(Plan(), body=train)) as cluster:
        cluster.start(0, 1, step=7)
        cluster.resize(0, 1, 2, up_to=15)
        cluster.wait_until_at(15, 0, 1, 2)
        cluster.kill("w0")
        cluster.let_go()
        cluster.wait_for_end(1, 2)
    received = {index: json.loads((tmp_path / f"report-{index}.json").read_text()) for index in (1, 2)}
    for found in received.values():
        assert found["step"] == alone["step"] == 5 * (1 + EVALUATIONS)
        assert found["evaluated"] == [5, 10, 15, 20, 25, 30]
        assert found["leads"] == (found["rank"] == 0)
    assert received[1]["losses"] == received[2]["losses"]
    assert (tmp_path / "model-1").exists()
    assert not (tmp_path / "model-2").exists()
    assert sorted(folder.name for folder in (tmp_path / "saved").iterdir()) == [
        f"checkpoint-{step}" for step in (10, 20, 30)
    ]
    assert "30/150" in (tmp_path / "log-1").read_text()  # its progress bar, which was worker 0's before
    for index in (1, 2):
        final = torch.load(tmp_path / f"final-{index}.pt")
        for name, value in alone["model"].items():
            torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)


def test_patience_goes_on_from_the_jobs_checkpoint(tmp_path: Path, alone: dict[str, Any]) -> None:
    with Cluster(tmp_path, replace(Plan(), body=train), checkpoints=True) as cluster:
        cluster.start(0, 1, step=17)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.target(2)
        cluster.wait_for_end(2)
    received = json.loads((tmp_path / "report-2.json").read_text())
    assert received["step"] == alone["step"]
    assert received["evaluated"] == [5, 10, 15, 20, 25, 30]


def test_under_torchrun_the_ranks_are_the_jobs(
    forked_python: tuple[str, ...], tmp_path: Path, alone: dict[str, Any]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*forked_python, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    ended = subprocess.run(
        [*command, "--no-python", *forked_python, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    received = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    assert [found["step"] for found in received] == [alone["step"]] * 2
    assert received[0]["losses"] == received[1]["losses"]
    assert [(tmp_path / f"model-{rank}").exists() for rank in range(2)] == [True, False]
