"""A small training under FSDP2 that writes down what it consumed, and what each worker held of it."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.sharded.transfer import Resharding
from elastic_runtime.state.packing import pack
from tests.elastic_runtime.training import FEATURES, Gate, Plan, Points, Record, backpropagate, digest
from tests.forked import preload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

SHARDED = ("agreed_saves", "collectives", "holdings", "mirror", "mode", "sharding", "shared_memory", "state", "wrap")
preload(__name__, *(f"elastic_runtime.sharded.{name}" for name in SHARDED))

WIDTH = 50  # divided by no number of workers here
AT_CLIPPING = IN_THE_MIDDLE = 1 << 20  # reported by a worker instead of a step


class Model(nn.Module):
    """Frozen, tied and plain parameters, buffers where they are asked for, and a layer that some steps use, or none."""

    def __init__(self, *, normalise: bool, with_expert: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.first, self.second, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH) if normalise else nn.Identity()
        self.leave = nn.Linear(WIDTH, 3)
        self.expert = nn.Linear(WIDTH, WIDTH) if with_expert else None
        self.uses_expert: Callable[[], bool] = lambda: False
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.enter(x)))
        x = self.second(torch.tanh(self.first(x)))
        x = torch.tanh(x + self.frozen(x))
        if self.expert is not None and self.uses_expert():
            x = x + self.expert(x)
        found: torch.Tensor = self.leave(x.to(self.leave.weight.dtype))
        return found


def shard(model: Model, mesh: DeviceMesh) -> None:
    fully_shard([model.first, model.second], mesh=mesh)
    fully_shard(model.enter, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_mixed(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def shard_two_types(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(model.leave, mesh=mesh)
    fully_shard(model, mesh=mesh)


def build(plan: Plan) -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(1)
    model = Model(normalise=plan.normalise, with_expert=plan.options.get("expert", False))
    if plan.options.get("sharded") == "two types":
        model.leave.bfloat16()
    rest = [p for name, p in model.named_parameters() if not name.startswith("enter")]
    groups: list[dict[str, Any]] = [{"params": list(model.enter.parameters()), "lr": 0.02}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of this worker's part, and of the whole, of parameters and optimizer state."""
    tensors = [t for t in pack([dict(model.named_parameters()), optimizer.state_dict()])[1] if isinstance(t, DTensor)]
    return [sum(t.to_local().nbytes for t in tensors), sum(t.numel() * t.element_size() for t in tensors)]


@dataclass(frozen=True)
class Clip:
    """How the loop clips. `stops`: at this step, worker `victim` stops after the others have begun to."""

    max_norm: float = 0.5
    norm_type: float = 2.0
    compared: bool = False
    stops: int = -1
    victim: int = 1

    def __call__(self, job: Any, index: int, model: nn.Module, gate: Gate | None) -> None:
        if gate and job.applied and job.step == self.stops:
            gate.at[index] = AT_CLIPPING
            if index == self.victim:
                stand_still(gate, index)
        if not self.compared:
            job.clip_grad_norm_(model.parameters(), self.max_norm, self.norm_type)
        elif job.applied:
            self._compare(job, model)
        else:
            assert float(job.clip_grad_norm_(model.parameters(), self.max_norm)) == 0.0

    def _compare(self, job: Any, model: nn.Module) -> None:
        """With torch's own."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        before = [_whole(gradient).clone() for gradient in gradients]
        expected = nn.utils.get_total_norm(before, self.norm_type)
        nn.utils.clip_grads_with_norm_(twins := [_with_grad(gradient) for gradient in before], self.max_norm, expected)
        found = job.clip_grad_norm_(model.parameters(), self.max_norm, self.norm_type)
        rounding = max(torch.finfo(gradient.dtype).eps for gradient in before)  # as the tensors' norms are rounded
        torch.testing.assert_close(found, expected, rtol=10 * rounding, atol=0.0)
        for gradient, twin in zip(gradients, twins, strict=True):
            torch.testing.assert_close(_whole(gradient), twin.grad, rtol=10 * rounding, atol=1e-6)


def stand_still(gate: Gate, index: int) -> None:
    gate.at[index] = IN_THE_MIDDLE
    while True:
        time.sleep(0.01)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _with_grad(gradient: torch.Tensor) -> torch.Tensor:
    twin = torch.zeros_like(gradient)
    twin.grad = gradient
    return twin


def die_in_the_transfer(number: int) -> None:
    """This process ends in the transfer of this number, between two of its batches."""
    exchange, seen = Resharding._exchange, []

    def counted(self: Resharding, *arguments: Any) -> None:
        seen.append(self)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(self, *arguments)

    Resharding._exchange = counted  # type: ignore[method-assign, assignment]


def train(
    plan: Plan,
    index: int,
    directory: Path,
    gate: Gate | None,
    clip: Callable[..., None] = Clip(),
    long_step: int = -1,
    dies_in_transfer: int = 0,
) -> None:
    """As `training.train`. `plan.options["sharded"]`: "" for none.

    The forward pass of `long_step` never ends, on the first two workers: they are in the middle of it. The second
    worker dies in the transfer of this number.
    """
    torch.set_num_threads(1)
    if index == 1 and dies_in_transfer:
        die_in_the_transfer(dies_in_transfer)
    options = dict(plan.options)
    wrap = {"": None, "plain": shard, "mixed": shard_mixed, "two types": shard_two_types}[
        options.pop("sharded", "plain")
    ]
    to_zeros, shard_size = options.pop("expert", False), options.pop("shard_size", None)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=plan.max_batch, **options)
    model, optimizer, scheduler = build(plan)
    model.uses_expert = lambda: job.step % 5 == 1
    loader: Any = DataLoader(Points(plan.samples), batch_size=plan.loader_batch, shuffle=True)
    model, optimizer, loader, scheduler = job.prepare(
        model, optimizer, loader, scheduler, shard=wrap, shard_size=shard_size if wrap else None
    )
    more = lambda: {"held": held(model, optimizer), "workers": job.world_size}  # noqa: E731
    if gate and index < 2:
        model.second.register_forward_pre_hook(lambda *_: stand_still(gate, index) if job.step == long_step else None)
    record = Record(job, index, directory, optimizer, more)
    computed: list[Any] = []
    losses = (directory / f"losses-{index}.jsonl").open("a", buffering=1)
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            session = job._session
            assert session is not None
            micro, computed = session.micro_batch, [] if session.begins_step else computed
            assert micro is not None
            loss = backpropagate(job, plan, index, model, x, y, indices)
            computed += [] if micro.padding else [[session.steps_before, micro.start, loss.hex()]]
            if job.applied:  # what is computed after a peer was lost means nothing
                losses.writelines(f"{json.dumps(row)}\n" for row in computed)
            clip(job, index, model, gate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not to_zeros)
            scheduler.step()
    save_final(job, index, directory, model, scheduler, optimizer)


def whole_state(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def save_final(job: Any, index: int, directory: Path, model: nn.Module, scheduler: Any, *optimizers: Any) -> None:
    whole = whole_state(model)
    moments: list[Any] = [
        get_optimizer_state_dict(model, each, options=StateDictOptions(full_state_dict=True))["state"]
        for each in optimizers
    ]
    torch.save(
        {
            "model": whole,
            "sha256": digest(whole, *moments),
            "lr": scheduler.get_last_lr(),
            "step": job.step,
            "rank": job.rank,
        },
        directory / f"final-{index}.pt",
    )


def train_with_a_part_left_out(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """`shard` does not wrap all of the model."""
    job = elastic_runtime.init(global_batch_size=plan.global_batch)
    model, optimizer, _ = build(plan)
    loader = DataLoader(Points(plan.samples), batch_size=plan.loader_batch)
    job.prepare(model, optimizer, loader, shard=lambda model, mesh: fully_shard(model.enter, mesh=mesh))
    epochs = job.epochs(1)
    next(epochs)


def rewrap_while_a_loss_is_held(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    job = elastic_runtime.init(global_batch_size=plan.global_batch)
    model, optimizer, _ = build(plan)
    loader: Any = DataLoader(Points(plan.samples), batch_size=plan.loader_batch)
    model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard)
    for _epoch in job.epochs(1):
        for x, y, _indices in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            job.backward(loss)
            optimizer.step()
            break
        break
    sharding = job._member.sharding
    assert sharding is not None
    gc.disable()
    shards = [weakref.ref(parameter) for parameter in model.parameters()]
    moments = [weakref.ref(kept["exp_avg"]) for kept in optimizer.state.values()]
    assert all(found() is not None for found in [*shards, *moments])
    sharding.wrapping.rewrap(sharding.link.group.mesh("cpu", "another"))
    assert loss is not None
    assert not any(found() is not None for found in [*shards, *moments])


def run_the_example(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(1)
    script = Path("examples/train_sharded.py").resolve()
    os.chdir(directory)
    runpy.run_path(str(script), run_name="__main__")
