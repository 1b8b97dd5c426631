"""Traces: nodes and jobs as CSV files, with the columns of Alibaba's published traces (cluster-trace-gpu-v2023)."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from kfp_gpuquota.errors import InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kfp_gpuquota.api import JobSpec, Node

Row = dict[str, str]
Record = TypeVar("Record")

WHOLE: Final = 1000
"""Thousandths of one GPU."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A node; CPU in thousandths of a core, memory in MiB. The scheduler has it as `node`, if that is given."""

    name: str
    gpus: int
    cpu_milli: int
    memory_mib: int
    model: str = ""
    node: Node | None = None


class Pace(NamedTuple):
    """How fast a training is: `rate` is its work per second, until `until` of its work is done; the rest it reports."""

    rate: float
    until: float
    throughput: float | None = None
    batch_size: int | None = None
    noise_scale: float | None = None


class Training(Protocol):
    """The measured speed of a training, in place of Amdahl's law."""

    def pace(self, placement: tuple[int, ...], done: float) -> Pace:
        """Return its pace with so many workers on each of its nodes, when that much of its work is done."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job that arrives `arrives_at` and takes `duration_s` at `workers` workers.

    Each worker takes `milli` thousandths of each of `gpus` GPUs of one node. It is elastic where `fewest` < `most`.
    It is one of the `user`, "" if unknown. The scheduler has it as `spec`, if that is given. With a `training`,
    `duration_s` is the amount of its work.
    """

    name: str
    project: str
    arrives_at: float
    duration_s: float
    gpus: int
    milli: int = WHOLE
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] | None = None
    priority: int = 50
    workers: int = 1
    fewest: int = 1
    most: int = 1
    spec: JobSpec | None = None
    training: Training | None = None
    user: str = ""

    @property
    def worker_gpus(self) -> float:
        """GPUs that one worker takes."""
        return self.gpus * self.milli / WHOLE

    @property
    def gpu_seconds(self) -> float:
        """The GPU seconds that the job uses at its requested size."""
        return self.workers * self.worker_gpus * self.duration_s


def read_nodes(path: Path) -> list[TraceNode]:
    """Columns sn, gpu, cpu_milli, memory_mib and, if there is one, model."""
    return _read(path, ("sn", "gpu", "cpu_milli", "memory_mib"), _node)


def read_jobs(path: Path, project_column: str = "", user_column: str = "") -> list[TraceJob]:
    """Columns name, num_gpu, gpu_milli, cpu_milli, memory_mib, creation_time, deletion_time (s).

    If there are such columns, also gpu_spec (models joined by |), priority, user, scheduled_time: a job takes the time
    from that to its deletion, or all of its time where it was never scheduled. `project_column` names the project; by
    default project, else qos, else there is one project for all. `user_column` names the user; by default user.
    """
    columns = ("name", "num_gpu", "gpu_milli", "cpu_milli", "memory_mib", "creation_time", "deletion_time")
    chosen = filter(None, (project_column, user_column))
    jobs = _read(path, (*columns, *chosen), lambda row: _job(row, project_column, user_column or "user"))
    return sorted(jobs, key=lambda job: (job.arrives_at, job.name))


def sped_up(jobs: Iterable[TraceJob], factor: float) -> list[TraceJob]:
    """Arrivals follow each other `factor` times as fast; what each job takes stays."""
    return [replace(job, arrives_at=job.arrives_at / factor) for job in jobs]


def thinned(nodes: Sequence[TraceNode], every: int) -> list[TraceNode]:
    """A smaller cluster of the same mix: every so many-th node."""
    return list(nodes[::every])


def make_elastic(jobs: Sequence[TraceJob], percent: float, stretch: int = 4) -> list[TraceJob]:
    """Every so many-th job of whole GPUs runs with 1 GPU up to `stretch` times those that it asks for."""
    made, whole = [], 0
    for job in jobs:
        eligible = job.gpus > 0 and job.milli == WHOLE
        if eligible and (whole + 1) * percent // 100 > whole * percent // 100:
            made.append(_elastic(job, stretch))
        else:
            made.append(job)
        whole += eligible
    return made


def _elastic(job: TraceJob, stretch: int) -> TraceJob:
    return replace(
        job,
        gpus=1,
        cpu_milli=job.cpu_milli // job.gpus,
        memory_mib=job.memory_mib // job.gpus,
        workers=job.gpus,
        fewest=1,
        most=job.gpus * stretch,
    )


def _read(path: Path, columns: Sequence[str], make: Callable[[Row], Record]) -> list[Record]:
    if not path.is_file():
        raise NotFoundError(f"there is no file {str(path)!r}; give a trace as CSV")
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = [column for column in columns if column not in (rows.fieldnames or ())]
        if missing:
            raise InvalidFieldError("columns", ", ".join(rows.fieldnames or ()), f"{path.name} needs {missing[0]!r}")
        made = []
        for number, row in enumerate(rows, start=2):
            try:
                made.append(make(row))
            except (ValueError, TypeError) as error:
                raise InvalidFieldError(f"line {number} of {path.name}", ",".join(row.values()), str(error)) from error
        return made


def _node(row: Row) -> TraceNode:
    return TraceNode(
        row["sn"], int(row["gpu"]), int(row["cpu_milli"]), int(row["memory_mib"]), model=row.get("model") or ""
    )


def _job(row: Row, project_column: str, user_column: str) -> TraceJob:
    models, gpus = row.get("gpu_spec") or "", int(row["num_gpu"])
    arrives_at, ends_at = float(row["creation_time"]), float(row["deletion_time"])
    started_at = float(row.get("scheduled_time") or arrives_at)
    return TraceJob(
        name=row["name"],
        project=_project(row, project_column),
        arrives_at=arrives_at,
        duration_s=max(1.0, ends_at - started_at),
        gpus=gpus,
        milli=int(row["gpu_milli"]) if gpus else 0,
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
        models=frozenset(models.split("|")) if models else None,
        priority=int(row.get("priority") or 50),
        user=row.get(user_column) or "",
    )


def _project(row: Row, column: str) -> str:
    """A name as projects have them."""
    given = row[column] if column else row.get("project") or row.get("qos") or ""
    return re.sub("[^a-z0-9]+", "-", given.lower()).strip("-")[:63] or "all"
