"""When GPUs are given back since workers do not come up, and when they are asked for again: pure.

A worker is *up* once its containers have started. Until then its time is counted where it does not get on:

| the worker                                                        | its time is counted from             |
|-------------------------------------------------------------------|--------------------------------------|
| is up                                                             | -                                    |
| has its volumes and network, and nobody complains: its images are | - (a slow pull is ended by the       |
| pulled, its init containers run                                   | container runtime, not by us)        |
| is complained of, by the kubelet or kube-scheduler                | the first complaint                  |
| has no volumes and no network yet, and nobody says why            | its creation                         |

and once its time is over

| its job                                      | gives back                                                            |
|----------------------------------------------|-----------------------------------------------------------------------|
| has fewer workers up than it needs to start  | everything: it returns to the queue, and fails after so many times    |
| trains, or has as many up as it needs        | this worker; it does not grow again for a while, and never fails      |

The pauses grow as Kueue's do: 60 s, 120 s, ... up to an hour, and are forgotten once it comes up.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LONGEST_PAUSE_S: Final = 3600.0
# What stands in the template cannot be an image's name: no other node and no later time changes that.
HOPELESS: Final = "InvalidImageName"


class ReadyRules(msgspec.Struct, frozen=True):
    """A `timeout_s` of 0 never gives anything back, `tries` of 0 tries for ever. `pause_s` is the first pause."""

    timeout_s: float = 600.0
    tries: int = 5
    pause_s: float = 60.0


class Waits(msgspec.Struct, frozen=True):
    """A worker that was not told to go. `since`: its time is counted from then; None where it is up or gets on."""

    index: int
    node: str
    up: bool
    since: float | None = None
    trouble: str = ""


class Retry(msgspec.Struct, frozen=True):
    """What was given back in vain so many times in a row, the last time `at`; asked for again `until` then.

    None is asked for again without an `until`. It is of all workers of the `attempt`, or of these `workers`.
    """

    count: int
    at: float
    until: float | None
    message: str
    attempt: int = 0
    workers: tuple[int, ...] = ()


class GivenUp(NamedTuple):
    """Workers whose time is over; `whole`: the job cannot go on without them."""

    late: tuple[Waits, ...]
    whole: bool

    @property
    def hopeless(self) -> bool:
        """To try again would not help."""
        return any(worker.trouble.startswith(HOPELESS) for worker in self.late)


def next_look(workers: Iterable[Waits], timeout_s: float) -> float | None:
    """When the time of the first of them is over; None while none is counted."""
    counted = [_over_at(worker, timeout_s) for worker in workers if worker.since is not None]
    return min(counted, default=None)


def given_up(workers: Sequence[Waits], *, needed: int, trains: bool, timeout_s: float, now: float) -> GivenUp | None:
    """Whose time is over; None where nobody's is. The job `needed` so many to start, `trains`: it has started."""
    late = tuple(w for w in workers if w.since is not None and _over_at(w, timeout_s) <= now)
    if not late:
        return None
    up = sum(worker.up for worker in workers)
    return GivenUp(late, whole=not (trains and up) and up < needed)


def requeued(lost: GivenUp, workers: int, before: Retry | None, rules: ReadyRules, attempt: int, now: float) -> Retry:
    """The whole job of so many `workers` returns to the queue; without an `until` it fails instead."""
    count = 1 if before is None else before.count + 1
    if lost.hopeless:
        return Retry(count, now, None, f"its workers can never come up: {_why(lost)}", attempt)
    what = f"{_none_of(len(lost.late), workers)} in {rules.timeout_s:g} s"
    if rules.tries and count >= rules.tries:
        times = "" if count == 1 else f", {count} times in a row"
        return Retry(count, now, None, f"{what}{times}: {_why(lost)}", attempt)
    until = now + pause_s(count, rules.pause_s)
    of = f" of {rules.tries}" if rules.tries else ""
    then = f"it gave its GPUs back, and is tried again at {_clock(until)} (try {count + 1}{of})"
    return Retry(count, now, until, f"{what}: {_why(lost)}; {then}", attempt)


def shrunk(lost: GivenUp, before: Retry | None, rules: ReadyRules, now: float) -> Retry:
    """These workers go, the job goes on without them."""
    count = 1 if before is None else before.count + 1
    until = now + pause_s(count, rules.pause_s)
    indices = tuple(worker.index for worker in lost.late)
    who = f"{len(indices)} more workers" if len(indices) > 1 else "one more worker"
    what = f"{who} did not come up in {rules.timeout_s:g} s: {_why(lost)}"
    return Retry(count, now, until, f"{what}; it goes on without, and does not grow before {_clock(until)}", 0, indices)


def has_come_up(workers: Iterable[Waits], needed: int) -> bool:
    """As many as it needs to start are up: what went wrong before is forgotten."""
    return sum(worker.up for worker in workers) >= needed


def pause_s(count: int, first_s: float) -> float:
    """After so many times in vain."""
    return min(first_s * 2.0 ** min(count - 1, 32), LONGEST_PAUSE_S)


def _over_at(worker: Waits, timeout_s: float) -> float:
    since = worker.since or 0.0
    return since if worker.trouble.startswith(HOPELESS) else since + timeout_s


def _none_of(late: int, workers: int) -> str:
    if workers == 1:
        return "its worker did not come up"
    none = f"none of its {workers} workers came up"
    return none if late == workers else f"{late} of its {workers} workers did not come up"


def _why(lost: GivenUp) -> str:
    """The sentence of one of them; that of one of whom something is said, if there is such a one."""
    worker = next((w for w in lost.late if w.trouble), lost.late[0])
    said = worker.trouble or "its volumes or its network are not there, and nobody has said why"
    where = f" on node {worker.node}" if worker.node else ""
    return f"worker {worker.index}{where}: {said}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")
