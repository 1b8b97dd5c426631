"""Jobs, nodes and events as tables. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.arrays import groups_of, name_of, reason_of
from kfp_gpuquota.api.job_sentences import expected_start_of
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.cli.display.output import Format, age, table, timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.api import Job, JobStatus, Worker
    from kfp_gpuquota.api.wire import Event, NodeView

_JOB_COLUMNS = ("JOB", "PROJECT", "TYPE", "STATUS", "GPUS", "REQUESTED", "PROGRESS", "AGE", "REASON")
_MORE_COLUMNS = ("MIN", "MAX", "PRIORITY", "EXPECTED START", "NODES", "DEVICES", "UID")


def job_table(
    jobs: Sequence[Job],
    output: str = Format.TABLE,
    *,
    width: int | None = None,
    headers: bool = True,
    labels: bool = False,
    grouped: bool = True,
) -> str:
    """Return a line for each job; with more columns in the wide form, which is never cut, as with `labels`.

    With the users of jobs that have one: they run as different users. If `grouped`, and without these columns, jobs of
    an array that are in the same phase, and do not run, are one line.
    """
    wide, users = output is Format.WIDE, any(job.owner for job in jobs)
    rows = (
        [
            *([group[0].owner] if users else []),
            *(_job_row(group[0]) if len(group) == 1 else _group_row(group)),
            *(_wide_row(group[0]) if wide else []),
            *([_labels(group[0])] if labels else []),
        ]
        for group in (groups_of(jobs) if grouped and not (wide or labels) else ([job] for job in jobs))
    )
    columns = _JOB_COLUMNS + (_MORE_COLUMNS if wide else ()) + (("LABELS",) if labels else ())
    columns = ("USER", *columns) if users else columns
    return table(columns, rows, width=None if wide or labels else width, headers=headers)


def node_table(nodes: Sequence[NodeView], *, headers: bool = True) -> str:
    """A line for each node; with its pool where any node is in one, and with resources that count as GPUs."""
    pooled, counted = any(view.node.pool for view in nodes), any(view.resources for view in nodes)
    rows = (
        [
            view.node.name,
            "ready" if view.node.ready else "not ready",
            as_number(view.gpus),
            as_number(view.gpus_in_use),
            as_number(view.gpus_idle),
            ", ".join(view.types),
            *([view.node.pool] if pooled else []),
            *([", ".join(f"{one.in_use} of {one.count} {one.name}" for one in view.resources)] if counted else []),
        ]
        for view in nodes
    )
    more = (*(["POOL"] if pooled else []), *(["RESOURCES"] if counted else []))
    columns = ("NODE", "STATUS", "GPUS", "IN USE", "IDLE", "MODEL", *more)
    return table(columns, rows, headers=headers)


def event_table(
    events: Sequence[Event], *, width: int | None = None, headers: bool = True, timestamps: bool = False
) -> str:
    """Return a line for each event, in the order given, with its age or, with `timestamps`, its time."""
    shown = timestamp if timestamps else age
    rows = (
        [shown(event.at), event.kind.value, event.project, event.job, event.gpus or "", _why(event)] for event in events
    )
    return table(
        ("TIME" if timestamps else "AGE", "EVENT", "PROJECT", "JOB", "GPUS", "REASON"),
        rows,
        width=width,
        headers=headers,
    )


def progress_text(job: Job) -> str:
    """The step that the job's training last reported; "" where it reported none."""
    progress = job.status.progress
    if progress is None:
        return ""
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    return f"step {progress.step}{total}"


def expected_start_text(job: Job, *, accuracy: bool = True) -> str:
    """Return when a job in the queue is expected to start, "unknown" where it cannot be known; "" for any other job.

    With `accuracy` also how right past estimates were.
    """
    if job.status.phase is not Phase.PENDING or (job.status.reason is not None and job.status.reason.code.holds):
        return ""
    expected = job.status.expected_start
    return "unknown" if expected is None else expected_start_of(expected, time.time(), accuracy=accuracy)


def phase_text(phase: Phase) -> str:
    """The phase as a verb: "is running", "has failed"."""
    if phase in {Phase.SUCCEEDED, Phase.FAILED}:
        return f"has {phase.value.lower()}"
    return f"{'was' if phase is Phase.CANCELLED else 'is'} {phase.value.lower()}"


def output_hint(job: Job) -> str:
    """Return where to read what the worker printed that made the job fail; "" if it was none of its workers."""
    reason = job.status.reason
    if job.status.phase is not Phase.FAILED or reason is None or reason.code is not ReasonCode.WORKER_FAILED:
        return ""
    index = next((one.index for one in job.status.workers if one.id == reason.details.get("worker")), 0)
    worker = f" --worker {index}" if index else ""
    return f"what it printed: gpuquota logs {job.spec.name} -p {job.spec.project}{worker}"


def _job_row(job: Job) -> list[object]:
    spec, status = job.spec, job.status
    return [
        spec.name,
        spec.project,
        spec.kind.value,
        status.phase.value,
        status.gpus,
        spec.asks if spec.shared else spec.gpus,
        progress_text(job),
        age(status.submitted_at),
        "" if status.reason is None or not _is_shown(status) else status.reason.message,
    ]


def _is_shown(status: JobStatus) -> bool:
    """Return whether a list has the reason: of a running job only that its GPUs are unused."""
    return status.phase is not Phase.RUNNING or status.gpus_unused


def _group_row(group: Sequence[Job]) -> list[object]:
    _, project, kind, phase, *_ = _job_row(group[0])
    gpus = as_number(sum(job.status.gpus for job in group))
    asked, submitted = f"{len(group)} x {group[0].spec.asks}", min(job.status.submitted_at for job in group)
    return [name_of(group), project, kind, phase, gpus, asked, "", age(submitted), reason_of(group)]


def _wide_row(job: Job) -> list[object]:
    held = [worker for worker in job.status.workers if worker.phase != "Gone"]
    nodes = sorted({worker.node for worker in held})
    spec = job.spec
    sizes = (spec.smallest, spec.largest, spec.effective_priority)
    return [*sizes, expected_start_text(job, accuracy=False), ",".join(nodes), _devices(held, nodes), job.uid]


def _devices(workers: Sequence[Worker], nodes: Sequence[str]) -> str:
    """Return the indices of the devices that are held: "0,1", or on several nodes "0,1;3" in the order of the nodes."""
    held = ({index for worker in workers if worker.node == node for index in worker.devices} for node in nodes)
    return ";".join(",".join(map(str, sorted(indices))) for indices in held)


def _labels(job: Job) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(job.spec.labels.items())) or "<none>"


def _why(event: Event) -> str:
    worker = f"worker {event.worker.rpartition('-')[2]}" if event.worker else ""
    return ": ".join(part for part in (worker, event.reason.message if event.reason else "") if part)
