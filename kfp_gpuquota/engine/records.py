"""A cluster's stored records of jobs and workers: the API's structs, and fields that only the cluster uses."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from kfp_gpuquota.api import ExpectedStart, Job, JobSpec, JobStatus, Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.api.quantity import as_number

# An elastic job may have had thousands of workers, and every list of jobs would contain all of them.
SHOWN_ENDED: Final = 20


KILLED_ABOVE: Final = 128
"""A shell's: the exit code of a process that a signal ended is this and the signal's number."""


class Intent(StrEnum):
    """What happens to a job after its last worker has exited."""

    RUN = "run"
    REQUEUE = "requeue"
    SUSPEND = "suspend"
    CANCEL = "cancel"
    DELETE = "delete"
    FAIL = "fail"


class Owner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The user of the machine as whom a job runs. `umask` and `limits` (name: soft, hard) are those of the process that
    submitted it.
    """

    uid: int
    name: str
    umask: int = 0o022
    limits: dict[str, tuple[int, int]] = {}


class AwaitedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job whose end is waited for, as it was found under its `name`; `met`: it has ended as it should."""

    name: str
    uid: str
    met: bool = False


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored record of a job.

    `attempt` counts its starts, and marks the workers of each. `managed`: its workers have joined a membership, so that
    it loses and gains workers without a restart. `completing`: a worker has finished, so that it gets no more.
    `generation_high` is the highest generation number used, `size` the GPUs it last ran with, `members` the workers of
    `generation`, which is in force. `incident_at` is when its last restart was counted, in seconds since the epoch.
    `growth_failed` is why it is not expanded again in this run. `promised` are the placements of its next workers, for
    which plans made room since `promised_at`, by asking the workers `victims` to leave. `updated_at` is when its
    sizes were last changed. `ran_s` is how long its earlier starts have run together. `owner`: None is the user of
    the cluster itself. `held` is why its start's conditions are not met, `awaited` are those of the jobs that it waits
    for that were found. `user` is the value of the label that names its user, "" without one.
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
    generation: int = 0
    members: tuple[str, ...] = ()
    lease_holder: str = ""
    lease_s: float = 0.0
    incident_at: float | None = None
    growth_failed: Reason | None = None
    promised: tuple[Placement, ...] = ()
    promised_at: float = 0.0
    victims: tuple[str, ...] = ()
    updated_at: float = 0.0
    ran_s: float = 0.0
    owner: Owner | None = None
    held: Reason | None = None
    awaited: tuple[AwaitedJob, ...] = ()
    user: str = ""

    @property
    def submitter(self) -> str:
        """The user as whom the job counts in its project: its owner, else the one of its label; "" if unknown."""
        return self.user if self.owner is None else self.owner.name

    @property
    def conditional(self) -> bool:
        """Whether its start has conditions that are not met, or not examined yet."""
        spec = self.spec
        conditions = (
            spec.begin_at is not None or spec.after or (spec.array is not None and spec.array.limit is not None)
        )
        return bool(conditions) and self.status.eligible_at is None and not self.attempt and not self.over

    @property
    def array_key(self) -> tuple[str, str, int] | None:
        """The project, name and owner of its array: nobody takes turns of another user's array."""
        if self.spec.array is None:
            return None
        return self.spec.project, self.spec.array.name, -1 if self.owner is None else self.owner.uid

    @property
    def begins_at(self) -> float | None:
        """When the job begins that is held until then, in seconds since the epoch."""
        return self.spec.begin_at if self.held is not None and self.held.code is ReasonCode.BEGINS_LATER else None

    @property
    def runs_until(self) -> float | None:
        """When its maximum run time is over, in seconds since the epoch; None without one, or in the queue."""
        if self.spec.max_runtime_s is None or self.status.started_at is None:
            return None
        return self.status.started_at + self.spec.max_runtime_s - self.ran_s

    @property
    def ending(self) -> bool:
        """Whether the job is being stopped permanently, so that the scheduler does not consider it any more."""
        return self.intent in {Intent.CANCEL, Intent.DELETE, Intent.FAIL}

    @property
    def over(self) -> bool:
        """Whether the job has ended or is being stopped permanently."""
        return self.status.phase.final or self.ending

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, or will be when its workers have exited."""
        return self.status.phase is Phase.SUSPENDED or self.intent is Intent.SUSPEND

    @property
    def runs(self) -> bool:
        """Whether the job runs, and nothing stops it."""
        return self.status.phase is Phase.RUNNING and self.intent is Intent.RUN and not self.completing


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored record of a worker.

    `released`: it was asked to leave, so that its exit does not affect the job; `released_at` in seconds since the
    epoch. `started_for` and `released_for` are the reasons of these decisions, `killed_for` is why its membership had
    it killed, `error` what ended its script, as it reported itself. `lost_with`: it ended with its machine, for this
    cause, and not by itself. `unseen`: it ended with
    0 while no process of the cluster ran, so that it may have been released.
    """

    worker: Worker
    attempt: int
    released: bool = False
    released_at: float | None = None
    started_for: Reason | None = None
    released_for: Reason | None = None
    killed_for: str = ""
    lost_with: str = ""
    error: str = ""
    unseen: bool = False

    @property
    def alive(self) -> bool:
        """Whether the worker may still hold its devices."""
        return self.worker.phase is not WorkerPhase.GONE


def leaving(record: WorkerRecord, now: float, why: Reason | None = None) -> WorkerRecord:
    """Return the worker's record after it was asked to leave, by the cluster or by its node."""
    worker = msgspec.structs.replace(record.worker, phase=WorkerPhase.LEAVING)
    return msgspec.structs.replace(record, worker=worker, released=True, released_at=now, released_for=why)


def view(record: JobRecord, workers: list[WorkerRecord], expected: ExpectedStart | None = None) -> Job:
    """Return the job for clients, with the workers of its present attempt: all that run, and the last that exited.

    `expected` is when it is expected to start.
    """
    chosen = [w for w in workers if w.attempt == record.attempt or w.alive]
    ended = [w.worker.id for w in chosen if not w.alive and w.worker.id != record.status.result_worker]
    left_out = set(ended[:-SHOWN_ENDED])
    shown = tuple(w.worker for w in chosen if w.worker.id not in left_out)
    held = as_number(sum(w.worker.gpus for w in workers if w.alive))
    status = msgspec.structs.replace(
        record.status, workers=shown, gpus=held, generation=record.generation_high, expected_start=expected
    )
    owner = record.owner.name if record.owner else ""
    return Job(uid=record.uid, spec=record.spec, status=status, owner=owner)


def with_status(record: JobRecord, **changes: object) -> JobRecord:
    """Return the record with some fields of its status changed."""
    return msgspec.structs.replace(record, status=msgspec.structs.replace(record.status, **changes))
