"""Evaluations and averaged models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.elastic_runtime.zoo.generated.drafts import evaluated
from tests.elastic_runtime.zoo.generated.parts.registry import part

if TYPE_CHECKING:
    from tests.elastic_runtime.zoo.generated.drafts import Draft

_ema: Any = get_ema_multi_avg_fn


@part("evaluation")
def not_evaluated(s: Draft) -> None:
    pass


@part("evaluation")
def evaluated_by_itself(s: Draft) -> None:
    def evaluate(_: int) -> None:
        s.model.eval()
        with torch.no_grad():
            s.model(torch.ones(3, 8))
            torch.rand(5)
        s.model.train()

    s.epilogue.append(evaluate)


@part("evaluation")
def evaluated_together(s: Draft) -> None:
    s.epilogue.append(lambda _: evaluated(s))


@part("evaluation")
def evaluated_before_the_epoch(s: Draft) -> None:
    s.prologue.append(lambda _: evaluated(s))


@part("evaluation")
def evaluated_in_the_loop(s: Draft) -> None:
    s.after_step.append(lambda _: evaluated(s) if s.job.applied and s.job.step % 3 == 2 else None)


# Averages


@part("average")
def none(s: Draft) -> None:
    pass


def _average(s: Draft, *, tracked: bool) -> None:
    def make() -> None:
        average = AveragedModel(s.model, multi_avg_fn=_ema(0.9), use_buffers=True)
        if tracked:
            s.job.track(average=average)
        s.after_step.append(lambda _: average.update_parameters(s.model))
        s.results.append(average)

    s.prepared.append(make)


@part("average")
def tracked_average(s: Draft) -> None:
    _average(s, tracked=True)


@part("average", rehearsed="AveragedModel")
def untracked_average(s: Draft) -> None:
    _average(s, tracked=False)


@part("average", rehearsed="averages weights and is neither prepared nor tracked")
def untracked_average_of_the_last_epochs(s: Draft) -> None:
    def make() -> None:
        average = AveragedModel(s.model)
        s.epilogue.append(lambda epoch: average.update_parameters(s.model) if epoch >= 2 else None)
        s.results.append(average)

    s.prepared.append(make)


class Shadow:
    """An average that is put in place of the weights to evaluate; it keeps these as they are, with their graph."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.kept = model, [p.detach().clone() for p in model.parameters()]
        self.before: list[torch.Tensor] = [p.clone() for p in model.parameters()]

    @torch.no_grad()
    def update_parameters(self) -> None:
        for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
            kept.lerp_(parameter, 0.1)

    def evaluate(self) -> None:
        self.before = [p.clone() for p in self.model.parameters()]
        for values in (self.kept, self.before):
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), values, strict=True):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept, value in zip(self.kept, state["kept"], strict=True):
            kept.copy_(value)
        self.before = state["before"]


@part("average")
def shadow_that_keeps_a_graph(s: Draft) -> None:
    def make() -> None:
        shadow = Shadow(s.model)
        s.job.track(shadow=shadow)
        s.after_step.append(lambda _: shadow.update_parameters())
        s.epilogue.append(lambda _: shadow.evaluate())
        s.results.append(torch.nn.ParameterList(shadow.kept))

    s.prepared.append(make)


@part("average", rehearsed="differ|other values|other gradients|another state|depend")
def average_by_hand_in_the_loss(s: Draft) -> None:
    """A dictionary of averages towards which the loss draws."""
    kept: dict[str, torch.Tensor] = {}

    def draw() -> Any:
        for name, parameter in s.model.named_parameters():
            kept.setdefault(name, torch.zeros_like(parameter.detach()))
        return 0.1 * sum((p - kept[name]).square().sum() for name, p in s.model.named_parameters())

    def follow(_: Any) -> None:
        if s.job.applied:
            for name, parameter in s.model.named_parameters():
                kept[name].lerp_(parameter.detach(), 0.5)

    s.more_loss.append(draw)
    s.after_step.append(follow)
