"""Placement by fragmentation gradient, on machines small enough to see what is right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.scheduler.placement.fragmentation import WHOLE, Demand, Machine, Packer, Spot

WHOLE_GPU, PAIR, HALF = Demand(1), Demand(2), Demand(1, 500)


def machines(*devices: int, cpu_milli: int = 100_000, model: str = "") -> list[Machine]:
    return [Machine(f"m{i}", n, cpu_milli, 100_000, model) for i, n in enumerate(devices)]


def test_a_share_goes_to_the_device_that_is_begun() -> None:
    packer = Packer(machines(2, 2), {HALF: 1, WHOLE_GPU: 1})
    first = packer.place(HALF)
    assert packer.place(HALF) == first


def test_a_whole_gpu_leaves_pairs_whole() -> None:
    packer = Packer(machines(2, 1), {WHOLE_GPU: 1, PAIR: 1})
    assert packer.place(WHOLE_GPU) == Spot(1, (0,))
    assert packer.place(PAIR) == Spot(0, (0, 1))


def test_a_demand_that_needs_no_devices_goes_where_no_devices_are_lost() -> None:
    scarce = [Machine("gpu", 4, 10_000, 1000), Machine("cpu", 0, 10_000, 1000)]
    packer = Packer(scarce, {Demand(1, WHOLE, 2_000): 1})
    assert packer.place(Demand(0, 0, 8_000)) == Spot(1, ())


def test_a_demand_goes_only_to_the_models_that_it_names() -> None:
    fleet = [Machine("a", 1, 1000, 1000, "T4"), Machine("b", 1, 1000, 1000, "A100")]
    packer = Packer(fleet, {WHOLE_GPU: 1})
    fussy = Demand(1, models=frozenset({"A100"}))
    assert packer.place(fussy) == Spot(1, (0,))
    assert packer.place(fussy) is None


def test_what_is_released_can_be_placed_again() -> None:
    packer = Packer(machines(1), {WHOLE_GPU: 1})
    spot = packer.place(WHOLE_GPU)
    assert spot is not None
    assert packer.place(WHOLE_GPU) is None
    packer.release(WHOLE_GPU, spot)
    assert packer.place(WHOLE_GPU) == spot


@pytest.mark.parametrize("lacking", [Demand(1, cpu_milli=2), Demand(1, memory_mib=2), Demand(3)])
def test_nothing_is_placed_where_something_is_lacking(lacking: Demand) -> None:
    packer = Packer([Machine("m", 2, 1, 1)], {lacking: 1})
    assert packer.place(lacking) is None


demands = st.builds(
    Demand,
    devices=st.integers(0, 3),
    milli=st.sampled_from([100, 250, 500, 1000]),
    cpu_milli=st.integers(0, 4),
    memory_mib=st.integers(0, 4),
)


@given(fleet=st.lists(st.integers(0, 4), min_size=1, max_size=4), wanted=st.lists(demands, min_size=1, max_size=25))
@settings(max_examples=80, deadline=None)
def test_no_device_is_ever_given_away_twice_and_a_refusal_is_true(fleet: list[int], wanted: list[Demand]) -> None:
    packer = Packer([Machine(f"m{i}", n, 20, 20) for i, n in enumerate(fleet)], dict.fromkeys(wanted, 1.0))
    left = [[WHOLE] * n for n in fleet]
    cpu, memory = [20] * len(fleet), [20] * len(fleet)
    for demand in wanted:
        possible = [
            i
            for i in range(len(fleet))
            if sum(d >= demand.milli for d in left[i]) >= demand.devices
            and cpu[i] >= demand.cpu_milli
            and memory[i] >= demand.memory_mib
        ]
        spot = packer.place(demand)
        assert (spot is None) == (not possible)
        if spot is not None:
            assert spot.machine in possible
            assert len(set(spot.devices)) == demand.devices
            for device in spot.devices:
                left[spot.machine][device] -= demand.milli
                assert left[spot.machine][device] >= 0
            cpu[spot.machine] -= demand.cpu_milli
            memory[spot.machine] -= demand.memory_mib
