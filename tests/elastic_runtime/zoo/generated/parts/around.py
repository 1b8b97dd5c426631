"""Code before and after the loader's loop."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.elastic_runtime.zoo.generated.parts.registry import part
from tests.elastic_runtime.zoo.parts import Samples, vector

if TYPE_CHECKING:
    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("prologue")
def nothing_before(s: Draft) -> None:
    pass


@part("prologue")
def buffer_before(s: Draft) -> None:
    tau = torch.ones(())
    s.model.register_buffer("tau", tau)
    s.prologue.append(lambda _: s.model.get_buffer("tau").mul_(0.7))
    s.scale_loss.append(lambda loss: loss * (1.0 + s.model.get_buffer("tau")))


@part("prologue")
def weights_shrunk_before(s: Draft) -> None:
    @torch.no_grad()
    def shrink(epoch: int) -> None:
        if epoch:
            next(s.model.parameters()).mul_(0.8)

    s.prologue.append(shrink)


@part("prologue")
def moments_cleared_before(s: Draft) -> None:
    s.prologue.append(lambda epoch: s.optimizer.state.clear() if epoch else None)


@part("prologue")
def layer_thawed_before(s: Draft) -> None:
    def begin() -> None:
        next(s.model.parameters()).requires_grad_(False)  # noqa: FBT003

    s.prepared.append(begin)
    s.prologue.append(lambda epoch: next(s.model.parameters()).requires_grad_(epoch >= 1))


@part("prologue")
def rates_summed_before(s: Draft) -> None:
    """Over the workers, without job.repeat."""

    def average(_epoch: int) -> None:
        for group in s.optimizer.param_groups:
            rate = torch.tensor(group["lr"] * 0.9)
            group["lr"] = float(s.job.all_reduce(rate) / sum(s.job.all_gather(1)))

    s.prologue.append(average)


@part("prologue")
def layer_frozen_before(s: Draft) -> None:
    """Where its gradients are cleared to zeros, momentum moves it still."""
    s.prologue.append(lambda epoch: next(s.model.parameters()).requires_grad_(epoch < 2))


@part("prologue")
def group_added_before(s: Draft) -> None:
    inner = s.make_optimizer

    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        optimizer = inner(_Given(others))
        first.requires_grad_(False)  # noqa: FBT003
        kept.append(first)
        return optimizer

    def thaw(epoch: int) -> None:
        if epoch == 1:
            kept[0].requires_grad_(True)  # noqa: FBT003
            others = {name: value for name, value in s.optimizer.param_groups[0].items() if name != "params"}
            s.optimizer.add_param_group({"params": kept, **copy.deepcopy(others)})

    kept: list[Any] = []
    s.make_optimizer = make
    s.prologue.append(thaw)


class _Given:
    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters

    def parameters(self) -> list[Any]:
        return self._parameters


@part("prologue", refused="created after prepare|after prepare", rehearsed="after prepare")
def layer_replaced_before(s: Draft) -> None:
    def replace(epoch: int) -> None:
        if epoch != 1:
            return
        torch.manual_seed(7)
        for name, module in list(s.model.named_modules()):
            if isinstance(module, nn.Linear) and module.out_features == 3:
                fresh = nn.Linear(module.in_features, 3)
                owner, _, last = name.rpartition(".")
                setattr(s.model.get_submodule(owner), last, fresh)
                s.optimizer.add_param_group({"params": list(fresh.parameters())})
                return

    s.prologue.append(replace)


@part("prologue", rehearsed="other values|depend on the number|differ|other gradients")
def anchor_copied_before(s: Draft) -> None:
    anchor: list[Any] = []

    def keep(_: int) -> None:
        anchor[:] = [copy.deepcopy(s.model)]

    def draw() -> Any:
        pairs = zip(s.model.parameters(), anchor[0].parameters(), strict=True)
        return 0.3 * sum((p - q.detach()).square().sum() for p, q in pairs)

    s.prologue.append(keep)
    s.more_loss.append(draw)


@part("epilogue")
def nothing_after(s: Draft) -> None:
    pass


@part("epilogue")
def buffer_after(s: Draft) -> None:
    s.model.register_buffer("rho", torch.ones(()))
    s.epilogue.append(lambda _: s.model.get_buffer("rho").mul_(0.8))
    s.scale_loss.append(lambda loss: loss * (1.0 + s.model.get_buffer("rho")))


@part("epilogue")
def weights_shrunk_after(s: Draft) -> None:
    @torch.no_grad()
    def shrink(_: int) -> None:
        next(s.model.parameters()).mul_(0.8)

    s.epilogue.append(shrink)


class Scaled(Samples):
    """Its samples have a size that the script sets."""

    size = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.size, y


def _scaled(s: Draft) -> Scaled:
    found = Scaled(vector)
    s.data = s.data or found  # a stream, or what has other lengths, stays
    return found


@part("epilogue")
def samples_scaled_by_the_epoch(s: Draft) -> None:
    """And otherwise for what an epoch ends with."""
    data = _scaled(s)
    s.prologue.append(lambda epoch: setattr(data, "size", 1.0 + 0.2 * epoch))
    s.epilogue.append(lambda _: setattr(data, "size", 1.0))


@part("epilogue", refused="changed 'size' of its Scaled")
def samples_scaled_after_each_epoch(s: Draft) -> None:
    data = _scaled(s)
    s.epilogue.append(lambda _: setattr(data, "size", data.size * 1.2))
