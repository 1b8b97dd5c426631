"""What the page remembers of teams' usage: means over intervals, also over changes within one."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import Project
from kfp_gpuquota.api.wire import ProjectView
from kfp_gpuquota.cluster.kubernetes.web.usage_history import MAX_CHANGES, UsageHistory


def view(held: float) -> ProjectView:
    return ProjectView(project=Project(name="team", guaranteed=1), allocated=held, over_quota=0, requested=held)


def test_means_are_those_of_the_time_that_was_measured() -> None:
    history = UsageHistory()
    for at, held in ((1005.0, 2), (1015.0, 2), (1025.0, 4)):
        history.note(view(held), at)
    found = list(history.of("team", 10, 0.0, 1032.0))
    assert [(one.at, one.seconds, one.held) for one in found] == [
        (1000, 5, 2), (1010, 10, 2), (1020, 10, pytest.approx(3)), (1030, 2, 4),
    ]  # fmt: skip
    assert {one.guaranteed for one in found} == {1}
    assert [one.at for one in history.of("team", 10, 1020.0, 1032.0)] == [1020, 1030]
    assert not list(history.of("other", 10, 0.0, 1032.0))
    history.forget("team")
    history.note(view(0), 0.0)
    assert [(one.held, one.guaranteed) for one in history.of("team", 10, 0.0, 1030.0)] == [(0, 1)], "idle all the time"
    history.forget("team")
    assert not list(history.of("team", 10, 0.0, 1032.0))


def test_a_team_that_changes_all_the_time_costs_bounded_memory() -> None:
    history = UsageHistory()
    for at in range(MAX_CHANGES + 500):
        history.note(view(at % 2), float(at))
    assert sum(one.seconds for one in history.of("team", 60, 0.0, MAX_CHANGES + 500.0)) == MAX_CHANGES
