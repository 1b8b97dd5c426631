"""Prices of GPU-hours: by type, and of all others."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api.history import HeldHours
from kfp_gpuquota.api.prices import Prices
from kfp_gpuquota.errors import InvalidFieldError


def held(gpu_type: str, gpu_hours: float = 10.0) -> HeldHours:
    return HeldHours(project="p", gpu_type=gpu_type, gpu_hours=gpu_hours)


def test_a_type_has_its_own_price_or_that_of_all_others_or_none() -> None:
    prices = Prices.parse(["H100=4.5", " A100 = 2", "1"])
    assert [prices.cost(held(name)) for name in ("H100", "A100", "", "T4")] == [45.0, 20.0, 10.0, 10.0]
    assert Prices.parse(["H100=0"]).cost(held("H100")) == 0.0
    assert Prices.parse(["H100=4.5"]).cost(held("T4")) is None
    assert not Prices.parse([])


def test_a_priced_type_of_which_nothing_was_held_is_named() -> None:
    assert Prices.parse(["H100=1", "H10O=2"]).unknown([held("H100")]) == ["H10O"]


@pytest.mark.parametrize("given", ["x", "H100=x", "=3", "-1", "nan", "inf", "A=1,A=2", "1,2", ""])
def test_what_is_no_price_is_refused(given: str) -> None:
    with pytest.raises(InvalidFieldError, match="price"):
        Prices.parse(given.split(","))
