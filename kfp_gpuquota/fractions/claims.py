"""The input of one sampling round: the claims of workloads on devices, and the memory that processes use."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


UNKNOWN: Final = ""


class Process(NamedTuple):
    """A process identified by its pid and its start time in clock ticks since boot, since pids are reused."""

    pid: int
    start: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's part of one device, in MiB.

    `request_mib` is guaranteed, `limit_mib` is the most it may use while the rest is idle. A claim that is not
    `running` belongs to a workload that waits for its request to be free. `since` is when the claim was created, in
    seconds since the epoch. A workload that `listens` follows the limit sent to it, `assigned_mib`, from its next step
    on: `follows_mib` is the limit it follows now, and `wanted_mib` the memory it wants (None: all up to its limit).
    """

    workload: str
    device: str
    request_mib: int
    limit_mib: int
    priority: int = 50
    since: float = 0.0
    running: bool = True
    listens: bool = False
    assigned_mib: int | None = None
    follows_mib: int | None = None
    wanted_mib: int | None = None


class Sample(NamedTuple):
    """The memory that one process uses of one device, and its workload (`UNKNOWN` where it has none)."""

    process: Process
    workload: str
    device: str
    used_mib: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's row for one workload on one device, in MiB."""

    workload: str
    device: str
    used_mib: int
    request_mib: int
    limit_mib: int
    granted_mib: int
    listens: bool = False

    @property
    def borrowed_mib(self) -> int:
        """The memory in use above the request, in MiB."""
        return max(0, self.used_mib - self.request_mib)


def usage(samples: Iterable[Sample]) -> Counter[str]:
    """Return the MiB used by each workload, 0 for those without a sample."""
    used: Counter[str] = Counter()
    for sample in samples:
        used[sample.workload] += sample.used_mib
    return used
