"""Records the progress that trainings report, and estimates the gain of one more worker."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state.model import NEVER, Job, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.scheduler.state.events import ProgressReported

LINEAR: Final = 1.0
"""The gain of a worker that adds as much throughput as each worker of the smallest measured size."""


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


def note_progress(job: Job, event: ProgressReported) -> None:
    """Record the reported checkpoint and throughput."""
    if event.checkpoint_at is not None:
        job.checkpoint_at = event.checkpoint_at
    mark = Mark(event.step, event.at, job.active if event.workers is None else event.workers)
    if not mark.workers:
        return
    if event.throughput is not None and event.throughput > 0:
        if not job.throughput_reported:  # steps and samples per second do not compare
            job.throughput.clear()
        job.throughput_reported = True
        job.throughput[mark.workers] = event.throughput
    elif not job.throughput_reported:
        _count_steps(job, mark)


def _count_steps(job: Job, mark: Mark) -> None:
    """Update the steps per second at one size since it was reached. A step has the same samples at every size."""
    since = job.counting_from
    fresh = since is None or since.workers != mark.workers or since.at < max(job.grown_at, job.shrunk_at)
    if since is None or fresh or mark.step < since.step:
        job.counting_from = mark
    elif mark.step > since.step and mark.at > since.at:
        job.throughput[mark.workers] = (mark.step - since.step) / (mark.at - since.at)


def gain(throughput: Mapping[int, float], workers: int) -> float:
    """Return the gain of one worker more than `workers`, relative to a worker of the smallest measured size.

    It is 1.0 with fewer than two measurements, and 0 where another worker does not help. It is rounded to tenths, so
    that noise does not decide. Giving each worker to the job with the largest gain is optimal where gains diminish
    (Optimus, EuroSys 2018). Sizes that were not measured are estimated by Amdahl's law, fitted to the others.
    """
    if len(throughput) < 2:
        return LINEAR
    smallest = min(throughput)
    one = throughput[smallest] / smallest
    measured = workers in throughput and workers + 1 in throughput
    at = throughput.__getitem__ if measured else _amdahl(throughput)
    return max(0.0, round((at(workers + 1) - at(workers)) / one, 1))


def _amdahl(throughput: Mapping[int, float]) -> Callable[[int], float]:
    """Return throughput by size: time per sample = fixed + divided / size by least squares, neither negative."""
    inverse, times = [1 / size for size in throughput], [1 / rate for rate in throughput.values()]
    x, y = fmean(inverse), fmean(times)
    slope = sum((i - x) * (t - y) for i, t in zip(inverse, times, strict=True)) / sum((i - x) ** 2 for i in inverse)
    divided = min(max(0.0, slope), y / x)
    fixed = y - divided * x
    return lambda size: 1 / (fixed + divided / size)
