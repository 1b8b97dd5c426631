"""Who lends what others borrow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api import Project
from kfp_gpuquota.api.lending import with_lent
from kfp_gpuquota.api.wire import ProjectView


def view(name: str, guaranteed: float, allocated: float, parent: str | None = None) -> ProjectView:
    return ProjectView(
        project=Project(name=name, guaranteed=guaranteed, parent=parent),
        allocated=allocated,
        over_quota=max(0.0, allocated - guaranteed),
        requested=allocated,
    )


def lent(*views: ProjectView, gpus: float | None = None) -> dict[str, float]:
    return {one.project.name: one.lent for one in with_lent(views, gpus)}


def test_a_team_lends_what_another_borrows_of_its_guarantee() -> None:
    assert lent(view("a", 2, 3), view("b", 2, 0), gpus=4) == {"a": 0, "b": 1}
    assert lent(view("a", 2, 3), view("b", 2, 2), gpus=8) == {"a": 0, "b": 0}


def test_what_is_guaranteed_to_nobody_is_borrowed_first() -> None:
    assert lent(view("a", 2, 5), view("b", 2, 0), gpus=6) == {"a": 0, "b": 1}
    assert lent(view("a", 2, 5), view("b", 2, 0)) == {"a": 0, "b": 2}


def test_several_lend_in_proportion_and_a_department_lends_nothing_of_its_own() -> None:
    department = view("d", 6, 0)
    found = lent(department, view("a", 0, 3), view("b", 4, 0, "d"), view("c", 2, 0, "d"), gpus=6)
    assert found == {"d": 0, "a": 0, "b": 2, "c": 1}


amounts = st.integers(0, 80).map(lambda quarters: quarters / 4)


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=6), amounts)
def test_what_is_lent_is_what_is_borrowed_beyond_what_nobody_was_promised(
    teams: list[tuple[float, float]], more: float
) -> None:
    views = [view(f"t{n}", guaranteed, allocated) for n, (guaranteed, allocated) in enumerate(teams)]
    gpus = max(sum(one.allocated for one in views), sum(one.project.guaranteed for one in views)) + more
    found = with_lent(views, gpus)
    unguaranteed = gpus - sum(one.project.guaranteed for one in views)
    borrowed = sum(one.over_quota for one in views)
    assert sum(one.lent for one in found) == pytest.approx(max(0.0, borrowed - unguaranteed), abs=1e-4)
    assert all(one.lent <= max(0.0, one.project.guaranteed - one.allocated) + 1e-6 for one in found)
