"""Builds an ElasticJob's status with its conditions, as it is to be written. Pure."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import Built
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.conversion import status_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.retries import retry_fields
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.conditions import with_condition
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.reporting import JobMembership
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobStatus
    from kfp_gpuquota.engine.records import JobRecord


def job_status(book: ElasticJobStore, membership: JobMembership, uid: str, page_url: str = "") -> Built | None:
    """Return an ElasticJob's status; None if it was deleted. The `membership` is notified after the write.

    `page_url` is the address of the web page, if the cluster has one.
    """
    state, record = book.runtime_states.get(uid), book.jobs.get(uid)
    if state is None or state.object.metadata.deletion_timestamp is not None:
        return None
    meta = state.object.metadata
    conditions = conditions_of(state, record, book.clock())
    if record is None:
        status = msgspec.structs.replace(  # what it has done before is kept for the time after its correction
            state.object.status,
            message=state.refused,
            reason="",
            conditions=conditions,
            observed_generation=meta.generation,
        )
    else:
        status = status_of(
            state.object,
            record,
            book.workers_of(uid),
            reserved=state.reserved,
            membership_digest=state.secret,
            membership_shard=state.shard,
            network_policy=state.network_policy,
            conditions=conditions,
            page=join(f"{page_url.rstrip('/')}/jobs", meta.namespace, meta.name) if page_url else None,
            ended=state.ended,
            retries=retry_fields(state.complaints, state.requeue, state.grow),
            expected=book.expected_start(uid),
            default_runtime_s=state.default_runtime_s,
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
    urgent = (
        status.phase,
        status.message,
        status.intent,
        status.completing,
        reserved,
        *held,
        *given_back,
        len(status.resizes),
    )
    path = paths.job(meta.namespace, meta.name)
    stored = partial(membership.status_stored, uid, reserved)
    return Built(path, f"{meta.namespace}/{meta.name}", body, urgent, stored)


def conditions_of(state: RuntimeState, record: JobRecord | None, now: float) -> tuple[Condition, ...]:
    """Return the conditions Accepted, WorkersReady and CheckpointsKept, and Complete or Failed of a finished job."""
    known: Sequence[Condition] = state.conditions
    for wanted in _wanted(state, record, now):
        known = with_condition(known, wanted, now)
    state.conditions = tuple(sorted(known, key=lambda c: c.type))
    return state.conditions


def _wanted(state: RuntimeState, record: JobRecord | None, now: float) -> list[Condition]:
    accepted = Condition("Accepted", "True", "Valid", "the specification is valid")
    if state.refused or record is None:
        return [Condition("Accepted", "False", "Invalid", state.refused)]
    found = [accepted, _workers_ready(state, record, now)]
    if state.object.spec.checkpoint is None:
        text = "no checkpoint claim is given: a stop of the whole job discards its work since it started"
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
