"""Valid jobs, and the messages for invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.errors import InvalidFieldError


def spec(**fields: Any) -> JobSpec:
    return JobSpec(**{"name": "train", "project": "team-a", "command": ("python", "train.py"), **fields})


def test_a_plain_job_is_one_worker_that_holds_all_its_gpus() -> None:
    job = spec(gpus=3)
    assert (job.elastic, job.smallest, job.largest, job.worker_gpus) == (False, 3, 3, 3)


def test_an_elastic_job_has_workers_of_one_gpu() -> None:
    job = spec(gpus=2, min_gpus=1, max_gpus=4)
    assert (job.elastic, job.smallest, job.largest, job.worker_gpus) == (True, 1, 4, 1)


@pytest.mark.parametrize(
    ("kind", "preemptible", "priority", "may_be_preempted"),
    [
        (Kind.TRAIN, None, 50, True),
        (Kind.TRAIN, False, 50, False),
        (Kind.BUILD, None, 100, False),
        (Kind.BUILD, True, 75, True),
    ],
)
def test_priority_and_preemption_follow_the_kind(
    kind: Kind, preemptible: bool | None, priority: int, may_be_preempted: bool
) -> None:
    job = spec(kind=kind, preemptible=preemptible)
    assert (job.effective_priority, job.may_be_preempted) == (priority, may_be_preempted)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"gpus": -1}, "gpus", "gpus is -1, but it must be at least 1 GPU"),
    ({"gpus": 0, "max_gpus": 2}, "max_gpus", "max_gpus is 2, but the job asks for no GPU: gpus is 0; leave it out"),
    ({"gpus": -1}, "gpus", "gpus is -1, but it must be at least 1 GPU"),
    ({"gpus": 2.5}, "gpus", "gpus is 2.5, but it must be a whole number"),
    ({"gpus": True}, "gpus", "gpus is True, but it must be a whole number"),
    ({"gpus": 10**7}, "gpus", "gpus is 10000000, but it must be at most 1000000 GPUs"),
    ({"gpus": 2, "min_gpus": 3}, "min_gpus", "min_gpus is 3, but it cannot exceed the requested 2 GPUs"),
    ({"gpus": 2, "max_gpus": 1}, "max_gpus", "max_gpus is 1, but it cannot be below the requested 2 GPUs"),
    ({"gpus": 3, "gpus_per_worker": 2}, "gpus", "it must be a multiple of gpus_per_worker, which is 2"),
    ({"gpus": 4, "min_gpus": 1, "gpus_per_worker": 2}, "min_gpus", "a multiple of gpus_per_worker, which is 2"),
    ({"kind": Kind.BUILD, "max_gpus": 2}, "kind", "an interactive session has one size"),
    ({"priority": -1}, "priority", "it must be between 0 and 1000000000"),
    ({"name": "Train_1"}, "name", "lower-case letters, digits and '-'"),
    ({"name": "Train_1"}, "name", "for example 'train-1'"),
    ({"name": ""}, "name", "1 to 63"),
    ({"name": "a" * 64}, "name", "1 to 63"),
    ({"project": "-x"}, "project", "starts and ends with one of the first two"),
    ({"command": ()}, "command", "it must name a program; add: -- COMMAND ARGS"),
    ({"command": ("a\0b",)}, "command", "an argument cannot hold a NUL character"),
    ({"environment": {"1A": "x"}}, "environment", "starts with no digit"),
    ({"environment": {"A": "x\0"}}, "environment.A", "a value cannot hold a NUL character"),
    ({"grace_period_s": -1.0}, "grace_period_s", "it must be between 0 and 86400 s"),
    ({"grace_period_s": float("nan")}, "grace_period_s", "it must be between 0 and 86400 s"),
    ({"max_restarts": -1}, "max_restarts", "it must be at least 0"),
]


@pytest.mark.parametrize(("fields", "field", "sentence"), REFUSED)
def test_what_may_not_be_is_refused_with_field_value_and_range(
    fields: dict[str, Any], field: str, sentence: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        spec(**fields)
    assert caught.value.field == field
    assert sentence in caught.value.message
    assert caught.value.exit_code == 2


@given(
    gpus=st.integers(1, 64),
    smallest=st.integers(1, 64),
    largest=st.integers(1, 64),
    per_worker=st.one_of(st.none(), st.integers(1, 8)),
)
def test_every_accepted_size_is_a_whole_number_of_workers(
    gpus: int, smallest: int, largest: int, per_worker: int | None
) -> None:
    try:
        job = spec(gpus=gpus, min_gpus=smallest, max_gpus=largest, gpus_per_worker=per_worker)
    except InvalidFieldError:
        return
    assert 1 <= job.smallest <= job.gpus <= job.largest
    assert all(size % job.worker_gpus == 0 for size in (job.smallest, job.gpus, job.largest))


def test_the_wire_format_gives_back_the_same_job() -> None:
    job = spec(gpus=2, min_gpus=1, max_gpus=4, environment={"A": "b"}, kind=Kind.TRAIN)
    assert msgspec.json.decode(msgspec.json.encode(job), type=JobSpec) == job


def test_a_decoded_job_is_validated_like_one_made_by_hand() -> None:
    raw = b'{"name": "train", "project": "team-a", "command": ["x"], "gpus": -1}'
    with pytest.raises(InvalidFieldError, match="gpus is -1"):
        msgspec.json.decode(raw, type=JobSpec)
