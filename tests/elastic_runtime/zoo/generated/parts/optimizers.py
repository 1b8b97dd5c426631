"""Optimizers, and what of them others hold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.elastic_runtime.zoo.generated.parts.registry import part

if TYPE_CHECKING:
    from tests.elastic_runtime.zoo.generated.drafts import Draft


@part("optimizer")
def sgd(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@part("optimizer")
def adamw(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)


@part("optimizer")
def amsgrad_in_groups(s: Draft) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        given: list[Any] = list(model.parameters())
        first, others = given[0], given[1:]
        groups: Any = [{"params": [first], "lr": 0.02}, {"params": others}]
        return torch.optim.Adam(groups, lr=0.01, amsgrad=True)

    s.make_optimizer = make


@part("optimizer")
def rmsprop(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.RMSprop(model.parameters(), lr=0.003, momentum=0.5, centered=True)


@part("optimizer")
def nadam(s: Draft) -> None:
    s.make_optimizer = lambda model: torch.optim.NAdam(model.parameters(), lr=0.01)


def _by_columns(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of this shape whose memory is in the reverse order of the dimensions."""
    order = tuple(reversed(range(like.dim())))
    return torch.zeros([like.shape[d] for d in order]).permute(order)


class Rotating(torch.optim.Optimizer):
    """Keeps a transposed average of each matrix, of which it reads the memory in order, as SOAP's kernels do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "average" not in state:
                    state["average"] = _by_columns(parameter.grad)
                state["average"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                turned = state["average"].as_strided((parameter.numel(),), (1,))
                weights = 1.0 + 0.1 * (torch.arange(parameter.numel()) % 3)
                parameter.sub_((turned * weights).view_as(parameter), alpha=group["lr"])


@part("optimizer")
def transposed_moments(s: Draft) -> None:
    s.make_optimizer = lambda model: Rotating(model.parameters())


class CountingSgd(torch.optim.SGD):
    """Counts its steps in an attribute, on which its rate depends."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1.0 + 0.2 * self.count)
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


@part("optimizer", refused="changes its attribute 'count'")
def counter_in_the_optimizer(s: Draft) -> None:
    s.make_optimizer = lambda model: CountingSgd(model.parameters(), lr=0.1)


class SlowSgd(torch.optim.SGD):
    """In each fourth step it goes half of the way back to slow weights, which are in a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        (group,) = self.param_groups
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] % 4 == 0:
            for slow, parameter in zip(self.slow, group["params"], strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


@part("optimizer", refused="changes its attribute 'slow'")
def slow_weights_in_the_optimizer(s: Draft) -> None:
    s.make_optimizer = lambda model: SlowSgd(model.parameters())


class Langevin(torch.optim.SGD):
    """Adds noise to each step, from torch's own generator and from Python's. Its first step sets a constant."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.last_loss = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.02 * random.random())


@part("optimizer")
def noise_in_the_optimizer(s: Draft) -> None:
    s.make_optimizer = lambda model: Langevin(model.parameters(), lr=0.1)


class NumberedSgd(torch.optim.SGD):
    """Keeps the first weights of each group in its state, under the group's number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for number, group in enumerate(self.param_groups):
            state: Any = self.state
            first = state[number].setdefault("first", [parameter.clone() for parameter in group["params"]])
            for parameter, before in zip(group["params"], first, strict=True):
                parameter.lerp_(before, 0.02)


@part("optimizer", refused="keeps state under the key 0, a number")
def state_under_a_number(s: Draft) -> None:
    s.make_optimizer = lambda model: NumberedSgd(model.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, and has none of what torch's class makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@part("optimizer", refused="has not called __init__ of torch.optim.Optimizer")
def wrapper_without_init(s: Draft) -> None:
    s.make_optimizer = lambda model: Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))


class Sharing(torch.optim.Optimizer):
    """Steps by another optimizer, whose groups are its own, as SAM and Lookahead do. `both`: also its state."""

    def __init__(self, parameters: Any, *, both: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups
        if both:
            self.state = self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@part("optimizer")
def wrapper_that_shares_groups_and_state(s: Draft) -> None:
    s.make_optimizer = lambda model: Sharing(model.parameters(), both=True)


@part("optimizer")
def wrapper_that_shares_groups(s: Draft) -> None:
    s.make_optimizer = lambda model: Sharing(model.parameters(), both=False)
