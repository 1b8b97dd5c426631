"""Leader election by one Lease, with the semantics and the periods of client-go's `leaderelection` package.

The holder renews the lease; a candidate acquires it when it has not changed for its duration, by the candidate's own
clock. The holder stops leading `renew_deadline_s` after the *start* of its last successful request (client-go counts
from its end): see `fence`. Every write of the lease carries the resourceVersion that was read, so only one of two
candidates succeeds.

`leaseTransitions` is the leader's epoch: it increases whenever another process acquires the lease.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import LeaseValidity
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Lease
from kfp_gpuquota.cluster.steady_clock import since_boot_s
from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

NAME: Final = "gpuquota-controller"
DURATION_S: Final = 15.0
RENEW_DEADLINE_S: Final = 10.0
RETRY_S: Final = 2.0

log = logging.getLogger(__name__)


class LeaderElection:
    """One candidate. `identity` is unique to the process; `clock` also advances while the process is stopped."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        identity: str,
        *,
        name: str = NAME,
        duration_s: float = DURATION_S,
        renew_deadline_s: float = RENEW_DEADLINE_S,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        if not duration_s > renew_deadline_s > retry_s > 0:
            periods = f"duration {duration_s:g}, renew deadline {renew_deadline_s:g}, retry {retry_s:g}"
            raise InvalidFieldError("lease periods", periods, "each must be longer than the next, all above 0 s")
        self._connection, self._identity, self._name = connection, identity, name
        self._path = join("/apis/coordination.k8s.io/v1/namespaces", namespace, "leases")
        self._duration_s, self._renew_deadline_s, self._retry_s = duration_s, renew_deadline_s, retry_s
        self._clock = self.clock = clock
        self._seen: tuple[str, float] = ("", 0.0)  # resourceVersion of the lease, and when it was first read
        self._version = ""  # resourceVersion of the lease as this process last wrote it
        self.validity = LeaseValidity(renew_deadline_s, clock)
        self.leads = False
        self.epoch = 0
        """The lease's `leaseTransitions` while this process leads."""

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self.attempt():
            await asyncio.sleep(self._retry_s)
        log.info("%s leads, epoch %d", self._identity, self.epoch)

    async def hold(self, connection: Connection | None = None, alive: Callable[[], bool] = lambda: True) -> None:
        """Renew the lease until this process must not lead any more; while not `alive()` it is not renewed.

        It may run in another thread, with a `connection` of that thread: then no other method is called meanwhile.
        """
        own = self._connection
        try:
            self._connection = connection or own
            while self.leads and (remaining_s := self.validity.remaining_s()) > 0:
                await asyncio.sleep(min(self._retry_s, remaining_s))
                if alive() and self.validity.valid():
                    await self.attempt()
        finally:
            self._connection = own
        self.leads = False
        self.validity.revoke()
        log.error("%s is no longer the leader", self._identity)

    async def attempt(self) -> bool:
        """Try to acquire or renew the lease; return whether this process holds it afterwards.

        A request that fails does not change the lease: the holder continues until its validity ends.
        """
        requested_at = self._clock()
        limit_s = self.validity.remaining_s() if self.leads else self._renew_deadline_s
        try:
            async with asyncio.timeout(min(limit_s, self._renew_deadline_s / 2)):
                held = await self._try(requested_at)
        except (ApiError, ClusterUnavailableError, TimeoutError) as error:
            log.info("the lease %s could not be acquired or renewed: %s", self._name, error or type(error).__name__)
            return self.leads and self.validity.valid()
        if not held:
            self.leads = False
            self.validity.revoke()
        return held

    async def release(self) -> None:
        """Release the lease, so that no candidate has to wait for its expiry. Best effort.

        The patch carries the version that this process last wrote: a lease that another process has acquired is not
        changed.
        """
        if not self.leads:
            return
        self.leads = False
        self.validity.revoke()
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now(), "acquireTime": _now()}
        body = {"metadata": {"resourceVersion": self._version}, "spec": spec}
        try:
            await self._connection.call(
                "PATCH", join(self._path, self._name), body, content_type="application/merge-patch+json", retry_for_s=0
            )
        except (ApiError, ClusterUnavailableError) as error:
            log.info("the lease %s was not released and will expire: %s", self._name, error)

    async def _try(self, requested_at: float) -> bool:
        try:
            lease = await self._connection.read(join(self._path, self._name), Lease)
        except ApiError as error:
            if not error.not_found:
                raise
            lease = None
        if lease is not None and not self._may_take(lease):
            return False
        mine = lease is not None and lease.spec.holder_identity == self._identity
        if lease is None:
            epoch = self.epoch if self.leads else 0
            try:
                written = await self._connection.call("POST", self._path, self._body(epoch, "", ""), retry_for_s=0)
            except ApiError as error:
                if self.leads and _is_namespace_gone(error):
                    log.error("the lease %s is gone with its namespace", self._name)
                    return False  # nobody can lead there: what this process may do ends now
                raise
        else:
            epoch = (lease.spec.lease_transitions or 0) + (not mine)
            since = lease.spec.acquire_time or "" if mine else ""
            body = self._body(epoch, lease.metadata.resource_version, since)
            written = await self._connection.call("PUT", join(self._path, self._name), body, retry_for_s=0)
        self._version = msgspec.json.decode(written, type=Lease).metadata.resource_version
        self._note_held(requested_at, epoch)
        return True

    def _may_take(self, lease: Lease) -> bool:
        """Return whether the lease is this process's own, released, or expired by this process's clock."""
        if lease.spec.holder_identity == self._identity:
            return True
        if self.leads:
            return False  # another process has acquired it
        return not lease.spec.holder_identity or self._expired(lease)

    def _note_held(self, requested_at: float, epoch: int) -> None:
        self.epoch = epoch
        if self.leads:
            self.validity.renewed(requested_at)
        else:
            self.validity.acquired(requested_at)
        self.leads = True

    def _expired(self, lease: Lease) -> bool:
        """Return whether the lease is unchanged for its duration, by this clock; the holder's clock may differ."""
        now, version = self._clock(), lease.metadata.resource_version
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] >= (lease.spec.lease_duration_seconds or 0)

    def _body(self, transitions: int, version: str, since: str) -> dict[str, Any]:
        metadata = {"name": self._name, **({"resourceVersion": version} if version else {})}
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


def _is_namespace_gone(error: ApiError) -> bool:
    """Return whether a creation is refused because its namespace is being deleted, or does not exist."""
    if error.status == HTTPStatus.FORBIDDEN:
        return "being terminated" in error.message
    return error.status == HTTPStatus.NOT_FOUND and "namespaces" in error.message


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
