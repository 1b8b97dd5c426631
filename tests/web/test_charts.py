"""Charts place points where they belong, and labels are short."""

from __future__ import annotations

import pytest

from kfp_gpuquota.web.charts import curve, short, steps


def test_a_curve_goes_from_the_left_edge_to_the_right_one() -> None:
    drawn = curve("loss", [(10, 2.0), (20, 1.0)], begin=10, end=20, marks=[15, 99])
    assert drawn is not None
    assert drawn.line.startswith("M0 ")
    assert "L600 " in drawn.line
    assert (drawn.top, drawn.bottom, drawn.latest, drawn.marks) == ("2", "1", "1", ("300",))


def test_what_is_no_number_is_left_out() -> None:
    drawn = curve("loss", [(0, float("nan")), (1, float("inf")), (2, 5.0)], begin=0, end=2)
    assert drawn is not None
    assert drawn.line.count(" ") == 1
    assert curve("loss", [(0, float("nan"))], begin=0, end=1) is None


def test_one_point_and_a_constant_can_be_drawn() -> None:
    for value in (0.0, 5.0, -1e300):
        drawn = curve("x", [(1, value), (1, value)], begin=1, end=1)
        assert drawn is not None
        assert "nan" not in drawn.line


def test_a_size_holds_until_it_changes() -> None:
    drawn = steps("GPUs", [(0, 0), (5, 2)], begin=0, end=10, top=2, latest="2 GPUs")
    assert drawn is not None
    assert drawn.line == "M0 120L300 120L300 8.9L600 8.9"
    assert drawn.area.endswith("L600 120L0 120Z")


@pytest.mark.parametrize(
    ("value", "label"),
    [(0.0, "0"), (0.00001234, "1.2e-5"), (0.04212, "0.0421"), (12.34, "12.3"), (19700.4, "19,700"), (1.5e6, "1.5M")],
)
def test_labels_are_short(value: float, label: str) -> None:
    assert short(value) == label
