"""The consequences for a job when a worker exits: the table of engine/lifecycle.py, row by row."""

from __future__ import annotations

import json

import msgspec
import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import JobSpec, JobStatus, Phase, Progress, Reason, ReasonCode, Resize, Worker, WorkerPhase
from kfp_gpuquota.engine.lifecycle import GROWTH_S, INCIDENT_S, after_worker_exited, members_reported, trained
from kfp_gpuquota.engine.records import Intent, JobRecord, WorkerRecord, with_status
from kfp_gpuquota.engine.requests import ran_too_long
from kfp_gpuquota.engine.scheduling import NEVER_AGAIN, job_changed
from kfp_gpuquota.server.membership.messages import decode
from kfp_gpuquota.server.membership.training_reports import TrainingReports

NOW = 100.0
KILLED = 137


def job(**fields: object) -> JobRecord:
    spec = JobSpec(name="train", project="team-a", command=("x",), gpus=2, min_gpus=1, max_gpus=4, max_restarts=2)
    record = JobRecord(uid="u", spec=spec, status=JobStatus(phase=Phase.RUNNING), attempt=1)
    return msgspec.structs.replace(record, **fields)


def worker(index: int, code: int | None = None, *, released: bool = False, rank: int | None = None) -> WorkerRecord:
    phase = WorkerPhase.RUNNING if code is None else WorkerPhase.GONE
    made = Worker(
        id=f"u-{index}", job_uid="u", index=index, node="n", devices=(index,), phase=phase, exit_code=code, rank=rank
    )
    return WorkerRecord(worker=made, attempt=1, released=released)


def after(record: JobRecord, *workers: WorkerRecord) -> JobRecord:
    """Apply the exit of the first worker."""
    return after_worker_exited(record, workers[0], workers, NOW)


def test_a_job_succeeds_when_its_last_worker_has_ended_with_0() -> None:
    ended = after(job(), worker(0, 0))
    assert (ended.status.phase, ended.status.exit_code, ended.status.finished_at) == (Phase.SUCCEEDED, 0, NOW)


def test_the_result_is_the_lowest_ranks() -> None:
    ended = after(job(), worker(0, 0, rank=2), worker(1, 0, rank=0), worker(2, 0, rank=1))
    assert ended.status.result_worker == "u-1"


def test_a_job_takes_no_more_workers_once_one_has_ended_with_0() -> None:
    going_on = after(job(), worker(0, 0), worker(1))
    assert (going_on.completing, going_on.status.phase) == (True, Phase.RUNNING)


@pytest.mark.parametrize("reported", [None, Progress(step=1, total_steps=40, at=NOW - 2)])
def test_a_training_ends_at_the_step_that_any_of_its_workers_applied_last(reported: Progress | None) -> None:
    found = trained(with_status(job(), progress=reported), 40, NOW).status.progress
    assert found is not None
    assert (found.step, found.at) == (40, NOW)


def test_the_scheduler_gets_batch_and_noise_scale_of_a_report_that_has_them() -> None:
    line = {"event": "ProgressReported", "worker": "u-0", "step": 1, "workers": 2}
    found = []
    for more in ({}, {"batch_size": 64, "noise_scale": 12.5}):
        report = TrainingReports().progress(decode(json.dumps(line | more).encode()), NOW, ())  # type: ignore[arg-type]
        (event,) = job_changed(job(), with_status(job(), progress=report))
        assert isinstance(event, scheduler.ProgressReported)
        found.append((event.workers, event.batch_size, event.noise_scale))
    assert found == [(2, None, None), (2, 64, 12.5)]
    with pytest.raises(msgspec.ValidationError):
        decode(json.dumps(line | {"noise_scale": -1.0}).encode())


def test_a_worker_that_was_told_to_go_says_nothing_about_the_job() -> None:
    assert after(job(), worker(0, KILLED, released=True), worker(1)) == job()


def test_an_unmanaged_job_fails_with_the_exit_code_of_its_worker() -> None:
    ended = after(job(), worker(0, 3))
    assert (ended.status.phase, ended.status.exit_code, ended.status.restarts) == (Phase.FAILED, 3, 0)
    assert ended.status.reason is not None
    assert ended.status.reason.message == "worker 0 ended with exit code 3"


def test_a_command_that_was_not_found_is_named_as_the_cause() -> None:
    ended = after(job(), worker(0, 127))
    assert ended.status.reason is not None
    assert ended.status.reason.message == "worker 0 ended with exit code 127: its command was not found"


def test_the_other_workers_of_a_failed_job_are_to_be_stopped() -> None:
    failing = after(job(), worker(0, 3), worker(1))
    assert (failing.intent, failing.status.phase) == (Intent.FAIL, Phase.RUNNING)


def test_a_managed_job_goes_on_without_a_worker_that_was_killed() -> None:
    going_on = after(job(managed=True), worker(0, KILLED), worker(1))
    assert (going_on.intent, going_on.status.phase, going_on.status.restarts) == (Intent.RUN, Phase.RUNNING, 1)
    assert going_on.status.reason is not None
    assert going_on.status.reason.message == "worker 0 was killed by signal 9; restart 1 of at most 2"


def grown(*, ago_s: float, **fields: object) -> JobRecord:
    """A job that trains with two workers since so long ago."""
    reason = Reason(code=ReasonCode.IDLE_GPUS, message="expanded from 1 to 2 GPUs: 1 GPU is idle")
    change = Resize(at=NOW - ago_s, from_gpus=1, to_gpus=2, generation=2, step=1, reason=reason)
    return with_status(job(managed=True, size=2, **fields), resizes=(change,))


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_growth_that_fails_stops_the_growing_and_costs_the_job_nothing(rank: int | None, restarts: int) -> None:
    record = with_status(grown(ago_s=5), restarts=restarts)
    going_on = after(record, worker(1, 2, rank=rank), worker(0, rank=0))
    assert (going_on.intent, going_on.status.phase, going_on.status.restarts) == (Intent.RUN, Phase.RUNNING, restarts)
    assert going_on.growth_failed is not None
    assert "ended with exit code 2 when the job grew" in going_on.growth_failed.message
    deferred = [e for e in job_changed(record, going_on) if isinstance(e, scheduler.JobDeferred)]
    assert [(e.reason, e.until) for e in deferred] == [(going_on.growth_failed, NEVER_AGAIN)]


def test_a_job_that_returned_to_the_queue_may_grow_again() -> None:
    failed = after(grown(ago_s=5), worker(1, 2, rank=1), worker(0, rank=0))
    waiting = after(failed, worker(0, KILLED, rank=0))
    assert (waiting.status.phase, waiting.growth_failed) == (Phase.PENDING, None)
    deferred = [e for e in job_changed(failed, waiting) if isinstance(e, scheduler.JobDeferred)]
    assert [e.until for e in deferred] == [0.0]


def test_a_worker_that_fails_long_after_a_growth_is_counted() -> None:
    going_on = after(grown(ago_s=GROWTH_S + 1), worker(1, 2, rank=1), worker(0, rank=0))
    assert (going_on.growth_failed, going_on.status.restarts) == (None, 1)


def test_a_managed_job_fails_when_it_loses_more_workers_than_it_may() -> None:
    worn = job(managed=True, status=JobStatus(phase=Phase.RUNNING, restarts=2))
    failing = after(worn, worker(0, KILLED), worker(1))
    assert failing.intent is Intent.FAIL
    assert failing.status.reason is not None
    assert "its 2 restarts are used up" in failing.status.reason.message


def test_a_managed_job_that_was_killed_whole_returns_to_the_queue() -> None:
    waiting = after(job(managed=True, size=2), worker(0, KILLED), worker(1, KILLED))
    assert (waiting.status.phase, waiting.intent, waiting.size) == (Phase.PENDING, Intent.RUN, 0)


def test_a_managed_job_whose_last_worker_failed_by_itself_fails() -> None:
    assert after(job(managed=True), worker(0, 1)).status.phase is Phase.FAILED


def test_a_crash_after_the_training_does_not_spoil_the_result_of_another_worker() -> None:
    ended = after(job(managed=True, completing=True), worker(0, KILLED, rank=0), worker(1, 0, rank=1))
    assert (ended.status.phase, ended.status.result_worker) == (Phase.SUCCEEDED, "u-1")


@pytest.mark.parametrize("others", [(), (1,), (1, 2)])
def test_a_script_that_fails_after_its_training_fails_the_job_whoever_else_has_a_result(
    others: tuple[int, ...],
) -> None:
    ends = [worker(index, 0, rank=index) for index in others[:1]] + [worker(index, rank=index) for index in others[1:]]
    ended = after(job(managed=True, completing=True), worker(0, 1, rank=0), *ends)
    failing = ended.intent is Intent.FAIL or ended.status.phase is Phase.FAILED
    assert (failing, ended.status.exit_code, ended.status.restarts) == (True, 1, 0)
    assert ended.status.reason is not None
    assert ended.status.reason.message == "worker 0 ended with exit code 1, after its training had ended"


def test_a_worker_that_came_too_late_to_train_does_not_spoil_the_others_result() -> None:
    ended = after(job(managed=True, completing=True), worker(1, 1), worker(0, 0, rank=0))
    assert (ended.status.phase, ended.status.result_worker) == (Phase.SUCCEEDED, "u-0")


def test_a_gang_of_a_plain_command_fails_with_any_of_its_workers_even_after_another_has_ended_well() -> None:
    ended = after(job(completing=True), worker(1, 3), worker(0, 0))
    assert (ended.status.phase, ended.status.exit_code) == (Phase.FAILED, 3)
    assert ended.status.reason is not None
    assert ended.status.reason.message == "worker 1 ended with exit code 3, after another one had ended with 0"


def test_the_run_time_of_all_starts_counts_and_none_in_the_queue() -> None:
    record = job(ran_s=5.0)
    record = msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, max_runtime_s=60.0))
    record = with_status(record, started_at=NOW - 20)
    assert record.runs_until == NOW - 20 + 60 - 5
    queued = after(record, worker(0, 0, released=True))
    assert (queued.status.phase, queued.ran_s, queued.runs_until) == (Phase.PENDING, 25.0, None)
    assert ran_too_long(queued).message == "it has run for 60 s in all its starts, which is its maximum run time"


def test_a_job_of_which_every_worker_was_told_to_go_returns_to_the_queue() -> None:
    assert after(job(), worker(0, 0, released=True)).status.phase is Phase.PENDING


@pytest.mark.parametrize(
    ("intent", "phase"),
    [
        (Intent.REQUEUE, Phase.PENDING),
        (Intent.SUSPEND, Phase.SUSPENDED),
        (Intent.CANCEL, Phase.CANCELLED),
        (Intent.DELETE, Phase.CANCELLED),
        (Intent.FAIL, Phase.FAILED),
    ],
)
def test_the_intent_decides_when_no_worker_is_left(intent: Intent, phase: Phase) -> None:
    assert after(job(intent=intent), worker(0, 143, released=True)).status.phase is phase
    assert after(job(intent=intent), worker(0, 143, released=True), worker(1)).status.phase is Phase.RUNNING


def test_the_last_loss_is_remembered_with_why_the_cluster_killed_the_worker() -> None:
    gone = msgspec.structs.replace(worker(1, KILLED, rank=1), killed_for="it did not answer for 5 s")
    going_on = after_worker_exited(job(managed=True, size=2), gone, [gone, worker(0)], NOW)
    assert going_on.status.last_failure is not None
    assert going_on.status.last_failure.at == NOW
    assert going_on.status.last_failure.reason.message == (
        "worker 1 was killed by signal 9 (it did not answer for 5 s); restart 1 of at most 2"
    )


@pytest.mark.parametrize(("others", "intent"), [(True, Intent.RUN), (False, Intent.REQUEUE)])
def test_a_lost_node_is_not_charged_to_the_job(others: bool, intent: Intent) -> None:
    lost = msgspec.structs.replace(worker(1, KILLED, rank=1), lost_with="node n2 was lost")
    record = with_status(job(managed=True), restarts=2)  # which is its max_restarts
    after = after_worker_exited(record, lost, [lost, *([worker(0, rank=0)] if others else [])], NOW)
    assert (after.status.restarts, after.incident_at) == (2, None)
    assert after.intent is intent or after.status.phase is Phase.PENDING
    assert after.status.last_failure is not None
    assert after.status.last_failure.reason.code is ReasonCode.NODE_LOST
    then = "the others go on" if others else "the job goes back to the queue"
    assert after.status.last_failure.reason.message == f"worker 1 was lost: node n2 was lost; {then}"


@pytest.mark.parametrize(("members", "completing"), [(("u-1",), False), (("u-0", "u-1"), True)])
def test_a_worker_that_ended_unseen_has_finished_if_it_is_a_member_of_the_generation(
    members: tuple[str, ...], completing: bool
) -> None:
    unseen = msgspec.structs.replace(worker(0, 0), unseen=True)
    record, (judged,) = members_reported(job(managed=True, completing=True), [unseen, worker(1)], members)
    assert (record.completing, judged.released, judged.unseen) == (completing, not completing, False)


def test_ends_are_judged_by_their_own_times() -> None:
    """Ends that were far apart are processed together by a cluster that was down, and one by one after an outage."""
    record = job(managed=True)
    first = after_worker_exited(record, worker(0, KILLED), [worker(0, KILLED), worker(1), worker(2)], NOW)
    later = after_worker_exited(first, worker(1, KILLED), [worker(1, KILLED), worker(2)], NOW + INCIDENT_S + 1)
    together = after_worker_exited(first, worker(1, KILLED), [worker(1, KILLED), worker(2)], NOW - 1)
    assert (later.status.restarts, later.incident_at) == (2, NOW + INCIDENT_S + 1)
    assert (together.status.restarts, together.incident_at) == (1, NOW)


def test_an_error_of_the_script_ends_the_job_when_no_other_worker_trains_and_is_its_reason() -> None:
    lost = msgspec.structs.replace(worker(0, 2, rank=0), error="LoopError: write job.backward(loss)")
    going_on = after(job(managed=True), lost, worker(1, rank=1))
    assert (going_on.intent, going_on.status.restarts) == (Intent.RUN, 1)
    ended = after(going_on, msgspec.structs.replace(lost, worker=worker(1, 2, rank=1).worker), worker(2))
    assert ended.intent is Intent.FAIL
    assert ended.status.reason is not None
    how, _, then = ended.status.reason.message.partition("; ")
    assert how == "worker 1 ended with exit code 2: LoopError: write job.backward(loss)"
    assert then == "a restart would repeat this error of its script"
