"""Plans follow each other at once, but not without end."""

from __future__ import annotations

from kfp_gpuquota.cluster.plan_pacing import MAX_PLANS_IN_A_ROW, PAUSE_S, PlanPacing


def test_plans_that_never_come_to_an_end_go_on_slowly_and_are_reported_once() -> None:
    pace, reports = PlanPacing(), 0
    for _ in range(MAX_PLANS_IN_A_ROW + 10):
        pace.planned(empty=False)
        reports += pace.reached_limit
    assert (pace.delay_s, reports) == (PAUSE_S, 1)


def test_a_plan_with_nothing_to_do_ends_the_count() -> None:
    pace = PlanPacing()
    for _ in range(3 * MAX_PLANS_IN_A_ROW):
        pace.planned(empty=False)
        pace.planned(empty=True)
        assert pace.delay_s == 0
