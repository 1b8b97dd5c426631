"""Random histories of the real engine in simulated time; `--histories 0:20000` plays others than `make test` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api import JobSpec, Kind, Phase, Project
from kfp_gpuquota.api.policy import IdleRule
from tests.kubernetes import twin_world
from tests.simulation import kubernetes
from tests.simulation.gathering import GATHERS
from tests.simulation.histories import (
    Delete,
    History,
    Kill,
    Restart,
    Resume,
    Submit,
    Suspend,
    draw_history,
    from_seed,
    hard_history,
)
from tests.simulation.running import play
from tests.simulation.trainings import ELASTIC

if TYPE_CHECKING:
    import pytest

CHUNK = 50
DEFRAGMENTED_EVERY = 2
"""In each second history free GPUs are gathered."""
KUBERNETES_EVERY = 5
"""The controller plays each fifth history."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Divide the seeds into chunks, which are played side by side."""
    if "seeds" in metafunc.fixturenames:
        first, last = map(int, metafunc.config.getoption("histories").split(":"))
        chunks = [range(at, min(at + CHUNK, last)) for at in range(first, last, CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=[f"{chunk.start}:{chunk.stop}" for chunk in chunks])


def test_the_engine_keeps_its_invariants_through_any_history(seeds: range) -> None:
    for seed in seeds:
        history = hard_history(seed)
        try:
            play(history.with_defragmentation() if seed % DEFRAGMENTED_EVERY == 0 else history)
        except BaseException as error:
            error.add_note(f"the history of seed {seed}: --histories {seed}:{seed + 1}")
            raise


def test_the_controller_keeps_its_invariants_through_any_history(seeds: range) -> None:
    for seed in seeds[::KUBERNETES_EVERY]:
        try:
            history = hard_history(seed)
            gathers = seed % DEFRAGMENTED_EVERY == 0
            kubernetes.play(history.with_defragmentation(twin_world.EPOCH) if gathers else history)
        except BaseException as error:
            error.add_note(f"the history of seed {seed}: --histories {seed}:{seed + 1}")
            raise


def test_a_suspended_job_whose_worker_had_finished_is_as_before_when_the_controller_restarts() -> None:
    """The pod of the worker that had finished remained, and made the suspended job one that completes."""
    kubernetes.play(from_seed(43))


def test_gpus_of_a_failed_job_are_not_idle_while_its_workers_exit_under_a_restarted_controller() -> None:
    """The scheduler forgot the job before its pods were listed, and another job's worker got a GPU of one of them."""
    kubernetes.play(from_seed(641))


def test_a_worker_that_shares_a_gpu_is_on_the_same_gpu_for_a_restarted_controller() -> None:
    """Its pod requests no GPU: its devices were not read, and the first free ones were taken for them."""
    kubernetes.play(from_seed(8))


def test_a_controller_starts_beside_a_worker_with_a_share_whose_job_was_deleted() -> None:
    """It counted as a job of no GPU, which ended each controller until the pod was removed."""
    kubernetes.play(from_seed(789))


def test_a_deleted_jobs_part_of_a_gpu_is_not_idle_for_a_restarted_controller_while_its_worker_exits() -> None:
    """Its pod, whose job was gone, counted on another GPU of its node, and others started on this one."""

    def submit(name: str, fraction: float) -> Submit:
        spec = JobSpec(name=name, project="a", command=("works",), gpu_fraction=fraction)
        return Submit(spec, (0.3, 0.0, None, 10.0))

    shares = ((0.0, submit("j01", 0.5)), (1.0, submit("j03", 0.5)))
    ends = ((20.0, Delete((0,))), (0.1, Restart(0.0)), (0.1, submit("j04", 0.5)))
    records = kubernetes.play(History((2,), (Project(name="a", guaranteed=2),), (*shares, *ends))).records
    assert {name: job.attempt for name, job in records.items()} == {"j03": 1, "j04": 1}


def test_a_gang_that_loses_workers_while_no_controller_runs_returns_to_the_queue() -> None:
    """Their pods were deleted unseen: the others held their GPUs, and waited for them for good."""

    def submit(name: str, gpus_per_worker: int | None = None) -> Submit:
        spec = JobSpec(name=name, project="a", command=("works",), gpus=4, gpus_per_worker=gpus_per_worker)
        return Submit(spec, (0.3, 0.0, None, 1.0))

    jobs = ((0.0, submit("j01")), (1.0, submit("j03", gpus_per_worker=1)), (20.0, Restart(1.0, loses=1)))
    records = kubernetes.play(History((2, 2, 4), (Project(name="a", guaranteed=8),), jobs)).records
    assert {name: job.status.phase for name, job in records.items()} == {"j01": Phase.RUNNING, "j03": Phase.PENDING}


def test_a_job_that_ran_while_no_controller_did_is_not_run_again() -> None:
    """The start was not written when the controller ended, and the workers finished before the next one began."""
    played = kubernetes.play(from_seed(1410))
    assert played.records["j02"].attempt == 1


def test_a_job_that_was_suspended_while_no_controller_ran_is_stopped() -> None:
    """Its pods were listed after it, so that it counted as one without workers, which then ran on for good."""
    kubernetes.play(from_seed(777))


def test_a_device_beyond_a_nodes_count_makes_no_room() -> None:
    """A pod without a pin was bound to a full node; each plan that chose it as a victim failed."""
    kubernetes.play(from_seed(556))


def test_a_worker_that_is_killed_because_its_node_is_gone_counts_as_lost_with_it() -> None:
    """Its peers had noticed first, and its membership had asked for its end: the job was charged a restart."""
    kubernetes.play(from_seed(21283).with_reservations())


def test_a_job_whose_controller_ended_before_it_wrote_its_status_is_not_held_while_it_runs() -> None:
    """It has an array's turn, and had a worker: the next controller held it until all jobs were read, and for good."""
    kubernetes.play(hard_history(810154))


def test_the_end_of_a_run_is_not_recorded_as_a_generation_of_the_next() -> None:
    """The loss of the last worker completed a generation, whose members the waiting job had."""
    kubernetes.play(from_seed(299))


def test_a_gang_that_moves_is_promised_no_worker_more_than_it_has() -> None:
    """When the first of its workers had exited, a sixth one was promised to a gang of five."""
    play(from_seed(743))


def test_another_process_asks_those_to_leave_that_the_one_before_did_not_ask() -> None:
    """It ended between two evictions for one job; the next one dropped its promise, and evicted others."""

    def submit(name: str, gpus: int, project: str) -> Submit:
        return Submit(JobSpec(name=name, project=project, command=("works",), gpus=gpus), (0.3, 0.0, None, 1.0))

    borrowers = tuple((1.0, submit(f"j{number:02}", 1, "b")) for number in (1, 3, 4, 5))
    others = ((20.0, Kill(1)), (0.0, submit("j06", 2, "a")), (0.0, submit("j08", 1, "b")))
    history = History((4,), (Project(name="a", guaranteed=2), Project(name="b", guaranteed=1)), (*borrowers, *others))
    for records in (play(history).state.jobs.values(), kubernetes.play(history).records.values()):
        attempts = {job.spec.name: job.attempt for job in records if job.status.phase is Phase.RUNNING}
        assert attempts == {"j01": 1, "j03": 1, "j06": 1}


@given(data=st.data())
@settings(max_examples=10, deadline=None, report_multiple_bugs=False)
def test_the_engine_keeps_its_invariants_through_histories_that_can_be_shrunk(data: st.DataObject) -> None:
    play(draw_history(lambda low, high: data.draw(st.integers(low, high)), seed=0, most=10).with_conditions())


def test_a_job_is_moved_once_for_a_job_that_needs_its_whole_node() -> None:
    """Its minimum is below its size: on the node that is being cleared it must not start again with its minimum."""

    def submit(name: str, gpus: int, command: str = "works", **more: object) -> Submit:
        spec = JobSpec(name=name, project="a", command=(command,), gpus=gpus, **more)  # type: ignore[arg-type]
        return Submit(spec, (0.3, 8.0, None, 1.0))

    cluster = play(
        History(
            (4, 4),
            (Project(name="a", guaranteed=8),),
            (
                (0.0, submit("fills", 2, kind=Kind.BUILD)),
                (1.0, submit("blocks", 2)),
                (1.0, submit("moved", 2, ELASTIC, min_gpus=1, max_gpus=2)),
                (20.0, Delete((1,))),
                (1.0, submit("big", 4)),
            ),
        )
    )
    records = {job.spec.name: job for job in cluster.state.jobs.values()}
    assert records["big"].status.phase is Phase.RUNNING
    assert records["moved"].attempt == 2
    assert records["moved"].status.moves == 2


def test_jobs_deleted_together_cost_no_other_job_anything() -> None:
    """Between the two deletions a plan would clear the device for the job that is deleted next."""

    def submit(name: str, **more: object) -> Submit:
        spec = JobSpec(name=name, project="a", command=("works",), **more)  # type: ignore[arg-type]
        return Submit(spec, (0.3, 0.0, None, 1.0))

    shares = [(0.5, submit(f"s{i}", gpu_fraction=0.25)) for i in range(4)]
    others = ((0.5, submit("held", gpus=1, kind=Kind.BUILD)), (1.0, submit("whole", gpus=1)), (5.0, Delete((0, 5))))
    cluster = play(History((1, 1), (Project(name="a", guaranteed=2),), (*shares, *others)))
    assert {j.spec.name: (j.attempt, j.status.moves) for j in cluster.state.jobs.values()} == {
        "s1": (1, 0), "s2": (1, 0), "s3": (1, 0), "held": (1, 0)
    }  # fmt: skip


def test_an_unused_job_that_was_resumed_between_two_looks_has_its_time_again() -> None:
    spec = JobSpec(name="j01", project="a", command=("works",), gpus=1)
    idle = IdleRule(warn_after_s=10.0, suspend_after_s=11.0)
    happenings = ((0.5, Submit(spec, (0.3, 1.0, None, 1.0))), (15.0, Suspend(0)), (2.0, Resume(0)), (20.0, Suspend(0)))
    for seed in range(4):  # it uses its GPUs with some
        play(History((2,), (Project(name="a", guaranteed=2),), happenings, seed=seed, idle=idle))


def test_jobs_gather_free_gpus_within_the_budget_that_a_killed_engine_remembers() -> None:
    """Each of these histories has such moves; the invariants compare what restarts cost with the budget."""
    moved = 0
    for seed in (0, 25):
        jobs = play(from_seed(seed).with_kills().with_defragmentation()).state.jobs.values()
        reasons = [job.status.last_move.reason.message for job in jobs if job.status.last_move is not None]
        moved += sum(GATHERS in reason for reason in reasons)
    assert moved


def test_a_controller_counts_what_its_moves_have_cost_against_the_budget_of_the_window() -> None:
    """Each round had all of the budget, until the controller was restarted."""
    for seed in (3, 36):
        assert kubernetes.play(hard_history(seed).with_defragmentation(twin_world.EPOCH)).gathering.jobs


def test_a_node_of_which_no_gpu_is_available_does_not_keep_plans_from_gathering_others() -> None:
    """Each plan of the window failed."""
    kubernetes.play(hard_history(111).with_defragmentation(twin_world.EPOCH))


def test_a_job_that_moves_with_what_is_lent_to_it_is_promised_no_more_than_that() -> None:
    """While its workers exited it was promised their successors twice, and other ones in each plan."""
    play(from_seed(122).with_defragmentation())
