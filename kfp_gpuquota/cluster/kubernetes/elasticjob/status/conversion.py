"""Converts a job's object to its record, and back. Pure. A restarted controller restores all state from the status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api import ExpectedStart, Phase, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.resources import counted_amounts, other_gpus_of
from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import job_spec_of, uncounted
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import bounded_number
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import index_of, worker_id
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.retries import NO_RETRIES, RetryFields
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.size_history import (
    reason_of,
    seconds,
    size_changes,
    start_range,
    status_of_object,
    stored_occurrence,
)
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import pod_name
from kfp_gpuquota.cluster.kubernetes.objects import custom_types
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobStatus, TrainingProgress
from kfp_gpuquota.engine.records import AwaitedJob, Intent, JobRecord, WorkerRecord, leaving, with_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.api.affinity import NodeTerm
    from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import CountedOf
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob


def record_of(
    job: ElasticJob,
    requests: Mapping[str, Any] | None = None,
    volume_terms: Callable[[str, tuple[str, ...]], tuple[NodeTerm, ...]] = lambda _namespace, _claims: (),
    counted: CountedOf = uncounted,
) -> JobRecord:
    """Return the record of a job's object, with its namespace's default `requests`, its volumes' nodes, and its claims.

    Raises InvalidFieldError for an invalid specification.
    """
    meta, status, found = job.metadata, job.status, status_of_object(job)
    return JobRecord(
        uid=meta.uid,
        spec=job_spec_of(job, requests, volume_terms, counted),
        status=msgspec.structs.replace(
            found,
            reason=found.reason if status.reason else None,  # else it is why the specification was refused
            result_worker=_id_of(meta.uid, meta.name, status.result_worker),
        ),
        incident_at=seconds(status.last_restart_time),
        growth_failed=reason_of(ReasonCode.WORKER_FAILED, status.growth_failed) if status.growth_failed else None,
        size=status.training_gpus,
        intent=Intent(status.intent),
        attempt=status.attempt,
        next_index=status.next_index,
        ran_s=status.ran_seconds,
        managed=status.generation > 0,
        completing=status.completing,
        generation_high=status.generation_reserved,
        generation=status.generation,
        members=tuple(worker_id(meta.uid, index) for index in status.ranks),
        awaited=tuple(AwaitedJob(one.name, one.uid, one.met) for one in status.awaited),
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC)


def _exact(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _id_of(job_uid: str, job: str, pod: str | None) -> str | None:
    return None if pod is None else worker_id(job_uid, bounded_number(pod.removeprefix(f"{job}-")) or 0)


def worker_record(
    pod: PodView,
    held: tuple[str, tuple[int, ...]],
    share: float,
    before: WorkerRecord | None,
    now: float,
    spec: JobSpec,
) -> WorkerRecord:
    """Return the record of a worker's pod; `before` is the previous one, `spec` that of its job.

    A pod that is being deleted was released.

    `held` are the node and the devices that it holds at present.
    """
    node, devices = held
    worker = Worker(
        id=worker_id(pod.job_uid, pod.index),
        job_uid=pod.job_uid,
        index=pod.index,
        node=node,
        devices=devices,
        share=share,
        other_gpus=other_gpus_of(spec),
        started_at=pod.created,
    )
    known = before.worker if before is not None else worker
    if known.node != node:
        known = msgspec.structs.replace(known, node=node, devices=devices)
    released = before is not None and before.released
    if pod.leaving and not released:
        return leaving(_recorded(before, known, pod.attempt), now)
    phase = WorkerPhase.RUNNING if pod.running else WorkerPhase.STARTING
    phase = WorkerPhase.LEAVING if released else phase
    return _recorded(before, msgspec.structs.replace(known, phase=phase), pod.attempt)


def _recorded(before: WorkerRecord | None, worker: Worker, attempt: int) -> WorkerRecord:
    """Return the record with this worker; what only an earlier record has is kept."""
    if before is None:
        return WorkerRecord(worker=worker, attempt=attempt)
    return msgspec.structs.replace(before, worker=worker, attempt=attempt)


def with_rank(record: WorkerRecord, members: Sequence[str]) -> WorkerRecord:
    """Return the worker's record with its rank among the members of the last stored generation."""
    if record.worker.id not in members:
        return record
    return msgspec.structs.replace(
        record, worker=msgspec.structs.replace(record.worker, rank=members.index(record.worker.id))
    )


def counting(job: JobRecord, pod: PodView) -> JobRecord:
    """Return the job's record including a worker that an earlier controller started: its conditions were met."""
    job = msgspec.structs.replace(
        job, next_index=max(job.next_index, pod.index + 1), attempt=max(job.attempt, pod.attempt), held=None
    )
    if job.status.phase is Phase.PENDING and pod.stage is Stage.ASSIGNED:
        job = with_status(job, phase=Phase.STARTING, started_at=pod.created)
    return job


def status_of(
    job: ElasticJob,
    record: JobRecord,
    workers: Sequence[WorkerRecord],
    *,
    reserved: int,
    membership_digest: str = "",
    membership_shard: int = -1,
    network_policy: str | None = None,
    conditions: Iterable[Condition],
    page: str | None = None,
    ended: Iterable[int],
    retries: RetryFields = NO_RETRIES,
    expected: ExpectedStart | None = None,
    default_runtime_s: float | None = None,
) -> ElasticJobStatus:
    """Return the status of the job's object.

    `expected` is when it is expected to start, `default_runtime_s` its maximum run time without one of its own.
    """
    status = record.status
    alive = [worker.worker for worker in workers if worker.alive]
    progress = status.progress
    result = next((w.worker.index for w in workers if w.worker.id == status.result_worker), None)
    return ElasticJobStatus(
        phase=status.phase.value,
        gpus=as_number(sum(worker.gpus for worker in alive)),
        workers=len(alive),
        generation=record.generation,
        message=status.reason.message if status.reason else "",
        reason=status.reason.code.value if status.reason else "",
        conditions=tuple(conditions),
        page=page,
        observed_generation=job.metadata.generation,
        eligible_time=_exact(status.eligible_at),
        awaited=tuple(custom_types.AwaitedJob(one.name, one.uid, one.met) for one in record.awaited),
        start_time=_time(status.started_at),
        completion_time=_time(status.finished_at),
        exit_code=status.exit_code,
        result_worker=job.status.result_worker if result is None else pod_name(job.metadata.name, result),
        restarts=status.restarts,
        last_restart_time=_time(record.incident_at),
        completing=record.completing,
        evictions=status.evictions,
        last_eviction=stored_occurrence(status.last_eviction),
        last_failure=stored_occurrence(status.last_failure),
        moves=status.moves,
        last_move=stored_occurrence(status.last_move),
        growth_failed=record.growth_failed.message if record.growth_failed else None,
        expected_start=None if expected is None else start_range(expected),
        progress=None if progress is None else msgspec.convert(progress, TrainingProgress, from_attributes=True),
        attempt=record.attempt,
        next_index=record.next_index,
        generation_reserved=reserved,
        membership_digest=membership_digest,
        membership_shard=membership_shard,
        network_policy=network_policy,
        intent=record.intent.value,
        ended=tuple(sorted(ended)),
        default_runtime_seconds=default_runtime_s,
        ran_seconds=round(record.ran_s, 1),
        training_gpus=record.size,
        ranks=tuple(map(index_of, record.members)),
        counted_resources=counted_amounts(record.spec) or None,
        resizes=size_changes(status.resizes),
        spent_seconds=status.spent,
        counted_until=_exact(status.counted_until),
        **retries,
    )
