"""FSDP2 trainings grow, shrink and are cut short; each sample counts once, and the model is the single worker's."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.sharded import files, mirror
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_training import (
    IN_THE_MIDDLE,
    build,
    rewrap_while_a_loss_is_held,
    run_the_example,
    save_final,
    shard,
    train,
    train_with_a_part_left_out,
)
from tests.elastic_runtime.training import Gate, Plan, Points, Record, backpropagate, trained_alone, worker_main
from tests.forked import context
from tests.polling import TIMEOUT_S, until
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

PLAN = Plan(body=train, epochs=2)
UNMIRRORED = {"ELASTIC_MIRROR": "off"}


def undisturbed(plan: Plan, directory: Path) -> dict[str, Any]:
    """What one process gets that does not shard anything."""
    return trained_alone(train, replace(plan, options={**plan.options, "sharded": ""}), directory)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(PLAN, tmp_path_factory.mktemp("reference"))


def test_a_sharded_job_grows_shrinks_and_is_replaced_and_holds_its_part_only(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        cluster.resize(0, 1, 2, up_to=12)
        cluster.wait_until_at(12, 0, 1, 2)
        cluster.target(0, 1, 2, 3)
        cluster.wait_until_prepared(0, 1, 2, 3)
        cluster.resize(1, 3, up_to=20)
        cluster.wait_for_end(0, 2)
        assert all(commit.lost_steps == 0 for commit in cluster.commits)
        cluster.let_go()
        cluster.wait_for_end(1, 3)
        cluster.check_result(reference)
    rows = [json.loads(line) for path in tmp_path.glob("consumed-*") for line in path.read_text().splitlines()]
    assert {row["workers"] for row in rows} == {2, 3}
    for part, whole in (row["held"] for row in rows):
        assert 0 < part < 0.53 * whole
    assert all(part < 0.36 * whole for part, whole in (row["held"] for row in rows if row["workers"] == 3))


def report(directory: Path, index: int, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / f"report-{index}.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def test_a_lost_shard_takes_all_back_to_the_last_checkpoint_and_says_so(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    plan = replace(PLAN, options={"checkpoint_every_s": 1e-9})
    with Cluster(tmp_path, plan, checkpoints=True, environment=UNMIRRORED) as cluster:
        cluster.start(0, 1, 2)
        until(lambda: files.whole_ones(f"{tmp_path}/checkpoints"), "a whole checkpoint")
        cluster.kill("w1")
        cluster.hold_at(20)
        commit = cluster.wait_for_size(2)
        cluster.let_go()
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)
        logs = cluster.logs()
    back = report(tmp_path, 0, "restored")[0]["step"]
    assert commit.lost_steps == 5 - back
    assert f"back to checkpoint-{back:012d}-" in logs
    assert f"{5 - back} steps are repeated" in logs


def test_a_lost_shard_without_a_checkpoint_ends_the_job_with_the_remedy(tmp_path: Path) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1, 2)
        for victim in ("w1", "w2"):  # the copies of one are with the other
            cluster.kill(victim)
        cluster.let_go()
        cluster.processes["w0"].join(TIMEOUT_S)
        assert cluster.processes["w0"].exitcode == 1, cluster.logs()
        assert "neither a copy of them nor a checkpoint; set ELASTIC_CHECKPOINT_DIR" in cluster.logs()


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lost_worker_costs_no_step_without_a_checkpoint(
    tmp_path: Path, reference: dict[str, Any], victim: int
) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1, 2)
        cluster.kill(f"w{victim}")
        cluster.let_go()
        commit = cluster.wait_for_size(2)
        cluster.wait_for_end(*{0, 1, 2} - {victim})
        cluster.check_result(reference)
        logs = cluster.logs()
    assert commit.lost_steps == 0
    assert "its shards of the model come from the copies of step 5: 0 steps are repeated" in logs


def test_copies_of_every_third_step_cost_at_most_three_steps_and_survive_changes_of_size(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN, environment={"ELASTIC_MIRROR": "3"}) as cluster:
        cluster.start(0, 1)
        cluster.resize(0, 1, 2, up_to=11)
        cluster.wait_until_at(11, 0, 1, 2)
        cluster.kill("w1")
        cluster.hold_at(20)
        lost = cluster.wait_for_size(2)
        cluster.target(0, 2, 3)
        cluster.wait_for_size(3)
        cluster.wait_until_at(20, 0, 2, 3)
        cluster.kill("w0")
        cluster.let_go()
        last = cluster.wait_for_size(2)
        cluster.wait_for_end(2, 3)
        cluster.check_result(reference)
    assert 2 <= lost.lost_steps <= 3
    assert last.lost_steps <= 3


def test_gradients_that_are_kept_at_zero_are_part_of_the_state(tmp_path: Path) -> None:
    """Moments and weight decay act on a layer that a step does not use, where its gradient is zero."""
    plan = replace(PLAN, options={"expert": True})
    reference = undisturbed(plan, tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        cluster.resize(0, 1, 2, up_to=9)
        cluster.wait_until_at(9, 0, 1, 2)
        cluster.hold_at(14)
        cluster.wait_until_at(14, 0, 1, 2)
        cluster.kill("w1")
        cluster.let_go()
        cluster.wait_for_size(2)
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)


def without_memory(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """The last worker joins on a machine that is full."""
    if index == 2:
        mirror.free_memory = lambda: (0, 0)
    train(plan, index, directory, gate)


def with_another_interval(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    os.environ["ELASTIC_MIRROR"] = str(2 * index + 1)
    train(plan, index, directory, gate)


@pytest.mark.parametrize("body", [without_memory, pytest.param(with_another_interval, marks=pytest.mark.slow)])
def test_workers_of_different_settings_agree_on_whether_and_when_to_copy(
    tmp_path: Path, reference: dict[str, Any], body: Callable[..., None]
) -> None:
    with Cluster(tmp_path, replace(PLAN, body=body)) as cluster:
        cluster.start(0, 1)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(reference)
        assert ("are not copied to other workers" in cluster.logs()) == (body is without_memory)


def lose_a_worker_between_epochs(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """The rate changes after each epoch; the second worker dies after the first one, and the others know before the
    next one.
    """
    torch.set_num_threads(1)
    wrap = None if "sharded" in plan.options else shard
    job = elastic_runtime.init(global_batch_size=plan.global_batch)
    model, optimizer, _ = build(plan)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader: Any = DataLoader(Points(plan.samples), batch_size=plan.loader_batch, shuffle=True)
    model, optimizer, loader, scheduler = job.prepare(
        model, optimizer, loader, scheduler, shard=wrap, shard_size=plan.options.get("shard_size")
    )
    record = Record(job, index, directory, optimizer, dict)
    for epoch in job.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            backpropagate(job, plan, index, model, x, y, indices)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        if epoch == 0 and job.world_size == 3:
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            until(lambda: job._member.must_recover, "the loss")
    save_final(job, index, directory, model, scheduler)


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({}, "1 steps are repeated"),
        pytest.param({"shard_size": 1}, "no step is lost", marks=pytest.mark.slow, id="replica-groups"),
    ],
)
def test_a_loss_between_two_epochs_repeats_the_end_of_the_first(
    tmp_path: Path, options: dict[str, int], cost: str
) -> None:
    plan = replace(PLAN, body=lose_a_worker_between_epochs, options=options)
    reference = trained_alone(lose_a_worker_between_epochs, replace(plan, options={"sharded": ""}), tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)
        assert cost in cluster.logs()


def test_a_worker_that_dies_during_a_change_of_size_costs_a_step(tmp_path: Path, reference: dict[str, Any]) -> None:
    body = partial(train, dies_in_transfer=2)
    with Cluster(tmp_path, replace(PLAN, body=body)) as cluster:
        cluster.start(0, 1)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)
        assert "1 steps are repeated" in cluster.logs()


def test_an_evicted_sharded_job_saves_and_goes_on_at_another_size_and_unsharded(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN, checkpoints=True) as cluster:
        cluster.start(0, 1)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.hold_at(10)
        cluster.target(2, 3, 4)
        cluster.wait_until_at(10, 2, 3, 4)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(2, 3, 4)
        cluster.plan = replace(PLAN, options={"sharded": ""})
        cluster.target(5)
        cluster.wait_for_end(5)
        cluster.check_result(reference)


def end_in_the_middle_of_a_step(cluster: Cluster, *indices: int) -> None:
    """All workers must leave during a step that never ends, and are killed when there is a checkpoint."""
    cluster.target(*indices)
    cluster.wait_until_at(IN_THE_MIDDLE, *indices)
    for index in indices:
        cluster.kill(f"w{index}", signal.SIGTERM)
    checkpoints = f"{cluster.directory}/checkpoints"
    until(lambda: files.whole_ones(checkpoints), lambda: f"a whole checkpoint\n{cluster.logs()}")
    for index in indices:
        cluster.kill(f"w{index}")


def test_a_job_that_is_told_to_go_in_a_step_that_never_ends_saves_the_steps_beginning(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, replace(PLAN, body=partial(train, long_step=8)), checkpoints=True) as cluster:
        end_in_the_middle_of_a_step(cluster, 0, 1)
        cluster.target(2, 3, 4)
        cluster.wait_for_end(2, 3, 4)
        cluster.check_result(reference)
    assert report(tmp_path, 2, "restored")[0]["step"] == 8


def test_what_is_saved_in_the_middle_of_a_step_has_its_buffers_and_types_of_the_beginning(tmp_path: Path) -> None:
    body = partial(train, long_step=8)
    plan = Plan(body=body, max_batch=None, normalise=True, epochs=1, options={"sharded": "mixed"})
    with Cluster(tmp_path, plan, checkpoints=True) as cluster:
        end_in_the_middle_of_a_step(cluster, 0, 1)
        step, tree = files.load_newest(f"{tmp_path}/checkpoints") or (-1, {})
        assert step == tree["model"]["norm.num_batches_tracked"] == 8
        cluster.target(2)
        cluster.wait_for_end(2)
        cluster.check_samples()


def test_the_death_of_a_joiner_costs_nothing(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.kill("w2")
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.check_result(reference)
        assert all(commit.lost_steps == 0 for commit in cluster.commits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(body=train, epochs=2, samples=10, global_batch=4, weighting="tokens"),
        Plan(body=train, epochs=2, samples=11, global_batch=7, weighting="sum", max_batch=1),
    ],
    ids=["weighted by tokens, fewer samples than workers", "sums, in micro-batches of one"],
)
def test_uneven_shares_count_right(tmp_path: Path, plan: Plan) -> None:
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_for_end(0, 1, 2)
        (tmp_path / "alone").mkdir()
        cluster.check_result(undisturbed(plan, tmp_path / "alone"))


def test_mixed_precision_passes_through_and_buffers_follow_rank_0(tmp_path: Path) -> None:
    plan = Plan(body=train, normalise=True, epochs=1, options={"sharded": "mixed"})
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        cluster.target(0, 1, 2)
        cluster.wait_until_prepared(0, 1, 2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        cluster.check_samples()
        finals = [final["model"] for final in cluster.finals().values()]
    assert finals[0]["norm.running_mean"].abs().sum() > 0
    assert finals[0]["enter.weight"].dtype == torch.float32
    for name, value in finals[0].items():
        assert all(torch.equal(value, other[name]) for other in finals[1:]), name


class Alone:
    """Worker processes without a coordinator, in rounds."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.gate = directory, Gate(context)
        self.processes: list[BaseProcess] = []

    def start(self, plan: Plan, *environments: dict[str, str]) -> None:
        self.gate.at[:] = [-1] * len(self.gate.at)
        for index, environment in enumerate(environments):
            everywhere = {"ELASTIC_CHECKPOINT_DIR": f"{self.directory}/checkpoints", **environment}
            arguments = (plan, index, str(self.directory), everywhere, self.gate)
            process = context.Process(target=worker_main, args=arguments)
            process.start()
            self.processes.append(process)

    def wait_until_at(self, step: int) -> None:
        until(
            lambda: all(self.gate.at[i] >= step for i in range(len(self.processes))),
            lambda: f"step {step}: {self.log()}",
        )

    def end(self) -> list[int | None]:
        """The exit codes of this round."""
        self.gate.limit.value = 1 << 40
        for process in self.processes:
            process.join(TIMEOUT_S)
            process.kill()
        codes = [process.exitcode for process in self.processes]
        self.processes.clear()
        return codes

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("log-*")))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    found = Alone(tmp_path)
    yield found
    found.end()


def check_equal(directory: Path, index: int, reference: dict[str, Any]) -> None:
    final = torch.load(directory / f"final-{index}.pt")
    assert final["step"] == reference["step"]
    for name, value in reference["model"].items():
        torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)


def test_alone_sigterm_saves_and_the_next_one_goes_on(alone: Alone, reference: dict[str, Any]) -> None:
    alone.gate.limit.value = 10
    alone.start(PLAN, {})
    alone.wait_until_at(10)
    alone.processes[0].terminate()
    assert alone.end() == [128 + signal.SIGTERM], alone.log()
    alone.start(PLAN, {"ELASTIC_REPORT_FILE": f"{alone.directory}/report-0.jsonl"})
    assert alone.end() == [0], alone.log()
    assert report(alone.directory, 0, "restored")[0]["step"] == 11
    check_equal(alone.directory, 0, reference)


def under_torchrun(ranks: int) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), **common} for rank in range(ranks)]


@pytest.mark.slow
def test_under_torchrun_all_save_together_and_a_loss_goes_back(alone: Alone, reference: dict[str, Any]) -> None:
    alone.gate.limit.value = 10
    alone.start(PLAN, *under_torchrun(2))
    alone.wait_until_at(10)
    alone.processes[1].terminate()
    assert alone.end() == 2 * [128 + signal.SIGTERM], alone.log()
    alone.gate.limit.value = 20
    alone.start(PLAN, *under_torchrun(3))
    alone.wait_until_at(20)
    alone.processes[1].kill()
    assert alone.end() == [1, -signal.SIGKILL, 1], alone.log()
    alone.start(PLAN, *under_torchrun(2))
    assert alone.end() == [0, 0], alone.log()
    check_equal(alone.directory, 0, reference)


def test_a_parameter_that_is_left_out_is_named(alone: Alone) -> None:
    alone.start(replace(PLAN, body=train_with_a_part_left_out), {})
    assert alone.end() == [2]
    assert "UsageError: shard= left parameter 'first.weight' unsharded" in alone.log()


def test_a_change_of_size_gives_the_old_shards_up_at_once(alone: Alone) -> None:
    alone.start(replace(PLAN, body=rewrap_while_a_loss_is_held), {"ELASTIC_CHECKPOINT_DIR": ""})
    assert alone.end() == [0], alone.log()


@pytest.mark.slow
def test_the_example_learns_and_saves_the_whole_model(alone: Alone) -> None:
    alone.start(replace(PLAN, body=run_the_example), {"ELASTIC_CHECKPOINT_DIR": ""})
    assert alone.end() == [0], alone.log()
    losses = [float(line.rpartition(" ")[2]) for line in alone.log().splitlines() if line.startswith("epoch")]
    assert losses[-1] < losses[0] / 2
    assert torch.load(alone.directory / "model.pt")["blocks.3.0.weight"].shape == (64, 64)
