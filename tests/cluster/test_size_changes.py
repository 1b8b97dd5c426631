"""Each change of a job's size, as it happened, has the cause of that change (engine/size_changes.py)."""

from __future__ import annotations

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, JobStatus, Phase, Reason, ReasonCode, Resize, Worker, WorkerPhase
from kfp_gpuquota.engine.lifecycle import after_worker_exited
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord, leaving
from kfp_gpuquota.engine.size_changes import after_commit, after_processes_changed
from kfp_gpuquota.membership import AnnounceCommit

NOW = 100.0
KILLED = 137
GROWS = Reason(code=ReasonCode.IDLE_GPUS, message="expanded from 1 to 3 GPUs: 2 GPUs are idle")
STARTS = Reason(code=ReasonCode.FITS, message="starts with 2 GPUs")
SHRINKS = Reason(
    code=ReasonCode.RECLAIMED,
    message="shrunk from 3 to 1 GPUs: project b takes back its share for x",
    details={"why": "project b takes back its share for x"},
)


def job(members: int = 0) -> JobRecord:
    spec = JobSpec(name="train", project="team-a", command=("x",), gpus=2, min_gpus=1, max_gpus=4, max_restarts=2)
    names = tuple(f"u-{i}" for i in range(members))
    status = JobStatus(phase=Phase.RUNNING)
    return JobRecord(uid="u", spec=spec, status=status, attempt=1, managed=members > 0, size=members, members=names)


def worker(index: int, started_for: Reason | None = STARTS, **fields: object) -> WorkerRecord:
    made = Worker(id=f"u-{index}", job_uid="u", index=index, node="n", devices=(index,), started_at=float(index))
    made = msgspec.structs.replace(made, phase=WorkerPhase.RUNNING)
    return msgspec.structs.replace(WorkerRecord(worker=made, attempt=1, started_for=started_for), **fields)


def gone(record: WorkerRecord, code: int) -> WorkerRecord:
    ended = msgspec.structs.replace(record.worker, phase=WorkerPhase.GONE, exit_code=code, rank=1)
    return msgspec.structs.replace(record, worker=ended)


def commit(record: JobRecord, workers: list[WorkerRecord], *members: int, generation: int = 2) -> JobRecord:
    names = tuple(f"u-{i}" for i in members)
    made = AnnounceCommit(generation, names, step=7, pause_ms=1.53, lost_steps=0, complete=True)
    after, ranked = after_commit(record, workers, made, NOW)
    assert [w.worker.id for w in sorted(ranked, key=lambda w: w.worker.rank or 0)] == list(names)
    return after


def last(record: JobRecord) -> Resize:
    return record.status.resizes[-1]


def test_the_first_generation_is_no_change_of_size() -> None:
    assert commit(job(), [worker(0), worker(1)], 0, 1).status.resizes == ()


def test_workers_of_one_decision_that_join_one_by_one_are_two_changes_with_their_own_figures() -> None:
    workers = [worker(0), worker(1, GROWS), worker(2, GROWS)]
    two = commit(job(1), workers, 0, 1)
    three = commit(two, workers, 0, 1, 2, generation=3)
    first, second = three.status.resizes
    assert (first.from_gpus, first.to_gpus, first.step, first.pause_ms) == (1, 2, 7, 1.5)
    assert first.reason.message == "expanded from 1 to 2 GPUs: 1 GPU is idle"
    assert second.reason.message == "expanded from 2 to 3 GPUs: 1 GPU is idle"
    assert second.reason.code is ReasonCode.IDLE_GPUS


def test_a_worker_of_the_start_that_joins_later_is_no_expansion_by_idle_gpus() -> None:
    grown = commit(job(1), [worker(0), worker(1)], 0, 1)
    assert last(grown).reason.message == "expanded from 1 to 2 GPUs: worker 1 was ready later than the others"


def test_a_shrink_in_two_generations_names_its_cause_twice_with_the_figures_of_each() -> None:
    workers = [worker(0), *(leaving(worker(i), NOW, SHRINKS) for i in (1, 2))]
    two = commit(job(3), workers, 0, 1)
    one = commit(two, workers, 0, generation=3)
    assert [change.reason.message for change in one.status.resizes] == [
        "shrunk from 3 to 2 GPUs: project b takes back its share for x",
        "shrunk from 2 to 1 GPUs: project b takes back its share for x",
    ]


def test_growth_after_a_shrink_does_not_repeat_the_reason_of_the_shrink() -> None:
    workers = [worker(0), leaving(worker(1), NOW, SHRINKS), worker(2, GROWS), worker(3, GROWS)]
    grown = commit(job(2), workers, 0, 2, 3)
    assert last(grown).reason.message == "expanded from 2 to 3 GPUs: 1 GPU is idle"


def test_a_loss_that_training_notices_first_gets_its_reason_when_the_process_has_ended() -> None:
    lost = worker(1)
    smaller = commit(job(2), [worker(0), lost], 0)
    assert last(smaller).reason.message == "worker 1 left by itself, or was lost"
    ended = gone(lost, KILLED)
    known = after_worker_exited(smaller, ended, [ended, worker(0)], NOW)
    assert last(known).reason.message == "worker 1 was killed by signal 9; restart 1 of at most 2"


def test_a_silent_worker_that_is_killed_is_the_reason_of_the_smaller_size() -> None:
    silent = msgspec.structs.replace(worker(2), killed_for="it did not answer for 10 s")
    smaller = commit(job(3), [worker(0), worker(1), silent], 0, 1)
    assert last(smaller).reason.message == "worker 2 was killed: it did not answer for 10 s"
    replaced = commit(smaller, [worker(0), worker(1), gone(silent, KILLED), worker(3, GROWS)], 0, 1, 3)
    assert last(replaced).reason.message == "expanded from 2 to 3 GPUs: 1 GPU is idle"


def test_a_worker_that_ended_with_0_is_the_reason_of_the_smaller_size() -> None:
    smaller = commit(job(2), [worker(0), gone(worker(1), 0)], 0)
    assert last(smaller).reason.message == "worker 1 has ended with exit code 0"


def test_a_loss_beside_a_release_is_not_explained_by_the_release() -> None:
    workers = [worker(0), leaving(worker(1), NOW, SHRINKS), worker(2)]
    assert last(commit(job(3), workers, 0)).reason.message == "worker 2 left by itself, or was lost"


@pytest.mark.parametrize(
    ("size", "running", "messages"),
    [
        (0, 2, []),
        (2, 2, []),
        (1, 2, ["expanded from 1 to 2 GPUs: 1 GPU is idle"]),
        (3, 2, ["shrunk from 3 to 2 GPUs: project b takes back its share for x"]),
        (2, 0, []),
    ],
)
def test_a_job_without_a_membership_has_the_size_of_its_processes(size: int, running: int, messages: list[str]) -> None:
    record = msgspec.structs.replace(job(), size=size)
    workers = [worker(0), worker(1, GROWS), leaving(worker(2), NOW, SHRINKS)]
    after = after_processes_changed(record, workers, workers[:running], NOW)
    assert [change.reason.message for change in after.status.resizes] == messages
    assert after.size == running
