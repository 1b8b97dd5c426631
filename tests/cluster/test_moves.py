"""The record of a job and the history after a worker is moved to another node."""

from __future__ import annotations

import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import JobSpec, JobStatus, Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.engine.change_recorder import ChangeRecorder
from kfp_gpuquota.engine.job_book import Change, JobBook
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord

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
