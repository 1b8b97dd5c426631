"""The cluster as a service of systemd: its unit, and the report that it is ready."""

from __future__ import annotations

import contextlib
import os
import socket
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.local.home import HOME_VARIABLE
from kfp_gpuquota.cluster.local.shared.config import SHARED_HOME, SHARED_SOCKET, SHARED_VARIABLE
from kfp_gpuquota.cluster.local.shared.files import part_of_others
from kfp_gpuquota.cluster.local.workers.cgroups import DAEMON
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNIT_FILE: Final = Path("/etc/systemd/system/gpuquota.service")
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@")
_UNIT: Final = """\
[Unit]
Description=GPU quota scheduler for the users of this machine
Documentation=https://github.com/kfp-gpuquota/kfp-gpuquota/tree/main/docs
After=network.target nss-user-lookup.target remote-fs.target nvidia-persistenced.service

[Service]
Type=notify
ExecStart={command}
{places}
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


def unit(words: Iterable[str], home: Path = SHARED_HOME, socket: Path = SHARED_SOCKET) -> str:
    """Return the unit of a service that runs `gpuquota` with these words, for a directory and a socket."""
    places = [_environment(HOME_VARIABLE, home)]
    if home == SHARED_HOME:
        places += [f"StateDirectory={home.name}", "StateDirectoryMode=0711"]
    if socket == SHARED_SOCKET:
        places += [f"RuntimeDirectory={socket.parent.name}", "RuntimeDirectoryPreserve=restart"]
    else:
        places.append(_environment(SHARED_VARIABLE, socket))
    return _UNIT.format(
        command=" ".join(map(_quoted, [str(Path(sysconfig.get_path("scripts")) / "gpuquota"), *words])),
        places="\n".join(places),
        daemon=DAEMON,
    )


def check_installation(paths: Iterable[Path]) -> None:
    """Raise UsageError where a user could change what root is about to run."""
    for path in paths:
        if (part := part_of_others(path)) is not None:
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
    return _escaped(word).replace("$", "$$")


def _environment(name: str, value: Path) -> str:
    return f"Environment={_escaped(f'{name}={value}')}"


def _escaped(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if set(word) <= _PLAIN else f'"{escaped}"'
