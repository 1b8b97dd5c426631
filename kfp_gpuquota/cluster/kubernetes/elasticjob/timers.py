"""Handles deadlines of ElasticJobs: expired leases, maximum run times, and deletion after completion."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, is_retryable
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.cluster.kubernetes.elasticjob.deadlines import Due, next_deadline
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
from kfp_gpuquota.engine import requests
from kfp_gpuquota.engine.records import Intent

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import JobPartEvents
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import OwnerReference
    from kfp_gpuquota.engine.decisions import Decisions

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0
_CANCELLED: Final = "cancelled by a user, or with its pipeline's run"
PROMPT_S: Final = 5.0  # a slower response means that the API server was unavailable


class JobTimers:
    """Timers of all jobs."""

    def __init__(self, book: Book, writer: Writer, decisions: Decisions, events: JobPartEvents) -> None:
        self._book, self._writer, self._decisions, self._events = book, writer, decisions, events

    def set(self, uid: str) -> None:
        """Set the timer of the job's next deadline."""
        state, job = self._book.runtime_states[uid], self._book.jobs[uid]
        if state.timer:
            state.timer.cancel()
        now = self._book.clock()
        lease_seen_at = now - (time.monotonic() - state.lease_seen_at)
        deadline = next_deadline(state.object, job, lease_seen_at=lease_seen_at)
        if deadline is not None:
            delay = max(0.0, deadline.at - now)
            state.timer = asyncio.get_running_loop().call_later(delay, self._due, uid, deadline.due)

    def _due(self, uid: str, due: Due) -> None:
        state = self._book.runtime_states.get(uid)
        if state is None or uid not in self._book.jobs:
            return
        meta = state.object.metadata
        path = join(f"/apis/{labels.API_VERSION}/namespaces", meta.namespace, "elasticjobs", meta.name)
        if due is Due.FORGET:
            body = {"preconditions": {"uid": meta.uid}, "propagationPolicy": "Background"}
            write = Write(verb="DELETE", path=path, about=f"{meta.namespace}/{meta.name}", body=body)
            self._writer.submit(write, lambda _: None, lambda _: self._later(uid))
        elif due is Due.LEASE_ENDED:
            write = Write(verb="GET", path=path, about=f"{meta.namespace}/{meta.name}")
            found = partial(self._lease_ended, uid, time.monotonic())
            self._writer.submit(write, found, lambda _: self._extend_lease(uid))
        else:
            self._decisions.stop_unless_over(uid, Intent.FAIL, requests.ran_too_long(self._book.jobs[uid]))

    def _later(self, uid: str) -> None:
        asyncio.get_running_loop().call_later(AGAIN_S, self._due, uid, Due.FORGET)

    def _lease_ended(self, uid: str, requested_at: float, answer: bytes) -> None:
        """Handle a lease that seems to have expired. Its client cannot renew it while the API server is unavailable.

        So the object is read first; if the response was slow, the lease is extended by its whole duration.
        """
        state, job = self._book.runtime_states.get(uid), self._book.jobs.get(uid)
        if state is None or job is None or job.over:
            return
        found = msgspec.json.decode(answer, type=ElasticJob)
        if time.monotonic() - requested_at > PROMPT_S:
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
        if (state := self._book.runtime_states.get(uid)) is None:
            return
        lease = state.object.spec.lease
        if lease is None or lease.duration_seconds == 0:
            reason = Reason(code=ReasonCode.USER, message=(lease.reason if lease else "") or _CANCELLED)
        else:
            reason = requests.lease_ended(lease.duration_seconds)
        self._decisions.stop_unless_over(uid, Intent.CANCEL, reason)

    def _extend_lease(self, uid: str) -> None:
        if (state := self._book.runtime_states.get(uid)) and uid in self._book.jobs:
            state.lease_seen_at = time.monotonic()
            self.set(uid)


def _run_of(job: ElasticJob) -> OwnerReference | None:
    return workflows.owner_of(job.metadata.owner_references)
