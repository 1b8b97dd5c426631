"""What the records of a cluster say about run times, and when a new estimate replaces an old one."""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING, cast

import msgspec

from kfp_gpuquota.api import ExpectedStart, JobSpec, JobStatus, Order, Phase, Progress, Reason, ReasonCode
from kfp_gpuquota.api.job import COMMAND_OF_PODS
from kfp_gpuquota.api.pipeline_labels import TASK
from kfp_gpuquota.api.wire import Supposition
from kfp_gpuquota.engine.expected_starts import RunTimesOfWaiting, note_expected, run_times
from kfp_gpuquota.engine.job_book import JobBook
from kfp_gpuquota.engine.records import JobRecord, with_status
from kfp_gpuquota.scheduler import RunTimeExpected
from kfp_gpuquota.scheduler.forecast import UNKNOWN
from tests.scheduler.world import World

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client
    from tests.conftest import EmbeddedCluster

NOW = 10_000.0
(OF_PODS,) = COMMAND_OF_PODS


def record(name: str, status: JobStatus, *, command: str = "train", **spec: object) -> JobRecord:
    made = JobSpec(name=name, project="team", command=(command,), **spec)  # type: ignore[arg-type]
    return JobRecord(uid=name, spec=made, status=status)


def ended(seconds: float) -> JobStatus:
    return JobStatus(phase=Phase.SUCCEEDED, started_at=100.0, finished_at=100.0 + seconds)


def book(*records: JobRecord) -> JobBook:
    made = JobBook({})
    for each in records:
        made.put_job(each)
    return made


RUNNING = JobStatus(phase=Phase.RUNNING, started_at=NOW - 50)
WAITING = JobStatus(phase=Phase.PENDING)


def test_the_closest_of_the_jobs_that_have_ended_are_the_examples_of_a_run_time() -> None:
    others = [record(f"other-{i}", ended(1000 + i), command="other") for i in range(3)]
    named = [record(f"train-{i}", ended(100 + i), command=f"run {i}") for i in range(3)]
    steps = [record(f"s{i}a7f{i}", ended(10 + i), command="step", labels={TASK: "fit"}) for i in range(3)]
    found = run_times(
        book(
            *others,
            *named,
            *steps,
            record("train-17", WAITING, command="changed"),
            record("x", WAITING, labels={TASK: "fit"}),
            record("mine", WAITING, command="other"),
            record("new", WAITING, command="new"),
        ),
        NOW,
    )
    assert found("train-17").examples == (100, 101, 102)
    assert found("x").examples == (10, 11, 12)
    assert found("mine").examples == (1000, 1001, 1002)
    assert len(found("new").examples) == 9


def test_the_command_of_a_pod_says_nothing_of_its_run_time() -> None:
    """On Kubernetes it is in the job's template, so that it is the same in the records of all jobs."""
    others = [record(f"other{i}", ended(600), command=OF_PODS) for i in range(3)]
    timed = record("timed", WAITING, command=OF_PODS, max_runtime_s=7200.0)
    records = book(*others, timed, record("new", WAITING, command=OF_PODS))
    assert run_times(records, NOW)("new").examples == (600, 600, 600)  # the project's
    world = World()
    world.project("team", 1, order=Order.SHORTEST)
    world.submit("timed", "team")
    world.submit("new", "team")
    assert {one.uid: one.seconds for one in RunTimesOfWaiting(records).changes(world.state)} == {"new": 600}


def test_jobs_that_still_run_lengthen_the_examples() -> None:
    jobs = [record(f"a{i}", ended(5)) for i in range(3)]
    found = run_times(book(*jobs, record("a7", RUNNING), record("a8", WAITING)), NOW)
    assert found("a8").examples == (5, 5, 5, 100)  # one that has run for 50 s already


def test_the_number_or_hash_at_the_end_of_a_name_does_not_count() -> None:
    alike = ["fit-7", "fit17", "fit-2024-11-25", "fit-9f1c2ab4e", "fit-550e8400-e29b-41d4-a716-446655440000"]
    examples = [record(name, ended(100), command=name) for name in alike]
    other = [record(f"{name}-x", ended(10), command="other") for name in alike]
    assert run_times(book(*examples, *other, record("fit", WAITING)), NOW)("fit").examples == (100,) * 5


def test_the_scheduler_gets_expected_run_times_where_the_shortest_job_is_first_once_until_another_has_ended() -> None:
    jobs = [record(f"a{i}", ended(seconds)) for i, seconds in enumerate((10, 20, 600))]
    timed = record("timed", WAITING, command="timed", max_runtime_s=7200.0)
    records = book(*jobs, record("a7", WAITING), record("other", WAITING, command="other"), timed)
    waiting = RunTimesOfWaiting(records)
    world = World()
    for order in (Order.FAIR, Order.SHORTEST):
        world.project("team", 1, order=order)
        for name in ("a7", "other", "timed"):
            if order is Order.FAIR:
                world.submit(name, "team")
        found = {event.uid: event.seconds for event in waiting.changes(world.state)}
        assert found == ({} if order is Order.FAIR else {"a7": 20, "other": 20})
    for event in RunTimesOfWaiting(records).changes(world.state):
        world.state.apply(event)
    assert waiting.changes(world.state) == []
    for i in range(4):
        records.put_job(record(f"b{i}", ended(30), command="other"))
    assert {event.uid: event.seconds for event in waiting.changes(world.state)} == {"other": 30}


def test_the_scheduler_gets_a_run_time_again_for_a_job_that_it_gets_again_or_that_is_another() -> None:
    jobs = [record(f"a{i}", ended(20), command=f"c{i}") for i in range(3)]
    records = book(*jobs, record("b", WAITING, command="other"))
    waiting = RunTimesOfWaiting(records)
    for _ in range(2):  # the second as after a change that was refused, from which the state was made again
        world = World()
        world.project("team", 1, order=Order.SHORTEST)
        world.submit("b", "team")
        assert [event.seconds for event in waiting.changes(world.state)] == [20]
    world.state.apply(RunTimeExpected("b", 20))
    records.put_job(record("b", WAITING, command="other", max_runtime_s=7200.0))
    assert [event.seconds for event in waiting.changes(world.state)] == [None]


def test_after_random_changes_of_records_the_run_times_are_those_of_the_records_alone() -> None:
    chance, records, world = Random(3), book(), World()
    waiting = RunTimesOfWaiting(records)
    for project in ("team", "other"):
        world.project(project, 1, order=Order.SHORTEST)
    for name in ("a7", "b9"):
        world.submit(name, "team")
        records.put_job(record(name, WAITING, command="none"))
    for _ in range(300):
        kind, number = chance.choice("abc"), chance.randint(0, 9)
        uid = f"{kind}-{number}"
        if chance.random() < 0.2:
            records.remove_job(uid)
        else:
            status = chance.choice([ended(chance.randint(1, 900)), RUNNING, WAITING])
            one = record(uid, status, command=f"{number}")
            project = "team" if uid not in records.jobs else records.jobs[uid].spec.project
            project = project if chance.random() < 0.9 else "other"
            records.put_job(msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, project=project)))
        changes = waiting.changes(world.state)
        assert changes == RunTimesOfWaiting(book(*records.jobs.values())).changes(world.state)
        for event in changes:
            world.state.apply(event)


def test_a_job_that_is_held_has_no_expected_start_from_then_on() -> None:
    waiting = book(record("train", WAITING))
    note_expected(waiting, {"train": ExpectedStart(earliest=NOW, latest=NOW + 60)}, NOW)
    assert waiting.expected_start("train") is not None
    held = Reason(code=ReasonCode.PROJECT_HELD, message="project team is held")
    waiting.put_job(with_status(waiting.jobs["train"], reason=held))
    assert waiting.expected_start("train") is None
    waiting.put_job(with_status(waiting.jobs["train"], reason=None))
    assert waiting.expected_start("train") is not None


def test_a_name_of_many_digits_is_read_in_no_time() -> None:
    names = ["1" * 60 + "x", "1111-" * 11 + "x", "a1b2" * 15 + "x"]
    found = run_times(book(*(record(f"{name}y{i}", ended(10)) for name in names for i in range(3))), NOW)
    assert found(names[0] + "y0").examples == (10, 10, 10)


def test_two_jobs_are_no_distribution() -> None:
    found = run_times(book(record("a1", ended(5)), record("a2", ended(5)), record("a3", WAITING)), NOW)
    assert found("a3") == UNKNOWN
    assert found("no-such-job") is UNKNOWN


def test_the_steps_that_are_left_are_the_run_time_that_is_left() -> None:
    progress = Progress(step=400, total_steps=1000, step_ms=500.0, at=NOW - 10)
    one = record("a1", msgspec.structs.replace(RUNNING, progress=progress), max_runtime_s=3600.0)
    assert run_times(book(one), NOW)("a1").left(0.5) == 290
    limited = record("a1", RUNNING, max_runtime_s=60.0)
    assert run_times(book(limited), NOW)("a1").left(0.5) == 10
    assert run_times(book(record("a1", RUNNING)), NOW)("a1").left(0.5) == inf


def test_an_estimate_is_replaced_only_by_one_that_differs_materially() -> None:
    one = book(record("a1", WAITING))
    first = ExpectedStart(earliest=NOW + 600, latest=NOW + 1800)
    assert note_expected(one, {"a1": first}, NOW) == ["a1"]
    assert note_expected(one, {"a1": ExpectedStart(earliest=NOW + 610, latest=NOW + 1850)}, NOW + 10) == []
    assert one.expected_starts["a1"] is first
    later = ExpectedStart(earliest=NOW + 600, latest=NOW + 3600)
    assert note_expected(one, {"a1": later}, NOW + 20) == ["a1"]
    assert note_expected(one, {}, NOW + 30) == ["a1"]
    assert one.expected_starts == {}


def test_a_job_that_may_start_at_any_moment_is_not_written_with_each_forecast() -> None:
    one = book(record("a1", WAITING))
    at_once = [note_expected(one, {"a1": ExpectedStart(earliest=at, latest=at)}, at) for at in range(0, 120, 15)]
    assert [changed for changed in at_once if changed] == [["a1"], ["a1"]]  # a minute apart


def test_of_many_changed_estimates_the_soonest_are_recorded_first() -> None:
    one = book(*(record(f"a{number}", WAITING) for number in range(5)))
    found = {f"a{number}": ExpectedStart(earliest=NOW - number, latest=NOW + 900) for number in range(4)}
    assert note_expected(one, found, NOW, 2) == ["a3", "a2"]
    assert note_expected(one, found, NOW, 3) == ["a0", "a1"]
    assert note_expected(one, {uid: found[uid] for uid in ("a1", "a2")}, NOW, 5) == ["a0", "a3"]
    assert one.expected_starts.keys() == {"a1", "a2"}


def test_a_job_that_has_started_has_no_expected_start() -> None:
    one = book(record("a1", WAITING))
    note_expected(one, {"a1": ExpectedStart(earliest=NOW, latest=NOW)}, NOW)
    one.put_job(record("a1", RUNNING))
    assert one.expected_starts == {}


def test_a_waiting_job_shows_when_it_is_expected_to_start(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 2)
    embedded_cluster.submit("first", gpus=2, max_runtime_s=3600.0)
    first = embedded_cluster.wait_for_phase("first", "Running")
    embedded_cluster.submit("second", gpus=2)
    second = embedded_cluster.wait_for("second", lambda job: job.status.expected_start is not None)
    expected, began = second.status.expected_start, first.status.started_at
    assert expected is not None
    assert began is not None
    assert abs(expected.latest - (began + 3600)) < 5
    assert embedded_cluster.job("first").status.expected_start is None
    third = JobSpec(name="third", project="team-a", command=("true",), gpus=2)
    (effect,) = cast("Client", embedded_cluster.client).what_if(Supposition(submit=(third,))).waits
    assert effect.expected_start is None  # the second one has no maximum run time
