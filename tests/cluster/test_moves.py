"""The record of a job and the history after a worker is moved to another node."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import JobSpec, JobStatus, Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.engine.change_recorder import ChangeRecorder
from kfp_gpuquota.engine.job_book import Change, JobBook
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
from tests.conftest import running_cluster
from tests.polling import until

if TYPE_CHECKING:
    from pathlib import Path

    from kfp_gpuquota.cluster.local.home import Home

NOW = 100.0
WHY = Reason(code=ReasonCode.CONSOLIDATED, message="moved from n0 to n1: big needs 2 GPUs")


@pytest.mark.parametrize(
    ("managed", "tail"), [(True, ""), (False, "; its process is started again there, and what it did not save is lost")]
)
def test_a_move_is_counted_explained_and_in_the_history(managed: bool, tail: str) -> None:
    book = JobBook({})
    spec = JobSpec(name="small", project="team-a", command=("x",))
    book.put_job(JobRecord(uid="u", spec=spec, status=JobStatus(phase=Phase.RUNNING), attempt=1, managed=managed))
    worker = Worker(id="u-0", job_uid="u", index=0, node="n0", devices=(0,), phase=WorkerPhase.RUNNING)
    book.put_worker(WorkerRecord(worker=worker, attempt=1))
    recorder = ChangeRecorder(book, Change(), NOW)
    recorder.plan(scheduler.Plan(move=(scheduler.Move("u", "u-0", scheduler.Placement("n1", (0,), ""), WHY),)))
    after = recorder.change.jobs["u"]
    assert after is not None
    assert after.status.moves == 1
    assert after.status.last_move is not None
    assert (after.status.last_move.at, after.status.last_move.reason.message) == (NOW, WHY.message + tail)
    (event,) = recorder.change.events
    assert (event.kind, event.worker, event.reason) == ("worker-moved", "u-0", after.status.last_move.reason)
    assert recorder.stopped == ["u-0"]


def where_it_is_morning() -> str:
    """Return a time zone in which it is between 6 and 7 now: a test whose clock jumps does not end on another day."""
    offset = (6 - time.gmtime().tm_hour + 12) % 24 - 12
    return f"Etc/GMT{-offset:+d}"


def stored(home: Home) -> scheduler.Defragmented:
    """Return what the state file has about moves that gather free GPUs."""
    with closing(sqlite3.connect(home.database)) as database:
        (value,) = database.execute("SELECT value FROM meta WHERE key = 'defragmented'").fetchone()
    return msgspec.json.decode(value, type=scheduler.Defragmented)


def test_jobs_move_in_the_window_and_a_killed_daemon_remembers_what_it_cost(
    jumping_clock: Path, tmp_path: Path
) -> None:
    """Two nodes have a job each that has run for an hour: the younger one moves; the budget allows no other."""
    zone = where_it_is_morning()
    rule = Defragmentation(window="00:00-24:00", time_zone=zone, budget_gpu_minutes=100, max_gpu_minutes_per_gpu=50)
    config = ClusterConfig(nodes=2, gpus_per_node=2, defragmentation=rule)
    with running_cluster(tmp_path / "home", config, new_interpreter=True) as cluster:

        def replace(new: str, *old: str) -> None:
            cluster.submit(new, "sleep", "infinity")
            cluster.wait_for_phase(new, "Running")
            for name in old:
                cluster.client.delete_job("team-a", name)
            until(lambda: not {job.spec.name for job in cluster.client.list_jobs("team-a").jobs} & {*old}, old)

        cluster.project("team-a", 4)
        for name in ("a", "b", "c"):
            replace(name)
        replace("d", "b", "d")
        begun = time.time()
        jumping_clock.write_text("3600")
        cluster.project("team-b", 0)  # a change, so a plan
        moved = cluster.wait_for("c", lambda job: "node-0" in {worker.node for worker in job.status.workers}).status
        assert moved.last_move is not None
        why = "moved from node-1 to node-0: to gather free GPUs, window 00:00-24:00; it repeats at most 3"
        assert moved.last_move.reason.message.startswith(why)
        spent = stored(cluster.home).lost_gpu_s
        assert 3660 <= spent < 3660 + time.time() - begun + 60
        cluster.kill_daemon()
        replace("e", "c")  # again a job on each node
        jumping_clock.write_text("7200")
        cluster.project("team-c", 0)
        until(lambda: stored(cluster.home).at > begun + 7100, "a round after the kill")
        assert stored(cluster.home).lost_gpu_s == spent
        assert [cluster.job(name).status.moves for name in "ae"] == [0, 0]
