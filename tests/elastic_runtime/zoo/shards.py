"""Scripts with shard=: right ones, and what a rehearsal names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, script, vectors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    Shard = Callable[[nn.Module, DeviceMesh], None]


def wrap(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each linear layer by itself, and the model."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  (a second, which other scripts do without)

    for part in model.children():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(init: dict[str, Any], model: nn.Module, shard: Shard = wrap, **more: Any) -> Any:
    """Train a classifier. `more`: tracked objects."""
    init = {**init, "reduction": "fast"}
    job = elastic_runtime.init(**init)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, vectors(), scheduler, shard=shard)
    job.track(**more)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y))
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            for each in more.values():
                each.update_parameters()
    return model


def layers() -> nn.Module:
    """Rows that two workers share unequally, and a buffer."""
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 3))


@script(modes=("fast",))
def sharded_layers(**init: Any) -> Any:
    return train(init, layers())


@script(rehearsed="a sum over the samples", modes=("fast",))
def sharded_loss_that_is_a_sum(**init: Any) -> Any:
    job = elastic_runtime.init(**{**init, "reduction": "fast"})
    model: Any = layers()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001), vectors(), shard=wrap)
    for _epoch in job.epochs(EPOCHS):
        for x, y in loader:
            job.backward(cross_entropy(model(x), y, reduction="sum"))
            optimizer.step()
            optimizer.zero_grad()
    return model


class Forgetful:
    """A count that is in its state and is not restored."""

    def __init__(self) -> None:
        self.count = 0.0

    def update_parameters(self) -> None:
        self.count += 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the mistake."""


@script(rehearsed="begins with different sharded states", modes=("fast",))
def sharded_beside_a_count_that_is_not_restored(**init: Any) -> Any:
    return train(init, layers(), count=Forgetful())


@script(rehearsed="left parameter '0.weight' unsharded", modes=("fast",))
def sharded_in_part(**init: Any) -> Any:
    def only_the_last(model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        fully_shard(list(model.children())[-1], mesh=mesh)

    return train(init, layers(), only_the_last)
