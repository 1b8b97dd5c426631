"""Decides when GPUs of workers that do not start are released, and when they are requested again. Pure.

A worker is *up* when its containers have started. Until then its timeout runs in these states:

| the worker                                                        | its timeout runs from                |
|-------------------------------------------------------------------|--------------------------------------|
| is up                                                             | -                                    |
| has its volumes and network, without a reported failure: images   | - (the container runtime limits slow |
| are pulled, init containers run                                   | pulls)                               |
| has a failure reported by the kubelet or kube-scheduler           | the first report                     |
| has no volumes and no network yet, without a reported failure     | its creation                         |

After the timeout

| its job                                      | releases                                                              |
|----------------------------------------------|-----------------------------------------------------------------------|
| has fewer workers up than it needs to start  | all GPUs: it returns to the queue, and fails after `tries` attempts   |
| trains, or has as many up as it needs        | this worker's; it does not grow for a while, and never fails          |

The pauses grow as Kueue's do: 60 s, 120 s, ... up to an hour, and are reset when the workers are up.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LONGEST_PAUSE_S: Final = 3600.0
# The template's image name is invalid: no other node and no later attempt can succeed.
HOPELESS: Final = "InvalidImageName"


class ReadyRules(msgspec.Struct, frozen=True):
    """Timeouts and retries. `timeout_s` 0: no timeout; `tries` 0: no limit; `pause_s` is the first pause."""

    timeout_s: float = 600.0
    tries: int = 5
    pause_s: float = 60.0


class StartingWorker(msgspec.Struct, frozen=True):
    """A worker that was not released. `since`: start of its timeout; None if it is up or makes progress."""

    index: int
    node: str
    up: bool
    since: float | None = None
    start_failure: str = ""


class Retry(msgspec.Struct, frozen=True):
    """GPUs released `count` times in a row, last `at`; they are requested again `until` then.

    Without `until` there is no further attempt. It refers to all workers of the `attempt`, or to these `workers`.
    """

    count: int
    at: float
    until: float | None
    message: str
    attempt: int = 0
    workers: tuple[int, ...] = ()


class LateWorkers(NamedTuple):
    """Workers whose timeout has passed; `whole`: the job cannot continue without them."""

    late: tuple[StartingWorker, ...]
    whole: bool

    @property
    def hopeless(self) -> bool:
        """Return whether no further attempt can succeed."""
        return any(worker.start_failure.startswith(HOPELESS) for worker in self.late)


def next_look(workers: Iterable[StartingWorker], timeout_s: float) -> float | None:
    """Return the earliest end of the workers' timeouts; None if none runs."""
    counted = [_over_at(worker, timeout_s) for worker in workers if worker.since is not None]
    return min(counted, default=None)


def given_up(
    workers: Sequence[StartingWorker], *, needed: int, trains: bool, timeout_s: float, now: float
) -> LateWorkers | None:
    """Return the workers past their timeout, if any. `needed`: workers to start; `trains`: training has begun."""
    late = tuple(w for w in workers if w.since is not None and _over_at(w, timeout_s) <= now)
    if not late:
        return None
    up = sum(worker.up for worker in workers)
    return LateWorkers(late, whole=not (trains and up) and up < needed)


def requeued(
    lost: LateWorkers, workers: int, before: Retry | None, rules: ReadyRules, attempt: int, now: float
) -> Retry:
    """Return the retry of a whole job with so many `workers`; without `until` the job fails."""
    count = 1 if before is None else before.count + 1
    if lost.hopeless:
        return Retry(count, now, None, f"its workers cannot start: {_why(lost)}", attempt)
    what = f"{_none_of(len(lost.late), workers)} in {rules.timeout_s:g} s"
    if rules.tries and count >= rules.tries:
        times = "" if count == 1 else f", {count} times in a row"
        return Retry(count, now, None, f"{what}{times}: {_why(lost)}", attempt)
    until = now + pause_s(count, rules.pause_s)
    of = f" of {rules.tries}" if rules.tries else ""
    then = f"it released its GPUs, and is retried at {_clock(until)} (attempt {count + 1}{of})"
    return Retry(count, now, until, f"{what}: {_why(lost)}; {then}", attempt)


def shrunk(lost: LateWorkers, before: Retry | None, rules: ReadyRules, now: float) -> Retry:
    """Return the retry of these workers, without which the job continues."""
    count = 1 if before is None else before.count + 1
    until = now + pause_s(count, rules.pause_s)
    indices = tuple(worker.index for worker in lost.late)
    subject = f"{len(indices)} more workers" if len(indices) > 1 else "one more worker"
    what = f"{subject} did not start in {rules.timeout_s:g} s: {_why(lost)}"
    then = f"the job continues without, and does not grow before {_clock(until)}"
    return Retry(count, now, until, f"{what}; {then}", 0, indices)


def has_started(workers: Iterable[StartingWorker], needed: int) -> bool:
    """Return whether as many workers are up as the job needs, which resets its retries."""
    return sum(worker.up for worker in workers) >= needed


def pause_s(count: int, first_s: float) -> float:
    """Return the pause in seconds after so many failed attempts."""
    return min(first_s * 2.0 ** min(count - 1, 32), LONGEST_PAUSE_S)


def _over_at(worker: StartingWorker, timeout_s: float) -> float:
    since = worker.since or 0.0
    return since if worker.start_failure.startswith(HOPELESS) else since + timeout_s


def _none_of(late: int, workers: int) -> str:
    if workers == 1:
        return "its worker did not start"
    none = f"none of its {workers} workers started"
    return none if late == workers else f"{late} of its {workers} workers did not start"


def _why(lost: LateWorkers) -> str:
    """Return the failure of one late worker, if possible of one with a reported reason."""
    worker = next((w for w in lost.late if w.start_failure), lost.late[0])
    failure = worker.start_failure or "its volumes or its network are not ready, and no reason was reported"
    where = f" on node {worker.node}" if worker.node else ""
    return f"worker {worker.index}{where}: {failure}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")
