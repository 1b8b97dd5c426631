"""When GPUs are given back since workers do not come up: the tables of readiness.py, and what of it a status keeps."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import last_warning
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_view
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.retries import complaints_of, retry_fields, retry_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import (
    LONGEST_PAUSE_S,
    ReadyRules,
    Retry,
    StartingWorker,
    given_up,
    has_started,
    next_look,
    pause_s,
    requeued,
    shrunk,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobStatus

PULL = "ImagePullBackOff: no such image"
UP = StartingWorker(0, "n0", up=True)
PULLS = StartingWorker(1, "n0", up=False)
RULES = ReadyRules()
AT_NOON = 1_795_521_600.0


def late(index: int, start_failure: str = PULL, since: float = 0.0) -> StartingWorker:
    return StartingWorker(index, "n1", up=False, since=since, start_failure=start_failure)


@pytest.mark.parametrize(
    ("workers", "needed", "trains", "whole"),
    [
        ([late(0)], 1, False, True),
        ([late(0), late(1)], 2, False, True),
        ([UP, late(1)], 2, False, True),  # a gang cannot start without it
        ([UP, late(1)], 2, True, False),  # one that trains is made whole by another worker
        ([UP, late(1)], 1, False, False),
        ([UP, late(1)], 1, True, False),
        ([late(0), late(1)], 1, True, True),  # no worker trains any more
        ([late(3)], 0, True, False),  # the training is over
        ([PULLS, late(0)], 1, False, True),
    ],
)
def test_who_gives_what_back(workers: list[StartingWorker], needed: int, trains: bool, whole: bool) -> None:
    lost = given_up(workers, needed=needed, trains=trains, timeout_s=600, now=600.0)
    assert lost is not None
    assert lost.whole is whole
    assert {worker.index for worker in lost.late} == {w.index for w in workers if w.since is not None}


@pytest.mark.parametrize(
    ("workers", "look"),
    [
        ([UP], None),
        ([PULLS], None),  # however long that takes
        ([UP, late(1, since=50.0), late(2, since=20.0)], 620.0),
        ([], None),
    ],
)
def test_nothing_is_given_back_before_its_time(workers: list[StartingWorker], look: float | None) -> None:
    assert given_up(workers, needed=1, trains=False, timeout_s=600, now=619.0) is None
    assert next_look(workers, 600) == look


def test_a_name_that_can_be_no_images_is_not_waited_for() -> None:
    wrong = late(0, start_failure='InvalidImageName: couldn\'t parse image name "My Image"', since=5.0)
    assert next_look([wrong], 600) == 5.0
    lost = given_up([wrong], needed=1, trains=False, timeout_s=600, now=5.0)
    assert lost is not None
    failed = requeued(lost, 1, None, RULES, attempt=1, now=5.0)
    assert failed.until is None
    assert failed.message.startswith("its workers cannot start: worker 0 on node n1: InvalidImageName")


def tried(before: Retry | None, attempt: int, rules: ReadyRules = RULES, workers: int = 1) -> Retry:
    lost = given_up([late(i) for i in range(workers)], needed=workers, trains=False, timeout_s=600, now=AT_NOON)
    assert lost is not None
    return requeued(lost, workers, before, rules, attempt, AT_NOON)


def test_the_pauses_grow_and_at_last_the_job_fails_with_the_kubelets_sentence() -> None:
    retry, pauses = None, []
    for attempt in range(1, RULES.tries + 1):
        retry = tried(retry, attempt)
        pauses.append(None if retry.until is None else retry.until - AT_NOON)
    assert pauses == [60.0, 120.0, 240.0, 480.0, None]
    assert retry is not None
    assert retry.message == f"its worker did not start in 600 s, 5 times in a row: worker 0 on node n1: {PULL}"


def test_it_says_when_it_is_tried_again_and_how_often_it_will_be() -> None:
    assert tried(None, 1, workers=2).message == (
        f"none of its 2 workers started in 600 s: worker 0 on node n1: {PULL}; it released its GPUs, and is retried "
        "at 12:01:00 UTC (attempt 2 of 5)"
    )


def test_without_a_limit_it_is_tried_for_ever_once_an_hour() -> None:
    retry = tried(Retry(99, 0.0, 1.0, ""), 100, ReadyRules(tries=0))
    assert retry.until == AT_NOON + LONGEST_PAUSE_S
    assert retry.message.endswith("(attempt 101)")


def test_a_sentence_of_one_worker_is_told_rather_than_the_silence_of_another() -> None:
    lost = given_up([late(0, start_failure=""), late(1)], needed=2, trains=False, timeout_s=600, now=600.0)
    assert lost is not None
    assert f"worker 1 on node n1: {PULL}" in requeued(lost, 2, None, RULES, 1, 600.0).message
    silent = given_up([late(0, start_failure="")], needed=1, trains=False, timeout_s=600, now=600.0)
    assert silent is not None
    assert "its volumes or its network are not ready" in requeued(silent, 1, None, RULES, 1, 600.0).message


def test_a_job_that_trains_goes_on_without_the_worker_and_never_fails_for_it() -> None:
    lost = given_up([UP, late(3)], needed=1, trains=True, timeout_s=600, now=AT_NOON)
    assert lost is not None
    many = shrunk(lost, Retry(99, 0.0, 1.0, ""), RULES, AT_NOON)
    assert (many.count, many.workers, many.until) == (100, (3,), AT_NOON + LONGEST_PAUSE_S)
    first = shrunk(lost, None, RULES, AT_NOON).message
    assert first == (
        f"one more worker did not start in 600 s: worker 3 on node n1: {PULL}; the job continues without, and does "
        "not grow before 12:01:00 UTC"
    )


def test_it_has_started_with_as_many_as_it_needs_to_start() -> None:
    assert not has_started([UP, PULLS], 2)
    assert has_started([UP, late(1)], 1)


@given(st.integers(1, 10_000), st.floats(1.0, 600.0))
def test_pauses_never_shrink_and_are_never_longer_than_the_longest(count: int, first: float) -> None:
    assert pause_s(count, first) <= pause_s(count + 1, first) <= LONGEST_PAUSE_S


times = st.integers(0, 2_000_000_000_000).map(lambda ms: ms / 1000)
retries = st.none() | st.builds(
    Retry,
    count=st.integers(1, 99),
    at=times,
    until=st.none() | times,
    message=st.text(max_size=9),
    attempt=st.integers(0, 9),
    workers=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@given(st.dictionaries(st.integers(0, 9), st.tuples(times, st.text(max_size=9)), max_size=3), retries, retries)
def test_what_a_status_keeps_is_read_again(
    complaints: dict[int, tuple[float, str]], requeue: Retry | None, grow: Retry | None
) -> None:
    written = msgspec.json.encode(ElasticJobStatus(**retry_fields(complaints, requeue, grow)))
    read = msgspec.json.decode(written, type=ElasticJobStatus)
    assert complaints_of(read.not_ready) == complaints
    assert (retry_of(read.requeue_state), retry_of(read.grow_state)) == (requeue, grow)


def test_a_pod_is_prepared_once_its_volumes_and_its_network_are_there() -> None:
    owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "j", "uid": "j", "controller": True}

    def prepared(**condition: str) -> bool:
        meta = {"name": "j-0", "uid": "u", "ownerReferences": [owner]}
        pod = {"metadata": meta, "status": {"conditions": [condition] if condition else []}}
        return pod_view(msgspec.convert(pod, Pod)).prepared

    assert prepared(type="PodReadyToStartContainers", status="True")
    assert not prepared(type="PodReadyToStartContainers", status="False")
    assert not prepared()


def test_the_newest_warning_about_a_pod_is_what_is_told() -> None:
    def event(reason: str, **when: str) -> dict[str, str]:
        return {"reason": reason, "message": "x" * 400, **when}

    old, new = "2026-11-22T07:00:00Z", "2026-11-22T07:00:01.000000Z"
    items = [event("A"), event("Old", lastTimestamp=old), event("New", eventTime=new), event("B")]
    said = last_warning(json.dumps({"items": items}).encode())
    assert said.startswith("New: xxx")
    assert len(said) == 300
    assert last_warning(b'{"items": []}') == ""
