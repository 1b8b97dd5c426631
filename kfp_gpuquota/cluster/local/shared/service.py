"""The cluster as a service of systemd: its unit, and the report that it is ready."""

from __future__ import annotations

import contextlib
import os
import socket
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.local.shared.config import SHARED_HOME, SHARED_SOCKET
from kfp_gpuquota.cluster.local.workers.cgroups import DAEMON
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNIT_FILE: Final = Path("/etc/systemd/system/gpuquota.service")
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@")
_WRITABLE: Final = 0o022
_STICKY: Final = 0o1000
_UNIT: Final = """\
[Unit]
Description=GPU quota scheduler for the users of this machine
Documentation=https://github.com/kfp-gpuquota/kfp-gpuquota/tree/main/docs
After=network.target nss-user-lookup.target remote-fs.target nvidia-persistenced.service

[Service]
Type=notify
ExecStart={command}
Environment=GPUQUOTA_HOME={home}
StateDirectory={state}
StateDirectoryMode=0711
RuntimeDirectory={runtime}
RuntimeDirectoryPreserve=restart
UMask=0077
Restart=on-failure
# Jobs outlive the daemon: the next one finds them.
KillMode=process
# One job that runs out of memory ends neither the others nor the daemon.
OOMPolicy=continue
TasksMax=infinity
LimitNOFILE=1048576
# For jobs with limits on memory and CPU, which are refused where systemd (before 254) does not know the second line.
Delegate=cpu memory
DelegateSubgroup={daemon}

[Install]
WantedBy=multi-user.target
"""


def unit(words: Iterable[str]) -> str:
    """Return the unit of a service that runs `gpuquota` with these words."""
    return _UNIT.format(
        command=" ".join(map(_quoted, [str(Path(sysconfig.get_path("scripts")) / "gpuquota"), *words])),
        home=SHARED_HOME,
        state=SHARED_HOME.name,
        runtime=SHARED_SOCKET.parent.name,
        daemon=DAEMON,
    )


def check_installation(paths: Iterable[Path]) -> None:
    """Raise UsageError where a user could change what root is about to run."""
    for path in paths:
        for part in (path.resolve(), *path.resolve().parents):
            facts = part.stat()
            if facts.st_uid != 0 or (facts.st_mode & _WRITABLE and not facts.st_mode & _STICKY):
                raise UsageError(
                    f"root would run {path}, and {part} can be changed by others; install kfp-gpuquota as root, for "
                    "example: python3 -m venv /opt/gpuquota && /opt/gpuquota/bin/pip install 'kfp-gpuquota[cluster]'"
                )


def notify_ready(environment: Mapping[str, str]) -> None:
    """Report to systemd that the service is ready (sd_notify), if it started this process."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending,
    ):
        sending.sendto(f"READY=1\nMAINPID={os.getpid()}".encode(), address.replace("@", "\0", 1))


def _quoted(word: str) -> str:
    """Return the word as an ExecStart line has it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if set(word) <= _PLAIN else f'"{escaped}"'
