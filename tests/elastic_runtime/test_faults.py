"""Bad input and faults around a training: each ends with a message that names the remedy, or changes nothing."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler

import elastic_runtime
from elastic_runtime.errors import CheckpointError, RunError, SettingsError, UsageError
from elastic_runtime.membership import coordinator_client as coordinator_module
from elastic_runtime.membership import generations as generations_module
from elastic_runtime.membership.coordinator_client import FIRST_PAUSE_S, Coordinator, EventOutbox
from elastic_runtime.membership.environment import Environment
from elastic_runtime.membership.generations import FEWEST_FAILURES, Generation, Generations
from elastic_runtime.membership.orders import Order
from elastic_runtime.membership.process_group import Interrupt
from tests import forked
from tests.cluster.conftest import CLOCK
from tests.elastic_runtime.harness import JOB, Cluster
from tests.elastic_runtime.training import Gate, Plan, Points, build, train, trained_alone, worker_main
from tests.forked import context
from tests.membership.test_service import Recorder
from tests.polling import TIMEOUT_S, until
from tests.standalone_coordinator import StandaloneCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Bad input


@pytest.mark.parametrize("options", [{}, {"reduction": "exact", "shards": 2}], ids=["fast", "exact"])
def test_a_worker_that_has_no_sample_in_any_step_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    plan = Plan(epochs=2, samples=9, global_batch=2, options=options)
    alone = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2, step=2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(alone)
        if options:
            assert {final["sha256"] for final in cluster.finals().values()} == {alone["sha256"]}


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(50))


class EndlessBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(range(50), 4, drop_last=False))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Points(50), batch_size=4, sampler=Endless()),
        DataLoader(Points(50), batch_sampler=EndlessBatches()),
    ],
    ids=["sampler", "batch sampler"],
)
def test_a_sampler_without_a_length_is_refused_with_the_remedy(loader: Any) -> None:
    model = nn.Linear(12, 3)
    with pytest.raises(UsageError, match=r"'Endless(Batches)?' has no len\(\)\); a sampler needs __len__"):
        elastic_runtime.init().prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)


class Counter:
    """What a script tracks, with something in it that no other process can have."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def train_with_a_lock(plan: Plan, _index: int, _directory: Path, _gate: Gate | None) -> None:
    job = elastic_runtime.init(global_batch_size=plan.global_batch)
    model, optimizer, scheduler = build(plan)
    job.prepare(model, optimizer, DataLoader(Points(plan.samples), batch_size=4), scheduler)
    job.track(counter=Counter())
    epochs = iter(job.epochs(1))
    next(epochs)


def test_a_joiner_whose_state_cannot_be_pickled_ends_and_names_it_and_the_others_go_on(tmp_path: Path) -> None:
    plan = Plan()
    alone = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        cluster.plan = Plan(body=train_with_a_lock)
        cluster.target(0, 1, 2)
        cluster.processes["w2"].join(TIMEOUT_S)
        assert cluster.processes["w2"].exitcode == 2
        output = (tmp_path / "log-2").read_text()
        assert "StateError: the training state cannot be saved: ['parts']['track:counter']['lock']: cannot" in output
        assert "keep open files, locks and lambdas out of state_dict()" in output
        cluster.plan = plan
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.check_result(alone)


# The directory of the checkpoints


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[Path]:
    """The directory, not writable; for root, to whom permissions do not apply, by a mount, or by /proc."""
    if os.geteuid():
        directory.chmod(0o555)
        yield directory
        directory.chmod(0o755)
        return
    if subprocess.run(["mount", "--bind", directory, directory], check=False, capture_output=True).returncode:
        yield Path("/proc/self/fd")  # a container's root may not mount
        return
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(directory))
    with pytest.raises(CheckpointError, match=f"ELASTIC_CHECKPOINT_DIR '{directory}' cannot be written to .*mount it"):
        elastic_runtime.init()


def test_a_read_only_directory_for_checkpoints_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    with read_only(tmp_path / "checkpoints") as directory:
        refused(directory, monkeypatch)


def test_a_file_system_that_takes_no_file_is_refused_at_once_though_permissions_allow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused(Path("/proc/self/fd"), monkeypatch)


def test_the_check_of_the_directory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "new"))
    elastic_runtime.init()
    assert list((tmp_path / "new").iterdir()) == []


# The clock

JUMPS_H = {10: 12, 20: -12, 30: 0}
"""At which steps both wait, and how far the clock is ahead from there on: half a day, a day back, and right again."""
LAST_PAUSE = 36
SCRIPT = """
import sys, threading, time
from pathlib import Path
from tests.elastic_runtime import training

class Doors:
    def __init__(self, directory):
        self.directory = directory
    def pass_through(self, index, step):
        (self.directory / f"at-{index}").write_text(str(step))
        while step in PAUSES and not ((self.directory / f"open-{step}").exists() and self.nothing_is_written()):
            time.sleep(0.002)
    def nothing_is_written(self):
        return all(thread.name != "elastic-checkpoint" for thread in threading.enumerate())

directory = Path(sys.argv[2])
training.train(training.Plan(options={"checkpoint_every_s": 1e-9}), int(sys.argv[1]), directory, Doors(directory))
"""


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead by the seconds in the file CLOCK_OFFSET_FILE."""
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    (tmp_path / "offset").write_text("0")
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(tmp_path / "offset")}


def checkpoints_of(directory: Path) -> list[dict[str, Any]]:
    """What rank 0 reported of them."""
    found = []
    for report in directory.glob("report-*.jsonl"):
        rows = [json.loads(line) for line in report.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found += [row for row in rows if row["event"] == "checkpoint"]
    return found


@pytest.mark.slow
def test_a_wall_clock_that_jumps_by_hours_disturbs_neither_training_nor_checkpoints(
    tmp_path: Path, clock: dict[str, str]
) -> None:
    alone = trained_alone(train, Plan(), tmp_path / "alone")
    (tmp_path / "token").write_text("secret")
    recorder = Recorder()
    with StandaloneCoordinator(recorder) as coordinator:
        coordinator.call(lambda service: service.open(JOB, "secret"))
        coordinator.call(lambda service: service.set_target(JOB, ["w0", "w1"]))
        workers = [start_beside(coordinator.url(JOB), tmp_path, index, clock) for index in range(2)]
        try:
            jump_at_each_pause(tmp_path)
            for worker in workers:
                output = worker.communicate(timeout=TIMEOUT_S)[0]
                assert worker.returncode == 0, output
                assert "recovering" not in output
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    for index in range(2):
        final = torch.load(tmp_path / f"final-{index}.pt")
        assert final["step"] == alone["step"]
        for name, value in alone["model"].items():
            torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)


def start_beside(url: str, directory: Path, index: int, clock: dict[str, str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **clock,
        "ELASTIC_COORDINATOR": url,
        "ELASTIC_TOKEN_FILE": str(directory / "token"),
        "ELASTIC_WORKER_ID": f"w{index}",
        "ELASTIC_CHECKPOINT_DIR": str(directory / "checkpoints"),
        "ELASTIC_REPORT_FILE": str(directory / f"report-{index}.jsonl"),
    }
    script = SCRIPT.replace("PAUSES", repr((*JUMPS_H, LAST_PAUSE)))
    command = [sys.executable, "-c", script, str(index), str(directory)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def jump_at_each_pause(directory: Path) -> None:
    """While both wait in a step; after it there is a checkpoint by the new time."""
    for step, ahead_h in JUMPS_H.items():
        for index in range(2):
            until(partial(stands_at, directory / f"at-{index}", step), f"worker {index} at step {step}")
        (directory / "offset").write_text(str(ahead_h * 3600))
        now = time.time() + ahead_h * 3600
        (directory / f"open-{step}").touch()
        until(partial(saved_since, directory, step, now), f"a checkpoint after step {step}, {ahead_h} h ahead")
    (directory / f"open-{LAST_PAUSE}").touch()


def saved_since(directory: Path, step: int, now: float) -> bool:
    return any(row["step"] > step and abs(row["at"] - now) < 3600 for row in checkpoints_of(directory))


def stands_at(file: Path, step: int) -> bool:
    return file.exists() and file.read_text() == str(step)


# The coordinator


class Doorman:
    """Where the coordinator is expected: closes each connection, or first gives one order."""

    ORDER = b'{"order": "Stay", "generation": 0}\n'
    ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(ORDER), ORDER)

    def __init__(self) -> None:
        self.answers = False
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1/membership/job"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                if self.answers:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """And wait until the other side has read it: what is unread at the end would take it back."""
        with contextlib.suppress(OSError):
            connection.sendall(self.ANSWER)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(TIMEOUT_S)


def test_a_failed_send_on_an_old_connection_leaves_the_new_one_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()[:2]
        environment = Environment(worker_id="w0", coordinator=f"http://{host}:{port}")
        worker = Coordinator(environment, lambda _: None, list, print)
        old, new = http.client.HTTPConnection(host, port), http.client.HTTPConnection(host, port)
        for connection in (old, new):
            connection.connect()
        worker._connection = new
        worker._drop(old)
        assert worker._connection is new
        assert [each.sock is None for each in (old, new)] == [True, False]
        worker._drop()
        assert [each.sock is None for each in (old, new)] == [True, True]


def interrupt_in_a_signal_handler(_arguments: list[str]) -> None:
    """Clear an interrupt over and over, while a signal's handler in the same thread sets it."""
    interrupt = Interrupt()
    signal.signal(signal.SIGALRM, lambda *_: interrupt.set())
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    for _ in range(200_000):
        interrupt.clear()
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_signal_handler_sets_an_interrupt_that_the_loop_is_clearing() -> None:
    assert forked.run(interrupt_in_a_signal_handler, timeout=TIMEOUT_S).returncode == 0


@pytest.mark.slow
def test_attempts_to_reconnect_become_rarer_up_to_a_limit_and_begin_anew_after_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest_s = 8 * FIRST_PAUSE_S
    monkeypatch.setattr(coordinator_module, "LONGEST_PAUSE_S", longest_s)
    attempts: list[float] = []
    connect = Environment.connect

    def noted(environment: Environment, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """Note the time here, not at the other side, whose thread may accept a connection late."""
        attempts.append(time.monotonic())
        return connect(environment, timeout_s)

    monkeypatch.setattr(Environment, "connect", noted)
    with Doorman() as doorman:
        environment = Environment(worker_id="w0", coordinator=doorman.url)
        worker = Coordinator(environment, lambda _: None, lambda: [{"event": "WorkerJoined", "worker": "w0"}], print)
        worker.start()
        try:
            until(lambda: len(attempts) > 13, "attempts whose pauses, doubled without end, would take minutes")
            pauses = [min(FIRST_PAUSE_S * 2**i, longest_s) for i in range(13)]
            waited = [later - at for at, later in itertools.pairwise(attempts)][:13]
            assert all(gap >= pause for gap, pause in zip(waited, pauses, strict=True)), waited
            doorman.answers = True
            before = len(attempts)
            until(
                lambda: any(later - at < longest_s for at, later in itertools.pairwise(attempts[before:])),
                "a shorter pause after an answer",
            )
        finally:
            worker.close(timeout_s=0.1)
    until(lambda: not worker._reader.is_alive() and not worker._writer.is_alive(), "the end of its threads")


def test_a_second_process_with_the_same_worker_id_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    plan = Plan()
    alone = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        environment = {
            "ELASTIC_COORDINATOR": cluster.coordinator.url(JOB),
            "ELASTIC_TOKEN_FILE": str(tmp_path / "token"),
            "ELASTIC_WORKER_ID": "w0",
        }
        double = context.Process(target=worker_main, args=(plan, 9, str(tmp_path), environment, cluster.gate))
        double.start()
        double.join(TIMEOUT_S)
        assert double.exitcode == 1, cluster.logs()
        output = (tmp_path / "log-9").read_text()
        assert "CoordinatorError: worker 'w0': the coordinator answered 409: another process runs as worker" in output
        assert "a worker's id is used once" in output
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        assert len(cluster.commits[-1].members) == 2
        assert not cluster.kills
        cluster.check_result(alone)


@pytest.fixture
def generations() -> Generations:
    """A worker in generation 5, ready for generation 7."""

    def no_store(number: int) -> Any:
        raise AssertionError(f"generation {number} is not to be built")

    made = Generations("w0", no_store, lambda *_, **__: None, lambda *_, **__: None, lambda: "gloo")
    made.adopt(Generation(5, ("w0", "w1"), None))
    made.on_order(Order("Propose", 7, ("w1", "w2"), base=5))
    return made


@pytest.mark.parametrize(
    "late",
    [
        Order("Recover", 4, ("w0",)),
        Order("Propose", 4, ("w0", "w3"), base=3),
        Order("Propose", 6, ("w0", "w3"), base=5),
        Order("Recover", 6, ("w0",)),
        Order("Propose", 4, (), base=3),
    ],
)
def test_an_order_of_an_older_generation_changes_nothing(generations: Generations, late: Order) -> None:
    voted = generations.vote()
    assert voted is not None
    assert voted.number == 7
    generations.on_order(late)
    assert generations.vote() is voted
    assert not generations.interrupt.is_set
    assert generations.adopted is not None
    assert generations.adopted.number == 5


def test_a_worker_that_waits_for_a_generation_does_not_enter_an_older_one(generations: Generations) -> None:
    generations.on_order(Order("Recover", 8, ("w1",)))
    assert generations.interrupt.is_set
    generations.on_order(Order("Recover", 6, ("w2",)))
    found = generations.wait_for_next(after=5)
    assert found is not None
    assert found.number == 8


class Unbuildable:
    """A worker before its first generation, whose groups cannot be built; `asked`: for which one was tried to."""

    def __init__(self, fails: Callable[[], Any]) -> None:
        self.asked: list[int] = []
        self.outbox = EventOutbox("w0", lambda: None)
        self._fails = fails
        send, publish = self.outbox.send, self.outbox.publish
        self.generations = Generations("w0", self._store, send, publish, lambda: "gloo")

    def _store(self, number: int) -> Any:
        self.asked.append(number)
        return self._fails()

    def reported(self) -> list[int]:
        """The generations that are reported as not built on each new connection."""
        return [event["generation"] for event in self.outbox.published() if event["event"] == "PreparationFailed"]

    def has_reported(self, number: int) -> bool:
        """Return whether this generation is the newest of them."""
        return self.reported() == [number]


def refuse() -> Any:
    raise ConnectionRefusedError("nobody listens there")


def test_a_generation_that_could_not_be_built_is_reported_on_each_new_connection_and_not_tried_again() -> None:
    worker = Unbuildable(refuse)
    worker.generations.on_order(Order("Recover", 1, ("w0", "w1")))
    until(worker.reported, "the report")
    worker.generations.on_order(Order("Recover", 1, ("w0", "w1")))  # as after each reconnection
    worker.generations.on_order(Order("Recover", 2, ("w0", "w1")))
    until(lambda: worker.reported() == [2], "the report of the next one")
    assert worker.asked == [1, 2]


def test_workers_that_cannot_connect_say_so_and_end_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy between them that resets connections, for example: they tried again silently, for good."""
    monkeypatch.setattr(generations_module, "FAILING_S", 0.0)
    worker = Unbuildable(refuse)
    for number in range(1, FEWEST_FAILURES + 1):
        worker.generations.on_order(Order("Recover", number, ("w0", "w1")))
        until(partial(worker.has_reported, number), "the report")
    with pytest.raises(RunError, match=r"could not connect to each other .*5 attempts.*nobody listens there"):
        worker.generations.wait_for_next(after=0)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message.split()[1] for message in warnings] == ["1", "2", "4"]


def test_a_worker_that_cannot_join_those_that_train_goes_on_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations_module, "FAILING_S", 0.0)
    worker = Unbuildable(refuse)
    for number in range(1, FEWEST_FAILURES + 3):
        worker.generations.on_order(Order("Propose", number, ("w0", "w1"), base=1))
        until(partial(worker.has_reported, number), "the report")
    worker.generations.on_order(Order("Release", 0, why="the test ends"))
    assert worker.generations.wait_for_next(after=0) is None


def test_a_generation_whose_members_cannot_be_connected_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations_module, "BUILD_S", 0.01)
    reached = threading.Event()
    worker = Unbuildable(reached.wait)
    worker.generations.on_order(Order("Recover", 1, ("w0", "w1")))
    until(worker.reported, "the report")
    reached.set()


def test_an_order_that_comes_again_does_not_interrupt_the_entry_that_it_demands(generations: Generations) -> None:
    entered = Order("Recover", 8, ("w1",))
    generations.on_order(entered)
    generations.wait_for_next(after=5)
    generations.on_order(entered)
    assert not generations.interrupt.is_set
    generations.on_order(Order("Recover", 9, ("w1",)))
    assert generations.interrupt.is_set


@pytest.mark.slow
def test_training_goes_on_while_the_coordinator_answers_seconds_late_and_the_resize_comes_in_the_end(
    tmp_path: Path,
) -> None:
    plan = Plan()
    alone = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan, relayed=True) as cluster:
        assert cluster.relay is not None
        cluster.start(0, 1)
        cluster.relay.slow(("w0", "w1"), 1.0)
        cluster.target(0, 1, 2)
        cluster.hold_at(20)
        cluster.wait_until_at(20, 0, 1)
        assert {commit.generation for commit in cluster.commits} == {1}  # for the next one a dozen answers are needed
        cluster.relay.slow(("w0", "w1"), 0.1)  # or it would take half a minute
        cluster.wait_until_prepared(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        assert [len(commit.members) for commit in cluster.commits if commit.complete][-1] == 3
        assert not cluster.kills
        cluster.check_result(alone)


# The environment


@pytest.fixture
def worker_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a worker whose coordinator is unavailable."""
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("ELASTIC_COORDINATOR", "http://127.0.0.1:9/v1/membership/job")
    monkeypatch.setenv("ELASTIC_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("ELASTIC_WORKER_ID", "w0")
    return monkeypatch


@pytest.mark.parametrize(
    "address",
    [
        "coordinator:8080",
        "ftp://host/x",
        "http://",
        "http://host:port/x",
        "http://[::1",
        "http://host/a b",
        "http://h:99999",
    ],
)
def test_an_address_that_is_none_is_refused_at_once(worker_env: pytest.MonkeyPatch, address: str) -> None:
    worker_env.setenv("ELASTIC_COORDINATOR", address)
    with pytest.raises(SettingsError) as refusal:
        elastic_runtime.init()
    assert f"ELASTIC_COORDINATOR is {address!r}, but it must be http(s)://HOST:PORT/PATH" in str(refusal.value)


def test_a_token_file_that_is_not_there_is_refused_at_once(worker_env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").unlink()
    (tmp_path / "address").write_text("http://127.0.0.1:9/v1/membership/job")
    for address in ("http://127.0.0.1:9/v1/membership/job", f"@{tmp_path}/address"):
        worker_env.setenv("ELASTIC_COORDINATOR", address)
        with pytest.raises(
            SettingsError, match=f"ELASTIC_TOKEN_FILE names the file '{tmp_path}/token', which cannot be"
        ):
            elastic_runtime.init()


def test_a_worker_may_start_before_its_coordinators_address_and_token_are_there(
    worker_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker_env.setenv("ELASTIC_COORDINATOR", f"@{tmp_path}/address")
    (tmp_path / "token").unlink()
    environment = Environment.read()
    ordered = threading.Event()
    worker = Coordinator(
        environment, lambda _: ordered.set(), lambda: [{"event": "WorkerJoined", "worker": "w0"}], print
    )
    worker.start()
    with StandaloneCoordinator(Recorder()) as coordinator:
        coordinator.call(lambda service: service.open(JOB, "secret"))
        coordinator.call(lambda service: service.set_target(JOB, ["w0"]))
        (tmp_path / "token").write_text("secret")
        (tmp_path / "address").write_text(coordinator.url(JOB))
        until(ordered.is_set, "an order")
        worker.close()


def test_a_worker_that_was_accepted_outlives_a_change_of_its_token(
    worker_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with StandaloneCoordinator(Recorder()) as coordinator:
        coordinator.call(lambda service: service.open(JOB, "secret"))
        (tmp_path / "token").write_text("secret")
        worker_env.setenv("ELASTIC_COORDINATOR", coordinator.url(JOB))
        ordered, refused = threading.Event(), threading.Event()
        joined = [{"event": "WorkerJoined", "worker": "w0"}]
        worker = Coordinator(Environment.read(), lambda _: ordered.set(), lambda: joined, lambda _: refused.set())
        worker.start()
        until(ordered.is_set, "an order")
        coordinator.call(lambda service: service.open(JOB, "another"))  # as after the loss of the key
        until(lambda: "401" in worker._away.why, "a refusal")
        ordered.clear()
        (tmp_path / "token").write_text("another")  # a kubelet follows the Secret
        until(ordered.is_set, "an order")
        assert not refused.is_set()
        worker.close()


@pytest.mark.parametrize(
    ("files", "output"),
    [
        ({}, "ELASTIC_COORDINATOR names the file '{}/address', which cannot be read: No such file"),
        ({"address": "soon"}, "ELASTIC_COORDINATOR is '@{}/address', a file that holds 'soon', but it must be http"),
    ],
    ids=["no file", "no address in it"],
)
def test_what_keeps_a_worker_waiting_is_said_with_the_variables_name(
    worker_env: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: dict[str, str], output: str
) -> None:
    worker_env.setattr(coordinator_module, "WARN_AFTER_S", 0.1)
    worker_env.setenv("ELASTIC_COORDINATOR", f"@{tmp_path}/address")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    worker = Coordinator(Environment.read(), lambda _: None, list, print)
    worker.start()
    try:
        until(lambda: caplog.records, "a warning")
        assert output.format(tmp_path) in caplog.records[0].getMessage()
    finally:
        worker.close(timeout_s=0.1)
    until(lambda: not worker._reader.is_alive() and not worker._writer.is_alive(), "the end of its threads")
