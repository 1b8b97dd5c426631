"""Lets each user of a shared cluster have the cluster as that user may use it (`server.app.Access`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.shared.accounts import ROOT, caller_of
from kfp_gpuquota.cluster.local.shared.guard import GuardedCluster
from kfp_gpuquota.errors import UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from kfp_gpuquota.cluster.local.cluster import LocalCluster
    from kfp_gpuquota.cluster.local.shared.config import SharedConfig


class UserAccess:
    """Identifies callers by their socket. Requests need no token: the kernel vouches for the user."""

    def __init__(self, cluster: LocalCluster, config: SharedConfig) -> None:
        self._cluster, self._config = cluster, config

    def cluster_for(self, request: web.Request, begin: Callable[[], None]) -> GuardedCluster:
        """Return the cluster as the request's sender may use it. Raises UnauthorizedError if the sender has left."""
        connected = request.transport.get_extra_info("socket") if request.transport else None
        if connected is None:
            raise UnauthorizedError("the connection has ended, and the user who sent the request cannot be determined")
        caller = caller_of(connected)
        group = self._config.admin_group
        admin = caller.uid == ROOT or (group != "" and caller.is_in(group))
        return GuardedCluster(self._cluster, caller, begin, admin=admin, jobs_per_user=self._config.jobs_per_user)
