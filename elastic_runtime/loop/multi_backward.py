"""Several backward passes in one iteration, each followed by an optimizer's step: a GAN's critic, then its generator.

Each pass is summed over the workers separately, but only the last one ends the step: if a worker is lost before that,
all workers return to the step's beginning, including those that have applied a pass. The state is therefore copied
before the first pass is applied. Rejected: each pass as a separate step. A worker that takes over a peer's state
between two of them would have to enter its loop in the middle of an iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.state.copies import Copies
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.torch_internals import forget_unscaled

if TYPE_CHECKING:
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.reduction.step_modes import Mode
    from elastic_runtime.state.training_state import TrainingState


class Passes:
    """The backward passes of the current iteration. `done`: how many are summed, with others to come."""

    def __init__(self, state: TrainingState) -> None:
        self.done = 0
        self.used = False  # an iteration of this training had several
        self._state = state
        self._copies = Copies(device=None)
        self._before: Any = None
        self._aside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def check(self, micro: MicroBatch, mode: Mode, *, first: bool) -> None:
        """UsageError and LoopError where an iteration cannot have several."""
        if mode.name != "fast":
            raise UsageError(
                f"job.backward(more=True) and optimizer.step(closure) need reduction='fast' without shard=, and this "
                f"training is {mode.name}: add the losses up, or train one of the models in a job of its own"
            )
        if not micro.last or not (first or self.done):
            raise LoopError(
                "job.backward(more=True) and optimizer.step(closure) need a step's whole share in one iteration, for "
                "optimizers act between the passes; leave max_batch_per_gpu out, or raise it to global_batch_size"
            )
        self.used = True

    def set_aside(self) -> None:
        """Set the content of `grad` from previous passes aside, so that it is not summed again."""
        if not self.done:
            return
        kept = [(p, p.grad) for _, p in self._state.parameters() if p.grad is not None]
        self._aside = [(parameter, gradient.clone()) for parameter, gradient in kept]
        for parameter, _ in kept:
            parameter.grad = None

    def add_back(self) -> None:
        """Gradients of several passes add up where the script does not clear them, as they do in torch."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._aside = []

    def complete_one(self) -> None:
        """A pass is summed, and about to be applied; others follow."""
        if not self.done:
            skeleton, tensors = pack(self._state.capture())
            self._before = unpack(skeleton, self._copies.take(tensors))
        self.done += 1

    def restore(self) -> None:
        """Restore the state of the step's beginning."""
        if self.done:
            self._state.load(self._before)
            for _, part in self._state.parts:
                if isinstance(part, torch.amp.GradScaler):
                    forget_unscaled(part)
            self._copies = Copies(device=None)  # optimizers go on in the memory of what they load
        self.forget()

    def forget(self) -> None:
        """The iteration is over."""
        self.done, self._before, self._aside = 0, None, []
