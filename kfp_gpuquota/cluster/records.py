"""What a cluster remembers of each job and worker: the API's structs and the few facts that are nobody else's."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Reason, Worker, WorkerPhase
from kfp_gpuquota.api.quantity import as_number

# An elastic job may see thousands of workers come and go; every list of jobs would carry them all.
SHOWN_ENDED: Final = 20


class Intent(StrEnum):
    """What is to become of a job when its last worker is gone."""

    RUN = "run"
    REQUEUE = "requeue"
    SUSPEND = "suspend"
    CANCEL = "cancel"
    DELETE = "delete"
    FAIL = "fail"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job as it is stored.

    `attempt` counts its starts, and marks the workers of each. `managed`: its workers have joined a membership, so
    it loses and gains workers without a restart. `completing`: a worker has finished, so it takes no more.
    `generation_high` is the highest generation number ever given out, `size` the GPUs it last ran with,
    `resize_reason` why its size is changing. `incident_at` is when its last restart was counted, in seconds since the
    epoch. `growth_failed` is why it does not grow again in this run.
    """

    uid: str
    spec: JobSpec
    status: JobStatus
    request_id: str = ""
    intent: Intent = Intent.RUN
    attempt: int = 0
    next_index: int = 0
    managed: bool = False
    completing: bool = False
    generation_high: int = 0
    size: int = 0
    resize_reason: Reason | None = None
    lease_holder: str = ""
    lease_s: float = 0.0
    incident_at: float | None = None
    growth_failed: Reason | None = None

    @property
    def ending(self) -> bool:
        """It is being stopped for good: the scheduler need not consider it any more."""
        return self.intent in {Intent.CANCEL, Intent.DELETE, Intent.FAIL}


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker as it is stored.

    `released`: it was told to go, so its end says nothing about the job; `released_at` in seconds since the epoch.
    """

    worker: Worker
    attempt: int
    released: bool = False
    released_at: float | None = None

    @property
    def alive(self) -> bool:
        """It may still hold its devices."""
        return self.worker.phase is not WorkerPhase.GONE


def leaving(record: WorkerRecord, now: float) -> WorkerRecord:
    """The worker after it was told to go, by us or by somebody else."""
    worker = msgspec.structs.replace(record.worker, phase=WorkerPhase.LEAVING)
    return msgspec.structs.replace(record, worker=worker, released=True, released_at=now)


def view(record: JobRecord, workers: list[WorkerRecord]) -> Job:
    """The job as clients see it, with the workers of its present attempt: all that live, and the last that ended."""
    chosen = [w for w in workers if w.attempt == record.attempt or w.alive]
    ended = [w.worker.id for w in chosen if not w.alive and w.worker.id != record.status.result_worker]
    left_out = set(ended[:-SHOWN_ENDED])
    shown = tuple(w.worker for w in chosen if w.worker.id not in left_out)
    held = as_number(sum(w.worker.gpus for w in workers if w.alive))
    status = msgspec.structs.replace(record.status, workers=shown, gpus=held, generation=record.generation_high)
    return Job(uid=record.uid, spec=record.spec, status=status)


def with_status(record: JobRecord, **changes: object) -> JobRecord:
    """The record with some fields of its status changed."""
    return msgspec.structs.replace(record, status=msgspec.structs.replace(record.status, **changes))
