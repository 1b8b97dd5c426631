"""What a script calls within an iteration: parts of a step, which is repeated if a worker is lost in one of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.loop.step_states import StepState

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.data.loader import ElasticLoader
    from elastic_runtime.loop.passes import ClosureSteps
    from elastic_runtime.loop.step import GlobalStep
    from elastic_runtime.reduction.backward_pass import Loss
    from elastic_runtime.reduction.step_modes import Clipping
    from elastic_runtime.validation.loop_watch import LoopWatch

Result = TypeVar("Result")


class StepCalls:
    """The calls, of the step that is being computed. `catching_up`: the state is not that of the script's place in the
    loop, so that nothing acts.
    """

    loader: ElasticLoader  # set once it is made: the two need each other
    closure_steps: ClosureSteps

    def __init__(self, step: GlobalStep) -> None:
        self._step = step
        self.catching_up = False
        self.reruns = False  # an iteration of a step that was applied before this process began
        self.rerun_failed = False  # it did not fit into memory
        self.watches: list[LoopWatch] = []

    @property
    def dropped(self) -> bool:
        """Whether the step is repeated after this iteration, by this worker at least."""
        return self._step.state is StepState.REPEATED

    def _repeat_step(self, error: CollectiveError) -> None:
        """Return to the step's beginning, and continue with the workers that are left."""
        raise NotImplementedError

    def run_pass(self, loss: Loss, *, more: bool) -> None:
        """Run the backward pass of `Job.backward`; repeat the step if a peer is lost."""
        if self.reruns:
            self._step.show_zeros()  # the script may have cleared those of the iteration's beginning
            return
        for watch in self.watches:
            watch.before_backward()
        evaluating = self.closure_steps.evaluating
        self._repeating(partial(self._step.run_pass, loss, more=more or evaluating, evaluation=evaluating))

    def _repeating(self, act: Callable[[], Result]) -> Result | None:
        """Do a part of the step; None if a peer is lost in it, and the step is going to be repeated."""
        try:
            return act()
        except CollectiveError as error:
            self._repeat_step(error)
            return None

    def end_evaluations(self) -> None:
        """End a step of evaluations; repeat it if a peer is lost."""
        self._repeating(self._step.end_evaluations)

    def skip(self) -> None:
        """Skip the iteration as `Job.skip` does; repeat the step if a peer is lost."""
        if not self.reruns:
            self._repeating(self._step.skip)

    @property
    def batch_start(self) -> int:
        """The place of this iteration's first sample in the step's global batch. LoopError outside of an iteration."""
        if self._step.micro is None:
            raise LoopError("job.batch_start is known in an iteration of the prepared loader's loop")
        return 0 if self._step.micro.padding else self._step.micro.start  # padding has copies of the first samples

    def gather_batch(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather as `Job.gather_batch` does."""
        if self.catching_up and self._step.micro is not None:  # of an iteration that others have applied
            return rows.new_zeros((self._step.micro.step_samples, *rows.shape[1:]))
        return self._step.gather_batch(rows, self.loader.batch.at(1))

    def gather_statistics(self, row: torch.Tensor) -> torch.Tensor | None:
        """Gather for SyncBatchNorm layers."""
        return None if self.catching_up else self._step.gather_statistics(row, self.loader.batch.at(1))

    def clip_grad_norm_(self, parameters: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Clip as `Job.clip_grad_norm_` does; repeat the step if a peer is lost."""
        norm = self._repeating(partial(self._step.clip_grad_norm_, parameters, clipping))
        return torch.tensor(0.0) if norm is None else norm

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Return whether the iteration did not fit, and is going to be repeated in halves."""
        if self.reruns:
            self.rerun_failed = self._step.out_of_memory(error, reruns=True)
            return self.rerun_failed
        return self._repeating(partial(self._step.out_of_memory, error)) is not False
