"""Random histories: joins, leaves, crashes, silence, lost and repeated messages, restarts of the coordinator."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.membership.simulation import World

WORKERS = [f"w{i}" for i in range(6)]


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.set_target(("w0", "w1"))

    def worker(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.world.workers)))

    @rule(wanted=st.lists(st.sampled_from(WORKERS), unique=True, max_size=4))
    def target_changes(self, wanted: list[str]) -> None:
        fresh = [w for w in wanted if w not in self.world.exited and not self.ended(w)]
        self.world.set_target(tuple(fresh))

    def ended(self, worker: str) -> bool:
        process = self.world.workers.get(worker)
        return process is not None and (process.left or not process.running)

    @rule()
    def everybody_connects_and_is_ready(self) -> None:
        for worker in list(self.world.workers):
            self.world.connect(worker)
            self.world.become_ready(worker)

    @rule(data=st.data(), twice=st.booleans())
    def a_message_arrives(self, data: st.DataObject, *, twice: bool) -> None:
        self.world.send_one(self.worker(data), twice=twice)

    @rule()
    def all_messages_arrive(self) -> None:
        for worker in list(self.world.workers):
            while self.world.workers[worker].connected and self.world.workers[worker].outbox:
                self.world.send_one(worker)

    @rule(data=st.data())
    def a_connection_breaks(self, data: st.DataObject) -> None:
        self.world.disconnect(self.worker(data))

    @rule()
    def all_connections_break(self) -> None:
        self.world.break_everything()

    @rule(data=st.data())
    def a_node_is_drained(self, data: st.DataObject) -> None:
        self.world.drain(self.worker(data))

    @rule(data=st.data())
    def a_worker_connects(self, data: st.DataObject) -> None:
        self.world.connect(self.worker(data))

    @rule(data=st.data())
    def a_worker_crashes(self, data: st.DataObject) -> None:
        self.world.end(self.worker(data))

    @rule()
    def the_cluster_sees_an_end(self) -> None:
        self.world.report_end()

    @rule(data=st.data())
    def a_worker_falls_silent(self, data: st.DataObject) -> None:
        self.world.workers[self.worker(data)].silent = True

    @rule()
    def a_step_is_trained(self) -> None:
        self.world.train()

    @rule(survivors=st.integers(0, 2))
    def a_peer_dies_at_the_end_of_a_step(self, survivors: int) -> None:
        self.world.train(failing_after=survivors)

    @rule()
    def recoveries_are_built(self) -> None:
        self.world.recover()

    @rule(seconds=st.floats(0.1, 12))
    def time_goes_by(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.world.restart_coordinator()

    @invariant()
    def no_two_memberships_under_one_number(self) -> None:
        for process in self.world.workers.values():
            if process.generation and not process.left:
                assert process.members == self.world.memberships[process.generation]

    def teardown(self) -> None:
        self.world.settle()
        wanted = {w for w in self.world.target if self.world.workers[w].running}
        base = self.world.machine.base
        assert (set(base.members) if base else set()) == wanted
        assert {w.generation for w in self.world.workers.values() if w.id in wanted} <= {base.number if base else 0}
        assert not [w.id for w in self.world.workers.values() if w.running and w.id not in wanted]


Histories.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
