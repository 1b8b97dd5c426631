"""Decides which jobs' GPUs have been unused for so long that their owners are warned, or that they are suspended. Pure.

| the job's GPUs                                        | the job                                                  |
|-------------------------------------------------------|----------------------------------------------------------|
| one was used, or not measured                         | counts again from the next time at which none is         |
| none was used for `warn_after_s`                      | its owner is warned, and again if the rule changes       |
| none was used for `preempt_after_s`, and it was warned| is suspended once a waiting job could start in its place |
| none was used for `suspend_after_s`, and it was warned| is suspended; its workers have their grace period        |

Invariant: a job is suspended only after a warning of which at least `suspend_after_s - warn_after_s` have passed (for
others `preempt_after_s - warn_after_s`), in all of which every one of its GPUs was measured and unused. What is counted
is in memory: another daemon counts again, as after a time in which nobody has measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.api.policy import IdleRule

LONGEST_GAP_S: Final = 20.0
"""For about so long a driver keeps its samples: what a device did before is not known."""


class Observed(NamedTuple):
    """A running job: whether its GPUs were used (None: one was not measured), its rule, and the policy that has it."""

    used: bool | None
    rule: IdleRule | None
    policy: str = ""


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


class Verdicts(NamedTuple):
    """What follows from an observation."""

    warn: tuple[Warned, ...] = ()
    suspend: tuple[Warned, ...] = ()
    preemptible: tuple[Warned, ...] = ()


@dataclass
class UnusedGpus:
    """Since when the GPUs of jobs are unused, and the warnings that hold, by job."""

    since: dict[str, float] = field(default_factory=dict)
    warned: dict[str, Warned] = field(default_factory=dict)
    observed_at: float = 0.0

    def observe(self, jobs: Mapping[str, Observed], now: float) -> Verdicts:
        """Return what follows; jobs that are not in `jobs` are forgotten."""
        measured = now - self.observed_at <= LONGEST_GAP_S
        self.observed_at = now
        for uid in self.since.keys() - jobs.keys():
            self.forget(uid)
        warn, suspend = list[Warned](), list[Warned]()
        for uid, seen in jobs.items():
            if seen.used is not False or seen.rule is None or (uid in self.since and not measured):
                self.forget(uid)
                continue
            since = self.since.setdefault(uid, now)
            warned = self.warned.get(uid)
            if warned is None or (warned.rule, warned.policy) != (seen.rule, seen.policy):
                self.warned.pop(uid, None)
                if now - since >= seen.rule.warn_after_s:
                    self.warned[uid] = Warned(uid, since, now, seen.rule, seen.policy)
                    warn.append(self.warned[uid])
            elif now >= warned.suspended_at:
                self.forget(uid)
                suspend.append(warned)
        held = (one for one in self.warned.values() if one.preemptible_at is not None and one.preemptible_at <= now)
        return Verdicts(tuple(warn), tuple(suspend), tuple(sorted(held, key=lambda one: one.since)))

    def forget(self, uid: str) -> None:
        """Count the job again from its next observation."""
        self.since.pop(uid, None)
        self.warned.pop(uid, None)
