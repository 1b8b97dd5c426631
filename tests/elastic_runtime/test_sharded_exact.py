"""reduction="exact" with shard=: the bits of one worker that shards nothing, whatever sizes and losses the job had."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import SettingsError
from elastic_runtime.membership.process_group import Group
from elastic_runtime.sharded import mirror
from elastic_runtime.sharded.exact_sums import ELEMENTWISE, check_elementwise
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_training import Clip, train
from tests.elastic_runtime.test_sharded import end_in_the_middle_of_a_step
from tests.elastic_runtime.training import FEATURES, Plan, Points
from tests.forked import context, preload
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from elastic_runtime.sharded.wrap import ShardFunction
    from tests.elastic_runtime.training import Gate

preload(__name__, "elastic_runtime.sharded.exact_sums")

PLAN = Plan(
    body=partial(train, clip=Clip(max_norm=0.05)),
    epochs=2,
    max_batch=None,
    normalise=True,
    mixed=True,
    global_batch=19,
    options={"reduction": "exact", "shards": 6, "seed": 3},
)
Losses = dict[tuple[int, int], str]


def losses_of(directory: Path) -> Losses:
    """By step and first sample. A step that was repeated has the losses of the first time."""
    found: Losses = {}
    for path in directory.glob("losses-*.jsonl"):
        for step, start, loss in map(json.loads, path.read_text().splitlines()):
            assert found.setdefault((step, start), loss) == loss, (step, start)
    return found


def train_unsharded(plan: Plan, directory: Path) -> tuple[str, Losses]:
    """In a process of its own: deterministic algorithms are switched on for good."""
    process = context.Process(
        target=PLAN.body, args=(replace(plan, options={**plan.options, "sharded": ""}), 0, directory, None)
    )
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    return torch.load(directory / "final-0.pt")["sha256"], losses_of(directory)


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Losses]:
    return train_unsharded(PLAN, tmp_path_factory.mktemp("reference"))


def finish(cluster: Cluster, directory: Path, *indices: int) -> tuple[str, Losses]:
    cluster.let_go()
    cluster.wait_for_end(*indices)
    cluster.check_samples()
    (digest,) = {final["sha256"] for final in cluster.finals().values()}
    return digest, losses_of(directory)


@pytest.mark.parametrize(
    "size", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_job_of_any_size_gets_the_bits_of_one_worker_that_shards_nothing(
    tmp_path: Path, unsharded: tuple[str, Losses], size: int
) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.target(*range(size))
        assert finish(cluster, tmp_path, *range(size)) == unsharded


def shard_it(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def shard_in_bfloat16(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def train_small(
    plan: Plan, index: int, directory: Path, gate: Gate | None, shard: ShardFunction, *, clips: bool
) -> None:
    job = elastic_runtime.init(global_batch_size=12, reduction="exact", shards=4)
    model: Any = nn.Linear(FEATURES, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Points(24), batch_size=12)
    model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard)
    for _epoch in job.epochs(1):
        for x, y, _ in loader:
            job.backward(nn.functional.cross_entropy(model(x), y))
            if clips and job.applied:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


def clip_or_die(job: Any, index: int, model: nn.Module, gate: Gate | None) -> None:
    """Clip; the second worker is killed between two iterations of step 9."""
    if index == 1 and job.step == 9 and not job._session.micro_batch.last:
        os.kill(os.getpid(), signal.SIGKILL)
    Clip(max_norm=0.05)(job, index, model, gate)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_optimizers_compute_the_same_bits_however_parameters_are_divided(kind: str) -> None:
    def trained(parts: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
        parameters = [nn.Parameter(part.clone()) for part in parts]
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
        check_elementwise([optimizer])
        for step in range(3):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient * (step + 1)
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters])

    values, gradients = torch.randn(2, 1003, generator=torch.Generator().manual_seed(1))
    whole = trained([values], [gradients])
    for parts in (2, 3, 7):
        assert torch.equal(trained([*values.chunk(parts)], [*gradients.chunk(parts)]), whole)


def test_optimizers_that_may_depend_on_the_division_are_refused_by_name() -> None:
    parameters = [nn.Parameter(torch.zeros(3, 3))]
    for optimizer in (torch.optim.Adafactor(parameters), torch.optim.LBFGS(parameters), Sgd(parameters)):
        with pytest.raises(SettingsError, match=f"cannot be used with {type(optimizer).__name__}: what it does to one"):
            check_elementwise([optimizer])
    with pytest.raises(SettingsError, match="leave fused=True out"):
        check_elementwise([torch.optim.AdamW(parameters, fused=True)])


def test_replica_groups_of_one_worker_are_refused() -> None:
    job = elastic_runtime.init(global_batch_size=4, reduction="exact")
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="each worker would hold the whole model"):
        job.prepare(model, optimizer, DataLoader(Points(8), batch_size=4), shard=shard_it, shard_size=1)


class Sgd(torch.optim.SGD):
    """Of a script."""


def test_a_join_a_loss_in_the_middle_of_a_step_and_a_leave_change_no_bit(
    tmp_path: Path, unsharded: tuple[str, Losses]
) -> None:
    with Cluster(tmp_path, replace(PLAN, body=partial(train, clip=clip_or_die))) as cluster:
        cluster.start(0, 1)
        cluster.resize(0, 1, 2, up_to=14)
        cluster.wait_until_at(9, 0, 2)
        assert cluster.wait_for_size(2).lost_steps == 0
        cluster.wait_until_at(14, 0, 2)
        cluster.resize(2, up_to=18)
        assert finish(cluster, tmp_path, 0, 2) == unsharded


COLLECTIVES = ("all_reduce", "all_to_all", "gather_parts")
"""All that a step has: `all_gather_into` and norms use them. A step has 25 of them."""
MOST_STEPS = 6
"""From the arrival of a worker to the next death."""


@dataclass(frozen=True)
class Death:
    """A worker of three is killed: before its n-th collective, or when it has started it (`begun`), or so many seconds
    after its first one.
    """

    nth: int = 0
    begun: bool = False
    after_s: float = 0.0


def deaths_of(seed: int, count: int, *, by_time: bool = False) -> dict[int, Death]:
    """Draw who of three workers is killed, and when; a new worker follows each. By the worker's number."""
    draw, alive, found = random.Random(seed), [0, 1, 2], {}
    for number in range(count):
        victim = alive.pop(draw.randrange(3))
        alive.append(3 + number)
        how = {"after_s": draw.random() * 0.1} if by_time else {"nth": draw.randrange(25), "begun": draw.random() < 0.5}
        found[victim] = Death(**how)
    return found


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(death: Death, job: Any, asked: Path) -> None:
    """Be killed as it is due, once that file is there."""
    seen = 0

    def counted(original: Any) -> Any:
        def method(group: Group, *arguments: Any) -> Any:
            nonlocal seen
            due = job.world_size == 3 and asked.exists()
            seen += due
            if due and death.after_s and seen == 1:
                threading.Timer(death.after_s, kill_myself).start()
            dies = due and not death.after_s and seen > death.nth
            if dies and not death.begun:
                kill_myself()
            started = original(group, *arguments)
            if dies:
                kill_myself()
            return started

        return method

    for name in COLLECTIVES:
        setattr(Group, name, counted(getattr(Group, name)))


def train_until_death(
    plan: Plan, index: int, directory: Path, gate: Gate | None, deaths: dict[int, Death], *, apart: bool
) -> None:
    if apart:  # copies of shards are sent, as between nodes
        mirror.node_number = os.getpid
    armed = False

    def clip(job: Any, index: int, model: nn.Module, gate: Gate | None) -> None:
        nonlocal armed
        if index in deaths and not armed:
            armed = True
            die(deaths[index], job, directory / f"die-{index}")
        Clip(max_norm=0.05)(job, index, model, gate)

    train(plan, index, directory, gate, clip=clip)


@pytest.mark.slow
@pytest.mark.parametrize(("apart", "by_time"), [(False, False), (True, True)], ids=["collectives", "moments"])
def test_a_worker_may_be_killed_at_any_moment_of_a_step(tmp_path: Path, *, apart: bool, by_time: bool) -> None:
    """ELASTIC_DEATHS=SEED:COUNT draws others (at most 21)."""
    seed, count = map(int, os.environ.get("ELASTIC_DEATHS", "1:3").split(":"))
    deaths = deaths_of(seed, count, by_time=by_time)
    plan = replace(PLAN, epochs=2 + count // 2)
    (tmp_path / "alone").mkdir()
    expected = train_unsharded(plan, tmp_path / "alone")
    alive = [0, 1, 2]
    with Cluster(tmp_path, replace(plan, body=partial(train_until_death, deaths=deaths, apart=apart))) as cluster:
        cluster.start(*alive, step=2)
        for victim, death in deaths.items():
            (tmp_path / f"die-{victim}").touch()
            cluster.hold_at(max(cluster.gate.at) + MOST_STEPS)
            process = cluster.processes[f"w{victim}"]
            process.join(TIMEOUT_S)
            assert process.exitcode == -signal.SIGKILL, f"{victim}: {death}\n{cluster.logs()}"
            alive = [*(worker for worker in alive if worker != victim), len(cluster.processes)]
            cluster.target(*alive)
            cluster.wait_until_prepared(*alive)
        assert finish(cluster, tmp_path, *alive) == expected


@pytest.mark.slow
def test_replica_groups_change_no_bit(tmp_path: Path, unsharded: tuple[str, Losses]) -> None:
    plan = replace(PLAN, options={**PLAN.options, "shard_size": 2})
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2, 3)
        cluster.kill("w1")
        assert finish(cluster, tmp_path, 0, 2, 3) == unsharded


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_size_and_unsharded(tmp_path: Path, unsharded: tuple[str, Losses]) -> None:
    with Cluster(tmp_path, PLAN, checkpoints=True) as cluster:
        cluster.start(0, 1)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.hold_at(12)
        cluster.wait_for_end(0, 1)
        cluster.target(2, 3, 4)
        cluster.wait_until_at(12, 2, 3, 4)
        cluster.target()
        cluster.let_go()
        cluster.wait_for_end(2, 3, 4)
        cluster.plan = replace(PLAN, options={**PLAN.options, "sharded": ""})
        cluster.target(5)
        assert finish(cluster, tmp_path, 5) == unsharded


@pytest.mark.slow
def test_a_state_that_is_saved_in_the_middle_of_a_step_goes_on_with_the_same_bits(
    tmp_path: Path, unsharded: tuple[str, Losses]
) -> None:
    with Cluster(
        tmp_path, replace(PLAN, body=partial(train, clip=Clip(max_norm=0.05), long_step=8)), checkpoints=True
    ) as cluster:
        end_in_the_middle_of_a_step(cluster, 0, 1)
        cluster.target(2, 3, 4)
        assert finish(cluster, tmp_path, 2, 3, 4) == unsharded


@pytest.mark.parametrize(
    ("shard", "clips", "message"),
    [
        (shard_in_bfloat16, False, "SettingsError: reduction='exact' sums the gradients of shards in the type of the"),
        (shard_it, True, "UsageError: a sum or norm over sharded parameters or gradients, as of torch.nn.utils.clip_"),
    ],
    ids=["sums in bfloat16", "torch's clipping"],
)
def test_what_would_depend_on_the_size_is_refused_by_name(
    tmp_path: Path, shard: ShardFunction, clips: bool, message: str
) -> None:
    body = partial(train_small, shard=shard, clips=clips)
    with Cluster(tmp_path, replace(PLAN, body=body)) as cluster:
        cluster.target(0, 1)
        for process in cluster.processes.values():
            process.join(TIMEOUT_S)
        assert [process.exitcode for process in cluster.processes.values()] == [2, 2], cluster.logs()
        assert cluster.logs().count(message) >= 2, cluster.logs()
