"""Policies through the real command line: defaults, bounds, fixed values, and their report to the user."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from tests.cli.conftest import Cli
from tests.conftest import running_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLEEP = ("--", "sleep", "infinity")


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Cli]:
    config = ClusterConfig(gpus_per_node=2, gpu_memory_mib=16384)
    with running_cluster(tmp_path / "home", config) as cluster:
        cli = Cli(cluster)
        cli("project create research-vision1 --guaranteed 2")
        cli("config project research-vision1")
        yield cli


def test_every_session_of_a_project_may_use_the_whole_gpu_and_is_told_by_which_policy(team: Cli) -> None:
    team("policy set sessions -p research-vision1 --kind build --gpu-limit 1")
    output = team("submit", "notebook", "-g", "0.25", "--interactive", *SLEEP)
    assert "gpu_fraction_limit is 1: policy sessions says so" in output
    assert team.job("notebook", "research-vision1")["spec"]["gpu_fraction_limit"] == 1
    assert "gpu_fraction_limit is set to 1 by sessions" in team("describe", "notebook")
    team("submit", "training", "-g", "0.25", *SLEEP)
    assert team.job("training", "research-vision1")["spec"].get("gpu_fraction_limit") is None


def test_a_bound_refuses_and_names_the_policy(team: Cli) -> None:
    team("policy set tight --gpu-memory-limit-most 8Gi")
    refused = team.run("submit", "big", "--gpu-memory", "4Gi", "--gpu-memory-limit", "12Gi", *SLEEP)
    assert refused.code == 2
    assert refused.err == "Error: --gpu-memory-limit is 12Gi, but policy 'tight' allows at most 8Gi\n"


def test_policies_are_listed_changed_and_deleted_and_survive_a_restart(team: Cli) -> None:
    team("policy set a --gpu-limit 0.5")
    team("policy set a --gpu-limit-forced 0.75")
    team("cluster stop")
    assert [line.split()[:3] for line in team("policy list").splitlines()] == [
        ["POLICY", "PROJECT", "KIND"],
        ["a", "all", "all"],
    ]
    assert json.loads(team("policy list -o json")) == [{"name": "a", "gpu_fraction_limit": {"forced": 0.75}}]
    team("policy delete a")
    assert json.loads(team("policy list -o json")) == []
    assert team.run("policy delete a").err == "Error: there is no policy 'a'; see: gpuquota policy list\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("policy set a", "policy is 'a', but it has no rule; give a limit as default, most or forced"),
        ("policy set a --gpu-limit 2", "--gpu-limit is 2, but it must be more than 0 and at most 1"),
        ("policy set a --gpu-memory-limit 0.5XB", "--gpu-memory-limit is 0.5XB, but it must be a number with one of"),
        (
            "policy set a --idle-warn 1h --idle-suspend 30m",
            "--idle-suspend is 30m, but it must be more than --idle-warn, which is 1h",
        ),
        ("policy set a -p nobody --gpu-limit 1", "project 'nobody' does not exist"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(team: Cli, command: str, message: str) -> None:
    refused = team.run(command)
    assert refused.code == 2
    assert message in refused.err
