"""The tree of the exact reduction: the same sum on every distribution of the work."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from elastic_runtime.errors import BatchPlanError
from elastic_runtime.plan.batches import check_shards, lockstep_shards, shard_batches, split
from elastic_runtime.reduction.sum_tree import joint_plan, range_plan
from elastic_runtime.sharded.exact_sums import PartialSums


def recursive(values: list[float], leaves: int) -> float:
    """The definition: split at the largest power of two below the number of leaves."""
    if leaves == 1:
        return values[0]
    half = 1 << (leaves - 1).bit_length() - 1
    return recursive(values[:half], half) + recursive(values[half:], leaves - half)


def summed_by(values: list[float], workers: int) -> float:
    """Sum as workers do: each its own leaves, then one of them the rest."""
    leaves = len(values)
    plans = [range_plan(*part, leaves) for part in split(leaves, workers)]
    partial: list[float] = []
    for (start, stop), plan in zip(split(leaves, workers), plans, strict=True):
        rows = [0.0] * 32
        for value, push in zip(values[start:stop] or [-0.0], plan.pushes, strict=True):
            rows[push.row] = value
            for into, source in push.merges:
                rows[into] += rows[source]
        partial += rows[: len(plan.nodes)]
    for into, source in joint_plan(tuple(plan.nodes for plan in plans), leaves):
        partial[into] += partial[source]
    return partial[0]


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(values=st.lists(FLOATS, min_size=1, max_size=40), workers=st.integers(1, 45))
def test_any_number_of_workers_gets_the_same_sum_to_the_bit(values: list[float], workers: int) -> None:
    alone, together = summed_by(values, 1), summed_by(values, workers)
    assert struct.pack("d", together) == struct.pack("d", alone) == struct.pack("d", recursive(values, len(values)))


@given(values=st.lists(st.none() | FLOATS, min_size=1, max_size=40), workers=st.integers(1, 45))
def test_sums_that_are_made_one_iteration_after_another_are_the_same_with_gaps(
    values: list[float | None], workers: int
) -> None:
    """As with shard=: in each iteration the workers' next shards, in order. None: a shard without a gradient."""
    leaves = len(values)
    plans = [lockstep_shards(leaves, rank, workers, leaves) for rank in range(workers)]
    order = [micro.shard for turn in zip(*plans, strict=True) for micro in turn if not micro.padding]
    assert order == list(range(leaves))
    pushes, sums = range_plan(0, leaves, leaves).pushes, PartialSums()
    for leaf, value in enumerate(values):
        if value is not None:
            sums.push(pushes, leaf, torch.tensor([value], dtype=torch.float64))
    found, without = sums.total(pushes), [-0.0 if value is None else value for value in values]
    assert (found is None) == all(value is None for value in values)
    if found is not None:
        assert struct.pack("d", float(found)) == struct.pack("d", recursive(without, leaves))


@given(leaves=st.integers(1, 64), workers=st.integers(1, 64))
def test_a_worker_is_left_with_few_partial_sums(leaves: int, workers: int) -> None:
    for part in split(leaves, workers):
        assert len(range_plan(*part, leaves).nodes) <= max(1, 2 * (leaves - 1).bit_length())


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_powers_of_two_are_left_with_one(workers: int) -> None:
    assert {len(range_plan(*part, 8).nodes) for part in split(8, workers)} == {1}


@given(samples=st.integers(1, 300), workers=st.integers(1, 20), shards=st.integers(1, 20))
def test_shards_are_the_same_whatever_the_number_of_workers(samples: int, workers: int, shards: int) -> None:
    alone = shard_batches(samples, 0, 1, shards)
    shares = [shard_batches(samples, rank, workers, shards) for rank in range(workers)]
    together = [m for share in shares for m in share if not m.padding]
    assert [(m.start, m.stop, m.shard) for m in together] == [(m.start, m.stop, m.shard) for m in alone]
    assert sum(m.size for m in alone) == samples
    assert all([m.last for m in share] == [False] * (len(share) - 1) + [True] for share in shares)


def test_a_shard_is_never_cut() -> None:
    check_shards(512, 8, 64)
    with pytest.raises(BatchPlanError, match="use at least shards=16"):
        check_shards(512, 8, 32)
    with pytest.raises(BatchPlanError, match="shards is 0"):
        check_shards(512, 0, None)
