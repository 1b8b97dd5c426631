"""Decides which jobs' GPUs have been unused for so long that their owners are warned, or that they are suspended. Pure.

| the job's GPUs                                        | the job                                                  |
|-------------------------------------------------------|----------------------------------------------------------|
| one was used, or not measured                         | counts again from the next time at which none is         |
| one was not measured, for at most `unmeasured_s`      | keeps its count, and nothing follows meanwhile           |
| none was used for `warn_after_s`                      | its owner is warned, and again if the rule changes       |
| none was used for `preempt_after_s`, and it was warned| is suspended once a waiting job could start in its place |
| none was used for `suspend_after_s`, and it was warned| is suspended; its workers have their grace period        |

Invariant: a job is suspended only after a warning of which at least `suspend_after_s - warn_after_s` have passed (for
others `preempt_after_s - warn_after_s`), in all of which every one of its GPUs was measured and unused. What is counted
is in memory: another daemon counts again, as after a time in which nobody has measured, unless it continues `counted`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kfp_gpuquota.engine import requests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.api.policy import IdleRule

T = TypeVar("T")

LONGEST_GAP_S: Final = 20.0
"""For about so long a driver keeps its samples: what a device did before is not known."""


class Observed(NamedTuple):
    """A running job: whether its GPUs were used (None: one was not measured), its rule, and the policy that has it.

    `active_at` is when its owner last worked with it otherwise, or its last worker was started, in seconds since the
    epoch: it counts as a use then.
    """

    used: bool | None
    rule: IdleRule | None
    policy: str = ""
    active_at: float = 0.0


class Warned(NamedTuple):
    """A job whose GPUs are unused `since` then, whose owner was warned `at` then; seconds since the epoch."""

    uid: str
    since: float
    at: float
    rule: IdleRule
    policy: str

    @property
    def suspended_at(self) -> float:
        """When the job is suspended."""
        return self.at + self.rule.suspend_after_s - self.rule.warn_after_s

    @property
    def preemptible_at(self) -> float | None:
        """From when on it is suspended for a job that waits; None: not earlier than `suspended_at`."""
        after_s = self.rule.preempt_after_s
        return None if after_s is None else self.at + after_s - self.rule.warn_after_s

    @property
    def warning(self) -> Reason:
        """What its owner is told."""
        return requests.gpus_unused(self.policy, self.since, self.suspended_at, preemptible_at=self.preemptible_at)

    def suspension(self, needed_by: str = "") -> Reason:
        """Return why it is suspended; `needed_by`: the project that needs its GPUs now."""
        return requests.gpus_unused(self.policy, self.since, None, needed_by=needed_by)


class Verdicts(NamedTuple):
    """What follows from an observation."""

    warn: tuple[Warned, ...] = ()
    suspend: tuple[Warned, ...] = ()
    preemptible: tuple[Warned, ...] = ()


class Counted(NamedTuple):
    """What is counted of a job: since when its GPUs are unused, when they last were, and the warning that holds."""

    since: float
    observed_at: float
    warned: Warned | None = None


@dataclass
class UnusedGpus:
    """Since when the GPUs of jobs are unused, when they last were, and the warnings that hold, by job.

    A job begins again that was not observed for `longest_gap_s`, or not measured for `unmeasured_s`.
    """

    longest_gap_s: float = LONGEST_GAP_S
    unmeasured_s: float = 0.0
    since: dict[str, float] = field(default_factory=dict)
    observed_at: dict[str, float] = field(default_factory=dict)
    warned: dict[str, Warned] = field(default_factory=dict)

    def observe(self, jobs: Mapping[str, Observed], now: float) -> Verdicts:
        """Return what follows; jobs that are not in `jobs` are forgotten.

        A job that is to be suspended is so at each observation until it is forgotten, or used.
        """
        for uid in self.since.keys() - jobs.keys():
            self.forget(uid)
        warn, suspend, preemptible = list[Warned](), list[Warned](), list[Warned]()
        for uid, seen in jobs.items():
            if not self._counts(uid, seen, now):
                continue
            rule, since, warned = seen.rule, self._since(uid, seen, now), self.warned.get(uid)
            assert rule is not None
            if warned is None or (warned.rule, warned.policy) != (rule, seen.policy):
                self.warned.pop(uid, None)
                if now - since >= rule.warn_after_s:
                    self.warned[uid] = warned = Warned(uid, since, now, rule, seen.policy)
                    warn.append(warned)
            elif now >= warned.suspended_at:
                suspend.append(warned)
            elif warned.preemptible_at is not None and warned.preemptible_at <= now:
                preemptible.append(warned)
        return Verdicts(tuple(warn), tuple(suspend), tuple(sorted(preemptible, key=lambda one: one.since)))

    def _counts(self, uid: str, seen: Observed, now: float) -> bool:
        """Return whether the job is unused now; forget it if it was used, or for too long not measured."""
        gap = now - self.observed_at.get(uid, now)
        if uid in self.since and seen.used is None and seen.rule is not None and 0 <= gap <= self.unmeasured_s:
            return False
        if seen.used is not False or seen.rule is None or gap > self.longest_gap_s:
            self.forget(uid)
            if seen.used is not False or seen.rule is None:
                return False
        self.observed_at[uid] = now
        return True

    def _since(self, uid: str, seen: Observed, now: float) -> float:
        """Return since when the job is unused; its warning does not hold if its owner worked with it afterwards."""
        since = self.since.setdefault(uid, now)
        if seen.active_at > since:
            self.warned.pop(uid, None)
            since = self.since[uid] = min(seen.active_at, now)
        return since

    def forget(self, uid: str) -> None:
        """Count the job again from its next observation."""
        self.since.pop(uid, None)
        self.observed_at.pop(uid, None)
        self.warned.pop(uid, None)

    def counted(self) -> dict[str, Counted]:
        """Return what is counted, by job, for `restore`."""
        return {uid: Counted(at, self.observed_at[uid], self.warned.get(uid)) for uid, at in self.since.items()}

    def restore(self, counted: Mapping[str, Counted]) -> None:
        """Continue what another process has counted: a job is forgotten if it is not observed in time."""
        for uid, one in counted.items():
            self.since[uid], self.observed_at[uid] = one.since, one.observed_at
            if one.warned is not None:
                self.warned[uid] = one.warned


def fewest(
    ones: Sequence[T], starts_without: Callable[[Sequence[T]], tuple[str, ...]]
) -> tuple[Sequence[T], tuple[str, ...]]:
    """Return the first of these whose absence starts anything, without those of them that it does not take, and what.

    Each question costs a plan: one where nothing would start, else as many as halving takes.
    """
    if not starts_without(ones):
        return (), ()
    count = bisect_left(range(1, len(ones)), x=True, key=lambda count: bool(starts_without(ones[:count]))) + 1
    starts = starts_without(ones[:count])

    def pruned(kept: Sequence[T], first: int, end: int) -> Sequence[T]:
        """Return these without as many as possible of those at these places of `ones`, halved until they are one."""
        fewer = [*kept[: len(kept) - (count - first)], *ones[end:count]]
        if first == end or starts_without(fewer) == starts:
            return fewer
        if end - first == 1:
            return kept
        middle = (first + end) // 2
        return pruned(pruned(kept, first, middle), middle, end)

    return pruned(ones[:count], 0, count - 1), starts
