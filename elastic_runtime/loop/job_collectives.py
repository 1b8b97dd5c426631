"""What all workers of a job compute together, beside the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from elastic_runtime.loop.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class JobCollectives(JobView):
    """Work of all workers, which is repeated where one is lost in the middle of it."""

    def repeat(self, work: Callable[[], Result]) -> Result:
        """`work()`, done by all workers together (an evaluation that adds up over them), and again where one is lost in
        the middle of it; returns what it returned. It starts again each time it is called, talks to the others by
        `job.all_reduce` and `job.all_gather` only, and asks there for `job.rank` and `job.world_size`, which change.

        After an epoch's loop, or in an iteration after `optimizer.step()` where `job.applied`; LoopError elsewhere.
        With shard= the shards are copied to other workers before it. Where one is lost meanwhile, `work` runs with the
        state of before the last step, which is trained again.
        """
        return self._prepared.repeat(work)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over all workers, and return it; alone it is the sum. CollectiveError where one is
        lost, which `job.repeat` ensures.
        """
        return self._prepared.synchronized_calls.all_reduce(tensor)

    def all_gather(self, value: Result) -> list[Result]:
        """Return copies of each worker's `value`, by rank: any object that can be pickled. Tensors may have any shapes
        and arrive on the CPU. CollectiveError if a worker is lost, which `job.repeat` handles.
        """
        return self._prepared.synchronized_calls.all_gather(value)

    def gather_batch(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the step's whole global batch, in its order; gradients flow back to each row's worker.

        For losses that compare all samples of a batch (contrastive ones): `rows` has one row for each sample of this
        iteration, shape (samples, ...), and the result is (global batch, ...) at every size. This iteration's own rows
        begin at `job.batch_start`. The loss is the mean over the own rows, as always, and job.backward sums up.

        In every iteration, before job.backward, and equally often on all workers. It needs a step's whole share in one
        iteration, so no smaller max_batch_per_gpu, and reduction="fast" without shard=: UsageError. Rows of integers
        have no gradient.
        """
        return self._prepared.gather_batch(rows)

    @property
    def batch_start(self) -> int:
        """The index of this iteration's first sample in the step's global batch: 0 with one worker."""
        return self._prepared.batch_start

    def mean(self, value: torch.Tensor | float, *, weight: float = 1.0) -> float:
        """Return the mean over all workers of one number of each, weighted by each one's `weight`; the same on all.

        At a place that all workers reach, as for `job.repeat`: after an epoch's loop, or in an iteration after
        `optimizer.step()` where `job.applied`; LoopError elsewhere. Where `job.dropped`, it is `value` itself.
        """
        if self.dropped:
            return float(value)

        def work() -> float:
            total = torch.tensor([float(value) * weight, weight], dtype=torch.float64)
            summed, weights = self.all_reduce(total).tolist()
            return float(summed / weights)

        return self._prepared.repeat(work, copies=False)
