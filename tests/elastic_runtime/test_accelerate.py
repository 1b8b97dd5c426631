"""A training written with Accelerate changes its size and loses workers; each sample counts once."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic_runtime import training
from tests.elastic_runtime.accelerate_training import train
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, trained_alone
from tests.polling import TIMEOUT_S
from tools.devcluster.layout import free_port

PLAN = Plan(body=train)

SCRIPT = """
import os, pathlib, sys
from tests.elastic_runtime import accelerate_training
from tests.elastic_runtime.training import Plan

accelerate_training.train(Plan(), int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), None)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one undisturbed process gets without Accelerate."""
    directory = tmp_path_factory.mktemp("reference")
    return trained_alone(training.train, Plan(), directory)


def test_an_accelerate_training_grows_and_loses_its_leader(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        cluster.grow_lose_the_first_and_end()
        cluster.check_result(reference)
    journals = [[int(step) for step in (tmp_path / f"journal-{index}").read_text().split()] for index in (0, 1)]
    assert journals[0][0] == journals[1][0] == 0  # what was logged before the loop
    assert journals[0][1:] + journals[1][1:] == list(range(1, 40))
    assert not (tmp_path / "journal-2").exists()  # it never was rank 0
    assert (tmp_path / "warm-2").exists()


def test_an_accelerate_training_shrinks_to_one_and_grows_again(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1, 2)
        cluster.resize(1, up_to=20)
        cluster.wait_for_end(0, 2)
        cluster.wait_until_at(20, 1)
        cluster.target(1, 3)
        cluster.wait_until_prepared(1, 3)
        cluster.let_go()
        cluster.wait_for_end(1, 3)
        cluster.check_result(reference)


def test_mixed_precision_and_uneven_shares_change_nothing_but_rounding(tmp_path: Path) -> None:
    plan = replace(PLAN, global_batch=17, epochs=1, options={"mixed_precision": "bf16"})
    alone = tmp_path / "alone"
    alone.mkdir()
    with Cluster(alone, plan) as cluster:
        cluster.target(0)
        cluster.wait_for_end(0)
    expected = torch.load(alone / "final-0.pt")
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_for_end(0, 1, 2)
        cluster.check_samples()
    for final in cluster.finals().values():
        assert final["lr"] == expected["lr"]
        for name, value in expected["model"].items():
            torch.testing.assert_close(final["model"][name], value, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_two_workers_go_on_with_a_state_that_three_saved(tmp_path: Path, reference: dict[str, Any]) -> None:
    three, two = tmp_path / "three", tmp_path / "two"
    for directory, workers, options in ((three, 3, {"save_at": 20}), (two, 2, {"load": str(three / "state")})):
        directory.mkdir()
        with Cluster(directory, replace(PLAN, options=options)) as cluster:
            cluster.target(*range(workers))
            cluster.wait_for_end(*range(workers))
    assert sorted(cluster.consumed()) == list(range(20, 39))
    for final in cluster.finals().values():
        assert final["lr"] == reference["lr"]
        for name, value in reference["model"].items():
            torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)


def test_under_torchrun_the_ranks_are_the_jobs(
    forked_python: tuple[str, ...], tmp_path: Path, reference: dict[str, Any]
) -> None:
    command = [*forked_python, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(
        [*command, "--no-python", *forked_python, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        final = torch.load(tmp_path / f"final-{rank}.pt")
        assert final["step"] == reference["step"]
        for name, value in reference["model"].items():
            torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)
