"""Writes the patches of RayClusters and RayJobs that their units need, one at a time for each unit."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.kuberay import scaling
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.kuberay.unit_registry import UnitRegistry
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Unit

RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class OwnerPatches:
    """The patches in flight. `put_cluster` and `put_job` receive the objects as the API server answers them."""

    def __init__(
        self,
        units: UnitRegistry,
        writer: Writer,
        put_cluster: Callable[[RayCluster], None],
        put_job: Callable[[RayJob], None],
    ) -> None:
        self._set, self._writer = units, writer
        self._put_cluster, self._put_job = put_cluster, put_job
        self._writing: set[str] = set()

    def sync(self, unit: Unit) -> None:
        """Write what the unit's objects need, one patch at a time."""
        if unit.uid in self._writing:
            return
        write, done = self._needed(unit)
        if write is not None:
            self._writing.add(unit.uid)
            self._writer.submit(write, partial(self._written, unit, done), partial(self._refused, unit))

    def _needed(self, unit: Unit) -> tuple[Write | None, Callable[[bytes], None]]:
        job = self._set.owners.jobs.get(unit.owner_uid)
        if job is not None and not unit.ended:
            write = scaling.suspension_of(unit, job, self._set.stops.get(unit.uid, ""))
            if write is not None or job.spec.suspend or unit.uid in self._set.stops:
                return write, self._job_written
        found = self._set.owners.group_of(unit.owner_uid, unit.request)
        if found is None or unit.ended:
            return None, self._cluster_written
        return scaling.size_of(unit, found[0], found[1]), self._cluster_written

    def _written(self, unit: Unit, done: Callable[[bytes], None], answer: bytes) -> None:
        self._writing.discard(unit.uid)
        done(answer)

    def _refused(self, unit: Unit, error: Exception) -> None:
        """Decide again after a pause, in which the watch reports the object's state."""
        if isinstance(error, ApiError) and error.not_found:
            self._writing.discard(unit.uid)
            return
        log.warning("%s could not be changed: %s", unit.uid, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._again, unit)

    def _again(self, unit: Unit) -> None:
        self._writing.discard(unit.uid)
        if unit.uid in self._set.units:
            self.sync(unit)

    def _cluster_written(self, answer: bytes) -> None:
        self._put_cluster(msgspec.json.decode(answer, type=RayCluster))

    def _job_written(self, answer: bytes) -> None:
        self._put_job(msgspec.json.decode(answer, type=RayJob))
