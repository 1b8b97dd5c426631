"""Whose turns in an array are counted."""

from __future__ import annotations

from kfp_gpuquota.api import JobSpec, JobStatus
from kfp_gpuquota.api.start_conditions import ArrayTask
from kfp_gpuquota.engine.job_book import Change, JobBook
from kfp_gpuquota.engine.records import JobRecord, Owner
from kfp_gpuquota.engine.start_conditions import settle


def test_nobody_takes_the_turns_of_another_users_array() -> None:
    """Of a shared project: one job of that name would hold all of another user's array."""
    book = JobBook({})
    jobs = [("hers-0", "sweep", 0, 1), ("his-1", "sweep", 1, 2), ("his-2", "sweep", 2, 2)]
    for uid, array, index, owner in jobs:
        spec = JobSpec(name=uid, project="a", command=("x",), gpus=1, array=ArrayTask(name=array, index=index, limit=1))
        record = JobRecord(uid=uid, spec=spec, status=JobStatus(), owner=Owner(uid=owner, name=str(owner)))
        change = Change(jobs={uid: record})
        settle(book, change, 0.0)
        book.apply_change(change)
    assert {uid: job.held is None for uid, job in book.jobs.items()} == {"hers-0": True, "his-1": True, "his-2": False}
