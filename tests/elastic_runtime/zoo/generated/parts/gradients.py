"""How gradients are cleared, skipped and changed by hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.elastic_runtime.zoo.generated.parts.registry import part

if TYPE_CHECKING:
    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("clearing")
def cleared_to_none(s: Draft) -> None:
    pass


@part("clearing")
def cleared_first(s: Draft) -> None:
    s.clears_first = True


@part("clearing")
def cleared_to_zeros(s: Draft) -> None:
    s.clear = lambda: s.optimizer.zero_grad(set_to_none=False)


@part("clearing")
def cleared_to_zeros_first(s: Draft) -> None:
    s.clear, s.clears_first = lambda: s.model.zero_grad(set_to_none=False), True


@part("clearing")
def cleared_to_zeros_in_some_steps(s: Draft) -> None:
    s.clear = lambda: s.optimizer.zero_grad(set_to_none=s.job.step % 3 == 0)


@part("clearing")
def cleared_to_zeros_first_in_some_steps(s: Draft) -> None:
    s.clear, s.clears_first = lambda: s.optimizer.zero_grad(set_to_none=s.job.step % 3 == 0), True


# Skipping


@part("skipping")
def nothing_skipped(s: Draft) -> None:
    pass


@part("skipping")
def every_fourth_step_skipped(s: Draft) -> None:
    s.skips = lambda: s.job.step % 4 == 2


# Hooks


@part("hook")
def no_hook(s: Draft) -> None:
    pass


@part("hook")
def hook_on_a_gradient(s: Draft) -> None:
    first: Any = next(s.model.parameters())
    first.register_hook(lambda gradient: gradient * 0.5)


@part("hook")
def hook_on_the_optimizer(s: Draft) -> None:
    @torch.no_grad()
    def decay(*_: Any) -> None:
        next(s.model.parameters()).mul_(0.99)

    s.prepared.append(lambda: s.optimizer.register_step_post_hook(decay))


@part("hook")
def hook_on_the_forward_pass(s: Draft) -> None:
    s.model.register_buffer("seen", torch.zeros(()))

    def count(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1.0 + 0.01 * module.get_buffer("seen"))

    s.model.register_forward_hook(count)
    s.before_step.append(lambda: s.model.get_buffer("seen").add_(1.0) if s.job.applied else None)


@part("hook")
def clipped(s: Draft) -> None:
    s.before_step.append(lambda: s.job.clip_grad_norm_(s.model.parameters(), 0.5))


@part("hook")
def gradients_read_where_applied(s: Draft) -> None:
    """As importance scores of pruning do, which fail where there is no gradient at all."""

    def score() -> None:
        if s.job.applied and not s.skips():
            max(float(p.grad.norm()) for p in s.model.parameters() if p.grad is not None)

    s.before_step.append(score)
