"""Traces as files, and the command that replays them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kfp_gpuquota.cli.main import application
from kfp_gpuquota.errors import InvalidFieldError, NotFoundError, UsageError
from kfp_gpuquota.simulator import make_elastic, read_jobs, read_nodes, sped_up, thinned

if TYPE_CHECKING:
    from pathlib import Path

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,T4\nn1,64000,262144,2,P100\n"
JOBS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,creation_time,deletion_time,scheduled_time
late,1000,1024,1,500,,BE,100,250,150
first,1000,1024,2,1000,T4|P100,LS,0,50,
web,1000,1024,0,0,,Burst able,5,50,5
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.csv"
    path.write_text(NODES)
    return path


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return path


def test_jobs_are_read_in_the_order_of_their_arrival(jobs: Path) -> None:
    first, web, late = read_jobs(jobs)
    assert (first.name, first.project, first.duration_s, first.gpus) == ("first", "ls", 50, 2)
    assert first.models == frozenset({"T4", "P100"})
    assert (late.worker_gpus, late.duration_s) == (0.5, 100)
    assert (web.worker_gpus, web.project) == (0, "burst-able")


def test_a_column_of_ones_choice_names_the_project(jobs: Path) -> None:
    assert [job.project for job in read_jobs(jobs, "name")] == ["first", "web", "late"]


def test_jobs_of_whole_gpus_are_made_elastic_evenly(jobs: Path) -> None:
    whole = [read_jobs(jobs)[0]] * 10
    made = make_elastic(whole, 30)
    assert [i for i, job in enumerate(made) if job.fewest < job.most] == [3, 6, 9]
    assert (made[3].workers, made[3].most, made[3].gpu_seconds) == (2, 8, whole[3].gpu_seconds)


def test_arrivals_are_sped_up_and_clusters_thinned(jobs: Path, nodes: Path) -> None:
    assert [job.arrives_at for job in sped_up(read_jobs(jobs), 5)] == [0, 1, 20]
    assert [node.name for node in thinned(read_nodes(nodes), 2)] == ["n0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,num_gpu\n", "jobs.csv needs 'gpu_milli'"),
        (JOBS.replace("late,1000", "late,many"), "line 2 of jobs.csv is 'late,many,"),
        (JOBS.replace("100,250,150", "100,,150"), "could not convert string to float"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_line(jobs: Path, text: str, message: str) -> None:
    jobs.write_text(text)
    with pytest.raises(InvalidFieldError) as refused:
        read_jobs(jobs)
    assert message in refused.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere\.csv"):
        read_nodes(tmp_path / "nowhere.csv")


def simulated(*arguments: object) -> str:
    result = CliRunner().invoke(application(), ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_compares_all_policies_and_draws_them(nodes: Path, jobs: Path, tmp_path: Path) -> None:
    picture = tmp_path / "policies.png"
    text = simulated("--nodes", nodes, "--jobs", jobs, "--picture", picture)
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["POLICY", "USED"]
    assert [line.split()[0] for line in lines[1:9]] == [
        "gpuquota",
        "fair-users",
        "shortest",
        "strict",
        "fifo",
        "static",
        "best-fit",
        "backfill",
    ]
    assert {line.split()[0] for line in lines[11:]} == {"be", "burst-able", "ls"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_answers_in_json(nodes: Path, jobs: Path) -> None:
    (answer,) = json.loads(
        simulated("--nodes", nodes, "--jobs", jobs, "--policy", "static", "--guaranteed", "ls=2", "-o", "json")
    )
    assert (answer["policy"], answer["gpus"], answer["finished"]) == ("static", 4, 3)
    assert len(answer["series"]["at"]) == len(answer["series"]["used"]["ls"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--policy", "lottery"],
            "--policy is lottery, but it must be one of gpuquota, fair-users, shortest, strict, fifo, static, "
            "best-fit, backfill",
        ),
        (["--guaranteed", "ls"], "--guaranteed is ls, but it is given as PROJECT=N"),
        (["--speed", "0"], "--speed is 0, but it must be above 0"),
        (["--every-node", "0"], "--every-node is 0, but it must be at least 1"),
        (["--elastic", "120"], "--elastic is 120, but it must be between 0 and 100 percent"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    nodes: Path, jobs: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        simulated("--nodes", nodes, "--jobs", jobs, *arguments)
    assert refused.value.message == message
