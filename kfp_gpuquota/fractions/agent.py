"""One node's agent: samples its devices, lets the enforcer decide, carries the decisions out.

It keeps nothing that it could not learn again: limits stand in the workloads' directories, use in the devices, and whom
a process belongs to in the kernel. So it may be killed at any time.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.reason import ReasonCode
from kfp_gpuquota.fractions import mailbox
from kfp_gpuquota.fractions.claims import UNKNOWN, Claim, Sample
from kfp_gpuquota.fractions.enforcer import Enforcer, Kill, Round
from kfp_gpuquota.fractions.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kfp_gpuquota.fractions.devices import DeviceMemory
    from kfp_gpuquota.fractions.lending import Policy

log = logging.getLogger(__name__)


class Share(NamedTuple):
    """A workload's claims, one per device, and the directory by which it listens."""

    claims: tuple[Claim, ...]
    directory: Path


class Agent:
    """`round` is to be called every fifth of a second or so while there are shares. Raises DeviceError."""

    def __init__(self, memory: DeviceMemory, owner_of: Callable[[int], str], policy: Policy) -> None:
        self._memory = memory
        self._processes = Processes(owner_of)
        self._enforcer = Enforcer(policy)

    def round(self, shares: Iterable[Share], now: float) -> Round:
        """Sample, decide, act. `now` in seconds of a clock that never goes back."""
        shares = list(shares)
        claims = [claim for share in shares for claim in _listened(share)]
        decided = self._enforcer.observe(
            self._memory.totals(), claims, self._samples({claim.workload for claim in claims}), now
        )
        for share in shares:
            _tell(share, decided)
        return msgspec.structs.replace(decided, kills=tuple(map(self._carry_out, decided.kills)))

    def _samples(self, claimed: set[str]) -> list[Sample]:
        """What processes use. Of those whose workload has no claim (any more) nothing is known but that they use it."""
        self._processes.refresh()
        return [
            Sample(process, owner if owner in claimed else UNKNOWN, use.device, use.used_mib)
            for use in self._memory.uses()
            if (process := self._processes.get(use.pid)) and use.start in {None, process.start}
            for owner in (self._processes.owner_of(process),)
        ]

    def _carry_out(self, kill: Kill) -> Kill:
        """What became of it."""
        why = f"for {kill.beneficiary}, whose request it holds" if kill.beneficiary else "it is over its limit"
        facts = (kill.process.pid, kill.workload, kill.device, kill.over_mib, why)
        if kill.only_reported:
            log.warning("process %s of %s on device %s would be ended: %s MiB too many (%s); the killer is off", *facts)
            return kill
        try:
            self._processes.end(kill.process, force=kill.force)
            log.warning("process %s of %s on device %s is ended: %s MiB too many (%s)", *facts)
        except PermissionError:
            log.error("process %s of %s on device %s cannot be ended: %s MiB too many (%s); it lacks CAP_KILL", *facts)
            return msgspec.structs.replace(kill, only_reported=True, refused=True)
        return kill

    def close(self) -> None:
        """Let go of the processes it watches."""
        self._processes.close()


def explain(kill: Kill, beneficiary: str, container: str = "") -> str:
    """For whoever asks why a process is gone. `beneficiary` is what people call the workload that it was for."""
    over = f"it held {show_mib(kill.over_mib)} of GPU memory above"
    why = f"{over} its request, which {beneficiary} has asked for" if kill.beneficiary else f"{over} its limit"
    verb = "would be ended, were the killer on" if kill.only_reported else "was ended"
    verb = "cannot be ended, for the agent lacks CAP_KILL" if kill.refused else verb
    where = f" in container {container}" if container else ""
    return f"its process {kill.process.pid}{where} {verb}: {why}"


def code_of(kill: Kill) -> ReasonCode:
    """What it was ended for."""
    return ReasonCode.GPU_MEMORY_RECLAIMED if kill.beneficiary else ReasonCode.OVER_GPU_MEMORY_LIMIT


def what_it_can_do(policy: Policy) -> str:
    """For the log at start: what this agent will and will not do."""
    if not policy.killer:
        return "tells workloads that listen how much GPU memory they may use; ends nobody: whom it would end is logged"
    if not _may_kill():
        return "is to end processes that hold what an owner needs, but lacks CAP_KILL: it can end its own user's only"
    return "tells workloads that listen how much GPU memory they may use, and ends processes that hold what owners need"


def _listened(share: Share) -> Iterable[Claim]:
    """The claims with what the workload says and was told: both stand where it may write, so no more than its limit."""
    said = mailbox.heard(share.directory)
    if said is None:
        return share.claims
    limit = mailbox.told(share.directory)
    return (
        msgspec.structs.replace(
            claim,
            listens=True,
            told_mib=_at_most(claim.limit_mib, limit),
            follows_mib=_at_most(claim.limit_mib, said.follows_mib),
            wanted_mib=said.wanted_mib,
        )
        for claim in share.claims
    )


def _at_most(limit_mib: int, said_mib: int | None) -> int | None:
    return None if said_mib is None else min(limit_mib, said_mib)


def _tell(share: Share, decided: Round) -> None:
    """The smallest of its devices' limits: a workload uses its devices alike."""
    limits = [
        decided.limits[key] for claim in share.claims if (key := (claim.workload, claim.device)) in decided.limits
    ]
    if limits and (limit := min(limits)) != mailbox.told(share.directory):
        try:
            mailbox.tell(share.directory, limit)
        except OSError as error:
            log.error("workload %s cannot be told its limit of %s MiB: %s", share.claims[0].workload, limit, error)


def _may_kill() -> bool:
    """Whether CAP_KILL (bit 5) is among the effective capabilities."""
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 5 & 1) or os.geteuid() == 0
