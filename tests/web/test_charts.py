"""Charts place points where they belong, and labels are short."""

from __future__ import annotations

import pytest

from kfp_gpuquota.web.charts import curves, short, smoothed, steps

NAN, INF = float("nan"), float("inf")


def test_a_curve_goes_from_the_left_edge_to_the_right_one() -> None:
    drawn = curves("loss", [("", [(10, 2.0), (20, 1.0)])], begin=10, end=20, marks=[15, 99])
    assert drawn is not None
    (line,) = drawn.lines
    assert line.path.startswith("M0 ")
    assert "L600 " in line.path
    assert (drawn.top, drawn.bottom, drawn.latest, drawn.marks) == ("2", "1", "1", ("300",))
    assert (line.xs, line.at, line.values) == ("0 600", "0 10", "2 1")


def test_what_is_no_number_interrupts_the_line_and_is_marked() -> None:
    drawn = curves("loss", [("", [(0, 4.0), (1, NAN), (2, 5.0), (3, INF), (4, INF)])], begin=0, end=4)
    assert drawn is not None
    assert drawn.lines[0].path.count("M") == 2
    assert drawn.gaps == (("0", "300"), ("300", "300"))
    assert (drawn.latest, drawn.note) == ("inf", "inf now: 3 of 5 reports")
    assert drawn.lines[0].values == "4 nan 5 inf inf"
    only = curves("loss", [("", [(0, NAN), (9, NAN)])], begin=0, end=9)
    assert only is not None
    assert (only.lines[0].path, only.gaps, only.note) == ("", (("0", "600"),), "no number now: 2 of 2 reports")
    assert curves("loss", [("", [])], begin=0, end=1) is None


def test_a_logarithmic_scale_places_powers_evenly_and_says_what_it_cannot_show() -> None:
    drawn = curves("loss", [("", [(0, 0.0), (1, 1.0), (2, 10.0), (3, 100.0)])], begin=0, end=3, logarithmic=True)
    assert drawn is not None
    heights = [float(one.split()[1]) for one in drawn.lines[0].path[1:].split("L")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)
    assert (drawn.bottom, drawn.top, drawn.note) == ("1", "100", "1 value of 0 or less is not drawn")


def test_runs_share_a_scale() -> None:
    drawn = curves("loss", [("a", [(0, 1.0), (1, 2.0)]), ("b", [(0, 3.0)]), ("c", [])], begin=0, end=1)
    assert drawn is not None
    assert [line.name for line in drawn.lines] == ["a", "b"]
    assert (drawn.bottom, drawn.top) == ("1", "3")


def test_a_moving_average_has_no_bias_and_leaves_out_what_is_no_number() -> None:
    assert [value for _, value in smoothed([(i, 7.0) for i in range(50)], 0.99)] == pytest.approx([7.0] * 50)
    values = [4.0, 0.0, INF, 2.0]
    means = [4.0, 4.0 * 0.9 / 1.9, INF, (4.0 * 0.81 + 2.0) / 2.71]
    found = smoothed(list(enumerate(values)), 0.9)
    assert [x for x, _ in found] == [0, 1, 2, 3]
    assert [value for _, value in found] == pytest.approx(means)


def test_a_smoothed_curve_is_drawn_over_its_values_and_shows_these_under_the_pointer() -> None:
    points = [(0, 4.0), (1, 0.0), (2, 4.0)]
    plain, smooth = (curves("loss", [("", points)], begin=0, end=2, smoothing=weight) for weight in (0.0, 0.9))
    assert plain is not None
    assert smooth is not None
    (before,), (after,) = plain.lines, smooth.lines
    assert (before.unsmoothed, after.unsmoothed) == ("", before.path)
    assert after.path != before.path
    assert (after.values, after.latest, smooth.top, smooth.bottom) == (before.values, "4", "4", "0")


def test_one_point_and_a_constant_can_be_drawn() -> None:
    for value in (0.0, 5.0, -1e300):
        drawn = curves("x", [("", [(1, value), (1, value)])], begin=1, end=1)
        assert drawn is not None
        assert "nan" not in drawn.lines[0].path


def test_a_size_holds_until_it_changes() -> None:
    drawn = steps("GPUs", [(0, 0), (5, 2)], begin=0, end=10, top=2, latest="2 GPUs")
    assert drawn is not None
    assert drawn.lines[0].path == "M0 120L300 120L300 8.9L600 8.9"
    assert drawn.area.endswith("L600 120L0 120Z")


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (0.0, "0"),
        (0.00001234, "1.2e-5"),
        (0.04212, "0.0421"),
        (12.34, "12.3"),
        (19700.4, "19,700"),
        (1.5e6, "1.5M"),
        (1e30, "1e30"),
        (NAN, "NaN"),
        (-2.5e12, "-2.5e12"),
        (5e-324, "4.9e-324"),
    ],
)
def test_labels_are_short(value: float, label: str) -> None:
    assert short(value) == label
