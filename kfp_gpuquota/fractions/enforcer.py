"""The state machine of one node's GPU memory: facts of a sampling round in, limits, readiness and kills out. Pure.

| what is seen                                     | what is done                                                      |
|--------------------------------------------------|-------------------------------------------------------------------|
| a device has memory that nobody reserved         | listening workloads receive a higher limit, as far as it is free  |
| a new workload's or owner's request is not free  | listening borrowers receive a lower limit                         |
| a borrower did not yield within `yield_s`        | it counts as silent                                               |
| silent borrowers hold what others have reserved  | the cheapest is ended: least priority, most over, youngest        |
| a workload is over its limit                     | its largest process is ended                                      |
| a process is there `term_s` after its SIGTERM    | SIGKILL                                                           |

What is decided rests on this round's samples and nothing older, so a process within its workload's request is never
ended, whatever was true before. Only times are stored; a restarted enforcer has lost nothing else.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.fractions.claims import UNKNOWN, Claim, Process, Row, Sample, usage
from kfp_gpuquota.fractions.lending import Policy, committed, most, reserved, targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """End a process of `workload` on `device`: `over_mib` above what it may use, for `beneficiary` ("": its own limit).

    `force`: SIGKILL, for it was asked before. With the killer off it is `only_reported`; `refused`: the kernel did not
    let the agent.
    """

    process: Process
    workload: str
    device: str
    over_mib: int
    beneficiary: str = ""
    force: bool = False
    only_reported: bool = False
    refused: bool = False


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round's answer.

    `limits` are levels, by workload and device: the limit to follow now. `ready` are the new workloads whose request is
    free on all their devices. `kills` are to be done now.
    """

    rows: tuple[Row, ...] = ()
    limits: dict[tuple[str, str], int] = {}
    ready: frozenset[str] = frozenset()
    kills: tuple[Kill, ...] = ()


class Enforcer:
    """One per node. `observe` is called with each round's facts; devices that lack a total are left alone."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._orders: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        self._dying: dict[Process, float] = {}
        self._reported: set[Process] = set()

    def observe(
        self, totals: Mapping[str, int], claims: Iterable[Claim], samples: Iterable[Sample], now: float
    ) -> Round:
        """Return the decision. `totals`: MiB of each device; `now` in seconds of a monotonic clock."""
        claims, samples = list(claims), list(samples)
        by_device: defaultdict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            by_device[claim.device].append(claim)
        seen: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            seen[sample.device].append(sample)
        self._forget({(c.workload, c.device) for c in claims}, {s.process for s in samples})
        rounds = [
            _Device(self, name, total, by_device[name], seen[name], now).decide() for name, total in totals.items()
        ]
        unready = {claim.workload for d in rounds for claim in d.unready}
        arriving = {claim.workload for found in by_device.values() for claim in found if not claim.running}
        return Round(
            rows=tuple(row for d in rounds for row in d.rows),
            limits={(name, d.name): limit for d in rounds for name, limit in d.limits.items()},
            ready=frozenset(arriving - unready),
            kills=tuple(kill for d in rounds for kill in d.kills),
        )

    def _forget(self, claimed: set[tuple[str, str]], alive: set[Process]) -> None:
        self._orders = defaultdict(list, {key: due for key, due in self._orders.items() if key in claimed})
        self._dying = {process: at for process, at in self._dying.items() if process in alive}
        self._reported &= alive

    def overdue(self, key: tuple[str, str], now: float) -> bool:
        """Return whether the workload has exceeded its time to yield on the device."""
        return any(now - at >= self.policy.yield_s for _, at in self._orders[key])

    def note_order(self, key: tuple[str, str], limit_mib: int, held_mib: int, now: float) -> None:
        """The workload should be at `limit_mib`, and holds `held_mib`.

        Each lower limit has its own time: one that was obeyed is settled, one that was not stays due when another
        follows it, and one that was taken back is forgotten.
        """
        due = [(limit, at) for limit, at in self._orders[key] if limit_mib <= limit < held_mib]
        if limit_mib < held_mib and all(limit != limit_mib for limit, _ in due):
            due.append((limit_mib, now))
        self._orders[key] = due

    def ending(self, process: Process, now: float) -> bool:
        """Return whether the process was terminated and its grace period is not over."""
        return now - self._dying.get(process, -math.inf) < self.policy.term_s

    def was_terminated(self, process: Process) -> bool:
        """Return whether SIGTERM was sent to the process."""
        return process in self._dying

    def end(self, kill: Kill, now: float) -> Kill | None:
        """The kill as it is to be carried out now: asked, then forced; None where it was done before."""
        if not self.policy.killer:
            if kill.process in self._reported:
                return None
            self._reported.add(kill.process)
            return msgspec.structs.replace(kill, only_reported=True)
        asked_at = self._dying.setdefault(kill.process, now)
        if asked_at == now:
            return kill
        return msgspec.structs.replace(kill, force=True) if now - asked_at >= self.policy.term_s else None


class _Device:
    """One device in one round."""

    def __init__(
        self, enforcer: Enforcer, name: str, total_mib: int, claims: list[Claim], samples: list[Sample], now: float
    ) -> None:
        self.name = name
        self.claims = claims
        self.samples = samples
        self.used = usage(samples)
        self.limits: dict[str, int] = {}
        self.unready: list[Claim] = []
        self.kills: list[Kill] = []
        self._enforcer = enforcer
        self._policy = enforcer.policy
        self._total = total_mib
        self._now = now
        listening = (claim.workload for claim in claims if claim.listens)
        self._unresponsive = frozenset(w for w in listening if enforcer.overdue((w, name), now))

    @property
    def rows(self) -> list[Row]:
        """The ledger's lines, as they are after the round."""
        return [
            Row(
                workload=claim.workload,
                device=self.name,
                used_mib=self.used[claim.workload],
                request_mib=claim.request_mib,
                limit_mib=claim.limit_mib,
                granted_mib=self.limits.get(claim.workload, claim.limit_mib),
                listens=claim.listens,
            )
            for claim in self.claims
        ]

    def decide(self) -> _Device:
        wanted = targets(self._total, self.claims, self.used, self._policy, self._unresponsive)
        self._lower(wanted)
        self._raise(wanted)
        self._admit()
        self._end_processes_over_limit()
        self._free_reserved()
        return self

    # Limits

    def _lower(self, wanted: Mapping[str, int]) -> None:
        """Lower the limit of each listening workload whose target is below its current limit."""
        for claim in self.claims:
            if not claim.listens or not claim.running:
                continue
            target = wanted.get(claim.workload, claim.request_mib)
            self.limits[claim.workload] = min(claim.assigned_mib or 0, target)
            held = max(claim.follows_mib or 0, self.used[claim.workload])
            self._enforcer.note_order((claim.workload, self.name), target, held, self._now)

    def _raise(self, wanted: Mapping[str, int]) -> None:
        """Raise limits only into what is free now, owners within their request first."""
        free = self._free()
        grain = int(self._total * self._policy.grain)
        order = sorted(self.claims, key=lambda c: (self.limits.get(c.workload, 0) >= c.request_mib, -c.priority))
        for claim in order:
            if (target := wanted.get(claim.workload)) is None:
                continue
            held = self._committed([claim])
            now_limit = self.limits[claim.workload]
            reachable = min(target, held + free)
            if reachable > now_limit and (reachable - now_limit >= grain or reachable == most(claim)):
                free -= max(0, reachable - held)
                self.limits[claim.workload] = reachable

    def _free(self) -> int:
        return self._total - self.used[UNKNOWN] - self._committed(self.claims)

    def _committed(self, claims: Iterable[Claim]) -> int:
        return sum(committed(claim, self.used[claim.workload], self._policy, self._unresponsive) for claim in claims)

    # Arriving workloads

    def _admit(self) -> None:
        """Find arriving workloads whose request is free beside everything that others hold or may use, oldest first."""
        arriving = sorted((c for c in self.claims if not c.running), key=lambda c: (c.since, c.workload))
        free = self._total - self.used[UNKNOWN] - self._committed(c for c in self.claims if c.running)
        for claim in arriving:
            free -= claim.request_mib
            if free < 0:
                self.unready.append(claim)

    # Kills

    def _end_processes_over_limit(self) -> None:
        for claim in self.claims:
            over = self.used[claim.workload] - claim.limit_mib - self._policy.slack_mib
            if claim.running and over > 0:
                self._end_largest(claim, over)

    def _free_reserved(self) -> None:
        """End silent borrowers until what is reserved is free, when those that listen have yielded."""
        missing = self._missing()
        for claim in self._victims():
            if missing <= 0:
                return
            over = self.used[claim.workload] - claim.request_mib
            missing -= self._end_largest(claim, over, self._beneficiary())

    def _missing(self) -> int:
        held = sum(max(self.used[c.workload], reserved(c, self.used[c.workload], self._policy)) for c in self.claims)
        coming = sum(self._yields(claim) for claim in self.claims)
        ending = sum(s.used_mib for s in self.samples if self._enforcer.ending(s.process, self._now))
        return held + self.used[UNKNOWN] - self._total - coming - ending

    def _yields(self, claim: Claim) -> int:
        """Return the MiB that a workload must still release within its time to yield."""
        if claim.workload not in self.limits or claim.workload in self._unresponsive:
            return 0
        return max(0, self.used[claim.workload] - self.limits[claim.workload])

    def _victims(self) -> list[Claim]:
        def borrows(claim: Claim) -> bool:
            return claim.running and self.used[claim.workload] > claim.request_mib and not self._yields(claim)

        terminated = {s.workload for s in self.samples if self._enforcer.was_terminated(s.process)}

        def cost(claim: Claim) -> tuple[bool, int, int, float, str]:
            over = self.used[claim.workload] - claim.request_mib
            return (claim.workload not in terminated, claim.priority, -over, -claim.since, claim.workload)

        return sorted(filter(borrows, self.claims), key=cost)

    def _beneficiary(self) -> str:
        """The workload that lacks most of what is reserved for it."""
        lacking = Counter(
            {c.workload: reserved(c, self.used[c.workload], self._policy) - self.used[c.workload] for c in self.claims}
        )
        return lacking.most_common(1)[0][0] if lacking else ""

    def _end_largest(self, claim: Claim, over_mib: int, beneficiary: str = "") -> int:
        """Return the MiB that this frees, now or when the terminated process has exited."""
        own = [s for s in self.samples if s.workload == claim.workload]
        largest = max(own, key=lambda s: (s.used_mib, s.process))
        kill = Kill(
            process=largest.process,
            workload=claim.workload,
            device=self.name,
            over_mib=over_mib,
            beneficiary=beneficiary,
        )
        counted = self._enforcer.ending(largest.process, self._now)
        if decided := self._enforcer.end(kill, self._now):
            self.kills.append(decided)
        return 0 if counted else largest.used_mib
