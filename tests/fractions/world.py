"""A device and its processes, as plain as can be: what the enforcer's decisions meet in the tests.

Nothing here knows how decisions are made. Allocations fail when the device is full, and the enforcer sees only samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.fractions import Claim, Enforcer, Policy, Process, Round, Sample

if TYPE_CHECKING:
    from random import Random

TOTAL = 16_000
DEVICE = "0"
ROUND_S = 0.2


@dataclass
class Workload:
    """One process with a claim. A listener reads its limit every `delay` + 1 rounds and asks before it grows."""

    name: str
    process: Process
    request: int
    limit: int
    since: float
    listens: bool
    priority: int = 50
    delay: int = 1
    obeys_sigterm: bool = True
    running: bool = False
    used: int = 0
    follows: int | None = None
    wanted: int | None = None
    received: int | None = None
    rounds: int = 0
    waiting_since: float | None = None
    failed_allocations: int = 0
    killed: bool = False

    @property
    def claim(self) -> Claim:
        return Claim(
            workload=self.name,
            device=DEVICE,
            request_mib=self.request,
            limit_mib=self.limit,
            priority=self.priority,
            since=self.since,
            running=self.running,
            listens=self.listens,
            assigned_mib=self.received,
            follows_mib=self.follows,
            wanted_mib=self.wanted,
        )


class World:
    """One device of `TOTAL` MiB, an enforcer, and a clock that advances in rounds."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.enforcer = Enforcer(policy or Policy(killer=True))
        self.workloads: dict[str, Workload] = {}
        self.now = 1000.0
        self.last = Round()
        self.killed: list[str] = []
        self.names: list[str] = []

    def add(self, name: str, request: float, limit: float, *, listens: bool = False, **more: Any) -> Workload:
        workload = Workload(
            name, Process(len(self.names) + 100, 7), int(request * TOTAL), int(limit * TOTAL), self.now, listens, **more
        )
        self.names.append(name)
        self.workloads[name] = workload
        return workload

    @property
    def free(self) -> int:
        return TOTAL - sum(w.used for w in self.workloads.values())

    def allocate(self, name: str, upto: int) -> bool:
        """Grow to `upto` if the device has free memory, as an allocation does; a listener stays within its limit."""
        workload = self.workloads[name]
        bound = upto if not workload.listens else min(upto, workload.follows or 0)
        if bound - workload.used > self.free:
            workload.failed_allocations += 1
            return False
        workload.used = max(workload.used, bound)
        return workload.used >= upto

    def samples(self) -> list[Sample]:
        return [Sample(w.process, w.name, DEVICE, w.used) for w in self.workloads.values() if w.running]

    def round(self) -> Round:
        """Sample, decide, carry out; listeners follow their limits, terminated processes exit."""
        self.now += ROUND_S
        before = {w.name: w.used for w in self.workloads.values()}
        self.last = self.enforcer.observe(
            {DEVICE: TOTAL}, [w.claim for w in self.workloads.values()], self.samples(), self.now
        )
        for kill in self.last.kills:
            workload = self.workloads[kill.workload]
            assert before[kill.workload] > workload.request, f"{kill} is within its request"
            if not kill.only_reported and (kill.force or workload.obeys_sigterm):
                self.killed.append(kill.workload)
                del self.workloads[kill.workload]
        for name in self.last.ready:
            self.workloads[name].running = True
        for workload in self.workloads.values():
            self._follow(workload)
        return self.last

    def _follow(self, workload: Workload) -> None:
        if not workload.listens or not workload.running:
            return
        workload.received = self.last.limits.get((workload.name, DEVICE), workload.received)
        workload.rounds += 1
        if workload.rounds % (workload.delay + 1) == 0:
            workload.follows = workload.received or 0
            workload.used = min(workload.used, workload.follows)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def random_step(self, random: Random) -> None:
        """Something happens: an arrival, growth, an owner that wants its part, an end."""
        held = sum(w.request for w in self.workloads.values())
        if random.random() < 0.3 and held < TOTAL:
            self._arrive(random, (TOTAL - held) / TOTAL)
        for workload in list(self.workloads.values()):
            if random.random() < 0.05:
                del self.workloads[workload.name]
            elif workload.running:
                self._use(workload, random)

    def _arrive(self, random: Random, room: float) -> None:
        request = min(random.choice([0.1, 0.25, 0.5, 0.75]), room)
        name = f"w{int(self.now * 10)}-{random.randrange(1 << 30)}"
        self.add(
            name,
            request,
            min(1.0, request * random.choice([1, 1.5, 3.2])),
            listens=random.random() < 0.5,
            priority=random.choice([50, 75, 100]),
            delay=random.choice([0, 1, 2, 30]),
            obeys_sigterm=random.random() < 0.7,
        )

    def _use(self, workload: Workload, random: Random) -> None:
        if workload.listens and random.random() < 0.3:
            workload.wanted = random.choice([None, workload.request // 2, workload.request, workload.limit])
        if random.random() < 0.5:
            self.allocate(workload.name, random.randint(0, workload.limit))
