"""A script in the making: parts add to its hooks, `train` is the loop that all scripts have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, GLOBAL_BATCH, Samples, vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

Hook = list["Callable[..., Any]"]


@dataclass
class Draft:
    """What the parts of one script have decided. Hooks are called in the order in which they were added."""

    init: dict[str, Any]
    job: Any = None
    model: nn.Module = field(default_factory=lambda: torch.nn.Linear(8, 3))
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    optimizer: Any = None
    make_scheduler: Callable[[Any], Any] | None = None
    scheduler: Any = None
    data: Any = None
    loader_options: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})
    loader: Any = None
    prepared: Hook = field(default_factory=list)  # () after prepare
    prologue: Hook = field(default_factory=list)  # (epoch) before the loader's loop
    iteration: Hook = field(default_factory=list)  # (x) -> x
    loss: Callable[[torch.Tensor, torch.Tensor], Any] = cross_entropy
    """(output, y) -> a loss, or (a loss, the options of job.backward)."""
    more_loss: Hook = field(default_factory=list)  # () -> a term, or (loss) -> loss by `scale_loss`
    scale_loss: Hook = field(default_factory=list)
    skips: Callable[[], bool] = lambda: False  # the iteration
    leaves: Callable[[], bool] = lambda: False  # the loader's loop, as an iteration begins
    leaves_first: bool = False  # in the first one of a training that resumes there
    batches: Callable[[], Iterator[Any]] | None = None  # of an epoch; None: the loader's
    number: int = 0  # of the iteration, by the count of `batches`
    before_step: Hook = field(default_factory=list)  # ()
    after_step: Hook = field(default_factory=list)  # (loss)
    clear: Callable[[], object] | None = None  # the gradients; None: optimizer.zero_grad()
    clears_first: bool = False  # as an iteration begins, not as it ends
    epilogue: Hook = field(default_factory=list)  # (epoch) after the loader's loop
    counted: Hook = field(default_factory=list)  # (total, n, losses) after it: what the loop has counted
    meter: Any = None  # of the loop: `update(loss)` in each iteration
    by_global_steps: bool = False
    results: list[Any] = field(default_factory=list)

    def build(self) -> None:
        """Make what the parts have chosen, and give it to `prepare`."""
        self.job = elastic_runtime.init(progress=False, **self.init)
        self.optimizer = self.make_optimizer(self.model)
        data = Samples(vector) if self.data is None else self.data
        loader = DataLoader(data, **({"batch_size": GLOBAL_BATCH} | self.loader_options))
        given = [self.model, self.optimizer, loader]
        if self.make_scheduler:
            self.scheduler = self.make_scheduler(self.optimizer)
            given.append(self.scheduler)
        self.loader = self.job.prepare(*given)[2]
        for hook in self.prepared:
            hook()

    def train(self) -> list[Any]:
        """The loop."""
        for epoch in self.job.epochs(EPOCHS):
            for hook in self.prologue:
                hook(epoch)
            total, n, losses = 0.0, 0, []
            if self.by_global_steps:
                for _step, batches in self.job.global_steps(self.loader):
                    for x, y in batches:
                        loss = self._backward(x, y)
                    self._apply(loss)
                    total, n = total + float(loss), n + 1
                    losses.append(float(loss))
            else:
                for x, y in self.batches() if self.batches else self.loader:
                    if self.leaves():
                        break
                    loss = self._backward(x, y)
                    self._apply(loss)
                    total, n = total + float(loss), n + 1
                    losses.append(float(loss))
            for hook in self.counted if n or not self.leaves_first else ():
                hook(total, n, losses)
            for hook in self.epilogue:
                hook(epoch)
        return [self.model, *self.results]

    def _backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.clears_first:
            self._clear()
        for hook in self.iteration:
            x = hook(x)
        found = self.loss(self.model(x), y)
        loss, options = found if isinstance(found, tuple) else (found, {})
        for hook in self.more_loss:
            loss = loss + hook()
        for hook in self.scale_loss:
            loss = hook(loss)
        if self.skips():
            self.job.skip()
        else:
            self.job.backward(loss, **options)
        detached: torch.Tensor = loss.detach()
        return detached

    def _apply(self, loss: torch.Tensor) -> None:
        for hook in self.before_step:
            hook()
        self.optimizer.step()
        for hook in self.after_step:
            hook(loss)
        if self.meter:
            self.meter.update(float(loss))
        if not self.clears_first:
            self._clear()

    def _clear(self) -> None:
        if self.clear is None:
            self.optimizer.zero_grad()
        else:
            self.clear()


def all_groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Return the parameter groups as they are now."""
    yield from optimizer.param_groups


def evaluated(s: Draft) -> float:
    """The loss over fixed samples that the workers share out."""
    s.model.eval()
    x, y = torch.linspace(-1, 1, 64).view(8, 8), torch.arange(8) % 3
    mine = slice(s.job.rank, None, s.job.world_size)
    with torch.no_grad():
        loss = cross_entropy(s.model(x[mine]), y[mine])
    s.model.train()
    return float(s.job.mean(loss, weight=float(len(x[mine]))))
