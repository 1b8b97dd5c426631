"""What users of FSDP2 do, as one training: for tests of real processes.

Two models with an optimizer each; a frozen backbone with low-rank adapters, of which a layer is unfrozen; activation
checkpointing, of both kinds; torch.compile, of either the whole or the blocks; averaged weights, kept by hand; an
optimizer's state taken out and put back in the middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.training import FEATURES, Points, Record
from tests.forked import preload

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from tests.elastic_runtime.training import Gate, Plan

preload(__name__)

WIDTH, RANK = 30, 3
UNFREEZES = 2  # the step after which the first layer is trained, too
WHOLE = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


class Adapted(nn.Module):
    """A frozen layer and its low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


class Backbone(nn.Module):
    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH).requires_grad_(requires_grad=False)
        blocks: list[nn.Module] = [Adapted() for _ in range(3)]
        if checkpointed == "wrapped":
            blocks = [checkpoint_wrapper(block) for block in blocks]
        self.blocks = nn.ModuleList(blocks)
        self.checkpointed = checkpointed == "called"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Average:
    """Averaged weights, kept by hand: of a sharded model its shards."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kept = model, {}  # type: nn.Module, dict[str, torch.Tensor]

    @torch.no_grad()
    def update_parameters(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self.kept:
                self.kept[name].lerp_(parameter, 0.1)
            else:
                self.kept[name] = parameter.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)


def wrapping(options: dict[str, Any]) -> Any:
    compiled = options.pop("compiled", "")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.pop("mixed", False) else None

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        more: dict[str, Any] = {"mp_policy": policy} if policy else {}
        for block in getattr(model, "blocks", []):
            if compiled == "blocks":
                block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)

    return shard


def train_zoo(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """`plan.options`: sharded, compiled ("", "blocks", "whole"), checkpointed ("", "called", "wrapped"), mixed."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    options = dict(plan.options)
    backbone, critic = Backbone(options.pop("checkpointed", "")), nn.Sequential(nn.Linear(WIDTH, 20), nn.Linear(20, 3))
    whole = options.get("compiled") == "whole"
    shard = wrapping(options) if options.pop("sharded", True) else None
    for name in ("compiled", "mixed"):
        options.pop(name, None)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=plan.max_batch, **options)
    adapters = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    adapters += backbone.enter.parameters()
    optimizers = [torch.optim.SGD(adapters, lr=0.3, momentum=0.9), torch.optim.AdamW(critic.parameters(), lr=0.01)]
    trained: Any = torch.compile(backbone, backend="aot_eager") if whole else backbone
    average = Average(critic)
    loader: Any = DataLoader(Points(plan.samples), batch_size=8, shuffle=True)
    _, _, loader = job.prepare([trained, critic], optimizers, loader, shard=shard)
    job.track(average=average)
    record = Record(job, index, directory, optimizers[0], dict)
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            features = trained(x)
            loss = nn.functional.cross_entropy(critic(features).float(), y)
            job.backward(loss + 0.1 * critic(features.detach()).float().square().mean())
            for model, optimizer in zip((backbone, critic), optimizers, strict=True):
                job.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters()
            if job.applied and job.step == UNFREEZES:
                backbone.enter.requires_grad_(requires_grad=True)
            if job.applied and job.step % 5 == 4:
                set_optimizer_state_dict(critic, optimizers[1], get_optimizer_state_dict(critic, optimizers[1]))
    save(job, index, directory, backbone, critic, optimizers[1], average)


def save(
    job: Any,
    index: int,
    directory: Path,
    backbone: nn.Module,
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average,
) -> None:
    found: list[Any] = [get_model_state_dict(model, options=WHOLE) for model in (backbone, critic)]
    found.append(
        {name: kept.full_tensor() if isinstance(kept, DTensor) else kept for name, kept in average.kept.items()}
    )
    found.append(get_optimizer_state_dict(critic, optimizer, options=FLAT))
    model = {f"{number}.{name}": value for number, state in enumerate(found) for name, value in state.items()}
    tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    torch.save({"model": tensors, "lr": [], "step": job.step, "rank": job.rank}, directory / f"final-{index}.pt")
