"""Evaluations written with Accelerate survive the loss, the joining and the leaving of a worker."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic_runtime.integrations.accelerate import ElasticAccelerator
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import (
    HELD_OUT,
    IN_EVALUATION,
    Gate,
    Plan,
    Points,
    Record,
    build,
    evaluated,
    stay_until_killed,
    trained_alone,
)
from tests.forked import preload

if TYPE_CHECKING:
    from pathlib import Path

preload(__name__)


class Staying:
    """A victim stays where the test asks it to, at a step, until it is killed; or all wait for the gate."""

    def __init__(self, plan: Plan, index: int, gate: Gate | None) -> None:
        self._asked, self._index, self._gate = plan.options, index, gate

    def at(self, place: str, step: int) -> None:
        asked = self._asked
        if self._gate is None or asked.get("place") != place:
            return
        if "victim" not in asked:
            self._gate.pass_through(self._index, IN_EVALUATION + step)
        elif (asked["victim"], asked["step"]) == (self._index, step):
            stay_until_killed(self._gate, self._index)


def evaluate(
    accelerator: ElasticAccelerator, model: nn.Module, held_out: Any, stay: Staying, *, together: bool
) -> dict[str, Any]:
    """As Accelerate's guides write it: gathered in each iteration, or added up and reduced at the end."""
    names: list[int] = []
    objects: list[str] = []
    right = torch.zeros(2)
    for number, (x, y, indices) in enumerate(held_out):
        with torch.no_grad():
            answers = model(x).argmax(-1)
        if number == 1:
            stay.at("before", accelerator.job.position.step)
        answers, truth, seen = accelerator.gather_for_metrics((answers, y, indices))
        objects += accelerator.gather_for_metrics([f"of rank {accelerator.process_index}"])
        names += seen.tolist()
        right += torch.tensor([(answers == truth).sum(), len(truth)]) / accelerator.num_processes
    stay.at("after", accelerator.job.step)
    if together:
        right = accelerator.reduce(right)
    return {"names": names, "right": right.tolist(), "size": accelerator.num_processes, "objects": len(objects)}


def evaluating(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """After each epoch rank 0 evaluates by itself, then all do together; in step 18 each; each step gathers a loss."""
    torch.set_num_threads(1)
    accelerator = ElasticAccelerator(
        cpu=True, global_batch_size=plan.global_batch, elastic={"max_batch_per_gpu": plan.max_batch}
    )
    job, stay = accelerator.job, Staying(plan, index, gate)
    model, optimizer, scheduler = build(plan)
    loader: Any = DataLoader(Points(plan.samples), batch_size=plan.loader_batch, shuffle=True)
    held_out: Any = DataLoader(Points(HELD_OUT), batch_size=4, shuffle=True)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    record = Record(job, index, directory, optimizer.optimizer, dict)
    results = (directory / f"evaluated-{index}.jsonl").open("a", buffering=1)
    work = partial(evaluate, accelerator, model, held_out, stay)
    for _epoch in accelerator.epochs(plan.epochs):
        assert accelerator.reduce(torch.ones(1)).item() >= 1  # what each epoch begins with
        with accelerator.split_between_processes(list(range(12))) as share:
            assert sorted(accelerator.gather(torch.tensor(share)).tolist()) == list(range(12))
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            assert len(accelerator.gather(loss.detach()[None])) == accelerator.num_processes
            with accelerator.main_process_first():
                stay.at("first", job.position.step)
            accelerator.wait_for_everyone()
            assert not accelerator.check_trigger()
            if job.position.step == 18:
                results.write(json.dumps({"step": 18, **work(together=False)}) + "\n")
        if accelerator.is_main_process:
            for x, _, _ in held_out:  # of one worker's: what it gathers concerns no other
                assert torch.equal(accelerator.gather_for_metrics(x), x)
        results.write(json.dumps({"step": job.step, **accelerator.repeat(partial(work, together=True))}) + "\n")
    accelerator.wait_for_everyone()
    torch.save(
        {"model": model.state_dict(), "step": job.step, "lr": scheduler.get_last_lr()}, directory / f"final-{index}.pt"
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what was trained, what was evaluated) by one undisturbed process."""
    directory = tmp_path_factory.mktemp("alone")
    plan = replace(Plan(), body=evaluating)
    return trained_alone(evaluating, plan, directory), evaluated(directory, 0)


def check_evaluations(directory: Path, alone: list[dict[str, Any]], *indices: int) -> None:
    """Each sample was evaluated once, with the same answers; by several workers where all were asked to."""
    for index in indices:
        found = evaluated(directory, index)
        assert [row["step"] for row in found] == [row["step"] for row in alone][-len(found) :]
        for ours in found:
            assert sorted(ours["names"]) == list(range(HELD_OUT))
            assert ours["right"][1] == pytest.approx(HELD_OUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "step", "victim"), [("before", 26, 0), ("after", 26, 1), ("before", 18, 1), ("first", 17, 0)]
)
def test_nothing_is_lost_with_a_worker(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, Any]]], victim: int, place: str, step: int
) -> None:
    """The worker is killed in a shared evaluation, in its own, or between steps, where rank 0 proceeds first."""
    plan = replace(Plan(), body=evaluating, options={"victim": victim, "place": place, "step": step})
    with Cluster(tmp_path, plan) as cluster:
        others = cluster.lose_in_evaluation(victim)
        cluster.check_result(alone[0])
    check_evaluations(tmp_path, alone[1], *others)
    assert [row["size"] for row in evaluated(tmp_path, others[0]) if row["step"] != 18] == [3, 2, 2]


def test_who_comes_and_who_goes_waits_for_the_evaluations_end(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    with Cluster(tmp_path, replace(Plan(), body=evaluating, options={"place": "before"})) as cluster:
        cluster.start(0, 1, step=IN_EVALUATION + 13)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.hold_at(IN_EVALUATION + 26)
        cluster.wait_until_at(IN_EVALUATION + 26, 0, 1, 2)
        cluster.target(0, 2)
        cluster.wait_until_prepared(0, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(alone[0])
    check_evaluations(tmp_path, alone[1], 0, 2)
    assert [(row["step"], row["size"]) for row in evaluated(tmp_path, 0) if row["step"] != 18] == [
        (13, 2),
        (26, 3),
        (39, 2),
    ]
    assert [row["step"] for row in evaluated(tmp_path, 1)] == [13, 18, 26]
    advised = [(tmp_path / f"log-{index}").read_text().count("accelerator.repeat(evaluate)") for index in (0, 1, 2)]
    assert advised == [1, 0, 0]


def test_who_comes_within_an_epoch_that_one_worker_has_begun_goes_on_in_it(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    """The collectives before the loop were those of one worker, and are not done again."""
    with Cluster(tmp_path, replace(Plan(), body=evaluating)) as cluster:
        cluster.start(0, step=5)
        cluster.resize(0, 1, up_to=20)
        cluster.wait_until_at(20, 0, 1)
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.check_result(alone[0])
    check_evaluations(tmp_path, alone[1], 0, 1)
