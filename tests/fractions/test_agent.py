"""The agent with real processes on simulated devices: they allocate, listen, ignore, fork and are ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_runtime.process.simulated_memory import SimulatedDevice, SimulatedOutOfMemoryError, create_device
from kfp_gpuquota.fractions import Claim, Policy, Process, Round
from kfp_gpuquota.fractions.agent import Agent, Share, what_it_can_do
from kfp_gpuquota.fractions.devices import SimulatedMemory
from kfp_gpuquota.fractions.processes import Processes, worker_of
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOTAL = 16_000
HOG = Path(__file__).with_name("hog.py")


@dataclass
class Hog:
    """A real process that follows its limit."""

    name: str
    process: subprocess.Popen[str]

    def do(self, command: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None


@dataclass
class Node:
    """One simulated device, an agent, workloads."""

    directory: Path
    policy: Policy = field(default_factory=lambda: Policy(killer=True, term_s=0.5))
    hogs: dict[str, Hog] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    agent: Agent = field(init=False)

    def __post_init__(self) -> None:
        create_device(self.directory / "0", TOTAL)
        self.restart()

    def restart(self) -> None:
        if hasattr(self, "agent"):
            self.agent.close()
        self.agent = Agent(SimulatedMemory({"0": self.directory / "0"}), worker_of, self.policy)

    def claim(self, name: str, request: float, limit: float, *, running: bool = True) -> None:
        (self.directory / name).mkdir(exist_ok=True)
        self.claims[name] = Claim(
            workload=name,
            device="0",
            request_mib=int(request * TOTAL),
            limit_mib=int(limit * TOTAL),
            since=time.time(),
            running=running,
        )

    def start(self, name: str, request: float, limit: float) -> Hog:
        self.claim(name, request, limit)
        process = subprocess.Popen(
            [sys.executable, HOG, str(self.directory / "0")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"ELASTIC_WORKER_ID": name, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.hogs[name] = Hog(name, process)
        return self.hogs[name]

    def round(self) -> Round:
        shares = [Share((claim,), self.directory / name) for name, claim in self.claims.items()]
        return self.agent.round(shares, time.monotonic())

    def until(self, holds: Callable[[Round], bool]) -> None:
        """Rounds until it holds."""
        until(lambda: holds(self.round()), self.round)

    def used(self, name: str) -> int:
        return next(row.used_mib for row in self.round().rows if row.workload == name)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.agent.close()
    for hog in made.hogs.values():
        hog.process.kill()
        hog.process.communicate()


def test_an_allocation_fails_when_the_device_is_full_and_the_room_of_the_dead_is_free(node: Node) -> None:
    first, second = node.start("first", 0.5, 1), node.start("second", 0.5, 1)
    assert first.do("take 12000") == "12000"
    assert second.do("take 5000") == "full"
    first.process.kill()
    first.process.wait()
    assert second.do("take 5000") == "5000"
    assert node.used("second") == 5000


def test_a_listener_uses_its_limit_and_is_back_at_its_request_when_an_owner_starts(node: Node) -> None:
    trainer = node.start("trainer", 0.25, 0.8)
    trainer.do(f"listen {node.directory / 'trainer'}")
    node.until(lambda _: node.used("trainer") == int(0.8 * TOTAL))
    node.claim("owner", 0.75, 0.75, running=False)
    node.until(lambda done: "owner" in done.ready)
    assert node.used("trainer") == int(0.25 * TOTAL)
    assert not trainer.ended


def test_who_does_not_listen_is_ended_and_the_owner_starts(node: Node) -> None:
    deaf = node.start("deaf", 0.25, 0.8)
    deaf.do(f"take {int(0.8 * TOTAL)}")
    node.claim("owner", 0.75, 0.75, running=False)
    node.until(lambda done: "owner" in done.ready)
    assert deaf.process.wait() == -signal.SIGTERM


def test_who_ignores_sigterm_is_killed(node: Node) -> None:
    deaf = node.start("deaf", 0.25, 0.8)
    deaf.do(f"take {int(0.8 * TOTAL)}")
    deaf.do("deaf")
    node.claim("owner", 0.75, 0.75, running=False)
    node.until(lambda done: "owner" in done.ready)
    assert deaf.process.wait() == -signal.SIGKILL


def test_a_child_with_an_empty_environment_counts_as_its_parents(node: Node) -> None:
    parent = node.start("parent", 0.25, 0.5)
    parent.do("take 1000")
    parent.do("fork 2000")
    node.until(lambda _: node.used("parent") == 3000)
    assert not node.round().kills


def test_an_agent_that_starts_again_ends_nobody_and_knows_everything(node: Node) -> None:
    trainer, quiet = node.start("trainer", 0.25, 0.5), node.start("quiet", 0.5, 0.5)
    quiet.do(f"take {int(0.5 * TOTAL)}")
    trainer.do(f"listen {node.directory / 'trainer'}")
    node.until(lambda _: node.used("trainer") == int(0.5 * TOTAL))
    before = node.round().rows
    for _ in range(5):
        node.restart()
        again = node.round()
        assert again.rows == before
        assert not again.kills
    assert not trainer.ended
    assert not quiet.ended


def test_a_stale_entry_of_a_reused_process_number_counts_nothing_and_ends_nobody(node: Node) -> None:
    quiet = node.start("quiet", 0.1, 0.2)
    quiet.do("take 100")
    (node.directory / "0" / "processes" / f"{quiet.process.pid}-1").write_text("15000")
    for _ in range(3):
        assert not node.round().kills
    assert node.used("quiet") == 100


def test_what_the_kernel_refuses_is_told_as_refused(node: Node) -> None:
    may_end = os.geteuid() != 0  # without root no other user is available, and the process may be ended
    deaf = node.start("deaf", 0.25, 0.5)
    deaf.do("take 8500")
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(node.directory / "0", folder / "0")
        folder.chmod(0o755)
        output = as_nobody(lambda: [kill.refused for kill in round_of(folder, node.claims["deaf"]).kills])
    finally:
        shutil.rmtree(folder)
    assert output == repr([not may_end])
    assert may_end or not deaf.ended


def round_of(folder: Path, claim: Claim) -> Round:
    """Run one round of an agent with a given map from processes to workloads."""
    agent = Agent(SimulatedMemory({"0": folder / "0"}), lambda _: claim.workload, Policy(killer=True))
    return agent.round([Share((claim,), folder)], time.monotonic())


def as_nobody(act: Callable[[], object]) -> str:
    """What it returns, in a process of a user without any right, where root may become one."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            os.write(writing, repr(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def test_a_process_that_was_reborn_under_the_same_number_is_not_signalled(node: Node) -> None:
    quiet = node.start("quiet", 0.1, 0.2)
    quiet.do("take 100")
    known = Processes(worker_of)
    now = known.get(quiet.process.pid)
    assert now
    assert not known.end(Process(now.pid, now.start - 1), force=True)
    assert not quiet.ended
    assert known.end(now, force=True)
    quiet.process.wait()
    known.refresh()
    assert known.get(now.pid) is None
    known.close()


def test_a_workload_that_writes_garbage_does_not_listen(node: Node) -> None:
    deaf = node.start("deaf", 0.25, 0.8)
    (node.directory / "deaf" / "usage.json").write_text('{"follows_mib": "all of it"')
    deaf.do("take 8000")
    assert not node.round().limits


def test_memory_of_a_process_whose_workload_was_taken_away_is_not_lent_while_it_lives(node: Node) -> None:
    removed = node.start("removed", 0.5, 0.5)
    removed.do("take 8000")
    trainer = node.start("trainer", 0.25, 1)
    trainer.do(f"listen {node.directory / 'trainer'}")
    node.until(lambda _: node.used("trainer") == TOTAL - 8000)
    del node.claims["removed"]  # its pod's object is deleted by force: the process still runs
    for _ in range(3):
        assert node.round().limits["trainer", "0"] == TOTAL - 8000
    removed.process.kill()
    removed.process.wait()
    node.until(lambda _: node.used("trainer") == TOTAL)


def test_a_workload_that_says_it_follows_more_than_its_limit_keeps_nobody_out(node: Node) -> None:
    node.start("liar", 0.25, 0.5)
    (node.directory / "liar" / "usage.json").write_text('{"follows_mib": 1000000}')
    (node.directory / "liar" / "limit.json").write_text('{"limit_mib": 1000000}')
    node.claim("owner", 0.5, 0.5, running=False)
    assert "owner" in node.round().ready


def test_the_agent_says_at_start_what_it_can_do() -> None:
    assert "ends no process" in what_it_can_do(Policy())
    assert "ends processes" in what_it_can_do(Policy(killer=True))


def test_the_allocator_says_how_much_is_free(tmp_path: Path) -> None:
    device = create_device(tmp_path / "gpu-0", 100)
    device.allocate(60)
    with pytest.raises(SimulatedOutOfMemoryError, match=r"cannot allocate 50 MiB: 40 of 100 MiB are free on gpu-0"):
        SimulatedDevice(tmp_path / "gpu-0").allocate(50)
    device.release(1000)
    assert device.free_mib == 100
