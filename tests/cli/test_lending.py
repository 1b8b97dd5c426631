"""Lending and release of GPU memory: real processes on simulated GPUs, through the real command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.fractions import Policy
from tests import polling
from tests.cli.conftest import PACED_TRAINING, Cli
from tests.cli.test_training import Steps
from tests.conftest import running_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOLDER = Path(__file__).with_name("holder.py")
TOTAL = 16_000


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Cli]:
    """One simulated GPU, an agent that may end processes, a team that may hold all of it."""
    config = ClusterConfig(gpus_per_node=1, gpu_memory_mib=TOTAL, memory_policy=Policy(killer=True, term_s=0.5))
    with running_cluster(tmp_path / "home", config) as cluster:
        cli = Cli(cluster)
        cli("project create team-a --guaranteed 1")
        cli("config project team-a")
        yield cli


def hold(cli: Cli, name: str, request: str, limit: str = "", *how: str) -> None:
    """Submit a process that takes as much memory as it may, `how` it does so."""
    limits = ("--gpu-limit", limit) if limit else ()
    cli("submit", name, "-g", request, *limits, "--", sys.executable, str(HOLDER), *how)


def memory(cli: Cli) -> dict[str, dict[str, Any]]:
    """The ledger by job."""
    (node,) = json.loads(cli("list nodes -o json"))
    return {share["job"]: share for share in node["shares"]}


def until(cli: Cli, holds: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def is_so() -> bool:
        found.clear()
        found.update(memory(cli))
        return holds(found)

    polling.until(is_so, lambda: found)
    return found


def used(found: dict[str, dict[str, Any]], job: str) -> int:
    return int(found[job]["used_mib"]) if job in found else 0


def test_a_listener_uses_its_limit_and_gives_it_back_to_an_owner_that_arrives(team: Cli) -> None:
    hold(team, "trainer", "0.25", "0.8", "listen")
    until(team, lambda found: used(found, "trainer") == 0.8 * TOTAL)
    hold(team, "owner", "0.75", "", "take", str(int(0.75 * TOTAL)))
    until(team, lambda found: (used(found, "owner"), used(found, "trainer")) == (0.75 * TOTAL, 0.25 * TOTAL))
    assert team.job("trainer", "team-a")["status"]["phase"] == "Running"
    team("delete", "owner")
    until(team, lambda found: used(found, "trainer") == 0.8 * TOTAL)


def test_a_process_that_does_not_listen_is_ended_for_the_owner_and_everybody_is_told_why(team: Cli) -> None:
    hold(team, "deaf", "0.25", "0.8", "take", str(int(0.8 * TOTAL)))
    until(team, lambda found: used(found, "deaf") == 0.8 * TOTAL)
    hold(team, "owner", "0.75", "", "take", str(int(0.75 * TOTAL)))
    until(team, lambda found: used(found, "owner") == 0.75 * TOTAL)
    assert team.job("deaf", "team-a")["status"]["phase"] == "Failed"
    output = team("describe", "deaf")
    assert (
        "was ended: it held 8800Mi of GPU memory above its request, which owner of project team-a has asked for"
        in output
    )


def test_an_owner_waits_for_its_part_and_can_be_deleted_before_it_starts(team: Cli) -> None:
    team("cluster", "stop")
    team("cluster", "start", "--gpus", "1", "--gpu-memory", "16000Mi", "--no-gpu-memory-killer")
    hold(team, "deaf", "0.25", "0.8", "take", str(int(0.8 * TOTAL)))
    until(team, lambda found: used(found, "deaf") == 0.8 * TOTAL)
    hold(team, "owner", "0.75", "", "take", "10")
    output = "would be ended, were the killer on"
    polling.until(lambda: output in team("describe", "deaf"))
    assert team.job("owner", "team-a")["status"]["phase"] == "Starting"
    assert team("explain", "owner") == (
        "owner is starting with 0.75 GPUs: has its place, and waits for GPU memory: 12000Mi of GPU 0 of node-0, where "
        "job deaf of project team-a uses 8800Mi above its request\n"
    )
    team("delete", "owner")
    until(team, lambda found: "owner" not in found)


def test_a_daemon_that_is_killed_goes_on_where_it_was(team: Cli) -> None:
    hold(team, "trainer", "0.25", "0.8", "listen")
    until(team, lambda found: used(found, "trainer") == 0.8 * TOTAL)
    team.cluster.kill_daemon()
    found = until(team, lambda found: "trainer" in found)
    assert used(found, "trainer") == 0.8 * TOTAL
    hold(team, "owner", "0.75", "", "take", str(int(0.75 * TOTAL)))
    until(team, lambda found: used(found, "owner") == 0.75 * TOTAL)
    assert team.job("trainer", "team-a")["status"]["phase"] == "Running"


def test_top_draws_the_memory_of_shared_gpus(team: Cli) -> None:
    assert team("top", "--gpus") == "idle: 1 of 1 GPU\n"
    hold(team, "trainer", "0.25", "0.75", "listen")
    until(team, lambda found: used(found, "trainer") == 0.75 * TOTAL)
    picture = team("top", "--gpus")
    assert "████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒┊·······" in picture
    assert picture.splitlines()[1].split()[:6] == ["node-0", "0", "trainer", "team-a", "11.7Gi", "3.9Gi"]


def test_a_plot_shows_use_against_request_and_limit_over_time(team: Cli, tmp_path: Path) -> None:
    hold(team, "trainer", "0.25", "0.75", "listen")
    until(team, lambda found: used(found, "trainer") == 0.75 * TOTAL)
    output = team("top", "--gpus", "--plot", str(tmp_path / "memory.png"), "--seconds", "1")
    assert re.search(r"memory\.png: 1 workloads, \d+ looks in \d s", output)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_training_yields_memory_between_two_steps_and_loses_none(team: Cli) -> None:
    team("submit", "trainer", "-g", "0.25", "--gpu-limit", "0.8", "--", sys.executable, PACED_TRAINING, "100000")
    steps = Steps(team, "trainer")
    until(team, lambda found: used(found, "trainer") == 0.8 * TOTAL)
    steps.go_on_with(gpus=1)
    hold(team, "owner", "0.75", "", "take", str(int(0.75 * TOTAL)))
    found = until(team, lambda found: used(found, "owner") == 0.75 * TOTAL)
    assert found["trainer"]["listens"]
    assert used(found, "trainer") == 0.25 * TOTAL
    steps.go_on_with(gpus=1)
    team("delete", "owner")
    until(team, lambda found: used(found, "trainer") == 0.8 * TOTAL)
    steps.go_on_with(gpus=1)
    trainer = team.job("trainer", "team-a")["status"]
    assert (trainer["restarts"], trainer["evictions"]) == (0, 0)
