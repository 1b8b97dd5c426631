"""The messages about a job's state changes in the step's log, one line each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Kind, Phase, ReasonCode, WorkerPhase
from kfp_gpuquota.api.job_sentences import expected_start_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import tzinfo

    from kfp_gpuquota.api import Job, Progress, Resize
    from kfp_gpuquota.api.job import ExpectedStart

PROGRESS_EVERY_S: Final = 5.0
# An elastic step calls elastic_runtime after it has imported torch and opened its data: from a cold disk the import
# alone has taken more than a minute.
JOINS_WITHIN_S: Final = 300.0
_SHOWN_METRICS: Final = 3
_LATER_S: Final = 60.0
"""A start that is expected later than announced by this much is announced again."""


class JobMessages:
    """Computes the messages between successive states of a job; call `lines` with each new state.

    Expected starts are shown in the time zone `zone` (None: the local one); `clock` is in seconds since the epoch.
    """

    def __init__(
        self,
        progress_every_s: float = PROGRESS_EVERY_S,
        zone: tzinfo | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._every_s, self._zone, self._clock = progress_every_s, zone, clock
        self._announced: ExpectedStart | None = None
        self._before: Job | None = None
        self._progress_at = float("-inf")
        self._apart_since: float | None = None
        self._joining_is_settled = False
        self.state = ""
        """The newest message about the job's state, without the name of its step."""

    def lines(self, job: Job, now: float) -> list[str]:
        """Return the messages for the changes since the previous state; `now` is in seconds of any monotonic clock."""
        states = [*self._phase(job), *self._restarts(job), *self._resizes(job)]
        self.state = states[-1] if states else self.state
        messages = [
            *self._page(job),
            *states,
            *self._expected_start(job),
            *self._progress(job, now),
            *self._joining(job, now),
        ]
        self._before = job
        return messages

    def _page(self, job: Job) -> Iterator[str]:
        if job.status.page and not (self._before and self._before.status.page):
            yield f"the job's page: {job.status.page}"

    def _phase(self, job: Job) -> Iterator[str]:
        before, status = self._before, job.status
        changed = before is None or before.status.phase is not status.phase
        if status.phase is Phase.RUNNING and changed:
            verb = "running" if job.spec.kind is Kind.BUILD else "training"
            requested = status.gpus if job.spec.shared else job.spec.gpus
            yield f"{verb} with {size(status.gpus, requested)}" if requested else "running"
        waits = {Phase.PENDING: "waiting", Phase.SUSPENDED: "suspended", Phase.STOPPING: "stopping"}
        word, reason = waits.get(status.phase), _reason(job)
        if word and reason and (changed or _reason(before) != reason):  # no reason: not planned yet
            yield f"{word}: {reason}"
        unused = status.phase is Phase.RUNNING and status.gpus_unused
        if unused and (before is None or _reason(before) != reason):
            yield f"warning: {reason}"
        if _held_up(job) and (before is None or not _held_up(before) or _reason(before) != reason):
            yield f"a worker does not start: {reason}"

    def _expected_start(self, job: Job) -> Iterator[str]:
        """Yield when a waiting job is expected to start; again if that is later, or the wait less than half."""
        expected, announced = job.status.expected_start, self._announced
        if job.status.phase is not Phase.PENDING:
            self._announced = None
        elif expected is not None:
            now = self._clock()
            if announced is None or not _is_about(expected, announced, now):
                self._announced = expected
                zone = "" if self._zone is None else f" {self._zone}"
                yield f"expected to start {expected_start_of(expected, now, self._zone, accuracy=False)}{zone}"

    def _restarts(self, job: Job) -> Iterator[str]:
        already = self._before.status.restarts if self._before else 0
        if job.status.restarts > already:
            yield f"restart {job.status.restarts} of at most {job.spec.max_restarts}: {_reason(job)}"

    def _resizes(self, job: Job) -> Iterator[str]:
        """Yield a message for each resize after the last reported one; a cluster may keep only the newest."""
        reported = self._before.status.resizes if self._before else ()
        changes = job.status.resizes
        first_new = changes.index(reported[-1]) + 1 if reported and reported[-1] in changes else 0
        yield from map(_resized, changes[first_new:])

    def _progress(self, job: Job, now: float) -> Iterator[str]:
        progress = job.status.progress
        if progress is None or (self._before and self._before.status.progress == progress):
            return
        if now - self._progress_at >= self._every_s:
            self._progress_at = now
            yield _progressed(progress)

    def _joining(self, job: Job, now: float) -> Iterator[str]:
        """Yield one warning where no worker joins elastic_runtime although the job has several or was resized."""
        if self._joining_is_settled or any(worker.rank is not None for worker in job.status.workers):
            self._joining_is_settled = True
            return
        if self._apart_since is None and _needs_membership(job):
            self._apart_since = now
        if self._apart_since is None:
            return
        late = job.status.phase is Phase.RUNNING and now - self._apart_since >= JOINS_WITHIN_S
        if late or job.status.phase is Phase.SUCCEEDED:
            self._joining_is_settled = True
            yield _unjoined(job, f"after {JOINS_WITHIN_S:.0f} s " if late else "")


def _is_about(expected: ExpectedStart, announced: ExpectedStart, now: float) -> bool:
    """Return whether the wait is neither longer than announced nor less than half of that."""
    return now + (announced.latest - now) / 2 <= expected.latest <= announced.latest + _LATER_S


def _held_up(job: Job) -> bool:
    """Return whether the job has its GPUs but its pods do not become ready, as with an image that cannot be pulled."""
    reason = job.status.reason
    given = job.status.phase in {Phase.STARTING, Phase.RUNNING}
    return given and reason is not None and reason.code is ReasonCode.PODS_NOT_READY


def progress_of(job: Job) -> tuple[int, int] | None:
    """Return (finished steps, total steps) where the training reports both, else None."""
    found = job.status.progress
    if found is None or not found.total_steps:
        return None
    return min(found.step, found.total_steps), found.total_steps


def succeeded(job: Job, worker: str, now: float) -> Job:
    """Return the job as it will be when the cluster has noticed that `worker`, its only one, has succeeded."""
    status = msgspec.structs.replace(job.status, phase=Phase.SUCCEEDED, finished_at=now, result_worker=worker)
    return msgspec.structs.replace(job, status=status)


def conclusion(job: Job) -> str:
    """Return the last message, which states how the job ended."""
    status = job.status
    why = f": {_reason(job)}" if _reason(job) else ""
    if status.phase is Phase.SUCCEEDED:
        lost = sum(resize.lost_steps for resize in status.resizes)
        count = len(status.resizes)
        changes = f"; {count} change{'' if count == 1 else 's'} of size, steps lost: {lost}" if count else ""
        return f"succeeded after {(status.finished_at or 0) - (status.started_at or 0):.0f} s{changes}"
    if status.phase is Phase.CANCELLED:
        return f"cancelled{why}"
    code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
    return f"failed{code}{why}"


def size(held: float, requested: float) -> str:
    """Return a number of GPUs as text, with the requested number where it differs."""
    gpus = f"{held} GPU{'' if held == 1 else 's'}"
    if held > requested:
        return f"{gpus} ({requested} requested, {held - requested} borrowed)"
    return gpus if held == requested else f"{gpus} ({requested} requested)"


def _needs_membership(job: Job) -> bool:
    """Return whether the job has several workers or another size than requested, which needs elastic_runtime."""
    if job.status.phase not in {Phase.RUNNING, Phase.SUCCEEDED}:
        return False
    borrows = job.spec.elastic and job.status.phase is Phase.RUNNING and job.status.gpus != job.spec.gpus
    return borrows or len(job.status.workers) > 1


def _unjoined(job: Job, when: str) -> str:
    running = sum(worker.phase is WorkerPhase.RUNNING for worker in job.status.workers)
    workers = running or len(job.status.workers)
    subject = f"none of its {workers} workers has" if workers > 1 else "its worker has not"
    then = "each of them does the whole work, and the result of one is kept"
    if workers == 1:
        then = "it does the whole work, and so does every worker that is added"
    if when:
        then = f"until it does, {then}"
    given = {"min_gpus": job.spec.min_gpus, "max_gpus": job.spec.max_gpus, "gpus_per_worker": job.spec.gpus_per_worker}
    sizes = ", ".join(name for name, value in given.items() if value is not None)
    return f"warning: {when}{subject} called elastic_runtime.init(): {then}; call it in the step, or leave out {sizes}"


def _resized(resize: Resize) -> str:
    verb = "expanded" if resize.to_gpus > resize.from_gpus else "shrunk"
    pause = "" if resize.pause_ms is None else f" (paused {resize.pause_ms:.0f} ms at step {resize.step})"
    reason = str(resize.reason)
    if verb == "shrunk" and resize.reason.code is ReasonCode.IDLE_GPUS:
        # No GPU was reclaimed: the workers that were ready first have begun without one that is still starting.
        return f"begun with {resize.to_gpus} of {resize.from_gpus} GPUs, until the other workers have joined{pause}"
    if not reason.startswith(verb):  # the scheduler's reasons contain the sizes, the reason of a crash does not
        reason = f"{verb} from {resize.from_gpus} to {resize.to_gpus} GPUs: {reason}"
    return f"{reason}{pause}"


def _progressed(progress: Progress) -> str:
    of = "" if progress.total_steps is None else f"/{progress.total_steps}"
    return ", ".join([f"step {progress.step}{of}", *progress.metric_texts[:_SHOWN_METRICS]])


def _reason(job: Job | None) -> str:
    return "" if job is None or job.status.reason is None else job.status.reason.message
