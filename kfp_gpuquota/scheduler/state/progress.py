"""Records the progress that trainings report, and estimates what a job achieves at another size."""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state.model import NEVER, Job, Mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler.state.events import ProgressReported

SLOWEST: Final = 1e-9
FASTEST: Final = 1e15
"""Throughputs in samples per second that are believed."""
LARGEST_BATCH: Final = 1 << 53


def note_started(job: Job, at: float) -> None:
    """Record the start of a worker: the first one begins a run, others expand the job. Events may be out of order."""
    if not job.active:
        job.started_at, job.grown_at, job.shrunk_at, job.counting_from = at, NEVER, NEVER, None
    elif at != job.started_at:
        job.grown_at = max(job.grown_at, at, job.started_at)
        job.started_at = min(job.started_at, at)


def note_shrunk(job: Job, at: float | None) -> None:
    """Record that the job has lost a worker, at a time that may be None."""
    if at is not None and job.active:
        job.shrunk_at = max(job.shrunk_at, at)


def note_progress(job: Job, event: ProgressReported) -> bool:
    """Record what was reported; return whether a size was measured for the first time, so that sizes may be chosen."""
    job.reports += 1
    if event.checkpoint_at is not None:
        job.checkpoint_at = event.checkpoint_at
    job.noise_scale = job.noise_scale if event.noise_scale is None else event.noise_scale
    job.pause_s = job.pause_s if event.pause_s is None else event.pause_s
    mark = Mark(event.step, event.at, job.active if event.workers is None else event.workers)
    if not 0 < mark.workers <= max(job.most, job.active):  # what a training sends may be anything
        return False
    if event.batch_size is not None and event.batch_size > 0:
        job.batches[mark.workers] = min(event.batch_size, LARGEST_BATCH)
    known, job.measured_last = mark.workers in job.throughput, mark.workers
    if event.throughput is not None and SLOWEST <= event.throughput <= FASTEST:
        if not job.throughput_reported:  # steps and samples per second do not compare
            job.throughput.clear()
        job.throughput_reported = True
        job.throughput[mark.workers] = event.throughput
    elif not job.throughput_reported:
        _count_steps(job, mark)
    return not known and mark.workers in job.throughput and job.most > job.wanted


def _count_steps(job: Job, mark: Mark) -> None:
    """Update the steps per second at one size since it was reached. A step has the same samples at every size."""
    since = job.counting_from
    fresh = since is None or since.workers != mark.workers or since.at < max(job.grown_at, job.shrunk_at)
    if since is None or fresh or mark.step < since.step:
        job.counting_from = mark
    elif mark.step > since.step and mark.at > since.at:
        job.throughput[mark.workers] = (mark.step - since.step) / (mark.at - since.at)


class Scaling:
    """The goodput of a job by its number of workers: useful samples per second, in any unit.

    Goodput is throughput times statistical efficiency. A step takes `fixed + divided * batch / workers`, fitted to the
    reports of the sizes that the job had (Amdahl's law where the batch is the same at all), times what this misses at
    the nearest of them: a network between nodes, for example. The efficiency of a batch B is (p + B0) / (p + B), where
    p is the gradient noise scale (McCandlish et al. 2018; Pollux, OSDI 2021) and B0 the smallest batch. A batch that
    was seen to change is taken to grow with the workers; one that does not has efficiency 1. With one measured size or
    none each worker adds the same throughput.
    """

    def __init__(self, job: Job) -> None:
        steps = {n: (job.batches.get(n, 1) / n, job.batches.get(n, 1) / rate) for n, rate in job.throughput.items()}
        self._known = len(steps) > 1
        self._noise = job.noise_scale
        if not self._known:
            return
        self._fixed, self._divided = _line(list(steps.values()))
        self._misses = sorted((n, s / (self._fixed + self._divided * x)) for n, (x, s) in steps.items())
        self._size = job.measured_last if job.measured_last in job.batches else min(job.batches, default=1)
        self._batch, self._least = job.batches.get(self._size, 1), min(job.batches.values(), default=1)
        self._grows = len(set(job.batches.values())) > 1

    def __call__(self, workers: int) -> float:
        """Return the goodput with that number of workers."""
        if not self._known:
            return float(workers)
        batch = max(self._least, self._batch * workers / self._size) if self._grows else self._batch
        step_s = (self._fixed + self._divided * batch / workers) * _between(self._misses, workers)
        efficiency = 1.0 if self._noise is None else (self._noise + self._least) / (self._noise + batch)
        return batch / step_s * efficiency


def _between(points: Sequence[tuple[int, float]], x: int) -> float:
    """Return the value at `x` of the line through the points, which are in order; beyond them that of the last one."""
    at = bisect_left(points, (x, 0.0))
    if at == 0 or at == len(points):
        return points[max(0, at - 1)][1]
    (low, before), (high, after) = points[at - 1], points[at]
    return (before * (high - x) + after * (x - low)) / (high - low)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return height and slope of the line through the points by least squares, neither negative; no x or y is 0."""
    x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
    spread = sum((p[0] - x) ** 2 for p in points)
    slope = sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), y / x)
    return y - slope * x, slope
