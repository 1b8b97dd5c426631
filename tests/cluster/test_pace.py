"""Plans follow each other at once, but not without end."""

from __future__ import annotations

from kfp_gpuquota.cluster.pace import MOST_IN_A_ROW, PAUSE_S, Pace


def test_plans_that_never_come_to_an_end_go_on_slowly_and_are_reported_once() -> None:
    pace, reports = Pace(), 0
    for _ in range(MOST_IN_A_ROW + 10):
        pace.planned(empty=False)
        reports += pace.runs_away
    assert (pace.delay_s, reports) == (PAUSE_S, 1)


def test_a_plan_with_nothing_to_do_ends_the_count() -> None:
    pace = Pace()
    for _ in range(3 * MOST_IN_A_ROW):
        pace.planned(empty=False)
        pace.planned(empty=True)
        assert pace.delay_s == 0
