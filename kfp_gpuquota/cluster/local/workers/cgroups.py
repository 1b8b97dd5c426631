"""Limits on the memory and the CPU of workers: a cgroup (version 2) for each worker that has one.

Workers' cgroups are children of the daemon's own, where the daemon may divide that: as root in the root of the
hierarchy, or in a cgroup that systemd has delegated (`systemd-run --user --scope -p Delegate=yes`). A cgroup other than
the root that gives controllers to its children may not hold processes itself, so the daemon first moves into a child of
its own; only from a delegated cgroup does it take other processes along, since only there nobody else's are.

Everywhere else a job that asks for a limit is refused with the reason: a limit that does not hold is none.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kfp_gpuquota.api import JobSpec

WORKERS: Final = "gpuquota-workers"
DAEMON: Final = "gpuquota-daemon"
_PERIOD_US: Final = 100_000
_NEEDED: Final = ("cpu", "memory")
_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes by which systemd marks a cgroup that it leaves to its owner."""
ADVICE: Final = "start the cluster with: systemd-run --user --scope -p Delegate=yes gpuquota cluster start"


@dataclass(frozen=True)
class Cgroups:
    """Where workers' cgroups are made. `unavailable`: why limits cannot be enforced, and what to do; "" if they can."""

    directory: Path = Path()
    unavailable: str = ""

    def of(self, worker: str, spec: JobSpec) -> tuple[str, dict[str, str]]:
        """Return the cgroup of a worker, and the content of its files; ("", {}) for a job without limits."""
        files = {}
        if spec.memory_limit_mib is not None:
            files = {"memory.max": str(spec.memory_limit_mib << 20), "memory.swap.max": "0", "memory.oom.group": "1"}
        if spec.cpu_limit is not None:
            files["cpu.max"] = f"{max(1000, round(spec.cpu_limit * _PERIOD_US))} {_PERIOD_US}"
        return (str(self.directory / worker), files) if files else ("", {})


NONE: Final = Cgroups(unavailable="the cluster gives its workers no cgroups of their own")


def prepare(*, service: bool = False) -> Cgroups:
    """Make the cgroup that holds workers' cgroups, in this process's own.

    `service`: systemd starts the daemon, again while workers run. It then puts the daemon into a cgroup beside theirs,
    from version 254 on; an earlier one could not start it beside workers that have limits.
    """
    mount = _mount_point(Path("/proc/self/mountinfo").read_text())
    if mount is None:
        return Cgroups(unavailable="this machine has no cgroup file system of version 2")
    own = divisible(mount / _own_path(Path("/proc/self/cgroup").read_text()), service=service)
    if own is None:
        return Cgroups(unavailable="the service has no cgroup for its daemon alone, which systemd 254 and later make")
    try:
        return _divided(own)
    except PermissionError:
        return Cgroups(unavailable=f"the cgroup {own} is not this user's to divide; {ADVICE}")
    except OSError as error:
        return Cgroups(unavailable=f"the cgroup {own} cannot be divided ({error.strerror}); {ADVICE}")


def divisible(own: Path, *, service: bool) -> Path | None:
    """Return the cgroup to divide, of a process in `own`; None where systemd could not start a `service` again."""
    if own.name == DAEMON:
        return own.parent
    return None if service else own


def _divided(own: Path) -> Cgroups:
    lacking = [name for name in _NEEDED if name not in (own / "cgroup.controllers").read_text().split()]
    if lacking:
        return Cgroups(unavailable=f"the cgroup {own} has no controller for {' and '.join(lacking)}")
    if (own / "cgroup.type").exists():  # not the root
        _leave(own)
    controllers = " ".join(f"+{name}" for name in _NEEDED)
    (own / "cgroup.subtree_control").write_text(controllers)
    workers = own / WORKERS
    workers.mkdir(exist_ok=True)
    (workers / "cgroup.subtree_control").write_text(controllers)
    return Cgroups(workers)


def _leave(own: Path) -> None:
    """Move this process, and from a delegated cgroup every one, into a child."""
    child = own / DAEMON
    child.mkdir(exist_ok=True)
    processes = (own / "cgroup.procs").read_text().split() if _is_delegated(own) else [str(os.getpid())]
    for process in processes:
        with suppress(ProcessLookupError):
            (child / "cgroup.procs").write_text(process)


def _is_delegated(cgroup: Path) -> bool:
    return any(name in _DELEGATED and os.getxattr(cgroup, name) == b"1" for name in os.listxattr(cgroup))


def _mount_point(mounts: str) -> Path | None:
    """Return where the hierarchy of version 2 is mounted: the fifth field of a line whose type is cgroup2."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def _own_path(membership: str) -> str:
    """Return this process's cgroup below the mount point: the line of hierarchy 0."""
    lines = [line for line in membership.splitlines() if line.startswith("0::")]
    return lines[0].removeprefix("0::").lstrip("/") if lines else ""
