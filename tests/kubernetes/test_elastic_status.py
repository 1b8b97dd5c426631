"""What a controller that starts makes of what stands in an ElasticJob, and what waits for time."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Phase
from kfp_gpuquota.cluster.kubernetes.deadlines import Deadline, Due, next_deadline
from kfp_gpuquota.cluster.kubernetes.elastic_status import record_of, status_of, with_condition, without_pods
from kfp_gpuquota.cluster.kubernetes.objects import (
    Condition,
    ElasticJob,
    ElasticJobSpec,
    ElasticJobStatus,
    JobLease,
    Metadata,
)
from kfp_gpuquota.cluster.records import Intent, with_status

TEMPLATE = msgspec.Raw(b'{"spec": {"containers": [{"name": "main"}]}}')
META = Metadata(name="job", namespace="team", uid="u", creation_timestamp=datetime(2026, 11, 21, tzinfo=UTC))


def job_with(**status: object) -> ElasticJob:
    spec = ElasticJobSpec(template=TEMPLATE, gpus=2, gpus_per_worker=1)
    return ElasticJob(metadata=META, spec=spec, status=ElasticJobStatus(**status))  # type: ignore[arg-type]


@given(
    st.sampled_from([p.value for p in Phase]),
    st.sampled_from([i.value for i in Intent]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_what_is_written_is_read_again(phase: str, intent: str, restarts: int, attempt: int, index: int) -> None:
    given_ = job_with(phase=phase, intent=intent, restarts=restarts, attempt=attempt, next_index=index)
    record = record_of(given_)
    written = status_of(given_, record, [], generation=3, reserved=32, conditions=(), ended=[1], ran_s=2.5)
    again = record_of(msgspec.structs.replace(given_, status=written))
    assert again == msgspec.structs.replace(record, managed=True, generation_high=32)


@pytest.mark.parametrize(
    ("intent", "phase"),
    [
        (Intent.RUN, Phase.PENDING),
        (Intent.REQUEUE, Phase.PENDING),
        (Intent.SUSPEND, Phase.SUSPENDED),
        (Intent.FAIL, Phase.FAILED),
        (Intent.CANCEL, Phase.CANCELLED),
    ],
)
def test_a_run_of_which_no_pod_is_left_is_over_as_it_was_meant_to_be(intent: Intent, phase: Phase) -> None:
    record = record_of(job_with(phase="Running", intent=intent.value, attempt=1))
    assert without_pods(record, 5.0).status.phase is phase


def test_what_waits_for_time_comes_in_its_order() -> None:
    record = with_status(record_of(job_with(phase="Running", attempt=1)), started_at=100.0)
    spec = ElasticJobSpec(
        template=TEMPLATE,
        max_runtime_seconds=50.0,
        ttl_seconds_after_finished=7.0,
        lease=JobLease(holder="h", duration_seconds=30),
    )
    job = ElasticJob(metadata=META, spec=spec)
    assert next_deadline(job, record, lease_seen_at=110.0, ran_s=0.0) == Deadline(140.0, Due.LEASE_ENDED)
    assert next_deadline(job, record, lease_seen_at=130.0, ran_s=20.0) == Deadline(130.0, Due.RAN_TOO_LONG)
    ended = with_status(record, phase=Phase.SUCCEEDED, finished_at=200.0)
    assert next_deadline(job, ended, lease_seen_at=0.0, ran_s=0.0) == Deadline(207.0, Due.FORGET)


def test_a_conditions_time_is_that_of_its_last_change() -> None:
    first = with_condition((), Condition("Ready", "False", "A", "x"), 10.0)
    same = with_condition(first, Condition("Ready", "False", "B", "y"), 20.0)
    other = with_condition(same, Condition("Ready", "True", "B", "y"), 30.0)
    assert [c[0].last_transition_time.timestamp() for c in (first, same, other)] == [10.0, 10.0, 30.0]  # type: ignore[union-attr]
    assert same[0].message == "y"
