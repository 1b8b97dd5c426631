"""A worker that is stopped by a signal while others wait is killed soon; any other one is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_runtime.errors import SettingsError
from elastic_runtime.membership.environment import Environment
from elastic_runtime.process import stopped_peers
from elastic_runtime.process.stopped_peers import (
    BOUND_S,
    LATE_S,
    LEAST_S,
    PAUSE_S,
    WAITED_S,
    Process,
    StoppedPeers,
    _switches,
    state_and_start,
)
from tests.elastic_runtime.harness import JOB, LIMITS, Cluster
from tests.elastic_runtime.training import Plan, train, trained_alone
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Others:
    """Of `Group` what a watch uses."""

    left: dict[int, str]
    own: list[str] = field(default_factory=list)

    def leave_process(self, text: str) -> None:
        self.own.append(text)

    def processes(self) -> dict[int, str]:
        return self.left


@dataclass
class Waits:
    waiting_since: float | None = 0.0
    waited_until: float = 0.0


class Watched:
    """A watch of one real process, by a clock of the test's."""

    def __init__(self, process: Process, bound_s: float | None = None, step_s: float | None = None) -> None:
        self.waits, self.killed = Waits(), list[Process]()
        self.watch = StoppedPeers(bound_s, self.waits, lambda: step_s, self.killed.append)
        self.watch._peers = Others({1: str(process)})  # only `look` looks

    def look_until(self, end_s: float, begin_s: float = 0.0) -> bool:
        """Look as the thread does; return whether the process was killed."""
        at = begin_s
        while at < end_s:
            self.watch.look(at)
            at += LATE_S / 2
        return bool(self.killed)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def identity(pid: int) -> Process:
    own = Process.own()
    assert own is not None
    return Process(own.space, pid, state_and_start(pid)[1])


def stop(process: subprocess.Popen[bytes]) -> Process:
    found = identity(process.pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: found.stopped, "a stopped process")
    return found


def test_a_stopped_process_is_killed_after_the_bound_and_one_that_continues_is_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    watched = Watched(stop(sleeper))
    assert not watched.look_until(WAITED_S + BOUND_S - LATE_S)
    sleeper.send_signal(signal.SIGCONT)
    until(lambda: not identity(sleeper.pid).stopped, "a process that continues")
    assert not watched.look_until(100, WAITED_S + BOUND_S - LATE_S)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: identity(sleeper.pid).stopped, "a stopped process")
    assert watched.look_until(200, 100)


@pytest.mark.parametrize(("step_s", "expected"), [(None, BOUND_S), (0.01, LEAST_S), (0.5, 1.0), (60.0, BOUND_S)])
def test_the_bound_is_a_few_steps(step_s: float | None, expected: float) -> None:
    assert StoppedPeers(None, Waits(), lambda: step_s).bound_s == expected
    assert StoppedPeers(7.0, Waits(), lambda: step_s).bound_s == 7.0


def test_a_process_that_is_stopped_at_each_look_and_runs_between_two_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """As one whose CPU time is limited by stopping it many times a second."""
    found, watched, at = stop(sleeper), Watched(identity(sleeper.pid), step_s=0.01), WAITED_S
    for _ in range(20):
        watched.watch.look(at)
        before = found.stop()
        sleeper.send_signal(signal.SIGCONT)
        until(lambda: not found.stopped, "a process that continues")
        stop(sleeper)
        assert before != found.stop()
        at += LATE_S / 2
    assert not watched.killed
    assert watched.look_until(at + 3 * LATE_S, at)


def test_a_stopped_process_for_which_nobody_waits_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(stop(sleeper))
    watched.waits.waiting_since = None
    assert not watched.look_until(100)


def test_time_in_which_this_process_did_not_run_does_not_count(sleeper: subprocess.Popen[bytes]) -> None:
    """As where a whole job is stopped and continued: its workers continue one after the other."""
    watched = Watched(stop(sleeper))
    assert not watched.look_until(WAITED_S + BOUND_S - LATE_S)
    assert not watched.look_until(1000 + BOUND_S, 1000)


@pytest.mark.parametrize("pause_s", [0.45, 0.9, 5.0])
def test_a_short_stop_of_the_whole_job_is_not_one_of_a_peer(sleeper: subprocess.Popen[bytes], pause_s: float) -> None:
    """The peer was stopped first, and this process continues first."""
    watched, begin_s = Watched(stop(sleeper), step_s=0.01), 100.0
    for at in (begin_s, begin_s + PAUSE_S, begin_s + 2 * PAUSE_S, begin_s + 2 * PAUSE_S + pause_s):
        watched.watch.look(at)
    assert not watched.killed


def test_stops_that_cannot_be_told_apart_are_left_to_the_coordinator(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system does not count how often a process has run."""
    process = stop(sleeper)
    monkeypatch.setattr(stopped_peers, "_switches", lambda _status: _switches("Name: sleep\nState: T (stopped)\n"))
    assert not Watched(process).look_until(100)


def test_a_process_elsewhere_or_another_one_with_its_number_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    process = stop(sleeper)
    for other in (process._replace(space="another/pid:[1]"), process._replace(started=process.started + 1)):
        assert not Watched(other).look_until(100)
        if other.space == process.space:
            other.kill()
    assert process.stopped
    process.kill()
    assert sleeper.wait() == -signal.SIGKILL


def test_a_busy_process_and_one_that_a_debugger_holds_are_left_alone() -> None:
    """The debugger is this test: it traces a child, which stops for it."""
    held = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)"
    for program in ("while True: pass", held):
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            found, state = identity(process.pid), "t" if program == held else "R"
            until(lambda: state_and_start(process.pid)[0] == state, f"state {state}")  # noqa: B023
            assert not Watched(found).look_until(100)
            process.kill()


def test_nothing_is_watched_where_proc_is_that_of_another_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host's that is mounted in a container: process 1 there is not the one that a signal would reach."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert Process.own() is None


def test_a_process_that_cannot_be_killed_is_not_reported_as_killed(
    sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_process: Process) -> None:
        raise PermissionError

    watched = Watched(stop(sleeper))
    watched.watch._kill = refused
    with pytest.raises(PermissionError):
        watched.look_until(100)
    assert not caplog.records


def test_each_worker_leaves_its_process_once_to_new_peers() -> None:
    watch, others = StoppedPeers(None, Waits(), lambda: None), Others({})
    watch._peers = others
    watch.leave_process()
    watch.leave_process()
    assert [Process.parse(text) for text in others.own] == [identity(os.getpid())]


def test_nothing_is_watched_where_that_is_off() -> None:
    watch = StoppedPeers(0.0, Waits(), lambda: None)
    watch.watch(Others({}))
    assert watch._thread is None


@pytest.mark.parametrize(("value", "expected"), [("auto", None), ("off", 0.0), ("5", 5.0)])
def test_the_bound_is_the_users_to_set(value: str, expected: float | None) -> None:
    assert Environment.read({"ELASTIC_STOPPED_S": value}).stopped_s == expected
    with pytest.raises(SettingsError, match="ELASTIC_STOPPED_S"):
        Environment.read({"ELASTIC_STOPPED_S": "-1"})


def all_have_left_their_process(cluster: Cluster, size: int) -> bool:
    def asked(service: Any) -> bool:
        newest = service.machine(JOB).generation
        space = service._jobs[JOB].store.space(newest, newest)
        return bool(space.check([f"process/{rank}" for rank in range(size)]))

    return bool(cluster.coordinator.call(asked))


def test_a_training_continues_without_a_worker_that_is_stopped(tmp_path: Path) -> None:
    """Its silence would be noticed after ten minutes."""
    plan, patient = Plan(), replace(LIMITS, silence_s=600.0, unheard_s=600.0, isolated_s=600.0)
    reference = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan, limits=patient) as cluster:
        cluster.start(0, 1, 2)
        until(lambda: all_have_left_their_process(cluster, 3), "what the workers leave for each other")
        cluster.kill("w1", signal.SIGSTOP)
        cluster.let_go()
        cluster.wait_for_size(2)
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)
        assert "had been stopped by a signal" in cluster.logs()
