"""The step's log: one line a change, nothing said twice."""

from __future__ import annotations

from typing import Any

import msgspec

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Kind, Phase, Progress, Reason, ReasonCode, Resize
from kfp_gpuquota.dsl.narration import Narrator, conclusion

SPEC = JobSpec(name="train", project="team-a", command=("true",), gpus=1, min_gpus=1, max_gpus=2)
WAITS = Reason(code=ReasonCode.NO_FREE_GPUS, message="all 2 GPUs are in use; 1 more is needed")
RECLAIMED = Reason(code=ReasonCode.RECLAIMED, message="shrunk from 2 to 1 GPUs: team-b takes back its quota")
IDLE = Reason(code=ReasonCode.IDLE_GPUS, message="1 GPU is idle")


def _job(phase: Phase, **status: Any) -> Job:
    return Job(uid="u", spec=SPEC, status=JobStatus(phase=phase, **status))


def _resize(before: int, after: int, reason: Reason, **more: Any) -> Resize:
    return Resize(at=1.0, from_gpus=before, to_gpus=after, generation=2, step=40, reason=reason, **more)


def _story(*jobs: Job) -> list[str]:
    narrator = Narrator()
    return [line for at, job in enumerate(jobs) for line in narrator.lines(job, float(at))]


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
    narrator = Narrator(progress_every_s=5.0)
    told = []
    for second in range(12):
        progress = Progress(step=second * 10, total_steps=120, metrics={"loss": 1.0 / (second + 1)})
        told += narrator.lines(_job(Phase.RUNNING, gpus=1, progress=progress), float(second))
    assert told == [
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
