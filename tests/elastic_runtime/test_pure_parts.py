"""Batch plan, data order and packing: pure, so checked over many values."""

from __future__ import annotations

import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import elastic_runtime
from elastic_runtime.errors import BatchPlanError, StateError
from elastic_runtime.plan.batches import check_batch, micro_batches, split
from elastic_runtime.plan.order import epoch_order, mix_seed, steps_in_epoch
from elastic_runtime.state.layouts import Copies, describe
from elastic_runtime.state.packing import pack, unpack

SIZES = st.integers(1, 40)


@given(samples=st.integers(1, 300), world_size=SIZES, max_batch=st.none() | SIZES)
def test_every_sample_of_a_step_is_in_one_micro_batch_of_one_worker(
    samples: int, world_size: int, max_batch: int | None
) -> None:
    shares = [micro_batches(samples, rank, world_size, max_batch) for rank in range(world_size)]
    assert [i for share in shares for m in share for i in range(m.start, m.stop)] == list(range(samples))
    assert sum(m.weight for share in shares for m in share) == pytest.approx(1)
    for share in shares:
        assert [m.last for m in share] == [False] * (len(share) - 1) + [True]
        assert all(m.size <= (max_batch or samples) for m in share)
        assert len(share) == 1 or not any(m.padding for m in share)


@given(total=st.integers(0, 500), parts=SIZES)
def test_shares_are_as_even_as_possible_and_larger_ones_come_first(total: int, parts: int) -> None:
    sizes = [stop - start for start, stop in split(total, parts)]
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(seed=st.integers(0, 1 << 63), epoch=st.integers(0, 1000), length=st.integers(1, 200))
def test_an_epochs_order_is_a_permutation_that_depends_on_seed_and_epoch_alone(
    seed: int, epoch: int, length: int
) -> None:
    order = list(epoch_order(seed, epoch, length, shuffle=True))
    torch.rand(3)
    assert order == list(epoch_order(seed, epoch, length, shuffle=True))
    assert sorted(order) == list(range(length))


def test_neighbouring_seeds_and_epochs_have_nothing_in_common() -> None:
    assert len({mix_seed(seed, epoch) for seed in range(50) for epoch in range(50)}) == 2500
    assert epoch_order(0, 1, 1000, shuffle=True) != epoch_order(1, 0, 1000, shuffle=True)


def test_the_last_smaller_step_counts_unless_it_is_dropped() -> None:
    assert steps_in_epoch(100, 30, drop_last=False) == 4
    assert steps_in_epoch(100, 30, drop_last=True) == 3


@pytest.mark.parametrize(("global_batch", "max_batch"), [(0, None), (-1, 4), (True, None), (8, 0), (8, True)])
def test_a_batch_that_cannot_be_is_refused_with_its_value(global_batch: int, max_batch: int | None) -> None:
    with pytest.raises(BatchPlanError, match=r"global_batch_size is|max_batch_per_gpu is"):
        check_batch(global_batch, max_batch)


def test_a_state_survives_packing() -> None:
    state = {"a": torch.arange(3), "b": [1, (torch.ones(2, 2, dtype=torch.bfloat16), "x")], "c": None}
    skeleton, tensors = pack(state)
    again = unpack(skeleton, [tensor.clone() for tensor in tensors])
    assert again["a"].tolist() == [0, 1, 2]
    assert again["b"][0] == 1
    assert again["b"][1][0].dtype == torch.bfloat16
    assert again["b"][1][1] == "x"


def test_a_copy_goes_into_memory_that_was_made_for_it_and_follows_other_shapes() -> None:
    copies, state = Copies(), [torch.randn(3, 4), torch.arange(5)]
    copies.make_room(describe(state))
    first = copies.take(state)
    kept = [tensor.data_ptr() for tensor in first]
    state[0].add_(1)
    second = copies.take(state)
    assert [tensor.data_ptr() for tensor in second] == kept
    assert all(torch.equal(copy, own) for copy, own in zip(second, state, strict=True))
    assert torch.equal(copies.take([torch.ones(2)])[0], torch.ones(2))


def test_a_state_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(StateError, match="keep open files, locks and lambdas"):
        pack({"f": lambda: None})


def test_every_public_error_names_its_exit_code() -> None:
    assert {elastic_runtime.UsageError.exit_code, elastic_runtime.RunError.exit_code} == {1, 2}
    for name in elastic_runtime.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(elastic_runtime, name), elastic_runtime.ElasticError)


def test_importing_it_imports_no_other_package_but_torch() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import elastic_runtime;"
        "print(sorted(m for m in set(sys.modules) - before if '.' not in m))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "['elastic_runtime']\n"
