"""What a controller that starts makes of what stands in an ElasticJob, and what waits for time."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import ExpectedStart, Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.job import Resize
from kfp_gpuquota.api.wire import ShareView
from kfp_gpuquota.cluster.job_timers import Deadline, Due, next_deadline
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import QUIET_S, Built, StatusWriter
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.conversion import (
    record_of,
    status_of,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.conditions import with_condition
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition, Metadata, Node, Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, ElasticJobSpec, ElasticJobStatus
from kfp_gpuquota.cluster.kubernetes.user_client.views import job_of, node_view
from kfp_gpuquota.engine.lifecycle import settled
from kfp_gpuquota.engine.records import Intent, WorkerRecord, with_status
from kfp_gpuquota.engine.size_changes import unmanaged_size
from kfp_gpuquota.errors import ClusterUnavailableError
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer

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
    record = msgspec.structs.replace(record_of(given_), generation=3, ran_s=2.5)
    written = status_of(given_, record, [], reserved=32, conditions=(), ended=[1])
    again = record_of(msgspec.structs.replace(given_, status=written))
    assert again == msgspec.structs.replace(record, managed=True, generation_high=32)


def resize(at: float, **more: Any) -> Resize:
    reason = Reason(code=ReasonCode.RECLAIMED, message="team-b takes back its GPU")
    given_ = {"from_gpus": 2, "to_gpus": 1, "generation": 3, "step": 7, "reason": reason, "pause_ms": 1.5, **more}
    return Resize(at=at, **given_)


def test_changes_of_size_are_read_again_and_only_the_last_are_kept() -> None:
    changes = tuple(resize(100.0 + i, step=i, lost_steps=i) for i in range(30))
    record = with_status(record_of(job_with(phase="Running")), resizes=changes)
    record = msgspec.structs.replace(record, size=4, generation=3, members=("u-4", "u-2"))
    written = status_of(job_with(), record, [], reserved=32, conditions=(), ended=())
    stored = ElasticJob(metadata=META, spec=job_with().spec, status=written)
    assert record_of(stored).status.resizes == changes[-20:]
    assert record_of(stored).size == 4
    assert record_of(stored).members == record.members
    shown = job_of(msgspec.json.decode(msgspec.json.encode(stored), type=ElasticJob))
    assert shown.status.resizes == changes[-20:]


def test_a_reason_of_another_version_is_kept_by_a_restarted_controller() -> None:
    """A client showed its sentence, and the controller forgot it."""
    failed = job_with(phase="Failed", reason="SinceThen", message="its license has expired")
    for status in (record_of(failed).status, job_of(failed).status):
        assert status.reason is not None
        assert status.reason.message == "its license has expired"


def test_an_expected_start_is_written_in_whole_minutes_and_read_again() -> None:
    expected = ExpectedStart(earliest=1_800_000_010.0, latest=1_800_000_640.0)
    written = status_of(job_with(), record_of(job_with()), [], reserved=32, conditions=(), ended=(), expected=expected)
    shown = job_of(
        msgspec.json.decode(msgspec.json.encode(ElasticJob(META, job_with().spec, written)), type=ElasticJob)
    )
    assert shown.status.expected_start == ExpectedStart(earliest=1_800_000_000.0, latest=1_800_000_660.0)


def test_a_worker_is_shown_with_its_rank_once_it_has_one() -> None:
    def pod(index: int, **status: Any) -> Pod:
        meta = {"name": f"job-{index}", "labels": {labels.WORKER: str(index)}}
        return msgspec.convert({"metadata": meta, "status": {"phase": "Running", **status}}, Pod)

    pods = [pod(0, phase="Failed"), pod(2), pod(4), pod(5)]
    shown = job_of(job_with(phase="Running", ranks=(4, 2)), pods)
    assert [(w.index, w.rank) for w in shown.status.workers] == [(0, None), (2, 1), (4, 0), (5, None)]


def test_what_keeps_pods_from_running_is_the_reason_that_a_client_shows() -> None:
    pull = Condition("WorkersReady", "False", "ImagePullBackOff", "ImagePullBackOff: no such image")
    stuck = job_of(job_with(phase="Starting", reason="fits", message="starts with 2 GPUs", conditions=(pull,)))
    assert stuck.status.reason == Reason(code=ReasonCode.PODS_NOT_READY, message="ImagePullBackOff: no such image")
    failed = job_of(job_with(phase="Failed", reason="worker-failed", message="it failed", conditions=(pull,)))
    assert str(failed.status.reason) == "it failed", "what ended it, where it has ended"


@pytest.mark.parametrize(
    ("container", "shown"),
    [
        (b'{"image": "i", "command": ["sh", "-c"], "args": ["true"]}', ("sh", "-c", "true")),
        (b'{"image": "registry/trainer:1"}', ("registry/trainer:1",)),
    ],
)
def test_a_job_is_shown_with_what_its_first_container_runs(container: bytes, shown: tuple[str, ...]) -> None:
    template = msgspec.Raw(b'{"spec": {"containers": [' + container + b"]}}")
    stored = msgspec.structs.replace(job_with(), spec=ElasticJobSpec(template=template, gpus=1))
    assert job_of(stored).spec.command == shown


def gpu_pod(name: str, gpus: int, phase: str = "Running", **annotations: str) -> Pod:
    container = {"name": "main", "resources": {"limits": {labels.GPU_RESOURCE: str(gpus)}}}
    notes = {f"{labels.GROUP}/{key}": value for key, value in annotations.items()}
    meta = {"name": name, "annotations": notes}
    spec = {"nodeName": "n", "containers": [container]}
    return msgspec.convert({"metadata": meta, "spec": spec, "status": {"phase": phase}}, Pod)


def test_a_nodes_devices_are_in_use_by_pods_under_the_quota_and_outside_of_it() -> None:
    node = msgspec.convert({"metadata": {"name": "n"}, "status": {"allocatable": {labels.GPU_RESOURCE: "4"}}}, Node)
    pods = [gpu_pod("ours", 1, devices="1"), gpu_pod("foreign", 2), gpu_pod("over", 1, "Succeeded")]
    shown = node_view(node, pods)
    assert shown.held == {1: ("ours",), 0: ("foreign",), 2: ("foreign",)}
    assert shown.used == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_shared_device_is_in_use_as_far_as_its_sharers_have_asked_for_it() -> None:
    node = msgspec.convert({"metadata": {"name": "n"}, "status": {"allocatable": {labels.GPU_RESOURCE: "2"}}}, Node)
    given_ = {"project": "t", "device": 0, "total_mib": 16384, "used_mib": 0, "limit_mib": 0, "granted_mib": 0}
    shares = [ShareView(worker=name, job=name, request_mib=4096, **given_) for name in "ab"]  # type: ignore[arg-type]
    assert node_view(node, [gpu_pod("a", 0, devices="0"), gpu_pod("b", 0, devices="0")], shares).used == {0: 0.5}


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
    assert settled(record, (), 5.0).status.phase is phase


def test_workers_that_start_one_after_another_are_no_growth() -> None:
    """After a growth the failure of a worker counts otherwise, and the size history would show one."""
    job = record_of(job_with(phase="Starting", attempt=1))

    def workers(*phases: WorkerPhase) -> list[WorkerRecord]:
        made = [
            Worker(id=f"u-{i}", job_uid="u", index=i, node="n", devices=(i,), phase=phase, started_at=0.0)
            for i, phase in enumerate(phases)
        ]
        return [WorkerRecord(worker=worker, attempt=1) for worker in made]

    assert unmanaged_size(job, workers(WorkerPhase.RUNNING, WorkerPhase.STARTING), 1.0).size == 0
    whole = unmanaged_size(job, workers(WorkerPhase.RUNNING, WorkerPhase.RUNNING), 2.0)
    assert (whole.size, whole.status.resizes) == (2, ())
    shrunk = unmanaged_size(whole, workers(WorkerPhase.RUNNING, WorkerPhase.STARTING), 3.0)
    assert [(change.from_gpus, change.to_gpus) for change in shrunk.status.resizes] == [(2, 1)]


def test_what_waits_for_time_comes_in_its_order() -> None:
    job = ElasticJob(metadata=META, spec=ElasticJobSpec(template=TEMPLATE, max_runtime_seconds=50.0))
    record = with_status(record_of(job), phase=Phase.RUNNING, started_at=100.0)
    assert next_deadline(record, lease_until=140.0, keep_s=7.0) == Deadline(140.0, Due.LEASE_ENDED)
    earlier = msgspec.structs.replace(record, ran_s=20.0)
    assert next_deadline(earlier, lease_until=160.0, keep_s=7.0) == Deadline(130.0, Due.RAN_TOO_LONG)
    ended = with_status(record, phase=Phase.SUCCEEDED, finished_at=200.0)
    assert next_deadline(ended, lease_until=30.0, keep_s=7.0) == Deadline(207.0, Due.FORGET)


def test_a_conditions_time_is_that_of_its_last_change() -> None:
    first = with_condition((), Condition("Ready", "False", "A", "x"), 10.0)
    same = with_condition(first, Condition("Ready", "False", "B", "y"), 20.0)
    other = with_condition(same, Condition("Ready", "True", "B", "y"), 30.0)
    assert [c[0].last_transition_time.timestamp() for c in (first, same, other)] == [10.0, 10.0, 30.0]  # type: ignore[union-attr]
    assert same[0].message == "y"


class Answered:
    """A writer that answers every write immediately."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        self.bodies.append(write.body)
        done(b"")


def test_what_is_urgent_is_not_held_up_by_what_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfp_gpuquota.cluster.kubernetes.client.writes.status_writer.SELDOM_S", 3600.0)

    async def write() -> list[Any]:
        loop, writer, status = asyncio.get_running_loop(), Answered(), Built("/path", "a", 0, urgent="runs")
        statuses = StatusWriter(cast("Writer", writer), lambda _: status)
        async with asyncio.timeout(TIMEOUT_S):
            statuses.changed("a")
            while not writer.bodies:
                await asyncio.sleep(0)
            status = Built("/path", "a", 1, urgent="runs")
            statuses.changed("a")
            while all(timer.when() < loop.time() + QUIET_S for timer in statuses._dirty.values()):
                await asyncio.sleep(0)
            status = Built("/path", "a", 2, urgent="given up")
            statuses.decided("a")
            while len(writer.bodies) < 2:
                await asyncio.sleep(0)
        statuses.close()
        return writer.bodies

    assert asyncio.run(write()) == [0, 2]


class Refusing:
    """A writer whose every write is refused, until `accepts`."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.accepts = False
        self.error: Exception = ApiError(422, "Invalid", 'status.phase: Unsupported value: "Later"')

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        self.bodies.append(write.body)
        if self.accepts:
            done(b"")
        else:
            failed(self.error)


def test_a_status_that_is_refused_is_written_after_growing_pauses_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def write() -> list[Any]:
        loop, writer, status = asyncio.get_running_loop(), Refusing(), Built("/path", "a", 0, urgent="runs")
        statuses = StatusWriter(cast("Writer", writer), lambda _: status)

        def pass_time() -> float:
            """Do what is due next, and return after which pause."""
            (timer,) = statuses._dirty.values()
            timer.cancel()
            pause_s = timer.when() - loop.time()
            for refusal in statuses._refused.values():
                refusal.until -= max(0.0, pause_s)
            statuses._look("a")
            return pause_s

        writer.error = ClusterUnavailableError("no answer")
        statuses.changed("a")
        pauses = [pass_time() for _ in range(9)]
        assert pauses[0] < 1
        assert all(2 <= pause <= 15 for pause in pauses[1:]), "an API server that fails is tried again soon"
        writer.error = Refusing().error
        writer.bodies.clear()
        status = Built("/path", "a", 0, urgent="runs again")
        statuses.decided("a")
        pauses = [pass_time() for _ in range(9)]
        assert [round(pause) for pause in pauses] == [0, 5, 10, 20, 40, 80, 160, 300, 300]
        statuses.decided("a")  # what has not changed is not written before its time
        assert pass_time() < 1
        assert len(writer.bodies) == 9
        status = Built("/path", "a", 1, urgent="ends")
        statuses.decided("a")
        assert pass_time() < 1
        assert [round(pass_time()) for _ in range(2)] == [5, 10]
        writer.accepts = True
        pass_time()
        statuses.close()
        return writer.bodies

    with caplog.at_level(logging.INFO):
        bodies = asyncio.run(write())
    assert bodies == [0] * 9 + [1] * 4
    logged = [record.message for record in caplog.records if "status of a" in record.message]
    assert [message.split()[5] for message in logged] == ["refused,", "refused,", "accepted"]
