"""Sparse gradients, as nn.Embedding(sparse=True) gives them: sums of rows, never of a whole table.

Each worker gathers its rows over a step's micro-batches. At the step's end all rows of all workers are gathered, and
every worker adds them up in the same order, so that they get the same bits. DistributedDataParallel with gloo does the
same. Which parameters have such gradients is a property of the modules: all workers take part for each of them in every
step, also if their own samples have no row of it.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import UsageError
from elastic_runtime.state.sparse_parameters import no_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.reduction.bucket_layout import Slot


def check_kind(slot: Slot, gradient: torch.Tensor) -> None:
    """Raise UsageError for a gradient that is sparse where dense ones are summed, or the opposite."""
    if gradient.is_sparse == slot.sparse:
        return
    found, expected = ("sparse", "dense") if gradient.is_sparse else ("dense", "sparse")
    raise UsageError(
        f"parameter {slot.name!r} got a {found} gradient, but {expected} ones are summed: only the weight of an "
        "nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True) that nothing else uses has sparse gradients; leave "
        "sparse=True out"
    )


def add_rows(slot: Slot, gradient: torch.Tensor, *, scale: float, first: bool) -> None:
    """Add a micro-batch's gradient to the slot's rows, or begin with it."""
    found = gradient.to(slot.sum_dtype)
    found = found * scale if scale != 1.0 else found
    slot.rows = (found if first or slot.rows is None else slot.rows + found).coalesce()


def sum_rows(slots: Iterable[Slot], group: Group) -> None:
    """Replace the rows of each slot by the sum over all workers. CollectiveError if a peer was lost."""
    by_kind = sorted(slots, key=_kind)
    for _, each in groupby(by_kind, key=_kind):
        _sum_kind(list(each), group)


def _kind(slot: Slot) -> tuple[str, str]:
    return str(slot.sum_dtype), str(slot.parameter.device)


def _sum_kind(slots: list[Slot], group: Group) -> None:
    """Sum the rows of slots of one type and device, by three collectives."""
    own = [no_rows(slot.parameter, slot.sum_dtype) if slot.rows is None else slot.rows for slot in slots]
    device = own[0].device
    counts = group.all_gather(torch.tensor([len(rows.values()) for rows in own], device=device))
    most: list[int] = counts.max(0).values.tolist()
    indices = [_padded(rows.indices()[0], size) for rows, size in zip(own, most, strict=True)]
    values = [_padded(rows.values(), size).flatten() for rows, size in zip(own, most, strict=True)]
    if not sum(most):
        return
    all_indices, all_values = group.all_gather(torch.cat(indices)), group.all_gather(torch.cat(values))
    sizes = [len(each) for each in values]
    places_of, values_of = torch.split(all_indices, most, 1), torch.split(all_values, sizes, 1)
    for number, (slot, size) in enumerate(zip(slots, most, strict=True)):
        places = places_of[number]
        rows = values_of[number].view(len(places), size, *slot.parameter.shape[1:])
        kept = list(_cut(places, rows, counts[:, number].tolist()))
        found = [torch.cat(each) for each in zip(*kept, strict=True)]
        slot.rows = torch.sparse_coo_tensor(
            found[0][None], found[1], slot.parameter.shape, check_invariants=False
        ).coalesce()


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros((size - len(tensor), *tensor.shape[1:]))])


def _cut(places: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (indices, values) of each worker, without the padding."""
    for rank, count in enumerate(counts):
        yield places[rank, :count], rows[rank, :count]
