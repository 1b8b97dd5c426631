"""Trainer's evaluations are shared out among the workers: the same figures as alone, also where one is lost in them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import IterableDataset

from elastic_runtime.integrations.transformers import ElasticTrainer
from elastic_runtime.integrations.transformers.evaluation import shared_out
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.test_trainer import DATA, Small, arguments
from tests.elastic_runtime.test_trainer_resizing import Passing
from tests.elastic_runtime.training import (
    HELD_OUT,
    Gate,
    Plan,
    evaluated,
    stay_until_killed,
    trained_alone,
)
from tests.forked import preload

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import EvalPrediction

preload(__name__)

BATCH = 4  # so the last one of the held-out samples has one
HELD = DATA[:HELD_OUT]
VICTIM_STAYS_AT = 5  # batches that it computes; with three workers that is in the second evaluation


class Watched(Small):
    """Counts what it computes for evaluations. A victim stays in one until it is killed."""

    main_input_name = "x"

    def __init__(self, index: int = -1, victim: int = 0, gate: Gate | None = None) -> None:
        super().__init__()
        self.predicted = self._batches = 0
        self._index, self._victim, self._gate = index, victim, gate

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.training:
            self._batches += 1
            if self._gate and self._index == self._victim and self._batches == VICTIM_STAYS_AT:
                stay_until_killed(self._gate, self._index)
            self.predicted += len(x)
        return super().forward(x, labels)


class Own(ElasticTrainer):
    """A script's own `prediction_step` is given what its worker computes."""

    def prediction_step(self, model: Any, inputs: Any, *how: Any, **named: Any) -> Any:
        assert set(inputs) == {"x", "labels"}
        return super().prediction_step(model, inputs, *how, **named)


class Adding:
    """A metric of `batch_eval_metrics`: it keeps what it has seen until it is asked for the result."""

    def __init__(self) -> None:
        self.labels: list[int] = []

    def __call__(self, given: EvalPrediction, *, compute_result: bool) -> dict[str, Any]:
        found: Any = given
        self.labels += found.label_ids.tolist()
        if not compute_result:
            return {}
        seen, self.labels = self.labels, []
        return {"labels": digest(seen)}


def compute(given: EvalPrediction) -> dict[str, Any]:
    """The inputs are those of the labels, in one order; and what was predicted of them."""
    found: Any = given
    for x, y, sample in zip(found.inputs, found.label_ids, HELD, strict=True):
        assert (x == sample["x"].numpy()).all()
        assert y == sample["labels"]
    return {"labels": digest(found.label_ids.tolist()), "predicted": float(found.predictions.sum())}


def digest(labels: list[int]) -> str:
    return hashlib.sha256(str(labels).encode()).hexdigest()


def own_kind(logits: Any, labels: torch.Tensor) -> Any:
    """What is exchanged is this, not the logits."""
    return logits[torch.arange(len(labels)), labels].square()


def evaluating(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # a script's default; else each loader process imports torch
    batchwise = plan.options.get("batchwise", False)
    asked: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no", "num_train_epochs": 4}
    asked |= {"per_device_eval_batch_size": BATCH, "batch_eval_metrics": batchwise}
    asked |= {"include_for_metrics": [] if batchwise else ["inputs"], "dataloader_num_workers": plan.loader_workers}
    trainer = Own(
        model=Watched(index, plan.options.get("victim", -1), gate),
        args=arguments(directory / "saved", **asked),
        train_dataset=DATA,
        eval_dataset=HELD,
        compute_metrics=Adding() if batchwise else compute,
        preprocess_logits_for_metrics=own_kind,
        callbacks=[Passing(index, gate)],
        global_batch_size=20,
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    model: Any = trainer.model
    with (directory / f"evaluated-{index}.jsonl").open("w") as written:
        written.writelines(json.dumps({**row, "own": model.predicted}) + "\n" for row in rows)
    torch.save({"model": model.state_dict(), "step": trainer.job.step, "lr": 0.0}, directory / f"final-{index}.pt")


@pytest.mark.parametrize(("victim", "batchwise", "loader_workers"), [(0, False, 2), (2, True, 0)])
def test_figures_are_those_of_one_worker_and_survive_a_loss(
    tmp_path: Path, victim: int, batchwise: bool, loader_workers: int
) -> None:
    options = {"victim": victim, "batchwise": batchwise}
    plan = replace(Plan(), body=evaluating, options=options, loader_workers=loader_workers)
    trained_alone(evaluating, plan, tmp_path / "alone")
    expected = evaluated(tmp_path / "alone", 0)
    with Cluster(tmp_path, plan) as cluster:
        others = cluster.lose_in_evaluation(victim)
        assert all(commit.lost_steps == 0 for commit in cluster.commits)
    found = [evaluated(tmp_path, index) for index in others]
    for ours in found:
        assert [(row["step"], row["eval_labels"]) for row in ours] == [(e["step"], e["eval_labels"]) for e in expected]
        for row, alone in zip(ours, expected, strict=True):
            for name in {"eval_loss", "eval_predicted"} & alone.keys():
                assert row[name] == pytest.approx(alone[name], rel=1e-4)
    assert [row["eval_loss"] for row in found[0]] == [row["eval_loss"] for row in found[1]]
    computed = [rows[0]["own"] for rows in found]
    assert max(computed) < len(expected) * HELD_OUT * 0.6  # by two, and by three before


class Streamed(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(HELD)


def test_what_nobody_knows_the_length_of_is_computed_by_each_worker(tmp_path: Path) -> None:
    trainer = ElasticTrainer(model=Small(), args=arguments(tmp_path), train_dataset=DATA, eval_dataset=Streamed())
    loader = trainer.get_eval_dataloader()
    with shared_out(trainer, loader) as shared:
        assert shared is loader
