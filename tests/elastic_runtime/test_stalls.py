"""A worker that does not come to the reduction is ended, and the others continue; one that is slow is not."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from elastic_runtime.errors import SettingsError
from elastic_runtime.membership.environment import Environment
from elastic_runtime.membership.process_group import COLLECTIVE_TIMEOUT
from elastic_runtime.process.stall_watch import BOUND_S, LATE_S, WARM_UP, StallWatch
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Gate, Plan, Points, train, trained_alone

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 10.0
STUCK_AT = 8


@dataclass
class Others:
    """Of `Group` what a watch uses."""

    waiting_in: set[int] = field(default_factory=set)

    def report_wait(self, step: int) -> None:
        self.waiting_in.add(step)

    def others_wait(self, step: int) -> bool:
        return step in self.waiting_in


@dataclass
class Waits:
    waiting_since: float | None = None
    waited_until: float = 0.0


class Watched:
    """A watch of a loop in its fourth step, and what it has done."""

    def __init__(self, bound_s: float | None = LIMIT_S) -> None:
        self.others, self.waits, self.ended = Others(), Waits(), 0
        self.watch = StallWatch(bound_s, self.waits, self._end)
        self.watch._thread = threading.current_thread()  # only `look` looks
        for step in range(WARM_UP):
            self.watch.begin(step, self.others)
            self.watch.reduced()
        self.watch.begin(WARM_UP, self.others)
        self.began = time.monotonic()

    def _end(self) -> None:
        self.ended += 1

    def look(self, after_s: float) -> bool:
        self.watch.look(self.began + after_s)
        return self.ended > 0


def test_a_worker_ends_if_it_computes_longer_than_the_bound_and_others_wait_in_its_step() -> None:
    watched = Watched()
    watched.others.report_wait(WARM_UP)
    assert [watched.look(after_s) for after_s in (1.0, LIMIT_S - 1, LIMIT_S + 1)] == [False, False, True]


def test_a_slow_worker_for_which_nobody_waits_continues() -> None:
    watched = Watched()
    watched.others.report_wait(WARM_UP - 1)
    assert not watched.look(100 * LIMIT_S)


def test_a_worker_that_waits_reports_it_and_continues_and_its_time_is_counted_from_there() -> None:
    watched = Watched()
    watched.waits.waiting_since = watched.began + 1
    assert not watched.look(LIMIT_S)
    assert not watched.others.waiting_in
    assert not watched.look(LIMIT_S + 2)
    assert watched.others.waiting_in == {WARM_UP}
    watched.waits.waiting_since, watched.waits.waited_until = None, watched.began + 3 * LIMIT_S
    assert not watched.look(3.9 * LIMIT_S)
    assert watched.look(4.1 * LIMIT_S)


@pytest.mark.parametrize("event", ["reduced", "pause", "restart"])
def test_what_follows_a_reduction_or_is_beside_the_training_may_take_any_time(event: str) -> None:
    watched = Watched()
    watched.others.report_wait(WARM_UP)
    getattr(watched.watch, event)()
    assert not watched.look(100 * LIMIT_S)


def test_first_steps_and_a_watch_that_is_off_end_nothing() -> None:
    watched = Watched()
    watched.watch.restart()
    off = Watched(0.0)
    for each in (watched, off):
        each.others.report_wait(WARM_UP)
        each.watch.begin(WARM_UP, each.others)
        assert not each.look(1e6)


def test_a_place_in_the_code_is_logged_once_before_a_worker_ends(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for after_s in (0.3 * LIMIT_S, 0.5 * LIMIT_S, 2 * LIMIT_S, 3 * LIMIT_S):
        assert not watched.look(after_s)
        assert len(caplog.messages) == (after_s > 0.3 * LIMIT_S)
    assert "this worker computes" in caplog.text
    assert "test_stalls.py" in caplog.text


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """As where a machine is suspended, or moved to another host: all its processes stop, whatever they do."""
    computes, waits = Watched(), Watched()
    computes.others.report_wait(WARM_UP)
    waits.waits.waiting_since = waits.began
    resumed_s = 100 * LIMIT_S
    for each in (waits, computes):
        each.watch.slept(resumed_s, each.began + resumed_s)
        each.watch.slept(LATE_S, each.began + resumed_s + LIMIT_S)  # in time: nothing is forgotten
        assert not each.look(resumed_s + LIMIT_S - 1)
    assert not waits.others.waiting_in
    assert not waits.look(resumed_s + LIMIT_S + 1)
    assert waits.others.waiting_in == {WARM_UP}
    assert computes.look(resumed_s + LIMIT_S + 1)


def test_a_worker_that_comes_to_the_reduction_while_the_coordinator_is_asked_continues() -> None:
    watched = Watched()

    def others_wait(_: int) -> bool:
        watched.waits.waiting_since = watched.began + 2 * LIMIT_S
        return True

    watched.others.others_wait = others_wait  # type: ignore[method-assign, assignment]
    assert not watched.look(2 * LIMIT_S)


def test_a_model_may_be_saved_for_twenty_minutes_and_a_stall_ends_before_the_collectives_do() -> None:
    assert 20 * 60 < StallWatch(None, Waits()).bound_s == BOUND_S < COLLECTIVE_TIMEOUT.total_seconds()


@pytest.mark.parametrize(("value", "expected"), [("auto", None), ("off", 0.0), ("90", 90.0)])
def test_the_bound_is_the_users_to_set(value: str, expected: float | None) -> None:
    assert Environment.read({"ELASTIC_STALL_S": value}).stall_s == expected


@pytest.mark.parametrize("value", ["-1", "0", "soon"])
def test_a_bound_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="ELASTIC_STALL_S"):
        Environment.read({"ELASTIC_STALL_S": value})


def stuck(plan: Plan, index: int, directory: Path, gate: Gate | None, *, place: tuple[type, str]) -> None:
    """In the second worker a call of this method never ends."""
    owner, name = place
    original = getattr(owner, name)

    def forever(*arguments: Any) -> Any:
        while gate is not None and gate.at[1] >= STUCK_AT:
            pass
        return original(*arguments)

    if index == 1:
        setattr(owner, name, forever)
    train(plan, index, directory, gate)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param((nn.Tanh, "forward"), id="forward"),
        pytest.param((Points, "__getitem__"), id="loader", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_stuck_is_ended_with_its_stack_and_the_others_repeat_the_step(
    tmp_path: Path, place: tuple[type, str]
) -> None:
    plan = replace(Plan(), body=partial(stuck, place=place))
    reference = trained_alone(train, Plan(), tmp_path / "alone")
    with Cluster(tmp_path, plan, environment={"ELASTIC_STALL_S": "3"}) as cluster:
        cluster.start(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_size(2)
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)
        log = (tmp_path / "log-1").read_text()
        assert "this worker does not come to the reduction" in log
        assert "in forever" in log
        assert "this worker waits for other workers" in cluster.logs()
