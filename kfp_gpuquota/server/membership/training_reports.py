"""The reports of trainings, forwarded to the cluster without interpretation."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

import msgspec

from kfp_gpuquota.api import Progress

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Value = TypeVar("Value")

MAX_STEP: Final = 1 << 53
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
"""JSON has integers of any length, which neither the scheduler computes with nor a page shows."""

MAX_METRICS: Final = 100
MAX_METRIC_LENGTH: Final = 200
"""More metrics, and the rest of a longer name, are left out."""
STRAGGLES_FROM: Final = 1.2
"""A worker whose own part of a step takes this multiple of the mean is a straggler: the others wait for it."""


class ProgressReported(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Rank 0's, as in `api.Progress`."""

    worker: str
    step: int
    epoch: Count = 0
    total_steps: Count | None = None
    metrics: dict[str, float] = {}
    checkpoint_at: float | None = None
    throughput: float | None = None
    step_ms: float | None = None
    workers: Count | None = None
    not_finite: dict[str, Literal["nan", "inf", "-inf"]] = {}
    batch_size: Annotated[int, msgspec.Meta(gt=0, le=MAX_STEP)] | None = None
    noise_scale: Annotated[float, msgspec.Meta(ge=0)] | None = None


class StepsTimed(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Each worker's: means over some seconds. `slowness`: its own part of a step over the mean of all workers'."""

    worker: str
    step_ms: float
    wait_ms: float
    slowness: float


class TrainingReports:
    """The newest of one job."""

    def __init__(self) -> None:
        self._slowness: dict[str, float] = {}

    def timed(self, event: StepsTimed) -> None:
        """Record a worker's time relative to the others."""
        self._slowness[event.worker] = event.slowness

    def progress(self, report: ProgressReported, at: float, members: Collection[str]) -> Progress:
        """Return the report for the cluster at `at` (seconds since the epoch), with the stragglers."""
        return Progress(
            step=report.step,
            total_steps=report.total_steps,
            epoch=report.epoch,
            at=at,
            metrics=_bounded(report.metrics),
            checkpoint_at=report.checkpoint_at,
            throughput=report.throughput,
            step_ms=report.step_ms,
            workers=report.workers,
            stragglers=self._stragglers(members),
            not_finite=_bounded(report.not_finite),
            batch_size=report.batch_size,
            noise_scale=report.noise_scale,
        )

    def _stragglers(self, members: Collection[str]) -> dict[str, float]:
        self._slowness = {worker: slowness for worker, slowness in self._slowness.items() if worker in members}
        return {worker: round(s, 2) for worker, s in sorted(self._slowness.items()) if s >= STRAGGLES_FROM}


def _bounded(metrics: Mapping[str, Value]) -> dict[str, Value]:
    return {name[:MAX_METRIC_LENGTH]: value for name, value in islice(metrics.items(), MAX_METRICS)}
