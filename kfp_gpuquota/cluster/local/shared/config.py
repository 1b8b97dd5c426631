"""The settings of a cluster that several users share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from kfp_gpuquota.api.validation import check_count
from kfp_gpuquota.errors import InvalidFieldError

SHARED_HOME: Final = Path("/var/lib/gpuquota")
SHARED_VARIABLE: Final = "GPUQUOTA_SHARED_SOCKET"
MAX_ADDRESS: Final = 90
"""Of a socket's path: the kernel has 108 bytes for it, and the daemon makes it under a longer name."""
SHARED_SOCKET: Final = Path("/run/gpuquota/socket")


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where users reach the cluster, and which of them: those in `group` (every user without one).

    Users in `admin_group` may do what root may through the socket: projects, policies, and all jobs. Others may have
    `jobs_per_user` that have not ended: each is a request of up to 1 MiB, in memory and on the disk.
    """

    socket: str = str(SHARED_SOCKET)
    group: str = ""
    admin_group: str = ""
    jobs_per_user: int = 1000

    def __post_init__(self) -> None:
        check_count("jobs_per_user", self.jobs_per_user, 1, "jobs")
        if not Path(self.socket).is_absolute() or len(self.socket.encode()) > MAX_ADDRESS:
            rule = f"it must be an absolute path of at most {MAX_ADDRESS} bytes"
            raise InvalidFieldError("socket", self.socket, rule)
