"""Accelerate's collectives as sums over the job's workers, which `job.repeat` does again where a worker is lost.

torch.distributed's own would leave some of the others waiting for each other. Values travel as bytes, each worker's in
a place of its own beside zeros: so the sum is exact for every type, and infinities and NaN arrive as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from elastic_runtime.loop.job import Job


def gather(job: Job, tensors: Any) -> Any:
    """All workers' rows, in order of ranks, of each tensor in lists, tuples and dictionaries.

    Shape of each: (sum of lengths, ...). UsageError where they differ in more than their lengths.
    """

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts_of(job, tensor[None] if tensor.ndim == 0 else tensor))

    return recursively_apply(gathered, tensors, error_on_other_type=True)


def gather_object(job: Job, found: Any) -> list[Any]:
    """All workers' objects; what they hold, one after another, as Accelerate's own does it."""
    return [item for items in job.all_gather(found) for item in items]


def reduce(job: Job, tensors: Any, reduction: str) -> Any:
    """Their "sum", "mean" or "max" over the workers, as new tensors."""

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        if reduction == "max":
            return torch.stack(parts_of(job, tensor[None])).amax(0)[0]
        total = job.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))
        return total.div_(job.world_size) if reduction == "mean" else total

    return recursively_apply(reduced, tensors, error_on_other_type=True)


def pad(job: Job, tensors: Any, dim: int, value: float, *, first: bool) -> Any:
    """As long in `dim` as the longest worker's; `first`: the padding comes before what is there."""

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        lacking = int(_numbers(job, [tensor.shape[dim]], tensor.device).max()) - tensor.shape[dim]
        shape = list(tensor.shape)
        shape[dim] = lacking
        filling = tensor.new_zeros(shape) + value  # as Accelerate: a type that holds both
        return torch.cat([filling, tensor] if first else [tensor, filling], dim) if lacking else tensor

    return recursively_apply(padded, tensors, error_on_other_type=True)


def parts_of(job: Job, rows: torch.Tensor) -> list[torch.Tensor]:
    """Each worker's rows. Shapes: (its length, ...)."""
    width = rows[:1].numel() if len(rows) else 0
    sizes = _numbers(job, [len(rows), width * rows.element_size()], rows.device)
    row_bytes = int(sizes[:, 1].max())
    if any(length and own != row_bytes for length, own in sizes.tolist()):
        raise UsageError(
            f"workers gather tensors whose rows have {sorted(set(sizes[:, 1].tolist()))} bytes (this one's shape: "
            f"{tuple(rows.shape)}); only their lengths may differ: pad_across_processes makes the rest equal"
        )
    most = int(sizes[:, 0].max()) * row_bytes
    whole = torch.zeros((len(sizes), most), dtype=torch.uint8, device=rows.device)
    mine = rows.detach().contiguous().view(-1).view(torch.uint8)
    whole[job.rank, : len(mine)] = mine
    job.all_reduce(whole)
    shape = rows.shape[1:]
    return [
        part[: length * row_bytes].contiguous().view(rows.dtype).view(length, *shape) if length else rows[:0]
        for part, length in zip(whole, sizes[:, 0].tolist(), strict=True)
    ]


def _numbers(job: Job, mine: list[int], device: torch.device) -> torch.Tensor:
    """One row of numbers of each worker."""
    numbers = torch.zeros((job.world_size, len(mine)), dtype=torch.int64, device=device)
    numbers[job.rank] = torch.tensor(mine)
    return job.all_reduce(numbers).cpu()
