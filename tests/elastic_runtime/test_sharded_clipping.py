"""job.clip_grad_norm_: torch's result for replicated and sharded models, and a peer that dies in the middle of it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import UsageError
from elastic_runtime.reduction.step_modes import Clipping
from elastic_runtime.sharded import files
from elastic_runtime.sharded.mode import clip_shards_
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_training import AT_CLIPPING, Clip, train
from tests.elastic_runtime.test_sharded import UNMIRRORED, undisturbed
from tests.elastic_runtime.test_transfer import both
from tests.elastic_runtime.training import Plan, Points
from tests.forked import preload
from tests.polling import until

if TYPE_CHECKING:
    from pathlib import Path

preload(__name__)


@pytest.mark.parametrize(("norm_type", "sharded"), [(2.0, ""), (math.inf, ""), (math.inf, "plain"), (2.0, "two types")])
def test_it_is_torchs_for_replicated_and_sharded_models_of_one_or_two_types(
    tmp_path: Path, norm_type: float, sharded: str
) -> None:
    body = partial(train, clip=Clip(max_norm=0.05, norm_type=norm_type, compared=True))
    plan = Plan(body=body, epochs=1, samples=80, options={"sharded": sharded})
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, step=2)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_samples()


@pytest.mark.slow
def test_a_peer_that_dies_in_the_middle_of_it_takes_all_back_to_the_checkpoint_and_nobody_else_ends(
    tmp_path: Path,
) -> None:
    body = partial(train, clip=Clip(stops=7))
    plan = Plan(body=body, epochs=2, options={"checkpoint_every_s": 1e-9})
    with Cluster(tmp_path, plan, checkpoints=True, environment=UNMIRRORED) as cluster:
        cluster.start(0, 1, 2)
        until(lambda: files.whole_ones(f"{tmp_path}/checkpoints"), "a whole checkpoint")
        cluster.let_go()
        cluster.wait_until_at(AT_CLIPPING, 0, 1, 2)
        cluster.kill("w1")
        cluster.wait_for_end(0, 2)
        assert "back to checkpoint" in cluster.logs()
        (tmp_path / "alone").mkdir()
        cluster.check_result(undisturbed(plan, tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_dies_in_the_middle_of_it_when_a_joiner_was_agreed_on_in_that_step_costs_what_a_loss_costs(
    tmp_path: Path, victim: int
) -> None:
    body = partial(train, clip=Clip(stops=7, victim=victim))
    plan = Plan(body=body, epochs=2, options={"checkpoint_every_s": 1e-9})
    with Cluster(tmp_path, plan, checkpoints=True) as cluster:
        cluster.start(0, 1, step=7)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        until(lambda: files.whole_ones(f"{tmp_path}/checkpoints"), "a whole checkpoint")
        cluster.let_go()
        cluster.wait_until_at(AT_CLIPPING, 0, 1)
        cluster.kill(f"w{victim}")
        cluster.wait_for_end(1 - victim, 2)
        assert cluster.commits[-1].members == (f"w{1 - victim}", "w2")
        (tmp_path / "alone").mkdir()
        cluster.check_result(undisturbed(plan, tmp_path / "alone"))


def test_a_replicated_models_peers_go_on_where_one_dies_in_the_middle_of_it(tmp_path: Path) -> None:
    body = partial(train, clip=Clip(stops=7))
    plan = Plan(body=body, epochs=2, options={"sharded": ""})
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_until_at(AT_CLIPPING, 1)
        cluster.kill("w1")
        cluster.wait_for_end(0, 2)
        assert cluster.commits[-1].lost_steps == 0
        (tmp_path / "alone").mkdir()
        cluster.check_result(undisturbed(plan, tmp_path / "alone"))


def test_it_asks_for_a_norm_and_for_parameters_of_the_model() -> None:
    group, _ = both()
    with pytest.raises(UsageError, match="norm_type=0; with shard= it must be above 0"):
        clip_shards_(group, [], Clipping(1.0, 0.0))
    with pytest.raises(UsageError, match=r"a gradient of shape \(3,\) that is not sharded"):
        clip_shards_(group, [torch.ones(3)], Clipping(1.0))


def test_without_a_cluster_it_is_torchs_and_outside_a_complete_step_it_does_nothing() -> None:
    job = elastic_runtime.init(global_batch_size=8, max_batch_per_gpu=4)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Points(8), batch_size=4))
    norms = []
    for _epoch in job.epochs(1):
        for x, y, _indices in loader:
            job.backward(nn.functional.cross_entropy(model(x), y))
            norms.append((job.applied, float(job.clip_grad_norm_(model.parameters(), 1e-3))))
            if job.applied:
                clipped = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
                assert clipped == pytest.approx(1e-3, rel=1e-2)
                model.weight.grad[0, 0] = math.nan
                with pytest.raises(RuntimeError, match="non-finite"):
                    job.clip_grad_norm_(model.parameters(), 1e-3, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
    assert [applied for applied, _ in norms] == [False, True]
    assert norms[0][1] == 0.0 < norms[1][1]
