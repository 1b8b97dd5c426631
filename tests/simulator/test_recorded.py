"""A cluster's own history as a trace: what was recorded of jobs, replayed, is what happened."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kfp_gpuquota.api import Device, Job, JobSpec, JobStatus, Node, Phase, Project, Reason, ReasonCode, Resize
from kfp_gpuquota.api.time_spent import Activity
from kfp_gpuquota.cli.main import application
from kfp_gpuquota.errors import NotFoundError, UsageError
from kfp_gpuquota.simulator import POLICIES, SimulationOptions, TraceJob, history, simulate, trace_node
from kfp_gpuquota.simulator.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import EmbeddedCluster

OPTIONS = SimulationOptions(
    clock=lambda: 0.0,
    leave_s=0.0,
    checkpoint_s=1.0,  # times are whole seconds, so an eviction costs no work
    projects=(Project(name="a", guaranteed=3), Project(name="b", guaranteed=4), Project(name="c")),
)
NODES = [Node(name=f"node-{i}", devices=tuple(Device(index=j) for j in range(4))) for i in range(2)]


def drawn(seed: int) -> list[TraceJob]:
    draw = random.Random(seed)
    jobs = []
    for number in range(60):
        spec = JobSpec(
            name=f"job-{number}", project=draw.choice("abc"), command=("true",), gpus=draw.choice([1, 1, 2, 4])
        )
        arrives_at = 1000.0 + draw.randrange(600)
        jobs.append(TraceJob(spec.name, spec.project, arrives_at, float(draw.randrange(5, 90)), spec.gpus, spec=spec))
    return sorted(jobs, key=lambda job: (job.arrives_at, job.name))


def as_recorded(simulation: Simulation) -> list[Job]:
    """The records of a cluster on which the simulation's jobs have run."""
    records = []
    for uid, life in simulation.lives.items():
        assert life.trace.spec is not None
        assert life.ended_at is not None
        at_work = life.ended_at - life.trace.arrives_at - life.queued_s
        status = JobStatus(
            phase=Phase.SUCCEEDED,
            submitted_at=life.trace.arrives_at,
            finished_at=life.ended_at,
            evictions=life.evictions,
            spent={Activity.ROOM: life.queued_s, Activity.RUNNING: at_work},
        )
        records.append(Job(uid=uid, spec=life.trace.spec, status=status))
    return records


@pytest.mark.parametrize("seed", range(5))
def test_what_a_cluster_has_recorded_is_replayed_as_it_happened(seed: int) -> None:
    nodes = [trace_node(node) for node in NODES]
    lived = Simulation(nodes, drawn(seed), POLICIES["gpuquota"], OPTIONS)
    lived.run()
    happened = lived.result(0.0)
    assert happened.evictions
    past = history(as_recorded(lived), NODES, {"a", "b", "c"}, since=0.0, now=1e6, throughput=OPTIONS.throughput)
    assert past.queued == happened.queued
    assert past.evicted == happened.evicted
    again = simulate(nodes, past.jobs, POLICIES["gpuquota"], OPTIONS)
    assert (again.queued, again.evicted, again.gpu_hours) == (
        happened.queued, happened.evicted, happened.gpu_hours
    )  # fmt: skip


def ran(name: str, project: str = "a", *, changes: Sequence[tuple[float, int, int]] = (), spec: int = 2) -> Job:
    """A job that was submitted at 100, and ran from 200 to 400."""
    why = Reason(code=ReasonCode.IDLE_GPUS, message="")
    resizes = tuple(
        Resize(at=at, from_gpus=before, to_gpus=after, generation=1, step=1, reason=why)
        for at, before, after in changes
    )
    status = JobStatus(
        phase=Phase.SUCCEEDED, submitted_at=100.0, started_at=200.0, finished_at=400.0, resizes=resizes,
        spent={Activity.QUOTA: 100.0, Activity.RUNNING: 200.0},
    )  # fmt: skip
    asked = JobSpec(name=name, project=project, command=("true",), gpus=spec, min_gpus=1, max_gpus=4)
    return Job(uid=name, spec=asked, status=status)


def of_jobs(*jobs: Job, since: float = 0.0) -> dict[str, float]:
    past = history(jobs, NODES, {"a"}, since=since, now=500.0, throughput=float)
    return {job.name: job.duration_s for job in past.jobs}


def test_the_work_of_an_elastic_job_is_that_at_its_requested_size() -> None:
    grown = ran("grown", changes=[(250.0, 2, 4)])  # 50 s with 2 and 150 s with 4
    shrunk = ran("shrunk", changes=[(300.0, 2, 1)])
    assert of_jobs(grown, shrunk, ran("same")) == {"grown": 350.0, "shrunk": 150.0, "same": 200.0}


def test_jobs_that_nobody_can_replay_are_counted() -> None:
    waits = Job(
        uid="w",
        spec=ran("w").spec,
        status=JobStatus(submitted_at=100.0, spent={Activity.QUOTA: 9.0}, counted_until=109.0),
    )
    past = history([ran("one"), ran("two", "gone"), waits], NODES, {"a"}, since=0.0, now=500.0, throughput=float)
    assert ([job.name for job in past.jobs], past.never_ran, past.of_deleted_projects) == (["one"], 1, 1)
    assert of_jobs(ran("one"), since=101.0) == {}


def twin(*words: str) -> str:
    result = CliRunner().invoke(application(), ["twin", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_clusters_history_is_replayed_with_other_quotas_and_nodes(
    embedded_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUQUOTA_HOME", str(embedded_cluster.home.root))
    embedded_cluster.project("team-a", 1)
    with pytest.raises(NotFoundError, match="no job of this time has run yet"):
        twin()
    embedded_cluster.submit("one", "true")
    embedded_cluster.wait_for_phase("one", "Succeeded")
    assert [line.split()[:2] for line in twin().splitlines()[1:5:3]] == [["today", "0.0"], ["team-a", "1"]]
    answer = json.loads(twin("--guaranteed", "team-a=0", "--limit", "team-a=0", "--with-node", "8", "-o", "json"))
    today, changed = answer["results"]
    assert (today["finished"], changed["finished"], changed["gpus"]) == (1, 0, today["gpus"] + 8)
    assert "1 never start" in twin("--limit", "team-a=0", "--guaranteed", "team-a=0")
    assert "STATIC MEAN" in twin("--static")
    replaced = json.loads(twin("--without-node", "node-0", "--with-node", "1", "-o", "json"))["results"][1]
    assert (replaced["finished"], replaced["gpus"]) == (1, 1)
    with pytest.raises(NotFoundError, match="project 'team-z' does not exist"):
        twin("--guaranteed", "team-z=1")
    with pytest.raises(NotFoundError, match="node 'n' does not exist"):
        twin("--without-node", "n")
    with pytest.raises(UsageError, match="--with-node is 0, but it must be at least 1 GPU"):
        twin("--with-node", "0")
    with pytest.raises(UsageError, match="it cannot be written: Format 'foo' is not supported"):
        twin("--picture", str(embedded_cluster.home.root / "picture.foo"))
