"""Trainings that have a bit of everything, through joins and losses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, trained_alone
from tests.elastic_runtime.zoo import driver
from tests.elastic_runtime.zoo.mixture import train_zoo
from tests.elastic_runtime.zoo.parts import SCRIPTS, Script

if TYPE_CHECKING:
    from pathlib import Path

PLAN = Plan(epochs=2, body=train_zoo)


def alone(directory: Path, plan: Plan = PLAN) -> dict[str, Any]:
    directory.mkdir()
    return trained_alone(train_zoo, plan, directory)


def same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (got["step"], got["scale"]) == (expected["step"], expected["scale"])
    for name, value in expected["model"].items():
        torch.testing.assert_close(got["model"][name], value, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("compiled", ["", "aot_eager"])
def test_several_models_averages_and_scalers_are_carried_through_joins_and_losses(
    tmp_path: Path, compiled: str
) -> None:
    plan = Plan(epochs=2, body=train_zoo, compiled=compiled)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        cluster.grow_lose_the_first_and_end()
        expected = alone(tmp_path / "alone")
        for final in cluster.finals().values():
            same(final, expected)


def test_a_checkpoint_of_a_compiled_model_is_read_by_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(tmp_path / "alone")
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    first = Plan(epochs=1, body=train_zoo, compiled="eager", options={"checkpoint_every_s": 1e-9})
    alone(tmp_path / "compiled", first)
    same(alone(tmp_path / "plain"), expected)
    assert list((tmp_path / "checkpoints").iterdir())


REFUSED = [(script, mode) for script in SCRIPTS.values() if script.refused for mode in script.modes]


@pytest.mark.parametrize(("script", "mode"), REFUSED, ids=[f"{script.name}-{mode}" for script, mode in REFUSED])
def test_what_cannot_be_right_on_several_workers_is_refused_alone(script: Script, mode: str, tmp_path: Path) -> None:
    assert re.search(script.refused, driver.refusal(script, mode, tmp_path / "alone"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("buffers_that_are_assigned_anew", "exact"),
        ("generator_with_batch_norm", "fast"),
        ("quasi_newton_with_a_line_search", "fast"),
        ("unused_experts_whose_gradients_are_zeros", "fast"),
        ("second_loader_of_unlabelled_samples", "fast"),
    ],
)
def test_a_script_trains_the_same_through_changes_of_size_and_a_loss(name: str, mode: str, tmp_path: Path) -> None:
    """A sample: benchmarks/zoo.py runs them all."""
    script = SCRIPTS[name]
    expected = driver.alone(script, mode, tmp_path / "alone")
    driver.compare(driver.changed(script, mode, tmp_path / "changed"), expected, exact=mode == "exact")


DEFECTS = [script for script in SCRIPTS.values() if script.body.__module__.endswith("defects") and not script.refused]


@pytest.mark.parametrize("script", DEFECTS, ids=[script.name for script in DEFECTS])
def test_a_script_that_went_wrong_once_trains_alone(script: Script, tmp_path: Path) -> None:
    for mode in script.modes[:1]:
        assert driver.alone(script, mode, tmp_path / mode)["step"] == 20 + 8 * (script.name == "checkpoint_of_its_own")
