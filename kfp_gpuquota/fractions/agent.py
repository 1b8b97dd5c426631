"""One node's agent: samples its devices, lets the enforcer decide, and executes the decisions.

Invariant: it keeps no state that it cannot read again, so that it may be killed at any time. Limits are in the
workloads' directories, usage is in the devices, and the owner of a process is in the kernel.

An agent and a workload agree on a limit by two files (docs/fractions.md). The workload can write to the directory, and
on Kubernetes the agent is root: so the agent follows no link there, opens only regular files, and reads two numbers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.reason import ReasonCode
from kfp_gpuquota.fractions.claims import UNKNOWN, Claim, Sample
from kfp_gpuquota.fractions.enforcer import Enforcer, Kill, Round
from kfp_gpuquota.fractions.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kfp_gpuquota.fractions.devices import DeviceMemory
    from kfp_gpuquota.fractions.lending import Policy


LIMIT_FILE: Final = "limit.json"
USAGE_FILE: Final = "usage.json"
LONGEST: Final = 4096
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class LimitMessage(msgspec.Struct, frozen=True):
    """The limit of a workload on each of its devices, in MiB."""

    limit_mib: int


class UsageMessage(msgspec.Struct, frozen=True):
    """A workload's report: the limit that it follows now, and the memory it wants (None: all up to its limit)."""

    follows_mib: int | None = None
    wanted_mib: int | None = None


def write_limit(directory: Path, limit_mib: int) -> None:
    """Write the workload's limit. Raises OSError."""
    temporary = f"{LIMIT_FILE}.new"
    within = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=within)
        new = os.open(temporary, _NEW, 0o644, dir_fd=within)
        try:
            os.fchmod(new, 0o644)  # independent of the umask: the workload is another user
            os.write(new, msgspec.json.encode(LimitMessage(limit_mib)))
        finally:
            os.close(new)
        os.replace(temporary, LIMIT_FILE, src_dir_fd=within, dst_dir_fd=within)
    finally:
        os.close(within)


def read_limit(directory: Path) -> int | None:
    """Return the limit that was written last; None where none was."""
    message = _read(f"{directory}/{LIMIT_FILE}", LimitMessage)
    return None if message is None else message.limit_mib


def read_usage(directory: Path) -> UsageMessage | None:
    """Return the workload's report; None for a workload that does not listen or writes an invalid file."""
    return _read(f"{directory}/{USAGE_FILE}", UsageMessage)


def _read(path: str, kind: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.json.decode(content, type=kind) if (content := _content(path)) else None
    except msgspec.DecodeError:
        return None


def _content(path: str) -> bytes:
    """Return the start of a regular file; empty for anything else, such as a link, or a pipe, which could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, LONGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


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
    usage = read_usage(share.directory)
    if usage is None:
        return share.claims
    limit = read_limit(share.directory)
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
    if limits and (limit := min(limits)) != read_limit(share.directory):
        try:
            write_limit(share.directory, limit)
        except OSError as error:
            log.error("cannot send workload %s its limit of %s MiB: %s", share.claims[0].workload, limit, error)


def _may_kill() -> bool:
    """Whether CAP_KILL (bit 5) is among the effective capabilities."""
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 5 & 1) or os.geteuid() == 0
