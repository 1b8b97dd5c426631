"""What trainings tell about themselves, and what follows: since when work is lost, what one worker more adds."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state.model import NEVER, Job, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.scheduler.state.events import ProgressReported

LINEAR: Final = 1.0
"""The gain of a worker that adds as much as those of the smallest size did each."""


def note_started(job: Job, at: float) -> None:
    """A worker starts: the first one begins a run, every other makes the job grow. In whatever order they are told."""
    if not job.active:
        job.started_at, job.grown_at, job.shrunk_at, job.counting_from = at, NEVER, NEVER, None
    elif at != job.started_at:
        job.grown_at = max(job.grown_at, at, job.started_at)
        job.started_at = min(job.started_at, at)


def note_shrunk(job: Job, at: float | None) -> None:
    """The job has given a worker back, at a time that may not be known."""
    if at is not None and job.active:
        job.shrunk_at = max(job.shrunk_at, at)


def note_progress(job: Job, event: ProgressReported) -> None:
    """Keep what was said about checkpoints and throughput."""
    if event.checkpoint_at is not None:
        job.checkpoint_at = event.checkpoint_at
    mark = Mark(event.step, event.at, job.active if event.workers is None else event.workers)
    if not mark.workers:
        return
    if event.throughput is not None and event.throughput > 0:
        if not job.throughput_told:  # steps and samples per second do not compare
            job.throughput.clear()
        job.throughput_told = True
        job.throughput[mark.workers] = event.throughput
    elif not job.throughput_told:
        _count_steps(job, mark)


def _count_steps(job: Job, mark: Mark) -> None:
    """Steps per second at one size, over all the time at it. A step is the same number of samples at every size."""
    since = job.counting_from
    fresh = since is None or since.workers != mark.workers or since.at < max(job.grown_at, job.shrunk_at)
    if since is None or fresh or mark.step < since.step:
        job.counting_from = mark
    elif mark.step > since.step and mark.at > since.at:
        job.throughput[mark.workers] = (mark.step - since.step) / (mark.at - since.at)


def gain(throughput: Mapping[int, float], workers: int) -> float:
    """What one worker more than `workers` adds, in tenths of what each worker of the smallest measured size does.

    1.0 where nothing is known yet, 0 where it does not help. In tenths, so that the noise of measurements does not
    decide. Giving each worker to the job with the largest gain makes the most of them where gains diminish (Optimus,
    EuroSys 2018); sizes that were not measured are read off Amdahl's law, fitted to those that were.
    """
    if len(throughput) < 2:
        return LINEAR
    smallest = min(throughput)
    one = throughput[smallest] / smallest
    measured = workers in throughput and workers + 1 in throughput
    at = throughput.__getitem__ if measured else _amdahl(throughput)
    return max(0.0, round((at(workers + 1) - at(workers)) / one, 1))


def _amdahl(throughput: Mapping[int, float]) -> Callable[[int], float]:
    """Throughput by size, with the time of a sample fixed + divided / size by least squares; neither is negative."""
    inverse, times = [1 / size for size in throughput], [1 / rate for rate in throughput.values()]
    x, y = fmean(inverse), fmean(times)
    slope = sum((i - x) * (t - y) for i, t in zip(inverse, times, strict=True)) / sum((i - x) ** 2 for i in inverse)
    divided = min(max(0.0, slope), y / x)
    fixed = y - divided * x
    return lambda size: 1 / (fixed + divided / size)
