"""reduction="exact": the same bits whatever sizes the job had; dropout, noise, BatchNorm, bfloat16, AdamW, clipping."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import BatchPlanError, SettingsError, StateError
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, Points, train
from tests.forked import context
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

PLAN = Plan(
    max_batch=None, normalise=True, mixed=True, global_batch=19, options={"reduction": "exact", "shards": 6, "seed": 3}
)


def train_alone(plan: Plan, directory: Path) -> str:
    """In a process of its own: deterministic algorithms are switched on for good."""
    directory.mkdir(exist_ok=True)
    process = context.Process(target=train, args=(plan, 0, directory, None))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    found: str = torch.load(directory / "final-0.pt")["sha256"]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_alone(PLAN, tmp_path_factory.mktemp("reference"))


def finish(cluster: Cluster, *indices: int) -> set[str]:
    cluster.let_go()
    cluster.wait_for_end(*indices)
    cluster.check_samples()
    return {final["sha256"] for final in cluster.finals().values()}


@pytest.mark.parametrize("size", [3, 8])
def test_a_job_of_any_size_gets_the_bits_of_one_worker(tmp_path: Path, undisturbed: str, size: int) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.target(*range(size))
        assert finish(cluster, *range(size)) == {undisturbed}


def test_growing_shrinking_and_losing_workers_change_no_bit(tmp_path: Path, undisturbed: str) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        for joiner, step in ((2, 8), (3, 11), (4, 14)):
            cluster.target(*range(joiner + 1))
            cluster.wait_until_prepared(*range(joiner + 1))
            cluster.hold_at(step)
            cluster.wait_until_at(step, *range(joiner + 1))
        cluster.kill("w0")
        cluster.kill("w3")
        cluster.hold_at(18)
        cluster.wait_for_size(3)
        cluster.wait_until_at(18, 1, 2, 4)
        cluster.target(4)
        cluster.wait_until_prepared(4)
        assert finish(cluster, 4) == {undisturbed}


@pytest.mark.slow
def test_a_stopped_worker_changes_no_bit(tmp_path: Path, undisturbed: str) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1, 2)
        cluster.kill("w0", signal.SIGSTOP)
        assert finish(cluster, 1, 2) == {undisturbed}


def test_loader_processes_change_no_bit(tmp_path: Path, undisturbed: str) -> None:
    with Cluster(tmp_path, replace(PLAN, loader_workers=2)) as cluster:
        cluster.target(0, 1)
        assert finish(cluster, 0, 1) == {undisturbed}


def test_a_checkpoint_goes_on_at_another_size_without_a_bit_changed(tmp_path: Path, undisturbed: str) -> None:
    with Cluster(tmp_path, PLAN, checkpoints=True) as cluster:
        cluster.start(0, 1)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.target(2, 3, 4)
        assert finish(cluster, 2, 3, 4) == {undisturbed}


def test_fast_is_not_exact_and_another_seed_is_another_training(tmp_path: Path, undisturbed: str) -> None:
    others = [replace(PLAN, options={}), replace(PLAN, options={**PLAN.options, "seed": 4})]
    digests = {train_alone(plan, tmp_path / str(i)) for i, plan in enumerate(others)}
    assert len(digests | {undisturbed}) == 3


def test_a_worker_that_computes_with_another_number_of_threads_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0)
        cluster.plan = replace(PLAN, threads=2)
        cluster.target(0, 1)
        cluster.wait_until_prepared(0, 1)
        cluster.let_go()
        cluster.processes["w1"].join(TIMEOUT_S)
        assert cluster.processes["w1"].exitcode == 1
        assert "the same torch, number of threads and kind of device" in cluster.logs()
        cluster.wait_for_end(0)


def test_what_would_change_a_shards_shape_is_an_error() -> None:
    with pytest.raises(SettingsError, match="'fast' or 'exact'"):
        elastic_runtime.init(reduction="bitwise")  # type: ignore[arg-type]
    with pytest.raises(BatchPlanError, match="use at least shards=13"):
        elastic_runtime.init(global_batch_size=50, max_batch_per_gpu=4, reduction="exact")


def test_a_state_of_another_reduction_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))

    def steps(**options: object) -> None:
        job = elastic_runtime.init(checkpoint_every_s=1e-6, **options)  # type: ignore[arg-type]
        model = nn.Linear(12, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Points(16), batch_size=8))
        for _epoch in job.epochs(2):
            for x, _y, _i in loader:
                job.backward(model(x).sum())
                model.zero_grad()

    steps()
    try:
        with pytest.raises(StateError, match="trained with reduction='fast', this script asks for reduction='exact'"):
            steps(reduction="exact")
    finally:
        torch.use_deterministic_algorithms(mode=False)
