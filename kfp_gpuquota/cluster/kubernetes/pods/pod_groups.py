"""Assigns waiting pods to their owner's group; the owner is read once, when its first pod arrives.

Owners are not watched: a cluster may have very many Jobs, and their gang size is needed only for some seconds, until
their pods have been created. So a response is cached for a short time, and read again for pods that arrive later.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, is_retryable
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.convert.owners import ALONE, GangSize, gang_size
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner

CACHED_S: Final = 30.0
RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


class Gangs:
    """Gang sizes by owner. `pods` are all tracked pods by uid; `put` receives pods after their owner was read."""

    def __init__(self, pods: Mapping[str, PodView], put: Callable[[PodView], None], writer: Writer) -> None:
        self._pods, self._put, self._writer = pods, put, writer
        self._sizes: dict[Owner, tuple[GangSize, float]] = {}
        self._waiting: dict[Owner, dict[str, PodView]] = {}
        self._all_read = asyncio.Event()
        self._all_read.set()

    def join(self, pod: PodView) -> PodView | None:
        """Return the pod with its group; None if its owner has to be read first, after which the pod is put."""
        owner = pod.owner
        if pod.stage is not Stage.WAITING:
            self.drop(pod.uid)
        if owner is None or pod.group_size or (pod.stage is not Stage.WAITING and owner not in self._sizes):
            return pod
        before = self._pods.get(pod.uid)
        if before is not None and before.stage is Stage.WAITING:
            return _grouped(pod, GangSize(before.group_size, before.group_size) if before.group_size else ALONE)
        size = self._cached_size(owner)
        if size is not None:
            return _grouped(pod, size)
        requested = owner in self._waiting
        self._waiting.setdefault(owner, {})[pod.uid] = pod
        if not requested:
            self._read(owner)
        return None

    def drop(self, uid: str) -> None:
        """Remove a deleted pod, perhaps before its owner was read."""
        for pods in self._waiting.values():
            pods.pop(uid, None)

    async def settled(self) -> None:
        """Wait until no owner is being read."""
        await self._all_read.wait()

    def _cached_size(self, owner: Owner) -> GangSize | None:
        found = self._sizes.get(owner)
        if found is None:
            return None
        if asyncio.get_running_loop().time() - found[1] < CACHED_S:
            return found[0]
        del self._sizes[owner]
        return None

    def _read(self, owner: Owner) -> None:
        self._all_read.clear()
        write = Write(verb="GET", path=owner.path, about=f"{owner.namespace}/{owner.group}", level=logging.DEBUG)
        self._writer.submit(
            write, lambda body: self._settle(owner, gang_size(owner, body)), partial(self._failed, owner)
        )

    def _failed(self, owner: Owner, error: Exception) -> None:
        """Plan the pods one by one if the API server refuses to show the owner; retry if it was unavailable."""
        if isinstance(error, ApiError) and not is_retryable(error):
            log.warning("pods of %s/%s are planned one by one: %s", owner.namespace, owner.group, error)
            self._settle(owner, ALONE)
        else:
            asyncio.get_running_loop().call_later(RETRY_S, self._read, owner)

    def _settle(self, owner: Owner, answer: GangSize) -> None:
        now = asyncio.get_running_loop().time()
        self._sizes = {one: found for one, found in self._sizes.items() if now - found[1] < CACHED_S}
        self._sizes[owner] = answer, now
        for pod in self._waiting.pop(owner, {}).values():
            self._put(_grouped(pod, answer))
        if not self._waiting:
            self._all_read.set()


def _grouped(pod: PodView, answer: GangSize) -> PodView:
    """Return the pod in its labelled group, else in its owner's group, with the owner's gang size."""
    size = answer.labelled if pod.group else answer.pods
    if pod.owner is None or size <= 1:
        return pod
    return msgspec.structs.replace(pod, group=pod.group or pod.owner.group, group_size=size)
