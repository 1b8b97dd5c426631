"""The same happens to a job on the embedded cluster and on Kubernetes, and the same sentences describe it."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.api import JobSpec, Kind, Project
from kfp_gpuquota.api.start_conditions import ArrayTask
from tests.simulation import kubernetes
from tests.simulation.histories import (
    Any_,
    Crash,
    Delete,
    History,
    LoseNode,
    Restart,
    Resume,
    SetQuota,
    Silence,
    Submit,
    Suspend,
    Update,
)
from tests.simulation.records import facts_of
from tests.simulation.running import play
from tests.simulation.trainings import ELASTIC, EPOCH


def submit(name: str, gpus: int, command: str = "works", *, works_s: float | None = None, **more: Any) -> Submit:
    steps, lease_s = more.pop("steps", None), more.pop("lease_s", 0.0)
    given = {"project": "a", "grace_period_s": 10.0, **more}
    spec = JobSpec(name=name, command=(command,), gpus=gpus, **given)
    return Submit(spec, (0.3, 1.0, works_s, 1.0), steps, lease_s)


def elastic(name: str = "j01", low: int = 1, high: int = 3, **more: Any) -> Submit:
    return submit(name, more.pop("gpus", high), ELASTIC, min_gpus=low, max_gpus=high, **more)


HISTORIES: dict[str, tuple[tuple[float, Any_], ...]] = {
    "a job succeeds": ((0.0, submit("j01", 2, works_s=20.0)),),
    "a job fails": ((0.0, submit("j01", 2)), (20.0, Crash(0, 1))),
    "a training ends": ((0.0, elastic(steps=30)),),
    "a training loses a worker": ((0.0, elastic()), (20.0, Crash(1, 137))),
    "a worker of a training hangs": ((0.0, elastic()), (20.0, Silence(1))),
    "a worker hangs during a restart": ((0.0, elastic()), (20.0, Silence(1)), (0.2, Restart(1.0))),
    "a training loses all its restarts": (
        (0.0, elastic(max_restarts=1)),
        *((30.0, Crash(0, 137)) for _ in range(3)),
    ),
    "a training is suspended and resumed": ((0.0, elastic()), (20.0, Suspend(0)), (20.0, Resume(0))),
    "a training lends and takes back": (
        (0.0, elastic(high=4)),
        (20.0, submit("j03", 2, project="b", works_s=20.0)),
    ),
    "a growth fails": ((0.0, elastic(high=4, gpus=3)), (20.0, submit("j03", 1, works_s=30.0)), (61.0, Crash(3, 1))),
    "a job is stopped for another": (
        (0.0, submit("j01", 4)),
        (20.0, submit("j03", 4, priority=90, works_s=20.0)),
    ),
    "a priority is raised while the job runs, which then keeps its workers": (
        (0.0, submit("j01", 4, project="b", priority=10, min_run_time_s=0.0)),
        (10.0, Update(0, 0, 0, priority=90)),
        (10.0, submit("j03", 4, project="b", priority=60, works_s=20.0)),
    ),
    "a node is lost": ((0.0, elastic(high=8, gpus_per_worker=4, gpus=8, low=4)), (20.0, LoseNode(0, 60.0))),
    "a gang loses its node": ((0.0, submit("j01", 6, gpus_per_worker=1)), (20.0, LoseNode(0, 20.0))),
    "a job runs for too long, over two starts": (
        (0.0, submit("j01", 2, max_runtime_s=50.0)),
        (20.0, submit("j03", 4, priority=90, works_s=20.0)),
    ),
    "a launcher ends": ((0.0, elastic(lease_s=30.0)),),
    "a launcher ends while its job waits and the engine does not run": (
        (0.0, submit("j03", 4, project="b", works_s=60.0)),
        (0.5, submit("j01", 4, lease_s=30.0)),
        (20.0, Restart(1.0)),
    ),
    "a job starts after the success of another one": (
        (0.0, submit("j01", 2, works_s=20.0)),
        (1.0, submit("j02", 1, after=("j01",), works_s=5.0)),
        (0.5, submit("j03", 1, after=("any:j01", "j02"), works_s=5.0)),
    ),
    "a job fails with the one that it waits for, and so does the one that waits for it": (
        (0.0, submit("j01", 2)),
        (1.0, submit("j02", 1, after=("j01",))),
        (0.5, submit("j03", 1, after=("j02",))),
        (0.5, submit("j04", 1, after=("any:j03",), works_s=5.0)),
        (20.0, Crash(0, 1)),
    ),
    "a job that is waited for is deleted while the engine restarts": (
        (0.0, submit("j01", 2)),
        (1.0, submit("j02", 1, after=("j01",))),
        (0.5, submit("j03", 1, after=("any:j01",), works_s=5.0)),
        (20.0, Delete((0,))),
        (0.05, Restart(1.0)),
    ),
    "a job begins later, and its age counts from then": (
        (0.0, submit("j01", 4, works_s=60.0)),
        (1.0, submit("j02", 4, begin_at=EPOCH + 30.0, works_s=20.0)),
        (10.0, submit("j03", 4, works_s=20.0)),
        (5.0, Restart(0.0)),
    ),
    "an array has two jobs at a time": (
        *((0.5, submit(f"j0{i}", 1, array=ArrayTask(name="sweep", index=i, limit=2), works_s=20.0)) for i in (1, 2, 3)),
        (10.0, Restart(1.0)),
    ),
    "jobs take the first type of GPUs that is free, one keeps it over a restart, and grows on it": (
        (0.0, elastic(high=6, gpus=3, project="b", gpu_types=("P", "Q"))),
        (2.0, submit("j02", 4, project="a", gpu_types=("P", "Q"), works_s=30.0)),
        (2.0, submit("j04", 2, project="a", gpu_types=("Q", "P"), works_s=30.0)),
        (10.0, Restart(1.0)),
        (1.0, submit("j05", 8, project="a", gpus_per_worker=1, gpu_types=("P", "Q"))),
    ),
    "a quota grows": (
        (0.0, submit("j01", 2, kind=Kind.BUILD, project="b")),
        (20.0, SetQuota(Project(name="b", guaranteed=2))),
    ),
}


def _needs_two_nodes(happening: tuple[float, Any_]) -> bool:
    one = happening[1]
    return isinstance(one, LoseNode) or (isinstance(one, Submit) and bool(one.spec.gpu_types))


@pytest.mark.parametrize("happenings", HISTORIES.values(), ids=HISTORIES)
def test_the_same_happens_to_a_job_on_both_kinds_of_cluster(happenings: tuple[tuple[float, Any_], ...]) -> None:
    nodes = (4, 4) if any(map(_needs_two_nodes, happenings)) else (4,)
    projects = (Project(name="a", guaranteed=2), Project(name="b", guaranteed=1))
    history = History(nodes, projects, happenings)
    embedded = play(history).state.jobs.values()
    on_kubernetes = kubernetes.play(history).records.values()
    assert facts_of(embedded, of_a_cluster=False) == facts_of(on_kubernetes, of_a_cluster=False)
