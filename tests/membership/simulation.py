"""Workers of one elastic job as a pure model: they obey orders, agree in-band, crash and lose messages on command."""

from __future__ import annotations

from dataclasses import dataclass, field

from kfp_gpuquota.membership import (
    AnnounceCommit,
    CollectiveFailed,
    Event,
    GenerationAdopted,
    Kill,
    LeaveRequested,
    Limits,
    Membership,
    Order,
    Propose,
    Recover,
    Release,
    Reserve,
    SendOrder,
    Stay,
    TargetChanged,
    Ticked,
    WorkerDisconnected,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
    WorkerReady,
    WorkerReconnected,
)

DESERVED = ("it did not leave within", "it switched to generation")
"""Why one may be killed that is connected and speaks: it disobeys, or joined alone what others have given up."""


@dataclass
class SimulatedWorker:
    id: str
    running: bool = True
    left: bool = False
    silent: bool = False
    connected: bool = False
    ready: bool = False
    failed: bool = False
    generation: int = 0
    members: tuple[str, ...] = ()
    step: int = 0
    order: Order = field(default_factory=lambda: Stay(0))
    outbox: list[Event] = field(default_factory=list)
    standing: list[Event] = field(default_factory=list)  # sent again to each coordinator

    def report(self, event: Event) -> None:
        if not self.silent:
            self.outbox.append(event)

    def stand(self, event: Event) -> None:
        self.standing.append(event)
        self.report(event)

    def adopt(self, generation: int, members: tuple[str, ...]) -> None:
        adopted = GenerationAdopted(self.id, generation, self.step, 1.0, members=members)
        if self.id not in members:
            self.left = True
            self.stand(adopted)
            return
        self.generation, self.members, self.failed = generation, members, False
        self.standing = [event for event in self.standing if not isinstance(event, CollectiveFailed)]
        self.report(adopted)


class World:
    """The machine, its workers and the cluster around them; checks what must always hold after each event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reserved = 0
        self.limits = Limits(starting_s=20, silence_s=10, leave_s=30, forming_s=5, failure_s=2)
        self.machine = Membership(limits=self.limits)
        self.workers: dict[str, SimulatedWorker] = {}
        self.target: tuple[str, ...] = ()
        self.unreported_ends: list[str] = []
        self.exited: set[str] = set()
        self.memberships: dict[int, tuple[str, ...]] = {}
        self.commits: list[AnnounceCommit] = []

    def apply(self, event: Event) -> None:
        for command in self.machine.apply(event, self.now):
            if isinstance(command, Reserve):
                assert command.generation > self.reserved, "a number is used once"
                self.reserved = command.generation
            elif isinstance(command, SendOrder):
                self._check(command.order)
                self._deliver(command.worker, command.order)
            elif isinstance(command, Kill):
                process = self.workers[command.worker]
                there = process.running and process.connected and not process.silent
                assert not there or command.why.startswith(DESERVED), f"{process} is killed: {command.why}"
                self.end(command.worker)
            elif isinstance(command, AnnounceCommit):
                self.commits.append(command)

    def _check(self, order: Order) -> None:
        if isinstance(order, Propose | Recover):
            assert order.generation <= self.reserved, "a number is reserved before it is sent"
            known = self.memberships.setdefault(order.generation, order.members)
            assert known == order.members, "one number, one membership"
            assert not self.exited & set(order.members), "an exited worker is in no new generation"

    def _deliver(self, worker: str, order: Order) -> None:
        process = self.workers.get(worker)
        if not (process and process.running and process.connected) or process.silent:
            return
        process.order = order
        if isinstance(order, Release):
            process.left = True

    # What can happen

    def set_target(self, workers: tuple[str, ...]) -> None:
        self.target = workers
        for worker in workers:
            self.workers.setdefault(worker, SimulatedWorker(worker))
        self.apply(TargetChanged(workers))

    def connect(self, worker: str) -> None:
        process = self.workers[worker]
        if not process.running or process.connected or process.silent:
            return
        process.connected = True
        process.outbox = list(process.standing)
        if process.generation:
            self.apply(WorkerReconnected(worker, process.generation, process.members, process.step))
        else:
            self.apply(WorkerJoined(worker))
            if process.ready:
                self.apply(WorkerReady(worker))
        if process.running:
            self._deliver(worker, self.machine.order_for(worker))

    def become_ready(self, worker: str) -> None:
        process = self.workers[worker]
        if process.running and process.connected and not process.ready:
            process.ready = True
            process.report(WorkerReady(worker))

    def send_one(self, worker: str, *, twice: bool = False) -> None:
        process = self.workers[worker]
        if process.connected and process.outbox:
            event = process.outbox.pop(0)
            self.apply(event)
            if twice:
                self.apply(event)

    def disconnect(self, worker: str) -> None:
        process = self.workers[worker]
        if process.connected:
            process.connected = False
            self.apply(WorkerDisconnected(worker))

    def break_everything(self) -> None:
        """All connections, to the coordinator and among workers."""
        for process in self.workers.values():
            self.disconnect(process.id)
            if process.running and not process.left and process.generation:
                self._fail(process)

    def drain(self, worker: str) -> None:
        """The worker's node is drained, and the worker requests its release."""
        process = self.workers[worker]
        if process.running and not process.left:
            process.stand(LeaveRequested(worker))

    def end(self, worker: str) -> None:
        process = self.workers.get(worker)
        if process and process.running:
            process.running = process.connected = False
            self.unreported_ends.append(worker)

    def report_end(self) -> None:
        if self.unreported_ends:
            worker = self.unreported_ends.pop(0)
            self.exited.add(worker)
            self.apply(WorkerGone(worker))

    def train(self, failing_after: int | None = None) -> None:
        """Run one step of every group: it succeeds, or fails if a peer is missing; members that agreed then switch.

        `failing_after`: only so many members see the last step succeed, then the first of them dies.
        """
        for group in self._groups():
            complete = all(self._in(w, group) for w in self.memberships[group])
            members = [w for w in self.workers.values() if w.running and not w.left and w.generation == group]
            if not complete:
                for process in members:
                    self._fail(process)
                continue
            agreed = self._agreed(members)
            survivors = members if failing_after is None else members[:failing_after]
            for process in survivors:
                process.step += 1
                if agreed:
                    process.adopt(agreed.generation, agreed.members)
            if failing_after is not None:
                self.end(members[0].id)
                for process in members[failing_after:]:
                    self._fail(process)

    def recover(self) -> None:
        """Adopt each recovery generation whose members all run and have received it."""
        for generation in [w.order for w in self.workers.values() if isinstance(w.order, Recover)]:
            everybody = [self.workers[w] for w in generation.members]
            if all(w.running and not w.left and w.order == generation and not w.silent for w in everybody):
                newest = max(w.step for w in everybody)
                for process in everybody:
                    if process.generation < generation.generation:
                        process.step = newest
                        process.adopt(generation.generation, generation.members)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for process in self.workers.values():
            if process.running and process.connected and not process.silent:
                self.apply(WorkerHeard(process.id))
        self.apply(Ticked())

    def restart_coordinator(self) -> None:
        self.machine = Membership(limits=self.limits, first_generation=self.reserved + 1, now=self.now)
        for process in self.workers.values():
            process.connected = False
        self.apply(TargetChanged(tuple(self.workers)))  # all that may still run, then those that should
        self.apply(TargetChanged(self.target))
        for worker in sorted(self.exited):
            self.apply(WorkerGone(worker))

    def settle(self) -> None:
        """Stop faults: deliver everything, connect all workers, and advance the time."""
        for _ in range(120):
            for worker in list(self.workers):
                process = self.workers[worker]
                if process.left:
                    self.end(worker)
                self.connect(worker)
                self.become_ready(worker)
                while process.connected and process.outbox:
                    self.send_one(worker)
            while self.unreported_ends:
                self.report_end()
            self.recover()
            self.train()
            self.tick(1.0)

    def _groups(self) -> list[int]:
        return sorted({w.generation for w in self.workers.values() if w.running and not w.left and w.generation})

    def _in(self, worker: str, group: int) -> bool:
        process = self.workers[worker]
        return process.running and not process.left and not process.silent and process.generation == group

    def _fail(self, process: SimulatedWorker) -> None:
        if not process.failed and not process.silent:
            process.failed = True
            process.stand(CollectiveFailed(process.id, process.generation, process.step, members=process.members))

    def _agreed(self, members: list[SimulatedWorker]) -> Propose | None:
        order = members[0].order
        if not isinstance(order, Propose) or order.base != members[0].generation:
            return None
        if any(w.order != order for w in members):
            return None
        joiners = [self.workers[w] for w in order.members if w not in order.members or w not in members[0].members]
        ready = all(w.running and not w.left and not w.silent and w.order == order for w in joiners)
        if ready:
            for process in joiners:
                process.step = members[0].step + 1
                process.adopt(order.generation, order.members)
        return order if ready else None
