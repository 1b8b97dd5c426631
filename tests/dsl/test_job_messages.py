"""The step's log: one line per change, without repetition."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import msgspec

from kfp_gpuquota.api import (
    Job,
    JobSpec,
    JobStatus,
    Kind,
    Phase,
    Progress,
    Reason,
    ReasonCode,
    Resize,
    Worker,
    WorkerPhase,
)
from kfp_gpuquota.api.job import ExpectedStart
from kfp_gpuquota.dsl.launcher.job_messages import JobMessages, conclusion, progress_of

SPEC = JobSpec(name="train", project="team-a", command=("true",), gpus=1, min_gpus=1, max_gpus=2)
WAITS = Reason(code=ReasonCode.NO_FREE_GPUS, message="all 2 GPUs are in use; 1 more is needed")
RECLAIMED = Reason(code=ReasonCode.RECLAIMED, message="shrunk from 2 to 1 GPUs: team-b takes back its quota")
IDLE = Reason(code=ReasonCode.IDLE_GPUS, message="1 GPU is idle")


def _job(phase: Phase, **status: Any) -> Job:
    return Job(uid="u", spec=SPEC, status=JobStatus(phase=phase, **status))


def _resize(before: int, after: int, reason: Reason, **more: Any) -> Resize:
    return Resize(at=1.0, from_gpus=before, to_gpus=after, generation=2, step=40, reason=reason, **more)


def _story(*jobs: Job) -> list[str]:
    messages = JobMessages()
    return [line for at, job in enumerate(jobs) for line in messages.lines(job, float(at))]


def test_changes_are_told_once_where_the_cluster_remembers_the_last_few_only() -> None:
    changes = [_resize(2, 1, RECLAIMED), _resize(1, 2, IDLE), _resize(2, 1, RECLAIMED, pause_ms=3.0)]
    jobs = [_job(Phase.RUNNING, gpus=1, resizes=tuple(kept)) for kept in (changes[:1], changes[:2], changes[1:])]
    assert _story(*jobs)[1:] == [
        "shrunk from 2 to 1 GPUs: team-b takes back its quota",
        "expanded from 1 to 2 GPUs: 1 GPU is idle",
        "shrunk from 2 to 1 GPUs: team-b takes back its quota (paused 3 ms at step 40)",
    ]


def test_the_address_of_the_jobs_page_is_told_once_it_is_known() -> None:
    page = "https://kubeflow.example.org/gpuquota/jobs/team-a/train"
    jobs = [_job(Phase.PENDING), _job(Phase.PENDING, page=page), _job(Phase.RUNNING, gpus=1, page=page)]
    assert _story(*jobs) == [f"the job's page: {page}", "training with 1 GPU"]


def test_the_owner_is_warned_once_of_unused_gpus_and_told_of_the_suspension() -> None:
    def reason(message: str) -> Reason:
        return Reason(code=ReasonCode.GPUS_UNUSED, message=message)

    warned = _job(Phase.RUNNING, gpus=1, reason=reason("its GPUs have been unused"))
    jobs = [_job(Phase.RUNNING, gpus=1), warned, warned, _job(Phase.SUSPENDED, reason=reason("its GPUs had been"))]
    assert _story(*jobs) == [
        "training with 1 GPU",
        "warning: its GPUs have been unused",
        "suspended: its GPUs had been",
    ]


def test_an_image_that_cannot_be_pulled_is_told_once() -> None:
    fits = _job(Phase.STARTING, reason=Reason(code=ReasonCode.FITS, message="starts with 1 GPU"))
    pull = _job(
        Phase.STARTING, reason=Reason(code=ReasonCode.PODS_NOT_READY, message="ImagePullBackOff: no such image")
    )
    assert _story(fits, pull, pull) == ["a worker does not start: ImagePullBackOff: no such image"]


def test_an_expected_start_is_reported_once_and_again_if_it_is_later_or_much_sooner() -> None:
    noon = 1_767_268_800.0
    messages = JobMessages(zone=UTC, clock=lambda: noon)

    def lines(earliest_s: float, latest_s: float, phase: Phase = Phase.PENDING) -> list[str]:
        expected = ExpectedStart(earliest=noon + earliest_s, latest=noon + latest_s)
        return messages.lines(_job(phase, expected_start=expected), 0.0)

    assert lines(600, 3600) == ["expected to start between 12:10 and 13:00 UTC"]
    assert lines(600, 3630) == lines(300, 2400) == [], "about the same"
    assert lines(600, 5400) == ["expected to start between 12:10 and 13:30 UTC"]
    assert lines(0, 1200) == ["expected to start between 12:00 and 12:20 UTC"]
    lines(0, 1200, Phase.RUNNING)
    assert lines(0, 1200) == ["expected to start between 12:00 and 12:20 UTC"], "it waits again"


def test_each_change_is_told_once() -> None:
    waiting = _job(Phase.PENDING, reason=WAITS)
    large = _job(Phase.RUNNING, gpus=2)
    shrunk = _job(Phase.RUNNING, gpus=1, resizes=(_resize(2, 1, RECLAIMED, pause_ms=11.6),))
    grown = msgspec.structs.replace(
        shrunk,
        status=msgspec.structs.replace(shrunk.status, gpus=2, resizes=(*shrunk.status.resizes, _resize(1, 2, IDLE))),
    )
    assert _story(waiting, waiting, large, large, shrunk, shrunk, grown) == [
        "waiting: all 2 GPUs are in use; 1 more is needed",
        "training with 2 GPUs (1 requested, 1 borrowed)",
        "shrunk from 2 to 1 GPUs: team-b takes back its quota (paused 12 ms at step 40)",
        "expanded from 1 to 2 GPUs: 1 GPU is idle",
    ]


def test_workers_that_begin_without_one_that_still_starts_are_not_said_to_have_shrunk() -> None:
    grow = Reason(code=ReasonCode.IDLE_GPUS, message="expanded from 1 to 2 GPUs: 1 GPU is idle")
    first = _job(Phase.RUNNING, gpus=2, resizes=(_resize(2, 1, grow, pause_ms=0.6),))
    assert _story(first)[1:] == ["begun with 1 of 2 GPUs, until the other workers have joined (paused 1 ms at step 40)"]


def test_a_new_reason_for_waiting_is_a_change() -> None:
    other = _job(Phase.PENDING, reason=RECLAIMED)
    assert len(_story(_job(Phase.PENDING, reason=WAITS), other, other)) == 2


def test_a_preempted_job_says_why_it_waits_again() -> None:
    stopping = _job(Phase.STOPPING, reason=RECLAIMED, gpus=1)
    assert _story(
        _job(Phase.RUNNING, gpus=1), stopping, _job(Phase.PENDING, reason=WAITS), _job(Phase.RUNNING, gpus=1)
    ) == [
        "training with 1 GPU",
        "stopping: shrunk from 2 to 1 GPUs: team-b takes back its quota",
        "waiting: all 2 GPUs are in use; 1 more is needed",
        "training with 1 GPU",
    ]


def test_progress_is_told_at_most_every_five_seconds() -> None:
    messages = JobMessages(progress_every_s=5.0)
    received = []
    for second in range(12):
        progress = Progress(step=second * 10, total_steps=120, metrics={"loss": 1.0 / (second + 1)})
        received += messages.lines(_job(Phase.RUNNING, gpus=1, progress=progress), float(second))
    assert received == [
        "training with 1 GPU",
        "step 0/120, loss 1",
        "step 50/120, loss 0.1667",
        "step 100/120, loss 0.09091",
    ]


def test_a_restart_is_told_with_its_cause() -> None:
    died = Reason(code=ReasonCode.WORKER_FAILED, message="worker 1 was killed by signal 9")
    assert _story(_job(Phase.RUNNING, gpus=2), _job(Phase.RUNNING, gpus=1, restarts=1, reason=died))[1:] == [
        "restart 1 of at most 3: worker 1 was killed by signal 9"
    ]


def _workers(*ranks: int | None, phase: WorkerPhase = WorkerPhase.RUNNING) -> tuple[Worker, ...]:
    return tuple(
        Worker(id=f"u-{index}", job_uid="u", index=index, node="n", devices=(index,), rank=rank, phase=phase)
        for index, rank in enumerate(ranks)
    )


def _warnings(*states: tuple[float, Job]) -> list[str]:
    messages = JobMessages()
    return [line for at, job in states for line in messages.lines(job, at) if line.startswith("warning")]


def test_an_elastic_step_that_has_not_joined_in_five_minutes_is_warned_once() -> None:
    two = _job(Phase.RUNNING, gpus=2, workers=_workers(None, None))
    assert _warnings((0.0, two), (299.9, two)) == []  # it may be importing torch from a cold disk all the while
    assert _warnings((0.0, two), (300.0, two), (310.0, two)) == [
        "warning: after 300 s none of its 2 workers has called elastic_runtime.init(): until it does, each of them "
        "does the whole work, and the result of one is kept; call it in the step, or leave out min_gpus, max_gpus"
    ]


def test_the_state_is_the_last_line_that_is_no_progress() -> None:
    messages = JobMessages()
    messages.lines(_job(Phase.RUNNING, gpus=1, progress=Progress(step=3, total_steps=9)), 0.0)
    assert messages.state == "training with 1 GPU"


def test_progress_is_shown_as_steps_of_steps_where_both_are_known() -> None:
    assert progress_of(_job(Phase.RUNNING, gpus=1, progress=Progress(step=3, total_steps=9))) == (3, 9)
    assert progress_of(_job(Phase.RUNNING, gpus=1, progress=Progress(step=10, total_steps=9))) == (9, 9)
    assert progress_of(_job(Phase.RUNNING, gpus=1, progress=Progress(step=3))) is None
    assert progress_of(_job(Phase.RUNNING, gpus=1)) is None


def test_a_metric_that_is_no_number_is_named_first() -> None:
    progress = Progress(metrics={"accuracy": 0.25}, not_finite={"loss": "nan"})
    assert progress.metric_texts == ["loss nan", "accuracy 0.25"]


def test_a_step_that_joins_at_last_is_not_warned() -> None:
    apart, joined = (_job(Phase.RUNNING, gpus=2, workers=_workers(*ranks)) for ranks in ((None, None), (0, None)))
    late = _job(Phase.RUNNING, gpus=2, workers=_workers(None, None))  # preempted, and started again
    assert _warnings((0.0, apart), (250.0, joined), (310.0, late), (900.0, late)) == []


def test_a_worker_alone_is_warned_when_it_has_another_size_than_was_asked_for() -> None:
    spec = msgspec.structs.replace(SPEC, gpus=2)
    less = msgspec.structs.replace(_job(Phase.RUNNING, gpus=1, workers=_workers(None)), spec=spec)
    (output,) = _warnings((0.0, less), (301.0, less))
    assert "its worker has not called elastic_runtime.init(): until it does, it does the whole work" in output


def test_a_step_that_is_not_elastic_need_not_join() -> None:
    plain = JobSpec(name="train", project="team-a", command=("true",), gpus=2)
    running = msgspec.structs.replace(_job(Phase.RUNNING, gpus=2, workers=_workers(None)), spec=plain)
    asked = _job(Phase.RUNNING, gpus=1, workers=_workers(None))
    done = _job(Phase.SUCCEEDED, workers=_workers(None, phase=WorkerPhase.GONE))
    assert _warnings((0.0, running), (999.0, running), (1000.0, done)) == []
    assert _warnings((0.0, asked), (999.0, asked), (1000.0, done)) == []


def test_several_plain_workers_are_told_that_each_does_the_whole_work() -> None:
    gang = JobSpec(name="train", project="team-a", command=("true",), gpus=2, gpus_per_worker=1)
    done = _job(Phase.SUCCEEDED, workers=_workers(None, None, phase=WorkerPhase.GONE))
    (output,) = _warnings((0.0, msgspec.structs.replace(done, spec=gang)))
    assert output.startswith("warning: none of its 2 workers has called elastic_runtime.init()")
    assert output.endswith("leave out gpus_per_worker")


def test_a_step_that_failed_before_it_could_join_is_not_warned() -> None:
    failed = _job(Phase.FAILED, exit_code=1, workers=_workers(None, None, phase=WorkerPhase.GONE))
    assert _warnings((0.0, _job(Phase.RUNNING, gpus=2, workers=_workers(None, None))), (5.0, failed)) == []


def test_a_job_without_gpus_is_not_training() -> None:
    spec = JobSpec(name="cpus", project="p", command=("x",), gpus=0)
    running = msgspec.structs.replace(_job(Phase.RUNNING), spec=spec)
    assert _story(running) == ["running"]


def test_an_interactive_session_is_not_training() -> None:
    session = msgspec.structs.replace(
        _job(Phase.RUNNING, gpus=1), spec=JobSpec(name="b", project="team-b", command=("sh",), kind=Kind.BUILD)
    )
    assert _story(session) == ["running with 1 GPU"]


def test_the_last_line_says_how_the_job_ended() -> None:
    resizes = (_resize(2, 1, RECLAIMED), _resize(1, 2, IDLE))
    assert conclusion(_job(Phase.SUCCEEDED, exit_code=0, started_at=10.0, finished_at=31.2, resizes=resizes)) == (
        "succeeded after 21 s; 2 changes of size, steps lost: 0"
    )
    died = Reason(code=ReasonCode.WORKER_FAILED, message="worker 0 ended with exit code 3")
    assert (
        conclusion(_job(Phase.FAILED, exit_code=3, reason=died))
        == "failed with exit code 3: worker 0 ended with exit code 3"
    )
    gone = Reason(code=ReasonCode.LEASE_ENDED, message="nobody renewed its lease")
    assert conclusion(_job(Phase.CANCELLED, reason=gone)) == "cancelled: nobody renewed its lease"
