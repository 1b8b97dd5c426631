"""What the machine decides, one history a test."""

from __future__ import annotations

import math

import pytest

from kfp_gpuquota.membership import (
    AnnounceCommit,
    AnnounceRelease,
    CollectiveFailed,
    Command,
    Event,
    GenerationAdopted,
    Kill,
    LeaveRequested,
    Limits,
    Membership,
    PreparationFailed,
    Propose,
    Recover,
    Release,
    Reserve,
    SendOrder,
    Stay,
    TargetChanged,
    Ticked,
    TrainingFinished,
    WorkerDisconnected,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
    WorkerReady,
    WorkerReconnected,
)


class Driver:
    """A machine with all commands that it has returned."""

    def __init__(self, machine: Membership | None = None) -> None:
        self.machine = machine or Membership()
        self.output: list[Command] = []
        self.now = 0.0

    def __call__(self, *events: Event, at: float | None = None) -> list[Command]:
        self.now = self.now if at is None else at
        new = [command for event in events for command in self.machine.apply(event, self.now)]
        self.output += new
        return new

    def orders(self, worker: str) -> list[object]:
        return [c.order for c in self.output if isinstance(c, SendOrder) and c.worker == worker]


def arrive(worker: str) -> tuple[Event, ...]:
    return WorkerJoined(worker), WorkerReady(worker)


def training(*workers: str) -> Driver:
    """Generation 1 of these workers is in force."""
    drive = Driver()
    drive(TargetChanged(workers))
    for worker in workers:
        drive(*arrive(worker))
    drive(*(GenerationAdopted(worker, 1, 0) for worker in workers))
    return drive


def test_the_first_generation_forms_when_every_wanted_worker_is_ready() -> None:
    drive = Driver()
    drive(TargetChanged(("a", "b")), *arrive("b"))
    assert drive.orders("b") == [Stay(0)]
    assert drive(WorkerJoined("a")) == []
    assert drive(WorkerReady("a")) == [
        Reserve(1),
        SendOrder("a", Recover(1, ("a", "b"))),
        SendOrder("b", Recover(1, ("a", "b"))),
    ]


def test_the_first_generation_starts_with_the_gang_after_some_patience() -> None:
    drive = Driver(Membership(min_workers=1))
    drive(TargetChanged(("a", "b")), *arrive("a"), at=1.0)
    assert Reserve(1) not in drive(Ticked(), at=5.9)
    assert SendOrder("a", Recover(1, ("a",))) in drive(Ticked(), at=6.0)


def test_a_worker_that_connects_before_the_cluster_names_it_waits() -> None:
    drive = Driver()
    drive(*arrive("a"))
    assert drive.machine.order_for("a") == Stay(0)
    assert SendOrder("a", Recover(1, ("a",))) in drive(TargetChanged(("a",)))


def test_a_joiner_is_proposed_behind_the_members_who_keep_their_order() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("c", "b", "a")))
    output = drive(*arrive("c"))
    proposal = Propose(2, ("a", "b", "c"), base=1)
    assert Reserve(2) in output
    assert [drive.machine.order_for(w) for w in "abc"] == [proposal] * 3


def test_a_leaver_is_released_only_when_everybody_has_switched() -> None:
    drive = training("a", "b", "c")
    drive(TargetChanged(("a", "b")))
    assert drive.machine.order_for("c") == Propose(2, ("a", "b"), base=1)
    assert AnnounceRelease("c", 7) in drive(GenerationAdopted("c", 2, 7))
    assert isinstance(drive.machine.order_for("c"), Propose)
    drive(GenerationAdopted("a", 2, 7, pause_ms=3.0))
    output = drive(GenerationAdopted("b", 2, 7, pause_ms=5.0))
    assert AnnounceCommit(2, ("a", "b"), 7, 5.0, 0, complete=True) in output
    assert isinstance(drive.machine.order_for("c"), Release)


def test_the_loss_of_a_member_makes_a_recovery_generation_of_the_survivors_at_once() -> None:
    drive = training("a", "b", "c")
    output = drive(WorkerGone("a"))
    assert output == [
        Reserve(2),
        SendOrder("b", Recover(2, ("b", "c"))),
        SendOrder("c", Recover(2, ("b", "c"))),
    ]


def test_a_failed_collective_and_a_broken_connection_together_are_a_loss() -> None:
    drive = training("a", "b", "c")
    assert drive(WorkerDisconnected("c"), at=10.0) == []
    output = drive(CollectiveFailed("a", 1))
    assert isinstance(output[0], Kill)
    assert SendOrder("b", Recover(2, ("a", "b"))) in output


def test_several_connections_that_break_at_once_have_time_to_come_back() -> None:
    drive = training("a", "b", "c")
    drive(*map(WorkerDisconnected, "abc"))
    drive(WorkerReconnected("a", 1, ("a", "b", "c"), 1), CollectiveFailed("a", 1), at=1.0)
    drive(WorkerReconnected("b", 1, ("a", "b", "c"), 1), at=1.5)
    assert killed(drive.output) == []
    output = drive(Ticked(), at=3.0)
    assert killed(output) == ["c"]
    assert SendOrder("b", Recover(2, ("a", "b"))) in output


def killed(output: list[Command]) -> list[str]:
    return [command.worker for command in output if isinstance(command, Kill)]


def passing(drive: Driver, *responsive: str, until: float) -> set[str]:
    """Return the workers that are killed while only these send events, twice a second."""
    found = set[str]()
    while drive.now < until:
        found |= set(killed(drive(*map(WorkerHeard, responsive), Ticked(), at=drive.now + 0.5)))
    return found


def both_back_after(drive: Driver, a_s: float, b_s: float, *, b_lost_s: float = 0.0) -> None:
    """All connections of a job of two break at 20 s; that of b's to the coordinator may be noticed later."""
    passing(drive, "a", "b", until=20.0)
    back = {worker: (WorkerReconnected(worker, 1, ("a", "b"), 1), CollectiveFailed(worker, 1)) for worker in "ab"}
    breaks = [(0.0, WorkerDisconnected("a")), (b_lost_s, WorkerDisconnected("b"))]
    happens = [*breaks, *((a_s, event) for event in back["a"]), *((b_s, event) for event in back["b"])]
    for after_s, event in sorted(happens, key=lambda row: row[0]):
        drive(Ticked(), event, at=20 + after_s)


@pytest.mark.parametrize("b_lost_s", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("a_s", "b_s"), [(0.1, 1.5), (10.0, 11.9)])
def test_of_two_whose_connections_all_break_together_the_first_to_be_back_has_nobody_killed(
    a_s: float, b_s: float, b_lost_s: float
) -> None:
    drive = training("a", "b")
    both_back_after(drive, a_s, b_s, b_lost_s=b_lost_s)
    assert passing(drive, "a", "b", until=23 + b_s) == set()
    assert killed(drive.output) == []
    assert [drive.orders(worker)[-1] for worker in "ab"] == [Recover(2, ("a", "b"))] * 2


def test_of_two_whose_connections_all_break_together_one_that_stays_away_is_killed_soon() -> None:
    drive = training("a", "b")
    passing(drive, "a", "b", until=20.0)
    drive(WorkerDisconnected("a"), WorkerDisconnected("b"))
    drive(WorkerReconnected("a", 1, ("a", "b"), 1), CollectiveFailed("a", 1), at=25.0)
    assert passing(drive, "a", until=26.5) == set()
    assert passing(drive, "a", until=27.0) == {"b"}
    assert drive.orders("a")[-1] == Recover(2, ("a",))


def test_a_failed_collective_that_nothing_explains_is_repeated_with_everybody_after_a_while() -> None:
    drive = training("a", "b")
    assert drive(CollectiveFailed("a", 1), at=1.0) == []
    assert drive(Ticked(), at=2.9) == []
    assert SendOrder("b", Recover(2, ("a", "b"))) in drive(Ticked(), at=3.0)


def test_the_loss_of_a_joiner_withdraws_the_proposal() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("a", "b", "c")), *arrive("c"))
    output = drive(WorkerGone("c"))
    assert output == [SendOrder("a", Stay(1)), SendOrder("b", Stay(1))]


def test_a_withdrawn_generation_that_was_agreed_on_anyway_is_in_force() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("a", "b", "c")), *arrive("c"), WorkerGone("c"))
    output = drive(GenerationAdopted("a", 2, 9))
    assert SendOrder("a", Recover(3, ("a", "b"))) in output
    assert drive.machine.generation == 2


def test_a_member_who_failed_behind_an_agreed_switch_is_not_left_behind() -> None:
    drive = training("a", "b", "c")
    drive(TargetChanged(("a", "b")), GenerationAdopted("a", 2, 5))
    drive(CollectiveFailed("b", 1, 4), at=1.0)
    assert SendOrder("b", Recover(3, ("a", "b"))) in drive(Ticked(), at=3.0)


def test_a_proposal_that_could_not_be_prepared_is_made_again_under_a_new_number() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("a", "b", "c")), *arrive("c"))
    assert drive(PreparationFailed("c", 2), at=1.0) == []
    drive(Ticked(), at=3.0)
    assert drive.machine.order_for("a") == Propose(3, ("a", "b", "c"), base=1)


def test_a_second_joiner_waits_for_the_generation_after_the_first_ones() -> None:
    drive = training("a")
    drive(TargetChanged(("a", "b", "c")), *arrive("b"))
    assert drive.machine.order_for("a") == Propose(2, ("a", "b"), base=1)
    drive(*arrive("c"))
    assert drive.machine.order_for("a") == Propose(2, ("a", "b"), base=1)
    drive(GenerationAdopted("a", 2, 3))
    assert drive.machine.order_for("b") == Propose(3, ("a", "b", "c"), base=2)


def test_a_joiner_that_gave_up_what_the_others_agreed_on_is_fetched_back_at_once() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("a", "b", "c")), *arrive("c"), TargetChanged(("a", "c")))
    assert drive.machine.order_for("c") == Propose(3, ("a", "c"), base=1)
    drive(PreparationFailed("c", 2))
    drive(GenerationAdopted("a", 2, 3))
    assert [drive.machine.order_for(w) for w in "ac"] == [Recover(4, ("a", "c"))] * 2


def test_a_joiner_that_switched_alone_to_what_another_generation_has_replaced_is_ended() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("a", "b", "c")), *arrive("c"), WorkerGone("a"), GenerationAdopted("b", 3, 5))
    assert drive.machine.order_for("c") == Propose(4, ("b", "c"), base=3)
    output = drive(GenerationAdopted("c", 2, 4))
    assert killed(output) == ["c"]
    assert SendOrder("b", Stay(3)) in output
    assert killed(drive(GenerationAdopted("b", 2, 4))) == []


def test_a_silent_worker_is_killed_and_its_peers_go_on() -> None:
    drive = training("a", "b")
    assert passing(drive, "a", until=10.0) == set()
    assert passing(drive, "a", until=10.5) == {"b"}
    assert drive.orders("a")[-1] == Recover(2, ("a",))


def test_a_worker_that_trains_alone_keeps_nobody_waiting_and_may_be_silent_for_longer() -> None:
    drive = training("a")
    drive(TargetChanged(("a", "b")), WorkerJoined("b"))
    assert passing(drive, "b", until=60.0) == set()
    assert passing(drive, "b", until=60.5) == {"a"}


def test_workers_that_are_all_silent_at_once_are_behind_a_broken_network_and_nobody_is_killed() -> None:
    drive = training("a", "b")
    assert passing(drive, until=50.0) == set()
    drive(WorkerHeard("a"), Ticked())
    assert passing(drive, "a", until=60.0) == set()
    assert passing(drive, "a", "b", until=100.0) == set()


def test_of_workers_that_were_all_silent_one_that_stays_so_is_killed() -> None:
    drive = training("a", "b")
    assert passing(drive, until=20.0) == set()
    assert passing(drive, "a", until=30.5) == set()
    assert passing(drive, "a", until=31.0) == {"b"}


def test_a_leaver_that_falls_silent_is_waited_for_until_everybody_has_switched() -> None:
    drive = training("a", "b", "c")
    drive(TargetChanged(("a", "b")), GenerationAdopted("a", 2, 5))
    assert passing(drive, "a", "b", until=10.5) == {"c"}


def test_a_worker_that_gets_ready_may_be_silent_for_longer_since_nobody_waits_for_it() -> None:
    drive = training("a")
    drive(TargetChanged(("a", "b")), WorkerJoined("b"))
    for now in (10.0, 890.0):
        output = drive(GenerationAdopted("a", 1, 0), Ticked(), at=now)
        assert killed(output) == []
    output = drive(GenerationAdopted("a", 1, 0), Ticked(), at=900.5)
    assert killed(output) == ["b"]


def test_a_worker_that_is_ready_is_waited_for_and_may_not_be_silent() -> None:
    drive = training("a")
    drive(TargetChanged(("a", "b")), *arrive("b"))
    assert passing(drive, "a", until=10.5) == {"b"}


def test_a_leaver_whose_collective_failed_before_the_others_recovered_without_it_is_released() -> None:
    drive = training("a", "b", "c")
    drive(TargetChanged(("a", "b")), CollectiveFailed("c", 1), WorkerGone("b"), GenerationAdopted("a", 3, 1))
    assert isinstance(drive.machine.order_for("c"), Release)


def test_a_leaver_that_finds_a_restarted_coordinator_after_the_others_have_switched_is_released_not_killed() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b")), TargetChanged(("a",)), WorkerReconnected("a", 7, ("a",), 30))
    output = drive(WorkerReconnected("b", 6, ("a", "b"), 30), GenerationAdopted("b", 7, 30))
    assert killed(output) == []
    assert isinstance(drive.machine.order_for("b"), Release)


def test_a_worker_that_does_not_leave_in_time_is_killed() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("a",)), at=1.0)
    for worker in "ab":
        drive(GenerationAdopted(worker, 1, 0), at=30.0)
    assert killed(drive(Ticked(), at=31.1)) == ["b"]


def test_one_member_stays_until_a_joiner_holds_the_state() -> None:
    drive = training("a", "b")
    drive(TargetChanged(("c",)))
    assert drive.machine.order_for("a") == Stay(1)
    drive(*arrive("c"))
    assert drive.machine.order_for("b") == Propose(2, ("a", "c"), base=1)
    drive(*(GenerationAdopted(worker, 2, 4) for worker in "abc"))
    assert drive.machine.order_for("a") == Propose(3, ("c",), base=2)


def test_an_evicted_job_agrees_on_an_empty_generation_and_starts_anew_with_the_next_workers() -> None:
    drive = training("a", "b")
    drive(TargetChanged(()))
    assert drive.machine.order_for("a") == Propose(2, (), base=1)
    drive(GenerationAdopted("a", 2, 8), TargetChanged(("c",)), *arrive("c"))
    assert drive.machine.order_for("c") == Stay(0)
    drive(GenerationAdopted("b", 2, 8))
    assert drive.machine.order_for("c") == Recover(3, ("c",))


def test_a_worker_that_was_told_to_go_by_its_node_asks_to_leave_by_agreement() -> None:
    drive = training("a", "b")
    drive(LeaveRequested("a"))
    assert drive.machine.order_for("b") == Propose(2, ("b",), base=1)


def test_nothing_is_resized_once_a_member_has_finished() -> None:
    drive = training("a", "b")
    drive(TrainingFinished("a", 100))
    assert drive(TargetChanged(("b",)), WorkerGone("a")) == []


def test_a_joiner_that_waits_for_a_switch_when_the_training_ends_is_released() -> None:
    drive = training("a")
    drive(TargetChanged(("a", "b")), *arrive("b"))
    assert drive.orders("b")[-1] == Propose(2, ("a", "b"), base=1)
    drive(TrainingFinished("a", 100))
    assert drive.orders("b")[-1] == Release("the training has finished")


def test_a_joiner_that_came_too_late_is_released() -> None:
    drive = training("a")
    drive(TargetChanged(("a", "b")), WorkerJoined("b"), TrainingFinished("a", 100))
    assert isinstance(drive.machine.order_for("b"), Release)


def test_one_that_has_not_finished_recovers_without_those_that_have() -> None:
    drive = training("a", "b")
    drive(TrainingFinished("a", 100), WorkerGone("a"))
    drive(CollectiveFailed("b", 1, 100))
    assert drive(Ticked(), at=2.0) == [Reserve(2), SendOrder("b", Recover(2, ("b",)))]


def test_the_exit_code_0_of_a_worker_says_that_the_training_is_over_where_nobody_heard_it_say_so() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b", "c")), WorkerGone("a", finished=True), WorkerReconnected("b", 7, ("a", "b"), 99))
    assert drive.machine.order_for("b") == Stay(7), "no worker is lost"
    drive(*arrive("c"))
    assert drive.orders("c")[-1] == Release("the training has finished")
    drive(CollectiveFailed("b", 7, 99, members=("a", "b")))
    assert SendOrder("b", Recover(8, ("b",))) in drive(Ticked(), at=2.0), "it was not there to see it"


def test_a_training_that_all_have_finished_is_not_begun_again_by_a_late_worker() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "c")), WorkerGone("a", finished=True), *arrive("c"))
    drive(Ticked(), at=30.0)
    assert drive.orders("c")[-1] == Release("the training has finished")
    assert not [command for command in drive.output if isinstance(command, Reserve)]


def test_who_has_not_started_is_not_waited_for_long_once_the_training_is_over() -> None:
    """The last worker is silent (stopped at a coordinator's restart), or sends events and is stuck; the job ends."""
    drive = training("a", "b")
    drive(TargetChanged(("a", "b", "c", "d")), WorkerJoined("c"), at=10.0)
    drive(WorkerGone("b", finished=True), TrainingFinished("a", 40), at=100.0)
    assert killed(drive(Ticked(), at=160.0)) == []
    assert sorted(killed(drive(Ticked(), at=160.1))) == ["c", "d"]


def test_a_worker_that_was_let_go_has_finished_nothing_by_ending_well() -> None:
    drive = training("a", "b")
    drive(LeaveRequested("a"), GenerationAdopted("a", 2, 5), GenerationAdopted("b", 2, 5))
    drive(WorkerGone("a", finished=True))
    assert not drive.machine.finished


def test_whoever_is_let_go_is_announced_once_also_where_its_collective_failed() -> None:
    drive = training("a", "b", "c")
    drive(LeaveRequested("c"), CollectiveFailed("c", 1, 4), WorkerGone("b"), GenerationAdopted("a", 3, 5))
    drive(GenerationAdopted("c", 3, 5), Ticked())
    assert [command for command in drive.output if isinstance(command, AnnounceRelease)] == [AnnounceRelease("c", 5)]


FAILED_IN_7 = CollectiveFailed("a", 7, 31, members=("a", "b", "c"))


def test_a_restarted_coordinator_learns_the_generation_from_its_workers() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b", "c")), WorkerReconnected("b", 7, ("a", "b"), 30))
    assert drive.machine.generation == 7
    drive(WorkerReconnected("a", 7, ("a", "b"), 30))
    assert drive(*arrive("c"))[-4:] == [
        Reserve(8),
        *(SendOrder(w, Propose(8, ("a", "b", "c"), base=7)) for w in "abc"),
    ]


@pytest.mark.parametrize("received", [GenerationAdopted("a", 7, 31, members=("a", "b", "c")), FAILED_IN_7])
def test_a_restarted_coordinator_learns_of_a_switch_that_was_agreed_on_before_it(received: Event) -> None:
    """Both had voted for the switch when the coordinator started, and reported it after they reconnected."""
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b", "c")), WorkerReconnected("a", 6, ("a", "b"), 30))
    drive(WorkerReconnected("b", 6, ("a", "b"), 30), *arrive("c"))
    assert drive.machine.pending is not None
    assert drive.machine.pending.number == 8
    output = drive(received)
    assert drive.machine.generation == 7
    output += drive(*(GenerationAdopted(worker, 7, 31, members=("a", "b", "c")) for worker in "bc"))
    assert killed(output) == []


def test_a_switch_that_its_joiner_gave_up_before_a_restarted_coordinator_learned_of_it_is_made_anew() -> None:
    """The others have met it there, and would send it the state for ever."""
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b", "c")), WorkerReconnected("a", 6, ("a", "b"), 30))
    drive(WorkerReconnected("b", 6, ("a", "b"), 30), *arrive("c"), PreparationFailed("c", 7, "it was withdrawn"))
    output = drive(GenerationAdopted("b", 7, 31, members=("a", "b", "c")))
    assert [c for c in output if isinstance(c, SendOrder)] == [SendOrder(w, Recover(9, ("a", "b", "c"))) for w in "abc"]
    assert killed(output) == []


def test_a_restarted_coordinator_learns_of_an_eviction_that_was_agreed_on_before_it_and_waits_for_all_to_leave() -> (
    None
):
    """Rank 0 saves and reports last: the next worker starts from its state."""
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b", "c")), TargetChanged(("c",)), *arrive("c"))
    drive(WorkerReconnected("b", 6, ("a", "b"), 30), GenerationAdopted("b", 7, 31, members=()))
    drive(WorkerGone("b"), WorkerReconnected("a", 6, ("a", "b"), 31))
    assert drive.machine.order_for("c") == Stay(0)
    output = drive(GenerationAdopted("a", 7, 31, members=()))
    assert AnnounceRelease("a", 31) in output
    assert isinstance(drive.machine.order_for("a"), Release)
    assert drive.orders("c")[-1] == Recover(9, ("c",)), "8 was proposed before 7 was reported"
    assert killed(drive.output) == []


def test_a_restarted_coordinator_believes_who_left_by_the_switch_as_well_as_who_stayed() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b", "c")), TargetChanged(("a", "b")), WorkerReconnected("c", 6, ("a", "b", "c"), 30))
    output = drive(GenerationAdopted("c", 7, 31, members=("a", "b")))
    assert AnnounceRelease("c", 31) in output
    assert drive.machine.generation == 7
    drive(WorkerReconnected("b", 6, ("a", "b", "c"), 30), WorkerReconnected("a", 7, ("a", "b"), 31))
    drive(GenerationAdopted("b", 7, 31, members=("a", "b")))
    assert isinstance(drive.machine.order_for("c"), Release)
    assert killed(drive.output) == []


def test_who_was_told_to_go_by_its_node_and_left_is_released_by_a_restarted_coordinator_that_still_wants_it() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b")), WorkerReconnected("a", 7, ("a",), 31), WorkerReconnected("b", 6, ("a", "b"), 31))
    drive(LeaveRequested("b"), GenerationAdopted("b", 7, 31, members=("a",)), at=0.1)
    assert isinstance(drive.machine.order_for("b"), Release)
    assert passing(drive, "a", "b", until=20.0) == set()
    assert AnnounceRelease("b", 31) in drive.output


def test_a_worker_that_comes_back_in_a_generation_that_was_replaced_without_it_is_killed() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b")), WorkerReconnected("a", 7, ("a",), 31), WorkerReconnected("b", 6, ("a", "b"), 30))
    assert passing(drive, "a", "b", until=1.5) == set(), "it may report immediately that it left by agreement"
    assert passing(drive, "a", "b", until=2.0) == {"b"}


def test_a_restarted_coordinator_forms_nothing_new_while_a_worker_may_still_be_training() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b")), *arrive("b"), at=1.0)
    assert not [c for c in drive(Ticked(), at=9.0) if isinstance(c, Reserve)]
    assert Reserve(8) in drive(Ticked(), at=10.0)


def test_a_restarted_coordinator_waits_for_a_worker_that_is_no_longer_wanted_and_holds_the_state() -> None:
    drive = Driver(Membership(first_generation=8))
    drive(TargetChanged(("a", "b")), TargetChanged(("b",)), *arrive("b"), at=1.0)
    assert not [c for c in drive(Ticked(), at=9.0) if isinstance(c, Reserve)]
    drive(WorkerReconnected("a", 7, ("a",), 30))
    assert drive.machine.order_for("a") == Propose(8, ("a", "b"), base=7)


def test_a_restarted_coordinator_takes_nobody_for_lost_who_has_not_found_it_yet() -> None:
    drive = Driver(Membership(first_generation=8))
    members = ("a", "b", "c")
    drive(TargetChanged(members), WorkerReconnected("a", 7, members, 30), CollectiveFailed("a", 7, 30))
    drive(WorkerReconnected("b", 7, members, 30), CollectiveFailed("b", 7, 30), at=1.0)
    assert killed(drive.output) == []
    assert passing(drive, "a", "b", until=10.0) == set()
    assert passing(drive, "a", "b", until=11.0) == {"c"}, "it was the one that died"
    assert drive.orders("b")[-1] == Recover(9, ("a", "b"))


def test_messages_of_an_older_generation_change_nothing() -> None:
    drive = training("a", "b", "c")
    drive(WorkerGone("c"), GenerationAdopted("a", 2, 3), GenerationAdopted("b", 2, 3))
    assert drive(CollectiveFailed("a", 1, 3), GenerationAdopted("b", 1, 2), at=60.0) == []


def test_the_same_history_gives_the_same_commands() -> None:
    assert training("a", "b", "c").output == training("a", "b", "c").output


CLUSTER = Limits(starting_s=math.inf, isolated_s=math.inf, return_s=30.0)


def listening(drive: Driver, *workers: str, until: float) -> None:
    """Advance the clock to that time; these workers send an event each second."""
    while drive.now < until:
        drive(*(WorkerHeard(worker) for worker in workers), Ticked(), at=drive.now + 1.0)


def restarted(*trained: str) -> Driver:
    drive = Driver(Membership(first_generation=8, limits=CLUSTER, trained=trained))
    drive(TargetChanged(trained))
    return drive


def test_workers_that_are_all_silent_are_not_killed_where_the_coordinator_may_be_cut_off() -> None:
    drive = Driver(Membership(limits=CLUSTER))
    drive(TargetChanged(("a", "b")), *arrive("a"), *arrive("b"))
    drive(GenerationAdopted("a", 1, 0), GenerationAdopted("b", 1, 0))
    listening(drive, "a", "b", until=20.0)
    listening(drive, until=4000.0)
    assert not kills(drive)
    listening(drive, "a", until=4030.0)
    assert kills(drive) == {"b"}


def test_a_lone_worker_is_not_killed_for_its_silence_where_the_coordinator_may_be_cut_off() -> None:
    drive = Driver(Membership(limits=CLUSTER))
    drive(TargetChanged(("a",)), *arrive("a"), GenerationAdopted("a", 1, 0))
    listening(drive, until=4000.0)
    assert not kills(drive)


def test_no_worker_that_trained_is_killed_after_a_restart_before_one_of_its_peers_is_heard() -> None:
    drive = restarted("a", "b", "c")
    listening(drive, until=600.0)
    assert not kills(drive)
    drive(WorkerReconnected("a", 7, ("a", "b", "c"), 5), WorkerReconnected("b", 7, ("a", "b", "c"), 5))
    listening(drive, "a", "b", until=drive.now + 25.0)
    assert not kills(drive)  # it has as long as a failover takes
    listening(drive, "a", "b", until=drive.now + 10.0)
    assert kills(drive) == {"c"}


def test_a_worker_that_had_not_trained_may_start_for_as_long_as_its_image_takes_after_a_restart() -> None:
    drive = restarted("a", "b")
    drive(TargetChanged(("a", "b", "pulling")))
    drive(WorkerReconnected("a", 7, ("a", "b"), 5), WorkerReconnected("b", 7, ("a", "b"), 5))
    listening(drive, "a", "b", until=3600.0)
    assert not kills(drive)


def test_newcomers_do_not_train_beside_workers_that_the_restarted_coordinator_cannot_hear() -> None:
    drive = restarted("a", "b")
    drive(TargetChanged(("a", "b", "new")), *arrive("new"))
    listening(drive, "new", until=600.0)
    assert not any(isinstance(order, Recover) for order in drive.orders("new"))
    drive(WorkerGone("a"), WorkerGone("b"))
    listening(drive, "new", until=620.0)
    assert drive.orders("new")[-1] == Recover(8, ("new",))


def kills(drive: Driver) -> set[str]:
    return {command.worker for command in drive.output if isinstance(command, Kill)}
