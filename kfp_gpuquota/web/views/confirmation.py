"""The page between a click and the stop of jobs: which jobs these are, and what each of them loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.api.wire import StopAction
from kfp_gpuquota.errors import NotFoundError, UsageError
from kfp_gpuquota.web.rendering import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.history import Report
    from kfp_gpuquota.web.actions import Chosen
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source

WORDS: Final = {
    StopAction.SUSPEND: "A suspended job is stopped, and kept out of the queue until somebody resumes it.",
    StopAction.CANCEL: "A cancelled job is stopped, and stays listed with its logs. It cannot be resumed.",
}
"""What becomes of a job; of deleted ones `SiteConfig.deletes` says it."""


@dataclass(frozen=True)
class Stopped:
    """One job, and a sentence for each thing that it loses."""

    job: Job
    losses: Sequence[str]


def values(source: Source, site: SiteConfig, action: str, chosen: Iterable[Chosen]) -> dict[str, Any]:
    """Return what the page shows. Raises UsageError where no job is chosen, NotFoundError for one that is not there."""
    jobs = [source.job(each.project, each.name) for each in dict.fromkeys(chosen)]
    if action not in set(StopAction):
        raise NotFoundError(f"jobs have no action {action!r} that stops them; they have {', '.join(StopAction)}")
    if not jobs:
        raise UsageError("no job is chosen: tick the boxes of some in the queue")
    wanted, now = StopAction(action), source.now()
    return {
        "action": wanted.value,
        "what": WORDS.get(wanted, site.deletes),
        "stopped": [Stopped(job, list(losses(job, source.reports_of(job.uid), now, wanted))) for job in jobs],
    }


def losses(job: Job, reports: Sequence[Report], now: float, action: StopAction) -> Iterator[str]:
    """Yield what a job that is stopped now loses, in sentences."""
    status = job.status
    if status.phase.final:
        yield f"It has ended ({status.phase.value}){'' if action is StopAction.DELETE else ': nothing changes'}."
    elif not status.gpus and not any(worker.phase != "Gone" for worker in status.workers):
        yield "Nothing of it runs."
    else:
        since = "" if status.started_at is None else f", and started {duration(now - status.started_at)} ago"
        yield f"It runs on {show_gpus(status.gpus)}{since}."
        yield _of_training(job, reports, now, action)


def _of_training(job: Job, reports: Sequence[Report], now: float, action: StopAction) -> str:
    progress = job.status.progress
    asked = f"It is asked to save a checkpoint, for which it has {duration(job.spec.grace_period_s)}"
    if progress is None:
        if action is StopAction.SUSPEND:
            return f"{asked}. It reports no steps: what it has not saved by then is lost."
        return "It reports no steps: what it has not saved is lost."
    if progress.checkpoint_at is None:
        since = f"all {progress.step:,} steps: it has reported no checkpoint"
    else:
        steps, age = steps_since_checkpoint(job, reports), duration(now - progress.checkpoint_at)
        done = "the steps" if steps is None else "1 step" if steps == 1 else f"{steps:,} steps"
        since = f"{done} since its last checkpoint, {age} ago"
    if action is StopAction.SUSPEND:
        return f"{asked}; otherwise it repeats {since}."
    return f"It loses {since}."


def steps_since_checkpoint(job: Job, reports: Iterable[Report]) -> int | None:
    """Return the steps since the last checkpoint, as far as reports tell it; None if they do not."""
    progress = job.status.progress
    if progress is None or progress.checkpoint_at is None:
        return None
    after = (report.step for report in reports if report.checkpoint_at == progress.checkpoint_at)
    first = next(after, None)
    return None if first is None else max(0, progress.step - first)
