"""Decides which jobs' GPUs have been unused for so long that their owners are warned, or that they are suspended. Pure.

| the job's GPUs                                        | the job                                                  |
|-------------------------------------------------------|----------------------------------------------------------|
| one was used, or not measured                         | counts again from the next time at which none is         |
| none was used for `warn_after_s`                      | its owner is warned                                      |
| none was used for `suspend_after_s`, and it was warned| is suspended; its workers have their grace period        |

Invariant: a job is suspended only after a warning of which at least `suspend_after_s - warn_after_s` have passed, in
all of which every one of its GPUs was measured and unused. What is counted is in memory: another daemon counts again,
as after a time in which nobody has measured.
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


class Unused(NamedTuple):
    """A job whose GPUs are unused: since when, in seconds since the epoch, and when it is suspended."""

    uid: str
    since: float
    suspended_at: float
    policy: str


class Verdicts(NamedTuple):
    """What follows from an observation, by job."""

    warn: tuple[Unused, ...] = ()
    suspend: tuple[Unused, ...] = ()
    used_again: tuple[str, ...] = ()


@dataclass
class UnusedGpus:
    """Since when the GPUs of jobs are unused, and when their owners were warned."""

    since: dict[str, float] = field(default_factory=dict)
    warned_at: dict[str, float] = field(default_factory=dict)
    observed_at: float = 0.0

    def observe(self, jobs: Mapping[str, Observed], now: float) -> Verdicts:
        """Return what follows; jobs that are not in `jobs` are forgotten."""
        measured = now - self.observed_at <= LONGEST_GAP_S
        self.observed_at = now
        for uid in self.since.keys() - jobs.keys():
            self._forget(uid)
        warn, suspend, used_again = list[Unused](), list[Unused](), list[str]()
        for uid, seen in jobs.items():
            if seen.used is not False or seen.rule is None or (uid in self.since and not measured):
                if self._forget(uid):
                    used_again.append(uid)
                continue
            since = self.since.setdefault(uid, now)
            leave_s = seen.rule.suspend_after_s - seen.rule.warn_after_s
            if uid not in self.warned_at:
                if now - since >= seen.rule.warn_after_s:
                    self.warned_at[uid] = now
                    warn.append(Unused(uid, since, now + leave_s, seen.policy))
            elif now >= max(since + seen.rule.suspend_after_s, self.warned_at[uid] + leave_s):
                self._forget(uid)
                suspend.append(Unused(uid, since, now, seen.policy))
        return Verdicts(tuple(warn), tuple(suspend), tuple(used_again))

    def _forget(self, uid: str) -> bool:
        """Return whether its owner was warned."""
        self.since.pop(uid, None)
        return self.warned_at.pop(uid, None) is not None
