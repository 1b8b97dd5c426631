"""`gpuquota what-if`: answers from the real cluster, which stays as it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


@pytest.fixture
def two_teams(cli: Cli) -> Cli:
    """Team A's elastic training has borrowed the other of the two GPUs, and a job of it waits."""
    cli("project create team-a --guaranteed 1")
    cli("project create team-b --guaranteed 1")
    cli("config project team-a")
    cli("submit", "train", "-g", "1", "--elastic", "--", "sleep", "infinity")
    cli.await_gpus("team-a", train=2)
    return cli


def test_it_says_who_would_give_way_to_whom_and_does_nothing(two_teams: Cli) -> None:
    output = two_teams("what-if -p team-b -g 1 --interactive")
    assert output.splitlines() == [
        "this-job of team-b would start: starts when 1 worker of train is gone",
        "train of team-a would shrink: shrunk from 2 to 1 GPUs: project team-b takes back its guaranteed GPU for "
        "this-job",
    ]
    assert [job["spec"]["name"] for job in json.loads(two_teams("list -A -o json"))] == ["train"]
    two_teams.await_gpus("team-a", train=2)


def test_it_says_why_a_job_would_wait(two_teams: Cli) -> None:
    output = two_teams("what-if -p team-b -g 2 --interactive")
    assert output.startswith("this-job of team-b would wait: needs 2 GPUs; project team-b has 1 GPU for jobs that")


def test_a_job_that_no_node_can_hold_does_not_merely_wait(two_teams: Cli) -> None:
    output = two_teams("what-if -p team-a -g 9")
    assert output.startswith("this-job of team-a cannot start on the nodes that there are: needs 9 GPUs; the largest")


def test_quotas_deleted_jobs_and_lost_nodes_can_be_supposed(two_teams: Cli) -> None:
    two_teams("submit", "wide", "-p", "team-b", "-g", "2", "--", "sleep", "infinity")
    assert "wide of team-b would start" in two_teams("what-if --guaranteed team-b=2 --guaranteed team-a=0")
    assert "wide of team-b would start" in two_teams("what-if --delete train")
    assert "wide of team-b would start" in two_teams("what-if --with-node 8 --guaranteed team-b=2")
    assert two_teams("what-if --limit team-a=2") == "nothing would change\n"
    outlook = json.loads(two_teams("what-if --without-node node-0 -g 1 -o json"))
    assert [effect["job"] for effect in outlook["waits"]] == ["this-job"]


MISTAKES = [
    ("what-if", "name a change, for example: gpuquota what-if -g 2"),
    ("what-if --delete nobody", "project 'team-a' has no job 'nobody' that runs or waits"),
    ("what-if -g 1 --with-node 0", "--with-node is 0, but it must be at least 1 GPU"),
    ("what-if -g 1 --with-node 300", "--with-node is 300, but it must be at most 256 GPUs"),
    ("what-if --without-node node-9", "node 'node-9' does not exist; see them with: gpuquota list nodes"),
    ("what-if --guaranteed team-b", "a quota is given as PROJECT=N"),
    (
        "what-if --guaranteed team-b=many",
        "--guaranteed is team-b=many, but it must be a number of GPUs, such as 4 or 0.5",
    ),
]


def test_a_mistake_is_one_sentence(two_teams: Cli) -> None:
    for words, sentence in MISTAKES:
        answer = two_teams.run(words)
        assert (answer.code, sentence in answer.err) == (2, True), answer
