"""Shares of GPUs, CPU and memory through the real command line: several workers on one device, each with its part."""

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
    """Two simulated GPUs of 16 GiB, 4 cores, 8 GiB; a team that may hold all of it."""
    config = ClusterConfig(gpus_per_node=2, gpu_memory_mib=16384, cpus_per_node=4, memory_per_node_mib=8192)
    with running_cluster(tmp_path / "home", config) as cluster:
        cli = Cli(cluster)
        cli("project create team-a --guaranteed 2")
        cli("config project team-a")
        yield cli


def running(cli: Cli, name: str) -> dict[str, object]:
    """Its one worker, once it runs."""
    job = cli.cluster.wait_for_phase(name, "Running")
    (worker,) = job.status.workers
    return {"devices": worker.devices, "share": worker.share, "gpus": job.status.gpus}


def output(cli: Cli, name: str) -> dict[str, str]:
    """The environment that its worker printed."""
    cli.cluster.wait_for_phase(name, "Succeeded")
    return dict(line.split("=", 1) for line in cli("logs", name).splitlines() if "=" in line)


def test_several_jobs_share_a_gpu_and_count_as_their_parts_of_it(team: Cli) -> None:
    for name, part in (("quarter", "0.25"), ("rest", "0.75"), ("half", "0.5")):
        team("submit", name, "-g", part, *SLEEP)
    assert running(team, "quarter") == {"devices": (0,), "share": 0.25, "gpus": 0.25}
    assert running(team, "rest")["devices"] == (0,)
    assert running(team, "half")["devices"] == (1,)
    assert json.loads(team("project list -o json"))[0]["allocated"] == 1.5
    (node,) = json.loads(team("list nodes -o json"))
    assert node["used"] == {"0": 1.0, "1": 0.5}
    assert [len(node["held"][device]) for device in ("0", "1")] == [2, 1]


def test_memory_is_a_part_of_a_gpu(team: Cli) -> None:
    team("submit", "both", "--gpu-memory", "12Gi", "--gpu-memory-limit", "16Gi", "--gpu-devices", "2", *SLEEP)
    team("submit", "small", "--gpu-memory", "4Gi", *SLEEP)
    team("submit", "more", "--gpu-memory", "6Gi", *SLEEP)
    assert running(team, "both") == {"devices": (0, 1), "share": 0.75, "gpus": 1.5}
    assert running(team, "small") == {"devices": (0,), "share": 0.25, "gpus": 0.25}
    waiting = team.cluster.wait_for("more", lambda job: job.status.reason is not None)
    assert waiting.status.phase == "Pending"
    assert team("explain more") == (
        "more is pending with 0 GPUs: needs 6Gi of a GPU; the most that is idle of a GPU is 0.25 on node-0, and "
        "project team-a holds 1.75 of its fair share of 2, so it starts when 0.125 more of it is released\n"
        "It is the only one that waits in its project.\n"
        "Expected start: unknown.\n"
    )


def test_a_worker_is_told_its_part_and_how_much_it_may_use(team: Cli) -> None:
    asked = {
        "plain": (("-g", "0.25"), "0.25", "0.25"),
        "limited": (("-g", "0.25", "--gpu-limit", "0.8"), "0.8", "0.25"),
        "memory": (("--gpu-memory", "4Gi", "--gpu-memory-limit", "8Gi", "--gpu-devices", "2"), str(8 << 30), "0.5"),
    }
    for name, (options, _, _) in asked.items():
        team("submit", name, *options, "--", "env")
    for name, (_, limit, gpus) in asked.items():
        environment = output(team, name)
        assert (environment["RUNAI_GPU_MEMORY_LIMIT"], environment["RUNAI_NUM_OF_GPUS"]) == (limit, gpus)


def test_a_part_of_the_computing_power_is_counted_and_given_to_mps(team: Cli) -> None:
    team("submit", "slow", "--gpu-memory", "1Gi", "--gpu-compute", "0.25", "--", "env")
    assert output(team, "slow")["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25.00"
    assert "1Gi of a GPU, 0.25 of the computing power" in team("describe slow")
    team("submit", "half", "--gpu-memory", "1Gi", "--gpu-compute", "0.5", *SLEEP)
    assert running(team, "half")["gpus"] == 0.5


def test_a_limit_is_not_counted_but_a_request_is(team: Cli) -> None:
    team("project set team-a --guaranteed 0 --limit 1")
    for name in ("one", "two"):
        team("submit", name, "-g", "0.4", "--gpu-limit", "1", *SLEEP)
        running(team, name)
    team("submit", "three", "-g", "0.4", *SLEEP)
    waiting = team.cluster.wait_for("three", lambda job: job.status.reason is not None)
    assert waiting.status.reason is not None
    assert waiting.status.reason.message == (
        "needs 0.4 of a GPU; project team-a holds 0.8 of its limit of 1, so it starts when it releases 0.2 GPUs or its "
        "limit grows by as much"
    )


def test_a_whole_gpu_is_taken_back_from_those_who_share_it(team: Cli) -> None:
    """Both borrowers of one device go, and the one on the other stays."""
    team("project set team-a --guaranteed 0")
    team("project create team-b --guaranteed 1")
    for name, part in (("a1", "0.6"), ("b1", "0.4"), ("c1", "0.9")):
        team("submit", name, "-g", part, *SLEEP)
        running(team, name)
    team("submit", "owner", "-p", "team-b", "-g", "1", *SLEEP)
    team.cluster.wait_for_phase("owner", "Running", "team-b")
    phases = {job["spec"]["name"]: job["status"]["phase"] for job in json.loads(team("list -o json"))}
    assert phases == {"a1": "Running", "b1": "Running", "c1": "Pending"}


def test_a_part_of_a_gpu_is_guaranteed_and_taken_back(team: Cli) -> None:
    team("project set team-a --guaranteed 0")
    assert "project team-b created: 0.5 GPUs guaranteed, at most 0.75" in team(
        "project create team-b --guaranteed 0.5 --limit 0.75"
    )
    for name, part in (("a1", "0.6"), ("b1", "0.4"), ("c1", "1")):
        team("submit", name, "-g", part, *SLEEP)
        running(team, name)
    team("submit", "owner", "-p", "team-b", "-g", "0.5", "--interactive", *SLEEP)
    team.cluster.wait_for_phase("owner", "Running", "team-b")
    views = {view["project"]["name"]: view for view in json.loads(team("project list -o json"))}
    assert (views["team-b"]["allocated"], views["team-b"]["over_quota"]) == (0.5, 0)
    assert views["team-b"]["project"]["guaranteed"] == 0.5


def test_cpu_and_memory_are_held_as_well(team: Cli) -> None:
    team("submit", "first", "-g", "0.1", "--cpu", "2500m", "--memory", "6Gi", *SLEEP)
    running(team, "first")
    team("submit", "cores", "-g", "0.1", "--cpu", "2", *SLEEP)
    team("submit", "memory", "-g", "0.1", "--memory", "4Gi", *SLEEP)
    cores = team.cluster.wait_for("cores", lambda job: job.status.reason is not None)
    memory = team.cluster.wait_for("memory", lambda job: job.status.reason is not None)
    assert cores.status.reason is not None
    assert memory.status.reason is not None
    assert cores.status.reason.message == (
        "needs 0.1 of a GPU and 2 CPUs; where GPUs are idle, at most 1.5 CPUs are left, on node-0, and project team-a "
        "holds 2.5 CPUs of its fair share of 4 CPUs, so it starts when 0.5 CPUs more are released there"
    )
    assert "at most 2Gi of memory are left, on node-0" in memory.status.reason.message
    team("delete", "first")
    running(team, "cores")
    running(team, "memory")


def test_what_shares_hold_survives_the_daemon(team: Cli) -> None:
    team("submit", "half", "-g", "0.5", *SLEEP)
    running(team, "half")
    team.cluster.kill_daemon()
    team("submit", "most", "-g", "0.7", *SLEEP)
    assert running(team, "most")["devices"] == (1,)


def test_shares_are_shown_as_they_were_asked_for(team: Cli) -> None:
    team("submit", "halves", "--gpu-memory", "8Gi", "--gpu-devices", "2", *SLEEP)
    running(team, "halves")
    assert "2 x 8Gi" in team("list")
    described = team("describe halves")
    assert "2 x 8Gi of GPUs" in described
    assert "Running with 1 GPU\n" in described


def test_a_quota_of_cpu_and_memory_holds(team: Cli) -> None:
    team("project", "set", "team-a", "--cpu", "1", "--cpu-limit", "1500m", "--memory-limit", "4Gi")
    assert "1 of at most 1.5" in team("project list -o wide")
    team("submit", "first", "-g", "0.1", "--cpu", "1", *SLEEP)
    running(team, "first")
    team("submit", "second", "-g", "0.1", "--cpu", "1", *SLEEP)
    waiting = team.cluster.wait_for("second", lambda job: job.status.reason is not None)
    assert waiting.status.reason is not None
    assert "project team-a holds 1 CPU of its limit of 1.5 CPUs" in waiting.status.reason.message
    answer = team.run("submit", "huge", "-g", "0.1", "--memory", "5Gi", "--", "true")
    assert "project 'team-a' may hold at most 4096 MiB of memory" in answer.err
    team("project set team-a --cpu-limit none")
    running(team, "second")


MISTAKES = [
    ("-g 1.5", "--gpus is 1.5, but it must be a whole number of GPUs, or a part of one, such as 0.25"),
    ("-g 0.5 --gpu-limit 0.4", "--gpu-limit is 0.4, but it must be between --gpus, which is 0.5, and 1"),
    ("-g 1 --gpu-memory 4G", "--gpus is 1, but it counts whole GPUs, and the job asks for a share of them"),
    ("--gpu-memory 0.5XB", "--gpu-memory is 0.5XB, but it must be a number with one of the suffixes"),
    ("--gpu-memory -4G", "--gpu-memory is -4G, but it must be more than 0"),
    ("--gpu-memory 17Gi", "--gpu-memory is 17Gi, but the largest GPU has 16384 MiB (16Gi)"),
    ("--gpu-memory 1Gi --gpu-memory-limit 17Gi", "--gpu-memory-limit is 17Gi, but the largest GPU has 16384 MiB"),
    ("-g 0.5 --gpu-devices 3", "--gpu-devices is 3, but one worker runs on one node, and the largest has 2 GPUs"),
    ("-g 0.009", "--gpus is 0.009, but the smallest share of a GPU is 0.01 here; ask for more"),
    ("--gpu-memory 163Mi", "--gpu-memory is 163Mi, but the smallest share of a GPU is 0.01 here, which is 164 MiB"),
    ("-g 0.5 --elastic", "it counts whole GPUs, and the job asks for a share of them (--gpus)"),
    ("--cpu 5", "--cpu is 5, but one worker runs on one node, and the largest has 4 cores"),
    ("--memory 9Gi", "--memory is 9Gi, but one worker runs on one node, and the largest has 8192 MiB"),
    ("--node-selector zone=a", "--node-selector is zone=a, but no node has these labels"),
    ('--runtime-env-json {"pip":["einops"]}', "--runtime-env is 'pip', but only a cluster that runs on Ray sets up"),
    ("--runtime-env-json [1]", "the runtime environment must be an object, as"),
    ("--runtime-env-json {", "the runtime environment is neither YAML nor JSON"),
    ("--runtime-env no-such.yaml", "--runtime-env no-such.yaml cannot be read: No such file or directory"),
    ("--runtime-env a --runtime-env-json {}", "mean the same; give one of them"),
    ("--toleration gpu:Never", "what follows ':' must be one of PreferNoSchedule, NoSchedule, NoExecute"),
]


def test_every_mistake_is_one_sentence_with_the_rule(team: Cli) -> None:
    for options, sentence in MISTAKES:
        answer = team.run("submit", "x", *options.split(), "--", "true")
        assert (answer.code, sentence in answer.err) == (2, True), (options, answer)
        assert answer.err.count("\n") == 1, answer.err
    assert json.loads(team("list -o json")) == []


def test_memory_needs_gpus_whose_memory_is_known(cli: Cli) -> None:
    cli("project create team-a --guaranteed 1")
    answer = cli.run("submit", "x", "-p", "team-a", "--gpu-memory", "1G", "--", "true")
    assert answer.code == 2
    assert "simulate memory: gpuquota cluster start --gpu-memory 16G" in answer.err


def test_a_job_in_segments_is_refused_in_the_words_of_the_command_line_or_says_what_its_nodes_lack(team: Cli) -> None:
    sizes = ("--gpus", "2", "--gpus-per-worker", "1", "--segment-topology", "rack")
    refused = team.run("submit", "job", *sizes, "--segment", "3", *SLEEP)
    assert (refused.code, refused.err) == (
        2,
        "Error: --segment is 3, but it does not divide the 2 workers of 2 GPUs; "
        "give sizes that are multiples of 3 GPUs, or set --gpus-per-worker\n",
    )
    team("submit", "job", *sizes, "--segment", "2", *SLEEP)
    spec = team.job("job", "team-a")["spec"]
    assert (spec["segment"], spec["segment_topology"]) == (2, "rack")
    why = "needs 2 GPUs in 1 segment of 2 workers, each within one rack; no node that it may use has the label rack"
    assert why in " ".join(team("explain", "job").split())
