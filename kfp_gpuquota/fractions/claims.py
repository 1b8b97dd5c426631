"""What workloads were given of a device, and what they use of it: the facts of one sampling round."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


UNKNOWN: Final = ""


class Process(NamedTuple):
    """A process that cannot be mistaken for another: its number and its start time in clock ticks since boot."""

    pid: int
    start: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's part of one device, in MiB.

    `request_mib` is guaranteed, `limit_mib` the most it may use when others leave it. A claim that is not `running`
    belongs to a newcomer that waits for its request to be free. `since` is when the claim was given, in seconds since
    the epoch. A workload that `listens` follows the limit that it is told, `told_mib`, from its next step on:
    `follows_mib` is the one it follows now, and `wanted_mib` what it would like to use (None: all that it may).
    """

    workload: str
    device: str
    request_mib: int
    limit_mib: int
    priority: int = 50
    since: float = 0.0
    running: bool = True
    listens: bool = False
    told_mib: int | None = None
    follows_mib: int | None = None
    wanted_mib: int | None = None


class Sample(NamedTuple):
    """What one process uses of one device, and whose it is (`UNKNOWN` where nobody knows)."""

    process: Process
    workload: str
    device: str
    used_mib: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's line for one workload on one device, in MiB."""

    workload: str
    device: str
    used_mib: int
    request_mib: int
    limit_mib: int
    granted_mib: int
    listens: bool = False

    @property
    def borrowed_mib(self) -> int:
        """What it uses above its request."""
        return max(0, self.used_mib - self.request_mib)


def usage(samples: Iterable[Sample]) -> Counter[str]:
    """MiB used by each workload, 0 for those without a sample."""
    used: Counter[str] = Counter()
    for sample in samples:
        used[sample.workload] += sample.used_mib
    return used
