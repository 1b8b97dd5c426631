"""Handles deadlines of ElasticJobs: their leases are read again before they count, ended jobs are deleted."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.cluster.job_timers import JobTimers
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, is_retryable
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, JobLease
from kfp_gpuquota.engine import requests
from kfp_gpuquota.engine.records import Intent

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import JobPartEvents
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import OwnerReference
    from kfp_gpuquota.engine.decisions import Decisions
    from kfp_gpuquota.engine.records import JobRecord

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0
_CANCELLED: Final = "cancelled by a user, or with its pipeline's run"
PROMPT_S: Final = 5.0  # a slower response means that the API server was unavailable


class ElasticJobTimers(JobTimers):
    """Timers of all ElasticJobs."""

    def __init__(self, book: ElasticJobStore, writer: Writer, decisions: Decisions, events: JobPartEvents) -> None:
        super().__init__(book, decisions)
        self._book, self._writer, self._events = book, writer, events

    def lease_s(self, job: JobRecord) -> float | None:
        """Return the duration of the lease of the job's object."""
        lease = self._lease(job.uid)
        return lease.duration_seconds if lease is not None and lease.holder else None

    def keep_s(self, job: JobRecord) -> float | None:
        """Return for how long the job's object is kept after its end."""
        return self._book.runtime_states[job.uid].object.spec.ttl_seconds_after_finished

    def kept_long_enough(self, job: JobRecord) -> None:
        """Delete the job's object, with what it owns."""
        body = {"preconditions": {"uid": job.uid}, "propagationPolicy": "Background"}
        write = msgspec.structs.replace(self._request(job.uid, "DELETE"), body=body)
        self._writer.submit(write, lambda _: None, lambda _: self._look_in(AGAIN_S, job.uid))

    def lease_ended(self, job: JobRecord) -> None:
        """Read the object: its lease may have been renewed."""
        found = partial(self._read_again, job.uid, asyncio.get_running_loop().time())
        self._writer.submit(self._request(job.uid, "GET"), found, lambda _: self._extend_lease(job.uid))

    def _request(self, uid: str, verb: str) -> Write:
        meta = self._book.runtime_states[uid].object.metadata
        path = paths.job(meta.namespace, meta.name)
        return Write(verb=verb, path=path, about=f"{meta.namespace}/{meta.name}")

    def _lease(self, uid: str) -> JobLease | None:
        return self._book.runtime_states[uid].object.spec.lease

    def _read_again(self, uid: str, requested_at: float, answer: bytes) -> None:
        """Handle a lease that seems to have expired. Its client cannot renew it while the API server is unavailable.

        So the object is read first; if the response was slow, the lease is extended by its whole duration.
        """
        state, job = self._book.runtime_states.get(uid), self._book.jobs.get(uid)
        if state is None or job is None or job.over:
            return
        found = msgspec.json.decode(answer, type=ElasticJob)
        if asyncio.get_running_loop().time() - requested_at > PROMPT_S:
            self._extend_lease(uid)
        elif found.spec.lease != state.object.spec.lease:
            self._events.job_read(found)
        elif found.spec.lease is not None and found.spec.lease.duration_seconds and (run := _run_of(found)):
            self._read_run(uid, run, found)
        else:
            self._abandon(uid)

    def _read_run(self, uid: str, run: OwnerReference, job: ElasticJob) -> None:
        """Extend the lease while the pipeline's run still waits for the step, which may be retried.

        If the API server refuses the request (no such run, no right to read it), the lease alone decides.
        """
        meta = job.metadata
        step = (meta.annotations or {}).get(labels.STEP, "")

        def answered(answer: bytes) -> None:
            try:
                waits = workflows.awaits(msgspec.json.decode(answer, type=workflows.Workflow), run.uid, step)
            except msgspec.ValidationError as error:
                log.warning("Workflow %s/%s cannot be read: %s", meta.namespace, run.name, error)
                waits = False
            (self._extend_lease if waits else self._abandon)(uid)

        def failed(error: Exception) -> None:
            if isinstance(error, ApiError) and not is_retryable(error):
                self._abandon(uid)
            else:
                self._extend_lease(uid)

        path = workflows.path(meta.namespace, run.name)
        self._writer.submit(Write(verb="GET", path=path, about=f"{meta.namespace}/{run.name}"), answered, failed)

    def _abandon(self, uid: str) -> None:
        """Cancel the job: its lease has expired, and there will be no further attempt of its step."""
        if uid not in self._book.runtime_states:
            return
        lease = self._lease(uid)
        if lease is None or lease.duration_seconds == 0:
            reason = Reason(code=ReasonCode.USER, message=(lease.reason if lease else "") or _CANCELLED)
        else:
            reason = requests.lease_ended(lease.duration_seconds)
        self._decisions.stop_unless_over(uid, Intent.CANCEL, reason)

    def _extend_lease(self, uid: str) -> None:
        if uid in self._book.jobs:
            self.renewed(uid)


def _run_of(job: ElasticJob) -> OwnerReference | None:
    return workflows.owner_of(job.metadata.owner_references)
