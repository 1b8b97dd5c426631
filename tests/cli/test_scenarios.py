"""The walk-through of the README, command by command, through the real command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.polling import until

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

SLEEP = ("--grace-period", "2", "--", "sleep", "infinity")


def train(cli: Cli, project: str, name: str, gpus: int, *options: str) -> None:
    cli("submit", name, "-p", project, "-g", str(gpus), *options, *SLEEP)


# One node of 2 GPUs, team-a with 2 guaranteed


def test_1_an_elastic_job_takes_what_is_idle_and_gives_it_back_to_a_session(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit", "elastic1", "-g", "1", "--elastic", *SLEEP)
    cli.await_gpus("team-a", elastic1=2)
    cli("submit", "filler1", "-g", "1", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", elastic1=1, filler1=1)
    assert "shrunk from 2 to 1 GPUs" in cli("explain elastic1")
    assert cli("delete elastic1 filler1") == "job elastic1 deleted\njob filler1 deleted\n"
    assert cli.cluster.client.list_jobs().jobs == ()


def test_2_an_elastic_job_starts_with_what_is_free_and_grows_later(cli: Cli) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit", "filler2", "-g", "1", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", filler2=1)
    cli("submit", "elastic2", "-g", "2", "--elastic", *SLEEP)
    cli.await_gpus("team-a", elastic2=1)
    cli("delete filler2")
    cli.await_gpus("team-a", elastic2=2)


# Four nodes of 10, teams A and B with 20 guaranteed each


def two_departments(cli: Cli) -> None:
    cli("project create a --guaranteed 20")
    cli("project create b --guaranteed 20")


def test_3_the_greedy_team_gives_back_what_it_borrowed_elastic_jobs_first(wide_cli: Cli) -> None:
    cli = wide_cli
    two_departments(cli)
    train(cli, "a", "elastic", 4, "--min-gpus", "2", "--max-gpus", "10")
    train(cli, "a", "old", 10)
    train(cli, "a", "important", 4, "--priority", "60")
    train(cli, "a", "young", 6)
    cli.await_gpus("a", elastic=10, old=10, important=4, young=6)
    submitted = cli.job("young", "a")["status"]["submitted_at"]
    train(cli, "b", "first", 10, "--gpus-per-worker", "1")
    train(cli, "b", "second", 10, "--gpus-per-worker", "1")
    cli.await_gpus("b", first=10, second=10)
    held = cli.await_jobs("a", lambda held: sum(held.values()) <= 20)
    assert (held["old"], held["important"], held["young"]) == (10, 4, 0)
    assert 2 <= held["elastic"] <= 6
    young = cli.job("young", "a")
    assert (young["status"]["phase"], young["status"]["submitted_at"]) == ("Pending", submitted)
    assert "is pending with 0 GPUs" in cli("explain young -p a")
    cli("delete first -p b")
    cli.await_gpus("a", young=6)


def test_4_small_jobs_are_packed_so_that_a_large_one_starts_at_once(wide_cli: Cli) -> None:
    cli = wide_cli
    two_departments(cli)
    for number in range(6):
        train(cli, "a", f"small-{number}", 3)
    cli.await_jobs("a", lambda held: sum(held.values()) == 18)
    nodes = {worker["node"] for n in range(6) for worker in cli.job(f"small-{n}", "a")["status"]["workers"]}
    assert len(nodes) == 2
    train(cli, "b", "large", 8)
    cli.await_gpus("b", large=8)


def scattered(cli: Cli) -> dict[str, str]:
    """One job of 3 GPUs left on each node, after twelve of them had filled the cluster: job -> worker id."""
    for number in range(12):
        train(cli, "a", f"small-{number}", 3)
    cli.await_jobs("a", lambda held: sum(held.values()) == 36)
    left: dict[str, str] = {}
    ended = []
    for number in range(12):
        worker = cli.job(f"small-{number}", "a")["status"]["workers"][0]
        if worker["node"] in left:
            ended.append(f"small-{number}")
        else:
            left[worker["node"]] = f"small-{number}"
    cli("delete", "-p", "a", *ended)
    return {name: cli.job(name, "a")["status"]["workers"][0]["id"] for name in left.values()}


def workers_now(cli: Cli, names: dict[str, str]) -> dict[str, str]:
    return {name: cli.job(name, "a")["status"]["workers"][-1]["id"] for name in names}


@pytest.mark.slow
def test_4b_a_scattered_job_is_moved_when_that_lets_the_waiting_job_start(wide_cli: Cli) -> None:
    cli = wide_cli
    two_departments(cli)
    before = scattered(cli)
    train(cli, "b", "large", 8)
    cli.await_gpus("b", large=8)
    cli.await_jobs("a", lambda held: sum(held.values()) == 12)
    after = workers_now(cli, before)
    assert sum(before[name] != after[name] for name in before) == 1


@pytest.mark.slow
def test_4c_nothing_is_moved_when_the_waiting_job_starts_without_it(wide_cli: Cli) -> None:
    cli = wide_cli
    two_departments(cli)
    before = scattered(cli)
    train(cli, "b", "medium", 7)
    cli.await_gpus("b", medium=7)
    assert workers_now(cli, before) == before


def test_5_an_idle_quota_may_be_borrowed_but_not_by_a_static_allocation(wide_cli: Cli) -> None:
    cli = wide_cli
    two_departments(cli)
    cli("project create static --guaranteed 0 --limit 0")
    train(cli, "a", "everything", 4, "--min-gpus", "1", "--max-gpus", "40")
    cli.await_gpus("a", everything=40)
    cli("delete everything -p a")
    cli("project set a --guaranteed 20 --limit 20")
    train(cli, "a", "bounded", 4, "--min-gpus", "1", "--max-gpus", "40")
    cli.await_gpus("a", bounded=20)


def test_6_a_session_within_quota_starts_at_once_and_is_never_preempted(wide_cli: Cli) -> None:
    cli = wide_cli
    two_departments(cli)
    train(cli, "a", "greedy", 4, "--min-gpus", "1", "--max-gpus", "40")
    cli.await_gpus("a", greedy=40)
    train(cli, "b", "notebook", 10, "--interactive")
    cli.await_gpus("b", notebook=10)
    train(cli, "b", "bigger", 10, "--interactive")
    cli.await_gpus("b", bigger=10)
    cli("submit", "over", "-p", "b", "-g", "1", "--interactive", "--", "sleep", "infinity")
    until(lambda: "guaranteed" in cli("explain over -p b"))
    output = cli("explain over -p b")
    assert "over is pending with 0 GPUs: needs 1 GPU; project b uses 20 GPUs of its guaranteed 20 GPUs" in output
    train(cli, "a", "more", 10)
    cli.await_gpus("b", notebook=10, bigger=10)
