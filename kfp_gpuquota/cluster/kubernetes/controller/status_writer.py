"""Writes the status of jobs and quotas by server-side apply, at a limited rate.

An unchanged status is not written. Fields that change constantly (progress, a team's GPUs) are written every few
seconds; a change of phase at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Phase
from kfp_gpuquota.cluster.kubernetes.client.async_client import APPLY_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.elasticjob.retries import retry_fields
from kfp_gpuquota.cluster.kubernetes.elasticjob.status import status_of, with_condition
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobStatus, GpuQuotaStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
    from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import ElasticJobs
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
    from kfp_gpuquota.cluster.records import JobRecord

QUIET_S: Final = 0.05
SELDOM_S: Final = 5.0
AGAIN_S: Final = 5.0

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes statuses that differ from the last written one. `build(key)` returns the status to write, if any."""

    def __init__(self, writer: Writer, build: Callable[[str], Built | None]) -> None:
        self._writer, self._build = writer, build
        self._dirty: dict[str, asyncio.TimerHandle] = {}
        self._written: dict[str, tuple[float, bytes, Any]] = {}
        self._under_way: set[str] = set()

    def changed(self, key: str) -> None:
        """Write the status soon, if it has changed."""
        if key not in self._dirty and key not in self._under_way:
            self._dirty[key] = asyncio.get_running_loop().call_later(QUIET_S, self._look, key)

    def decided(self, key: str) -> None:
        """Write the status at once if an urgent field has changed, even if a delayed write is pending."""
        timer = self._dirty.get(key)
        if timer is not None and timer.when() > asyncio.get_running_loop().time() + QUIET_S:
            timer.cancel()
            del self._dirty[key]
        self.changed(key)

    def forget(self, key: str) -> None:
        """Drop a deleted object."""
        self._written.pop(key, None)
        if timer := self._dirty.pop(key, None):
            timer.cancel()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._dirty.values():
            timer.cancel()
        self._dirty.clear()

    def _look(self, key: str) -> None:
        self._dirty.pop(key, None)
        built = self._build(key)
        if built is None:
            self.forget(key)
            return
        at, body, urgent = self._written.get(key, (0.0, b"", None))
        encoded = msgspec.json.encode(built.body)
        if encoded == body:
            return
        loop = asyncio.get_running_loop()
        wait = 0.0 if built.urgent != urgent else at + SELDOM_S - loop.time()
        if wait > 0:
            self._dirty[key] = loop.call_later(wait, self._look, key)
            return
        self._written[key] = (loop.time(), encoded, built.urgent)
        self._under_way.add(key)
        self._writer.submit(_apply(built), partial(self._done, key, built), partial(self._failed, key))

    def _done(self, key: str, built: Built, _answer: bytes) -> None:
        self._under_way.discard(key)
        if built.stored is not None:
            built.stored()
        self.changed(key)  # it may have changed in the meantime

    def _failed(self, key: str, error: Exception) -> None:
        self._under_way.discard(key)
        self._written.pop(key, None)
        if isinstance(error, ApiError) and error.status == 404:
            return
        log.warning("the status of %s is written again in %g s: %s", key, AGAIN_S, error)
        self._dirty[key] = asyncio.get_running_loop().call_later(AGAIN_S, self._look, key)


class Built(msgspec.Struct, frozen=True):
    """A status to write. A change of `urgent` is written at once; `stored` is called after the write."""

    path: str
    about: str
    body: Any
    urgent: Any
    stored: Callable[[], None] | None = None


def _apply(built: Built) -> Write:
    return Write(
        verb="PATCH",
        path=f"{built.path}/status?fieldManager={labels.FIELD_MANAGER}&force=true",
        about=built.about,
        lane=Lane.STATUS,
        body=built.body,
        content_type=APPLY_PATCH,
        level=logging.DEBUG,
    )


def job_status(jobs: ElasticJobs, uid: str) -> Built | None:
    """Return an ElasticJob's status; None if it was deleted."""
    state, record = jobs.book.runtime_states.get(uid), jobs.book.jobs.get(uid)
    if state is None or state.object.metadata.deletion_timestamp is not None:
        return None
    meta = state.object.metadata
    conditions = conditions_of(state, record, time.time())
    if record is None:
        status = ElasticJobStatus(message=state.refused, conditions=conditions, observed_generation=meta.generation)
    else:
        status = status_of(
            state.object,
            record,
            jobs.book.workers_of(uid),
            generation=state.generation,
            reserved=state.reserved,
            membership_digest=state.secret,
            membership_shard=state.shard,
            conditions=conditions,
            ended=state.ended,
            ran_s=state.ran_s,
            ranks=state.ranks,
            retries=retry_fields(state.complaints, state.requeue, state.grow),
        )
    body = {
        "apiVersion": labels.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid},
        "status": _without_nulls(status),
    }
    held = status.gpus, status.workers, status.generation, status.ended
    given_back = status.requeue_state, status.grow_state
    reserved = status.generation_reserved  # numbers wait for it
    urgent = (status.phase, status.message, status.intent, reserved, *held, *given_back, len(status.resizes))
    path = f"/apis/{labels.API_VERSION}/namespaces/{meta.namespace}/elasticjobs/{meta.name}"
    stored = partial(jobs.membership.status_stored, uid, reserved)
    return Built(path, f"{meta.namespace}/{meta.name}", body, urgent, stored)


def quota_status(snapshot: Snapshot, name: str, conditions: dict[str, tuple[Condition, ...]]) -> Built | None:
    """Return a GpuQuota's status; None if it was deleted. `conditions` are the previous conditions, by name."""
    quota = snapshot.quotas.get(name)
    if quota is None:
        conditions.pop(name, None)
        return None
    held, project = snapshot.held(name), snapshot.projects.get(name)
    refused = snapshot.refused_quotas.get(name, "")
    accepted = Condition("Accepted", "True", "Valid", "it is in force")
    if refused:
        kept = "the last good one stays in force" if project is not None else "no quota is in force"
        accepted = Condition("Accepted", "False", "Invalid", f"{refused}; {kept}")
    known = with_condition(conditions.get(name, quota.status.conditions), accepted, time.time())
    conditions[name] = known
    status = GpuQuotaStatus(
        gpus=held.gpus,
        borrowed=held.borrowed,
        requested=held.requested,
        waiting=held.waiting,
        conditions=known,
    )
    body = {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": name},
        "status": {"gpus": 0, "borrowed": 0, "waiting": 0, **msgspec.to_builtins(status)},
    }
    return Built(f"/apis/{labels.API_VERSION}/gpuquotas/{name}", name, body, (accepted.status, accepted.message))


def conditions_of(state: RuntimeState, record: JobRecord | None, now: float) -> tuple[Condition, ...]:
    """Return the conditions Accepted, WorkersReady and CheckpointsKept, and Complete or Failed of a finished job."""
    known: Sequence[Condition] = state.conditions
    for wanted in _wanted(state, record, now):
        known = with_condition(known, wanted, now)
    state.conditions = tuple(sorted(known, key=lambda c: c.type))
    return state.conditions


def _wanted(state: RuntimeState, record: JobRecord | None, now: float) -> list[Condition]:
    accepted = Condition("Accepted", "True", "Valid", "it can be what it asks for")
    if state.refused or record is None:
        return [Condition("Accepted", "False", "Invalid", state.refused)]
    found = [accepted, _workers_ready(state, record, now)]
    if state.object.spec.checkpoint is None:
        text = "no checkpoint claim is given: what stops the whole job loses its work since it started"
        found.append(Condition("CheckpointsKept", "False", "NoClaim", text))
    else:
        claim = state.object.spec.checkpoint.claim_name
        found.append(Condition("CheckpointsKept", "True", "Claim", f"on claim {claim}"))
    phase = record.status.phase
    message = record.status.reason.message if record.status.reason else ""
    if phase.final:
        found.append(Condition("Complete", str(phase is Phase.SUCCEEDED), phase.value, message))
        found.append(Condition("Failed", str(phase is not Phase.SUCCEEDED), phase.value, message))
    return found


def _workers_ready(state: RuntimeState, record: JobRecord, now: float) -> Condition:
    if state.held_back:
        return Condition("WorkersReady", "False", "PodRefused", state.held_back)
    start_failure = next((text for text in state.start_failure.values() if text), "")
    if start_failure:
        return Condition("WorkersReady", "False", start_failure.partition(":")[0], start_failure)
    if state.requeue is not None and state.requeue.attempt == record.attempt:
        rests = state.requeue.until is None or now < state.requeue.until  # after that it waits in the queue
        return Condition("WorkersReady", "False", "GivenUp", state.requeue.message if rests else "")
    running = record.status.phase is Phase.RUNNING
    return Condition("WorkersReady", str(running), record.status.phase.value, "")


def _without_nulls(status: ElasticJobStatus) -> dict[str, Any]:
    """Return the status without nulls, which some fields refuse; server-side apply removes absent fields."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    return {name: value for name, value in found.items() if value is not None}
