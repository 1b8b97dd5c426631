"""The user at the other end of a connection: who it is, what its groups are, and the limits of the process that asks.

All of it is what the kernel says of that process; of the machine's accounts only names are looked up.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import select
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.engine.records import Owner
from kfp_gpuquota.errors import ConflictError, ForbiddenError, InvalidFieldError
from kfp_gpuquota.server.transport.unix_sockets import peer, peer_groups

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator

GROUP_SIGN: Final = "@"
ROOT: Final = 0
UNLIMITED: Final = -1
_LIMITS: Final = {
    "Max cpu time": "RLIMIT_CPU",
    "Max file size": "RLIMIT_FSIZE",
    "Max data size": "RLIMIT_DATA",
    "Max stack size": "RLIMIT_STACK",
    "Max core file size": "RLIMIT_CORE",
    "Max resident set": "RLIMIT_RSS",
    "Max processes": "RLIMIT_NPROC",
    "Max open files": "RLIMIT_NOFILE",
    "Max locked memory": "RLIMIT_MEMLOCK",
    "Max address space": "RLIMIT_AS",
    "Max pending signals": "RLIMIT_SIGPENDING",
    "Max msgqueue size": "RLIMIT_MSGQUEUE",
    "Max nice priority": "RLIMIT_NICE",
    "Max realtime priority": "RLIMIT_RTPRIO",
    "Max realtime timeout": "RLIMIT_RTTIME",
}
"""The names of limits in /proc/PID/limits, and in Python's module `resource`. prlimit(2) of another user's process
needs a capability that root lacks in some containers.
"""
_LIMIT: Final = re.compile(r"(Max [a-z ]+?) {2,}(\S+) +(\S+)")


@dataclass(frozen=True)
class Caller:
    """The user and the process that a request came from."""

    uid: int
    pid: int
    groups: frozenset[int]

    @property
    def name(self) -> str:
        """Return the name of the user's account; the number without one."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    def is_in(self, group: str) -> bool:
        """Return whether the process has the group; not if there is no such group."""
        try:
            return grp.getgrnam(group).gr_gid in self.groups
        except KeyError:
            return False

    def is_among(self, members: Iterable[str]) -> bool:
        """Return whether a list of users and @groups has this user."""
        name = self.name
        return any(
            self.is_in(member.removeprefix(GROUP_SIGN)) if member.startswith(GROUP_SIGN) else member == name
            for member in members
        )

    def owner(self) -> Owner:
        """Return the owner of a job that this process submits. Raises ForbiddenError, ConflictError."""
        try:
            name = pwd.getpwuid(self.uid).pw_name
        except KeyError:
            raise ForbiddenError(f"user {self.uid} has no account on this machine, so no job can run as it") from None
        umask, limits = _limits_of(self.pid, self.uid)
        return Owner(uid=self.uid, name=name, umask=umask, limits=limits)


def caller_of(connected: socket.socket) -> Caller:
    """Return the process that has connected to a socket of this machine."""
    pid, uid = peer(connected)
    return Caller(uid, pid, peer_groups(connected) or _groups_of(uid))


def check_member(member: str) -> None:
    """Raise InvalidFieldError for a user or @group that the machine does not have."""
    name = member.removeprefix(GROUP_SIGN)
    is_group = member.startswith(GROUP_SIGN)
    try:
        grp.getgrnam(name) if is_group else pwd.getpwnam(name)
    except (KeyError, ValueError):
        kind, hint = ("group", "") if is_group else ("user", f"a group is given as {GROUP_SIGN}{name}")
        raise InvalidFieldError("member", member, f"this machine has no such {kind}", hint=hint) from None


def group_id(field: str, group: str) -> int:
    """Return the number of a group. Raises InvalidFieldError."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        rule = "this machine has no such group"
        raise InvalidFieldError(field, group, rule, hint=f"make it: groupadd --system {group}") from None


def _groups_of(uid: int) -> frozenset[int]:
    """Return the groups of the account, where the process has more of them than the kernel reports."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(account.pw_name, account.pw_gid))


def _limits_of(pid: int, uid: int) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the umask and the limits of the user's process. Raises ConflictError if it has ended.

    The descriptor shows at the end that it was one process all the time, and no other one with its number.
    """
    try:
        held = os.pidfd_open(pid)
        try:
            status = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            limits = dict(_limits_in(Path(f"/proc/{pid}/limits").read_text()))
            if int(status["Uid"].split()[1]) == uid and not select.select([held], [], [], 0)[0]:
                return int(status["Umask"], 8), limits
        finally:
            os.close(held)
    except (OSError, KeyError, ValueError):
        pass
    raise ConflictError("the process that submits the job has ended, or this machine cannot see it; submit it again")


def _limits_in(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for line in text.splitlines():
        if (found := _LIMIT.match(line)) and found[1] in _LIMITS:
            soft, hard = (UNLIMITED if word == "unlimited" else int(word) for word in found.groups()[1:])
            yield _LIMITS[found[1]], (soft, hard)
