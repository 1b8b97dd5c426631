"""What time does to ElasticJobs: leases expire, runs last too long, finished jobs are deleted."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.request import Write
from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.cluster.kubernetes.elasticjob.deadlines import Due, next_deadline
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
from kfp_gpuquota.cluster.records import Intent, JobRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import OwnerReference

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0
_CANCELLED: Final = "cancelled by a user, or with its pipeline's run"
_NO_ANSWER: Final = frozenset({403, 404})
PROMPT_S: Final = 5.0  # an API server that takes longer to answer was away


class JobClock:
    """`stop(job, intent, reason)` stops a job, `found(job)` takes an object that is newer than what the watch told."""

    def __init__(
        self,
        book: Book,
        writer: Writer,
        *,
        stop: Callable[[JobRecord, Intent, Reason], None],
        found: Callable[[ElasticJob], None],
    ) -> None:
        self._book, self._writer, self._stop, self._found = book, writer, stop, found

    def set(self, uid: str) -> None:
        """Wait for the next that is due: by its lease, its longest run and when it is to be forgotten."""
        facts, job = self._book.facts[uid], self._book.jobs[uid]
        if facts.timer:
            facts.timer.cancel()
        deadline = next_deadline(facts.object, job, lease_seen_at=facts.lease_seen_at, ran_s=facts.ran_s)
        if deadline is not None:
            delay = max(0.0, deadline.at - time.time())
            facts.timer = asyncio.get_running_loop().call_later(delay, self._due, uid, deadline.due)

    def _due(self, uid: str, due: Due) -> None:
        facts, job = self._book.facts.get(uid), self._book.jobs.get(uid)
        if facts is None or job is None:
            return
        meta = facts.object.metadata
        path = f"/apis/{labels.API_VERSION}/namespaces/{meta.namespace}/elasticjobs/{meta.name}"
        if due is Due.FORGET:
            body = {"preconditions": {"uid": meta.uid}, "propagationPolicy": "Background"}
            write = Write(verb="DELETE", path=path, about=f"{meta.namespace}/{meta.name}", body=body)
            self._writer.submit(write, lambda _: None, lambda _: self._later(uid))
        elif due is Due.LEASE_ENDED:
            write = Write(verb="GET", path=path, about=f"{meta.namespace}/{meta.name}")
            found = partial(self._lease_ended, uid, time.time())
            self._writer.submit(write, found, lambda _: self._lend_a_lease(uid))
        else:
            why = f"it ran for {facts.object.spec.max_runtime_seconds:g} s, which is its maxRuntimeSeconds"
            self._stop(job, Intent.FAIL, Reason(code=ReasonCode.USER, message=why))

    def _later(self, uid: str) -> None:
        asyncio.get_running_loop().call_later(AGAIN_S, self._due, uid, Due.FORGET)

    def _lease_ended(self, uid: str, asked_at: float, answer: bytes) -> None:
        """A lease seems to have ended. Who waits for the job cannot renew it while the API server is away.

        So the server is asked first; where it took its time to answer, they get a whole lease to come back.
        """
        facts, job = self._book.facts.get(uid), self._book.jobs.get(uid)
        if facts is None or job is None or job.status.phase.final or job.ending:
            return
        found = msgspec.json.decode(answer, type=ElasticJob)
        if time.time() - asked_at > PROMPT_S:
            self._lend_a_lease(uid)
        elif found.spec.lease != facts.object.spec.lease:
            self._found(found)
        elif found.spec.lease is not None and found.spec.lease.duration_seconds and (run := _run_of(found)):
            self._ask_run(uid, run, found)
        else:
            self._abandon(uid)

    def _ask_run(self, uid: str, run: OwnerReference, job: ElasticJob) -> None:
        """A pipeline's step may be made again: while its run waits for it, its lease goes on.

        Not so where the controller may not read the run (an installation without that right): the lease says it alone.
        """
        meta = job.metadata
        place = (meta.annotations or {}).get(labels.STEP, "")

        def answered(answer: bytes) -> None:
            try:
                waits = workflows.awaits(msgspec.json.decode(answer, type=workflows.Workflow), run.uid, place)
            except msgspec.ValidationError as error:
                log.warning("Workflow %s/%s cannot be read: %s", meta.namespace, run.name, error)
                waits = False
            (self._lend_a_lease if waits else self._abandon)(uid)

        def failed(error: Exception) -> None:
            if isinstance(error, ApiError) and error.status in _NO_ANSWER:
                self._abandon(uid)
            else:
                self._lend_a_lease(uid)

        path = f"{workflows.COLLECTION.format(namespace=meta.namespace)}/{run.name}"
        self._writer.submit(Write(verb="GET", path=path, about=f"{meta.namespace}/{run.name}"), answered, failed)

    def _abandon(self, uid: str) -> None:
        """Cancel the job: its lease has ended, and no attempt of its step will come."""
        facts, job = self._book.facts.get(uid), self._book.jobs.get(uid)
        if facts is None or job is None or job.status.phase.final or job.ending:
            return
        lease = facts.object.spec.lease
        if lease is None or lease.duration_seconds == 0:
            self._stop(job, Intent.CANCEL, Reason(code=ReasonCode.USER, message=_CANCELLED))
            return
        why = f"its lease of {lease.duration_seconds:g} s has expired: its launcher has ended, and no other one came"
        self._stop(job, Intent.CANCEL, Reason(code=ReasonCode.LEASE_ENDED, message=why))

    def _lend_a_lease(self, uid: str) -> None:
        if (facts := self._book.facts.get(uid)) and uid in self._book.jobs:
            facts.lease_seen_at = time.time()
            self.set(uid)


def _run_of(job: ElasticJob) -> OwnerReference | None:
    return workflows.owner_of(job.metadata.owner_references)
