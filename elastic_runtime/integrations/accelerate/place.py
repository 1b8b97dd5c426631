"""An Accelerator that knows the job's rank and size of the moment, and calls that all workers make together."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import gather, recursively_apply

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_runtime.job import Job


class PlacedAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """Before the loop each worker is alone; then Accelerate's state, which all of its functions ask, is the job's."""

    job: Job

    @property
    def is_local_main_process(self) -> bool:
        """Rank 0: which workers share a machine is the cluster's to know."""
        return bool(self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """As `on_main_process`."""
        return self.on_main_process(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On rank 0."""
        if self.is_main_process:
            print(*args, **kwargs)  # noqa: T201

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Gathering and the like concern this worker only. It keeps its rank."""
        rank, size = self.process_index, self.num_processes
        self._show(rank, 1)
        try:
            yield
        finally:
            self._show(rank, size)

    def follow(self, *_: object) -> None:
        """Show the rank and size of the moment."""
        self._show(self.job.rank, self.job.world_size)

    def _show(self, rank: int, size: int) -> None:
        cuda = self.device.type == "cuda"
        several = (DistributedType.MULTI_GPU, "nccl") if cuda else (DistributedType.MULTI_CPU, "gloo")
        kind, backend = several if size > 1 else (DistributedType.NO, None)
        for state in (PartialState(), self.state):
            state.process_index, state.num_processes = rank, size
            state.distributed_type, state.backend = kind, backend

    @contextmanager
    def _together(self, name: str) -> Iterator[None]:
        """All workers do it at the same place: outside an iteration, or where it completes a step. Else LoopError."""
        if not self.sync_gradients:
            raise LoopError(
                f"accelerator.{name} was called in an iteration that has not completed a global step; workers differ "
                "in how many iterations a step has, so call it below accelerator.backward, "
                "within: if accelerator.sync_gradients"
            )
        try:
            yield
        except RuntimeError as error:
            if self.num_processes > 1:
                error.add_note(
                    f"accelerator.{name}: another worker was lost, or called it with another shape. Only the "
                    "gradients' reduction is repeated after a loss; with share_evaluation=False an evaluation needs "
                    "no other worker"
                )
            raise

    def gather(self, tensor: Any) -> Any:
        """As Accelerator's, at a place that all workers reach; parts may differ in length."""
        with self._together("gather"):
            return recursively_apply(_gather_uneven, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator's, in the loop over an evaluation loader; without the samples that were there twice."""
        with self._together("gather_for_metrics"):
            return super().gather_for_metrics(input_data, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator's, at a place that all workers reach."""
        with self._together("reduce"):
            return super().reduce(tensor, *args, **kwargs)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator's, at a place that all workers reach."""
        with self._together("pad_across_processes"):
            return super().pad_across_processes(tensor, *args, **kwargs)

    def wait_for_everyone(self) -> None:
        """As Accelerator's, at a place that all workers reach."""
        with self._together("wait_for_everyone"):
            super().wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """As Accelerator's, at a place that all workers reach."""
        with self._together("main_process_first"), super().main_process_first():
            yield

    def local_main_process_first(self) -> Any:
        """As `main_process_first`."""
        return self.main_process_first()

    @contextmanager
    def join_uneven_inputs(self, *_: Any, **__: Any) -> Iterator[None]:
        """Nothing: shares may always be uneven."""
        yield


def _gather_uneven(tensor: torch.Tensor) -> torch.Tensor:
    """All workers' rows, in order of ranks. Shape: (sum of lengths, ...)."""
    rows = tensor[None] if tensor.ndim == 0 else tensor
    lengths = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    if len(set(lengths)) == 1:
        found: torch.Tensor = gather(rows)
        return found
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))  # Accelerate's own padding makes integers of booleans
    padded[: len(rows)] = rows
    parts = gather(padded).split(max(lengths))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
