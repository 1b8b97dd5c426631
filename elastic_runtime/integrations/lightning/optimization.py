"""Trainer's automatic optimization, of a global step in place of a batch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization

if TYPE_CHECKING:
    from collections import OrderedDict

    from torch.optim import Optimizer

    from elastic_runtime.integrations.lightning.strategy import ElasticStrategy


class ElasticOptimization(_AutomaticOptimization):
    """Runs forward and backward passes of all micro-batches of a step, again where a worker is lost."""

    @property
    def _strategy(self) -> ElasticStrategy:
        strategy: Any = self.trainer.strategy
        found: ElasticStrategy = strategy
        return found

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        return Closure(step_fn=partial(self._global_step, kwargs, optimizer, batch_idx))

    def _global_step(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> ClosureResult:
        """Return the result of this worker's last micro-batch."""
        strategy, job = self._strategy, self._strategy.job
        clear = self._make_zero_grad_fn(batch_idx, optimizer)
        found = ClosureResult(None)
        for batch in strategy.micro_batches(kwargs["batch"]):
            first = job.begins_step
            strategy.results.begin_micro_batch(batch, first=first)
            found = self._training_step(type(kwargs)(kwargs, batch=batch))
            if clear is not None and first:
                clear()
            if found.closure_loss is None:
                job.skip()
            else:
                strategy.backward(found.closure_loss, optimizer)
        return found

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        self._strategy.results.end_step()
