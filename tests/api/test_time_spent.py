"""Where a job's time went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Phase, Reason, ReasonCode, Resize
from kfp_gpuquota.api.time_spent import Activity, time_spent
from kfp_gpuquota.cli.admin.report import time_csv, time_rows, time_table
from kfp_gpuquota.engine.records import JobRecord, with_status
from kfp_gpuquota.engine.time_accounting import account

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEC = JobSpec(name="train", project="team-a", command=("true",))


def because(code: ReasonCode) -> Reason:
    return Reason(code=code, message="")


def after(changes: Sequence[tuple[float, dict[str, object]]], *, attempt: int = 0) -> JobStatus:
    """Return the status of a job that was submitted at 0, after these changes of its status."""
    job = account(None, JobRecord(uid="u", spec=SPEC, status=JobStatus(), attempt=attempt), 0.0)
    for at, fields in changes:
        job = account(job, with_status(job, **fields), at)
    return job.status


def test_each_part_has_its_time_and_all_add_up_to_the_jobs_life() -> None:
    resize = Resize(
        at=0.0, from_gpus=1, to_gpus=2, generation=2, step=7, reason=because(ReasonCode.FITS), pause_ms=1500.0
    )
    status = after(
        [
            (0.0, {"reason": because(ReasonCode.WAITS_FOR_JOBS)}),
            (10.0, {"reason": because(ReasonCode.OVER_FAIR_SHARE)}),
            (15.0, {"reason": because(ReasonCode.NO_FREE_GPUS)}),
            (35.0, {"phase": Phase.STARTING, "reason": because(ReasonCode.FITS)}),
            (36.0, {"phase": Phase.RUNNING}),
            (96.0, {"resizes": (resize,)}),
            (136.0, {"phase": Phase.STOPPING}),
            (137.0, {"phase": Phase.PENDING, "reason": None}),
            (140.0, {"phase": Phase.SUSPENDED}),
            (150.0, {"phase": Phase.PENDING}),
        ]
    )
    parts = time_spent(status, 151.0)
    assert parts == {
        Activity.HELD: 10.0, Activity.QUOTA: 5.0, Activity.ROOM: 24.0, Activity.STARTING: 1.0, Activity.RUNNING: 98.5,
        Activity.RESIZING: 1.5, Activity.STOPPING: 1.0, Activity.SUSPENDED: 10.0,
    }  # fmt: skip
    assert sum(parts.values()) == 151.0


def test_an_end_that_is_known_later_takes_back_what_followed_it() -> None:
    status = after(
        [(1.0, {"phase": Phase.RUNNING}), (9.0, {"phase": Phase.STOPPING}),
         (12.0, {"phase": Phase.FAILED, "finished_at": 8.0})]
    )  # fmt: skip
    assert time_spent(status, 99.0) == {Activity.ROOM: 1.0, Activity.RUNNING: 7.0}


def test_a_job_that_another_version_has_recorded_says_so() -> None:
    status = after([], attempt=1)
    status = msgspec.structs.replace(status, phase=Phase.RUNNING)
    assert time_spent(status, 5.0) == {Activity.RUNNING: 5.0}
    old = JobRecord(uid="u", spec=SPEC, status=JobStatus(phase=Phase.RUNNING, submitted_at=10.0), attempt=1)
    assert time_spent(account(old, old, 30.0).status, 31.0) == {Activity.UNRECORDED: 20.0, Activity.RUNNING: 1.0}


@pytest.mark.parametrize("since", [0.0, 5.0])
def test_a_report_adds_up_the_jobs_of_each_project(since: float) -> None:
    waited = after([(90.0, {"phase": Phase.RUNNING})])
    jobs = [Job(uid=str(i), spec=SPEC, status=msgspec.structs.replace(waited, submitted_at=4.0 * i)) for i in range(3)]
    rows = time_rows(jobs, since, 100.0)
    count = 3 if since == 0.0 else 1
    assert rows[0]["jobs"] == count
    assert rows[0]["room_s"] == 90.0 * count
    assert time_table(rows).split() == ["PROJECT", "JOBS", "WAITING", "FOR", "ROOM", "RUNNING", "team-a", str(count),
                                      {3: "4m", 1: "90s"}[count], {3: "30s", 1: "10s"}[count]]  # fmt: skip
    assert time_csv(rows).startswith("project,jobs,held_s,suspended_s,quota_s,room_s,")
