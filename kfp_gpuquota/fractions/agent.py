"""One node's agent: samples its devices, lets the enforcer decide, and executes the decisions.

Invariant: it keeps no state that it cannot read again, so that it may be killed at any time. Limits are in the
workloads' directories, usage is in the devices, and the owner of a process is in the kernel.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.reason import ReasonCode
from kfp_gpuquota.fractions import limit_files
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
    """A workload's claims, one for each device, and the directory of its messages."""

    claims: tuple[Claim, ...]
    directory: Path


class Agent:
    """The agent of one node. Call `round` about five times a second while there are shares. Raises DeviceError."""

    def __init__(self, memory: DeviceMemory, owner_of: Callable[[int], str], policy: Policy) -> None:
        self._memory = memory
        self._processes = Processes(owner_of)
        self._enforcer = Enforcer(policy)

    def round(self, shares: Iterable[Share], now: float) -> Round:
        """Sample the devices, decide, and execute the decisions. `now` is in seconds of a monotonic clock."""
        shares = list(shares)
        claims = [claim for share in shares for claim in _with_messages(share)]
        decided = self._enforcer.observe(
            self._memory.totals(), claims, self._samples({claim.workload for claim in claims}), now
        )
        for share in shares:
            _send_limit(share, decided)
        return msgspec.structs.replace(decided, kills=tuple(map(self._carry_out, decided.kills)))

    def _samples(self, claimed: set[str]) -> list[Sample]:
        """Return what processes use; the workload is UNKNOWN for processes whose workload has no claim."""
        self._processes.refresh()
        return [
            Sample(process, owner if owner in claimed else UNKNOWN, use.device, use.used_mib)
            for use in self._memory.uses()
            if (process := self._processes.get(use.pid)) and use.start in {None, process.start}
            for owner in (self._processes.owner_of(process),)
        ]

    def _carry_out(self, kill: Kill) -> Kill:
        """End the process, and return the kill with its outcome."""
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
        """Close the handles of the watched processes."""
        self._processes.close()


def explain(kill: Kill, beneficiary: str, container: str = "") -> str:
    """Return why a process was ended, for users. `beneficiary` is the display name of the workload that it was for."""
    over = f"it held {show_mib(kill.over_mib)} of GPU memory above"
    why = f"{over} its request, which {beneficiary} has asked for" if kill.beneficiary else f"{over} its limit"
    verb = "would be ended, were the killer on" if kill.only_reported else "was ended"
    verb = "cannot be ended, for the agent lacks CAP_KILL" if kill.refused else verb
    where = f" in container {container}" if container else ""
    return f"its process {kill.process.pid}{where} {verb}: {why}"


def code_of(kill: Kill) -> ReasonCode:
    """Return the reason code of a kill."""
    return ReasonCode.GPU_MEMORY_RECLAIMED if kill.beneficiary else ReasonCode.OVER_GPU_MEMORY_LIMIT


def what_it_can_do(policy: Policy) -> str:
    """Return what this agent will do under the policy, for the log at start."""
    if not policy.killer:
        return "sends GPU memory limits to workloads that listen; ends no process, only logs which it would end"
    if not _may_kill():
        return "should end processes that hold what an owner needs, but lacks CAP_KILL: only those of its own user"
    return "sends GPU memory limits to workloads that listen, and ends processes that hold what owners need"


def _with_messages(share: Share) -> Iterable[Claim]:
    """Return the claims with the workload's messages, each capped at its limit: the workload can write both files."""
    usage = limit_files.read_usage(share.directory)
    if usage is None:
        return share.claims
    limit = limit_files.read_limit(share.directory)
    return (
        msgspec.structs.replace(
            claim,
            listens=True,
            assigned_mib=_at_most(claim.limit_mib, limit),
            follows_mib=_at_most(claim.limit_mib, usage.follows_mib),
            wanted_mib=usage.wanted_mib,
        )
        for claim in share.claims
    )


def _at_most(limit_mib: int, reported_mib: int | None) -> int | None:
    return None if reported_mib is None else min(limit_mib, reported_mib)


def _send_limit(share: Share, decided: Round) -> None:
    """Send the workload the smallest of its devices' limits, since it uses its devices equally."""
    limits = [
        decided.limits[key] for claim in share.claims if (key := (claim.workload, claim.device)) in decided.limits
    ]
    if limits and (limit := min(limits)) != limit_files.read_limit(share.directory):
        try:
            limit_files.write_limit(share.directory, limit)
        except OSError as error:
            log.error("cannot send workload %s its limit of %s MiB: %s", share.claims[0].workload, limit, error)


def _may_kill() -> bool:
    """Whether CAP_KILL (bit 5) is among the effective capabilities."""
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 5 & 1) or os.geteuid() == 0
