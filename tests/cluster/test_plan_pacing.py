"""Plans follow each other at once, but not without end."""

from __future__ import annotations

from kfp_gpuquota.cluster.plan_pacing import (
    BURST_S,
    MAX_PLANS_IN_A_ROW,
    PAUSE_S,
    PLANNING_SHARE,
    PlanPacing,
    RestAfterPlans,
)


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


def test_requests_get_two_thirds_of_the_time_while_plans_are_asked_for_without_end() -> None:
    rest, now, planned_s = RestAfterPlans(), 0.0, 0.0
    for _ in range(1_000):
        now += rest.delay_s(now)
        rest.planned(now, now + 0.01)
        now += 0.01
        planned_s += 0.01
    assert planned_s / now <= PLANNING_SHARE + BURST_S / now


def test_plans_of_a_few_arrivals_follow_without_delay() -> None:
    rest, now = RestAfterPlans(), 100.0
    for _ in range(5):
        assert rest.delay_s(now) == 0
        rest.planned(now, now + 0.01)
        now += 0.01
