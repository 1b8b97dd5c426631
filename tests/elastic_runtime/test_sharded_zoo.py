"""What users of FSDP2 do beside a plain loop, through a grow, a shrink and a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from elastic_runtime.sharded import files
from tests.effort import soaked
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_zoo import train_zoo
from tests.elastic_runtime.training import Plan, trained_alone
from tests.polling import until

if TYPE_CHECKING:
    from pathlib import Path


def undisturbed(plan: Plan, directory: Path) -> dict[str, Any]:
    """What one process gets, with the plain models."""
    directory.mkdir()
    return trained_alone(train_zoo, plan, directory)


def grow_shrink_and_lose_one(cluster: Cluster) -> None:
    """Two workers, three, two others, and one of them is killed."""
    cluster.start(0, 1)
    cluster.resize(0, 1, 2, up_to=10)
    cluster.wait_until_at(10, 0, 1, 2)
    cluster.target(1, 2)
    cluster.wait_until_prepared(1, 2)
    cluster.hold_at(18)
    cluster.wait_for_end(0)
    cluster.wait_until_at(18, 1, 2)
    until(lambda: files.whole_ones(f"{cluster.directory}/checkpoints"), "a whole checkpoint")
    cluster.kill("w2")
    cluster.let_go()
    cluster.wait_for_end(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"checkpointed": "called"}, marks=soaked),
        {"checkpointed": "called", "sharded": False},
        {"checkpointed": "wrapped"},
        pytest.param({"compiled": "whole"}, marks=soaked),
        {"compiled": "blocks"},
    ],
    ids=["checkpointed", "checkpointed, replicated", "checkpoint wrappers", "compiled", "compiled blocks"],
)
def test_two_models_adapters_averages_and_optimizer_states_go_through_a_grow_a_shrink_and_a_loss(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plan = Plan(body=train_zoo, epochs=2, options={**options, "checkpoint_every_s": 1e-9})
    with Cluster(tmp_path, plan, checkpoints=True) as cluster:
        grow_shrink_and_lose_one(cluster)
        checkpointed = options.get("checkpointed", "")
        alone = Plan(body=train_zoo, epochs=2, options={"sharded": False, "checkpointed": checkpointed})
        cluster.check_result(undisturbed(alone, tmp_path / "alone"))


@pytest.mark.slow
def test_mixed_precision_goes_through_a_grow_a_shrink_and_a_loss(tmp_path: Path) -> None:
    plan = Plan(body=train_zoo, epochs=2, options={"mixed": True, "checkpoint_every_s": 1e-9})
    (tmp_path / "resized").mkdir()
    with Cluster(tmp_path / "resized", plan, checkpoints=True) as cluster:
        grow_shrink_and_lose_one(cluster)
        cluster.check_samples()
        found = cluster.finals()["final-1"]["model"]
    (tmp_path / "undisturbed").mkdir()
    with Cluster(tmp_path / "undisturbed", plan) as cluster:
        cluster.target(0, 1)
        cluster.wait_for_end(0, 1)
        expected = cluster.finals()["final-0"]["model"]
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=5e-3, msg=name)
