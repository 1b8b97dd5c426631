"""A history, played in a real cluster."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from elastic_runtime.sharded import files
from kfp_gpuquota.membership.tables import WorkerState
from tests.elastic_runtime.harness import JOB
from tests.elastic_runtime.histories import MOST_AT_ONCE
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.membership import Membership
    from tests.elastic_runtime.harness import Cluster
    from tests.elastic_runtime.histories import Word
    from tests.elastic_runtime.relay import Relay

LAST_HELD_STEP = 42
"""Of 44 (exact) or 52: the training does not end before its history has."""


class Play:
    """A history in a real cluster. Workers are named by their index among the wanted ones, or (lost ones) in the
    generation in force; numbers beyond start again at 0.

    One healthy worker that holds the state stays: what is trained must not be lost, or nothing would be tested.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.wanted: list[int] = []
        self.killed: set[str] = set()
        self.risky: set[str] = set()
        """These workers may be treated as lost: they are silent, or their connections broke when a peer died."""
        self._fresh = 0
        self._step = 3

    def begin(self, workers: int, *, sharded: bool = False) -> None:
        """So many train, and wait; in shards, which are lost with a worker, with a checkpoint to go back to."""
        self._hold_after(0)
        self.grow(workers)
        self.cluster.wait_until_at(self._step, *range(workers))
        if sharded:
            until(lambda: files.whole_ones(f"{self.cluster.directory}/checkpoints"), self.cluster.logs)

    def do(self, word: Word) -> None:
        """The next thing happens."""
        self._drop_the_ended()
        getattr(self, word.name)(*word.numbers)

    def end(self) -> None:
        """Nothing more happens; all end in their own time, and as they should.

        The network is complete again, if slow: an exiting worker reports it for a few seconds only.
        """
        self._relay.heal()
        self.cluster.let_go()
        until(self._all_have_ended, self.cluster.logs, timeout_s=2 * TIMEOUT_S)
        for worker, process in self.cluster.processes.items():
            ended = process.exitcode
            expected = ended == -signal.SIGKILL if worker in self.killed else ended == 0
            lost = worker in self.risky and ended == -signal.SIGKILL
            assert expected or lost, f"{worker} ended with {ended}\n{self.cluster.logs()}"
        unexpected = {worker for worker, _ in self.cluster.kills} - self.killed - self.risky
        assert not unexpected, f"taken for lost: {unexpected}\n{self.cluster.logs()}"

    # Pace

    def run(self, steps: int) -> None:
        """So many steps, and the training waits there."""
        self._hold_after(steps)
        until(self._somebody_is_there, lambda: f"step {self._step}\n{self.cluster.logs()}")

    def go(self, steps: int) -> None:
        """The same, and what follows happens meanwhile."""
        self._hold_after(steps)

    # What the cluster wants

    def grow(self, count: int) -> None:
        """Add new workers to the target."""
        for _ in range(min(count, MOST_AT_ONCE - len(self.wanted))):
            self._hire()
        self._tell()

    def shrink(self, place: int) -> None:
        """One is to go, if it is not the last."""
        if len(self.wanted) > 1:
            self.wanted.remove(self._wanted_at(place))
            self._tell()

    def replace(self, place: int) -> None:
        """One is to go, and a new one to come."""
        self.wanted.remove(self._wanted_at(place))
        self._hire()
        self._tell()

    def evict(self) -> None:
        """All are to go, and others begin where they ended; or stay, where they have not agreed on it after 3 steps."""
        before, self.wanted = self.wanted, []
        self._tell()
        self._hold_after(3)
        try:
            until(lambda: not self._running(), timeout_s=5)
        except TimeoutError:
            self.wanted = before
        self.grow(2)

    def restart(self, tenths: int) -> None:
        """The coordinator is away for so long, and has forgotten everything."""
        self.cluster.restart_coordinator(away_s=tenths / 10)

    # Processes

    def kill(self, *places: int) -> None:
        """These die at once."""
        victims = self._victims(places)
        for victim in victims:
            self.cluster.kill(victim)
        self._bury(victims)

    def stop(self, place: int) -> None:
        """It does nothing any more, and its connections stay."""
        for victim in self._victims([place]):
            self.cluster.kill(victim, signal.SIGSTOP)
            self.killed.add(victim)

    def pause(self, place: int, tenths: int) -> None:
        """It does nothing for so long."""
        worker = f"w{self._wanted_at(place)}"
        if worker in self.killed:
            return  # it would go on again
        self.cluster.kill(worker, signal.SIGSTOP)
        time.sleep(tenths / 10)
        self.cluster.kill(worker, signal.SIGCONT)

    def abort(self, stage: int) -> None:
        """A new worker dies in the middle of joining: connected, ready, prepared, or just having entered."""
        if len(self.wanted) == MOST_AT_ONCE:
            return
        newest = f"w{self._hire()}"
        self._tell()
        self._hold_after(1)
        with contextlib.suppress(TimeoutError):  # it may not come so far: then it dies where it is
            until(lambda: self._stage(newest) >= stage, newest, timeout_s=3)
        self.cluster.kill(newest)
        self._bury([newest])

    # The network between workers and coordinator

    def cut(self, *places: int) -> None:
        """Reset all connections of these workers."""
        self._relay.cut({self._risk(place) for place in places})

    def tear(self, *places: int) -> None:
        """Half a message, and an end."""
        self._relay.tear({self._risk(place) for place in places})

    def slow(self, place: int, hundredths: int) -> None:
        """Each piece takes so long."""
        self._relay.slow([f"w{self._wanted_at(place)}"], hundredths / 100)

    def hold(self, place: int, tenths: int) -> None:
        """Silence for so long: above the harness's limit the worker is taken for lost."""
        self._relay.hold([self._risk(place)], tenths / 10)

    # Inside

    @property
    def _relay(self) -> Relay:
        assert self.cluster.relay
        return self.cluster.relay

    def _hold_after(self, steps: int) -> None:
        self._step = min(self._step + steps, LAST_HELD_STEP)
        self.cluster.hold_at(self._step)

    def _hire(self) -> int:
        self.wanted.append(self._fresh)
        self._fresh += 1
        return self.wanted[-1]

    def _tell(self) -> None:
        self.cluster.target(*self.wanted)

    def _running(self) -> list[str]:
        return [worker for worker, process in self.cluster.processes.items() if process.is_alive()]

    def _bury(self, victims: Iterable[str]) -> None:
        self.killed.update(victims)
        for victim in victims:
            self.cluster.processes[victim].join()

    def _somebody_is_there(self) -> bool:
        self._drop_the_ended()
        return any(at >= self._step for at in self.cluster.gate.at)

    def _all_have_ended(self) -> bool:
        if not list(self.cluster.directory.glob("final-*.pt")):
            self._drop_the_ended()  # the last one may have been taken for lost
        return not self._running()

    def _drop_the_ended(self) -> None:
        """Set the target as a cluster does: without ended workers, and with a replacement of the last one."""
        running = self._running()
        alive = [index for index in self.wanted if f"w{index}" in running]
        if alive != self.wanted:
            self.wanted = alive
            self.grow(0 if alive else 1)

    def _wanted_at(self, place: int) -> int:
        return self.wanted[place % len(self.wanted)]

    def _risk(self, place: int) -> str:
        worker = f"w{self._wanted_at(place)}"
        self.risky.add(worker)
        return worker

    def _victims(self, places: Iterable[int]) -> list[str]:
        """Return the workers at these ranks of the generation in force; fewer if no healthy worker would stay."""
        members = self.cluster.commits[-1].members
        running = self._running()
        safe = [w for w in members if w in running and int(w[1:]) in self.wanted and w not in self.risky | self.killed]
        victims: list[str] = []
        for place in places:
            victim = members[place % len(members)] if members else ""
            if victim in running and victim not in victims and set(safe) - {*victims, victim}:
                victims.append(victim)
        return victims

    def _stage(self, worker: str) -> int:
        return self.cluster.coordinator.call(lambda service: stage_of(service.machine(JOB), worker))


def stage_of(machine: Membership, worker: str) -> int:
    """How far a worker has come: 0 connected, 1 ready, 2 prepared, 3 in the generation in force; -1 nothing of it."""
    if machine.base and worker in machine.base.members:
        return 3
    if machine.pending and worker in machine.pending.prepared:
        return 2
    member = machine.members[worker]
    return int(member.state is WorkerState.READY) if member.last_message_at is not None else -1
