"""HSDP: replica groups grow in number and shrink, and a lost worker costs no step: other groups have its shards."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import CollectiveError, ModelMismatchError, SettingsError, UsageError
from elastic_runtime.membership.generations import Generations
from elastic_runtime.membership.orders import Order
from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.sharded import files
from elastic_runtime.sharded.mode import ShardedReducer
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_training import AT_CLIPPING, Clip, build, save_final, shard, stand_still, train
from tests.elastic_runtime.test_sharded import Alone, check_equal, under_torchrun, undisturbed
from tests.elastic_runtime.training import Gate, Plan, Points, Record, backpropagate, trained_alone
from tests.forked import preload
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

preload(__name__)

PLAN = Plan(body=train, epochs=2, options={"shard_size": 2})
UNMIRRORED = {"ELASTIC_MIRROR": "off"}


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 12)))
def test_every_worker_is_in_one_group_whose_members_hold_no_more_than_they_were_meant_to(
    ranks: int, wanted: int | None
) -> None:
    grid = Grid.of(ranks, wanted)
    assert grid.shards * grid.groups == ranks
    assert grid.shards >= min(ranks, wanted or ranks)
    for rank in range(ranks):
        group, same = grid.same_group(rank), grid.same_shard(rank)
        assert set(group) & set(same) == {rank}
        assert group[grid.shard_of(rank)] == same[grid.group_of(rank)] == rank


def test_a_worker_with_groups_of_another_size_is_refused_by_name() -> None:
    """Its groups would never be complete, and it would wait for them."""
    store = HashStore()
    store.set("shard_size", "2")  # as rank 0 does
    worker = Generations("w1", lambda _: store, lambda *_, **__: None, lambda *_, **__: None, lambda: "gloo")
    worker.shard_size = 0
    worker.on_order(Order("Recover", 1, ("w0", "w1")))
    with pytest.raises(ModelMismatchError, match="shard_size=None here, and shard_size=2 on rank 0"):
        worker.wait_for_next(after=0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    found = Alone(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(PLAN, tmp_path_factory.mktemp("reference"))


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("consumed-*") for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_groups_are_added_and_given_back_and_each_holds_the_model_once(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        cluster.resize(0, 1, 2, up_to=8)
        cluster.wait_until_at(8, 0, 1, 2)
        cluster.resize(0, 1, 2, 3, up_to=12)
        cluster.wait_until_at(12, 0, 1, 2, 3)
        cluster.resize(0, 2, 3, up_to=17)  # no number of groups of two: one of three
        cluster.wait_until_at(17, 0, 2, 3)
        cluster.resize(0, 2, up_to=22)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2, 3)
        cluster.check_result(reference)
        assert all(commit.lost_steps == 0 for commit in cluster.commits)
    shares = {row["workers"]: row["held"][0] / row["held"][1] for row in rows(tmp_path)}
    assert shares.keys() == {2, 3, 4}
    assert 0.4 < shares[4] < 0.53


@pytest.mark.parametrize(
    "victims", [(1,), pytest.param((0, 3), marks=pytest.mark.slow)], ids=["one", "one-of-each-group"]
)
def test_a_lost_worker_costs_no_step_and_no_copies_are_read(
    tmp_path: Path, reference: dict[str, Any], victims: tuple[int, ...]
) -> None:
    """Without checkpoints and without copies in host memory: the other group has the same shards."""
    with Cluster(tmp_path, PLAN, environment=UNMIRRORED) as cluster:
        cluster.start(0, 1, 2, 3)
        for victim in victims:
            cluster.kill(f"w{victim}")
        cluster.hold_at(15)
        commit = cluster.wait_for_size(4 - len(victims))
        left = sorted({0, 1, 2, 3} - {*victims})
        cluster.wait_until_at(15, *left)
        for number in range(len(victims)):
            left.append(4 + number)
            cluster.resize(*left, up_to=18 + 3 * number)
            cluster.wait_until_at(18 + 3 * number, *left)
        cluster.let_go()
        cluster.wait_for_end(*left)
        cluster.check_result(reference)
        logs = cluster.logs()
    assert commit.lost_steps == 0
    assert "others have its shards: no step is lost" in logs
    assert "come from the copies" not in logs


def unclipped(*_: object) -> None:
    """Clip nothing: a worker that has the sum would wait for those of its group."""


def lost_in_the_sum(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """Of step 8 the first worker has the sum, and applies it; the second and third have not."""
    original, seen = ShardedReducer.reduce, 0

    def reduce(self: ShardedReducer) -> None:
        nonlocal seen
        original(self)
        seen += 1
        if gate and index in {1, 2} and seen == 9:
            gate.at[index] = 1 << 20
            until(lambda: self._sharding.link.group._interrupt.is_set, lambda: "the loss")
            raise CollectiveError("the sum was lost")

    ShardedReducer.reduce = reduce  # type: ignore[method-assign]
    train(plan, index, directory, gate, clip=unclipped)


def test_a_loss_after_which_some_have_applied_the_step_takes_all_back_to_their_own_copies(
    tmp_path: Path,
) -> None:
    body = partial(train, clip=unclipped)
    reference = trained_alone(body, replace(PLAN, options={"sharded": ""}), tmp_path / "alone")
    with Cluster(tmp_path, replace(PLAN, body=lost_in_the_sum)) as cluster:
        cluster.start(0, 1, 2, 3)
        cluster.let_go()
        cluster.wait_until_at(1 << 20, 1, 2)
        cluster.wait_until_at(9, 0, 3)
        cluster.kill("w3")
        cluster.wait_for_size(3)
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(reference)
        assert "its shards of the model come from the copies of step 8: 1 steps are repeated" in cluster.logs()


@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_of_one_copy(tmp_path: Path) -> None:
    plan = replace(PLAN, body=partial(train, clip=Clip(compared=True)), epochs=1)
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2, 3)
        cluster.wait_for_end(0, 1, 2, 3)
        cluster.check_result(undisturbed(plan, tmp_path / "alone"))


@pytest.mark.slow
def test_an_evicted_job_saves_one_copy_and_goes_on_with_any_layout(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path, PLAN, checkpoints=True) as cluster:
        cluster.start(0, 1, 2, 3)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2, 3)
        assert [saved.ranks for saved in files.whole_ones(f"{tmp_path}/checkpoints")] == [2]
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2
        cluster.hold_at(25)  # the last step of the second epoch
        cluster.plan = replace(PLAN, options={})
        cluster.target(4, 5, 6)
        cluster.wait_until_at(25, 4, 5, 6)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(4, 5, 6)
        cluster.plan = PLAN
        cluster.target(7, 8, 9, 10)
        cluster.wait_for_end(7, 8, 9, 10)
        cluster.check_result(reference)


@pytest.mark.slow
def test_under_torchrun_and_alone_there_are_groups_too(alone: Alone, reference: dict[str, Any]) -> None:
    alone.gate.limit.value = 10
    alone.start(PLAN, *under_torchrun(4))
    alone.wait_until_at(10)
    alone.processes[1].terminate()
    assert alone.end() == 4 * [128 + signal.SIGTERM], alone.log()
    alone.start(PLAN, {})
    assert alone.end() == [0], alone.log()
    check_equal(alone.directory, 0, reference)


@pytest.mark.slow
def test_uneven_shares_in_micro_batches_count_right(tmp_path: Path) -> None:
    plan = replace(PLAN, samples=11, global_batch=7, weighting="sum", max_batch=1)
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2, 3)
        cluster.wait_for_end(0, 1, 2, 3)
        cluster.check_result(undisturbed(plan, tmp_path / "alone"))


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2"])
def test_another_number_of_workers_of_a_group_is_refused(size: Any) -> None:
    job = elastic_runtime.init(global_batch_size=4)
    model = nn.Linear(12, 3)
    loader = DataLoader(Points(8), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(SettingsError, match="from 1 up: the number of workers that hold one copy"):
        job.prepare(model, optimizer, loader, shard=lambda m, mesh: fully_shard(m, mesh=mesh), shard_size=size)


def test_replica_groups_of_a_model_that_is_not_sharded_are_refused() -> None:
    job = elastic_runtime.init(global_batch_size=4)
    model = nn.Linear(12, 3)
    with pytest.raises(UsageError, match="of use with shard= only"):
        job.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(Points(8), batch_size=4), shard_size=2)


def own_submesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard within the replica group only, so that nothing sums between the groups."""
    assert mesh.mesh_dim_names
    fully_shard(model, mesh=mesh[mesh.mesh_dim_names[1]])


def own_mesh(model: nn.Module, _mesh: DeviceMesh) -> None:
    """Leave out the mesh: torch takes all ranks."""
    fully_shard(model)


@pytest.mark.parametrize("wrong", [own_submesh, own_mesh])
def test_another_mesh_than_the_one_of_replica_groups_is_refused(wrong: Callable[..., None]) -> None:
    job = elastic_runtime.init(global_batch_size=4)
    model = nn.Linear(12, 3)
    loader = DataLoader(Points(8), batch_size=4)
    job.prepare(model, torch.optim.SGD(model.parameters()), loader, shard=wrong, shard_size=1)
    with pytest.raises(UsageError, match="sharded over another mesh"):
        next(iter(job.epochs(1)))


def test_one_process_trains_in_replica_groups_twice() -> None:
    """As a notebook does, or a search for options."""
    for _ in range(2):
        job = elastic_runtime.init(global_batch_size=4)
        model = nn.Linear(12, 3)
        optimizer: Any = torch.optim.SGD(model.parameters())
        loader: Any = DataLoader(Points(8), batch_size=4)
        whole = lambda model, mesh: fully_shard(model, mesh=mesh)  # noqa: E731
        model, optimizer, loader = job.prepare(model, optimizer, loader, shard=whole, shard_size=2)
        for _epoch in job.epochs(1):
            for x, _y, _indices in loader:
                job.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        assert job.step == 2


def two_optimizers(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """Each clips before its step; the second and third worker stop between both in step 8."""
    torch.set_num_threads(1)
    wrap = None if "sharded" in plan.options else shard
    job = elastic_runtime.init(global_batch_size=plan.global_batch)
    model, _, _ = build(plan)
    first = torch.optim.AdamW(model.enter.parameters(), lr=0.02)
    second = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("enter")], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(second, step_size=7, gamma=0.9)
    loader: Any = DataLoader(Points(plan.samples), batch_size=plan.loader_batch, shuffle=True)
    model, (first, second), loader, scheduler = job.prepare(
        model, [first, second], loader, scheduler, shard=wrap, shard_size=2 if wrap else None
    )
    record = Record(job, index, directory, second, dict)
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            backpropagate(job, plan, index, model, x, y, indices)
            job.clip_grad_norm_(model.enter.parameters(), 0.3)
            first.step()
            if gate and job.applied and job.step == 8:
                gate.at[index] = AT_CLIPPING
                if index in {1, 2}:
                    stand_still(gate, index)
            job.clip_grad_norm_([p for group in second.param_groups for p in group["params"]], 0.3)
            second.step()
            first.zero_grad()
            second.zero_grad()
            scheduler.step()
    save_final(job, index, directory, model, scheduler)


@pytest.mark.slow
def test_a_state_that_one_of_two_optimizers_has_changed_is_not_continued_with(tmp_path: Path) -> None:
    """All shards are there after the loss, and all of one step, but half of it is applied."""
    plan = replace(PLAN, body=two_optimizers, options={}, epochs=1)
    reference = trained_alone(two_optimizers, replace(plan, options={"sharded": ""}), tmp_path / "alone")
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2, 3)
        cluster.let_go()
        cluster.wait_until_at(AT_CLIPPING, 0, 1, 2, 3)
        for victim in ("w1", "w2"):
            cluster.kill(victim)
        cluster.wait_for_end(0, 3)
        cluster.check_result(reference)
        assert "its shards of the model come from the copies of step 8: 0 steps are repeated" in cluster.logs()
