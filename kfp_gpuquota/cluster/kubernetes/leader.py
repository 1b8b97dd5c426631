"""Who leads: one Lease, as client-go's leader election has it.

Whoever holds it renews it; the others take it once it has not changed for its duration, by their own clocks. A leader
that could not renew for `renew_deadline_s` stops at once: by then another one may lead soon, but not yet.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.cluster.kubernetes.connection import ApiError
from kfp_gpuquota.cluster.kubernetes.objects import Lease
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.connection import Connection

NAME: Final = "gpuquota-controller"
DURATION_S: Final = 12.0
RENEW_DEADLINE_S: Final = 8.0
RETRY_S: Final = 2.0

log = logging.getLogger(__name__)


class LeaderElection:
    """One candidate. `identity` is unique for each process."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        identity: str,
        *,
        duration_s: float = DURATION_S,
        renew_deadline_s: float = RENEW_DEADLINE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._connection, self._identity = connection, identity
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._duration_s, self._renew_deadline_s, self._retry_s = duration_s, renew_deadline_s, retry_s
        self._seen: tuple[str, float] = ("", 0.0)  # the lease's version, and when it was first seen
        self.leads = False

    async def acquire(self) -> None:
        """Return once this one leads."""
        while not await self._tried():
            await asyncio.sleep(self._retry_s)
        self.leads = True
        log.info("%s leads", self._identity)

    async def hold(self) -> None:
        """Renew until it cannot be: returns when this one must not act any more."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while loop.time() - renewed < self._renew_deadline_s:
            await asyncio.sleep(self._retry_s)
            if await self._tried():
                renewed = loop.time()
            elif not self.leads:
                break
        self.leads = False
        log.error("%s leads no more", self._identity)

    async def release(self) -> None:
        """Let go, so that another one need not wait. Best effort."""
        if not self.leads:
            return
        self.leads = False
        body = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}}
        try:
            await self._connection.call(
                "PATCH", f"{self._path}/{NAME}", body, content_type="application/merge-patch+json", patience_s=0
            )
        except (ApiError, ClusterUnavailableError) as error:
            log.info("the lease runs out by itself: %s", error)

    async def _tried(self) -> bool:
        """Whether this one holds the lease now."""
        try:
            async with asyncio.timeout(self._renew_deadline_s / 2):
                return await self._try()
        except (ApiError, ClusterUnavailableError, TimeoutError) as error:
            log.info("the lease could not be had: %s", error or type(error).__name__)
            return False

    async def _try(self) -> bool:
        try:
            lease = await self._connection.read(f"{self._path}/{NAME}", Lease)
        except ApiError as error:
            if not error.gone:
                raise
            await self._connection.call("POST", self._path, self._body(0, "", ""), patience_s=0)
            return True
        spec = lease.spec
        mine = spec.holder_identity == self._identity
        if self.leads and not mine:
            self.leads = False  # somebody took it
            return False
        if not mine and spec.holder_identity and not self._ran_out(lease):
            return False
        transitions = (spec.lease_transitions or 0) + (not mine)
        version, since = lease.metadata.resource_version, spec.acquire_time if mine else ""
        body = self._body(transitions, version, since or "")
        await self._connection.call("PUT", f"{self._path}/{NAME}", body, patience_s=0)
        return True

    def _ran_out(self, lease: Lease) -> bool:
        """By our own clock: that of the holder may be another one."""
        now, version = asyncio.get_running_loop().time(), lease.metadata.resource_version
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] >= (lease.spec.lease_duration_seconds or 0)

    def _body(self, transitions: int, version: str, since: str) -> dict[str, Any]:
        metadata = {"name": NAME, **({"resourceVersion": version} if version else {})}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(self._duration_s),
                "acquireTime": since or _now(),
                "renewTime": _now(),
                "leaseTransitions": transitions,
            },
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
