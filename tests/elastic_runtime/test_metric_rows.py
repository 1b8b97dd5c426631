"""One row for each step, from whichever worker is rank 0."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

import elastic_runtime
from elastic_runtime.process.reporting import MetricRows
from tests.elastic_runtime.zoo.parts import vectors


class Worker:
    """A worker that reports, and what it logged."""

    def __init__(self, *, leads: bool) -> None:
        self.leads, self.logged = leads, list[tuple[int, dict[str, float]]]()
        self.rows = MetricRows(lambda: self.leads, self.log)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))


def test_a_step_that_is_repeated_is_logged_once_with_its_last_figures() -> None:
    worker = Worker(leads=True)
    for step, loss in ((0, 3.0), (1, 2.0), (1, 1.5), (2, 1.0)):
        worker.rows.add(step, {"loss": loss})
    worker.rows.flush()
    assert worker.logged == [(0, {"loss": 3.0}), (1, {"loss": 1.5}), (2, {"loss": 1.0})]


def test_figures_of_one_step_become_one_row() -> None:
    worker = Worker(leads=True)
    worker.rows.add(4, {"loss": 1.0})
    worker.rows.add(4, {"accuracy": 0.5})
    worker.rows.flush()
    worker.rows.flush()
    assert worker.logged == [(4, {"loss": 1.0, "accuracy": 0.5})]


def test_each_step_is_logged_by_exactly_one_worker_though_rank_0_is_lost() -> None:
    """It is lost in step 3: it has not logged step 2, and the next rank 0 does."""
    first, second = Worker(leads=True), Worker(leads=False)
    for step in range(3):
        for worker in (first, second):
            worker.rows.add(step, {"loss": float(step)})
    second.leads = True
    for step in (3, 4):
        second.rows.add(step, {"loss": float(step)})
    second.rows.flush()
    assert [step for worker in (first, second) for step, _ in worker.logged] == [0, 1, 2, 3, 4]


def test_a_training_logs_each_of_its_steps() -> None:
    job = elastic_runtime.init(progress=False)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = job.prepare(model, optimizer, vectors())
    logged: list[int] = []

    @job.on_report
    def log(metrics: dict[str, Any], step: int) -> None:
        assert metrics["loss"] > 0
        logged.append(step)

    for _epoch in job.epochs(2):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            job.backward(loss)
            optimizer.step()
            job.report(loss=loss.item())
            optimizer.zero_grad()
    assert logged == list(range(8))
