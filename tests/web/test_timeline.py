"""The Timeline page: who held what when, what is expected, and what it sums up to."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import ExpectedStart
from kfp_gpuquota.api.history import HeldHours, Usage, gpu_hours_of
from tests.web.listed import NOW, Cluster, job, on


def test_jobs_are_shown_with_their_sizes_over_time_and_waiting_ones_where_they_are_expected() -> None:
    """The last hour and a quarter of an hour more are 1,000 units wide; now is at 800."""
    grown = job("grown", worker=on("grown", "n", 0, 1), started_at=NOW - 5400)
    ended = job("ended", started_at=NOW - 1800, finished_at=NOW - 900)
    before = job("before", started_at=NOW - 9000, finished_at=NOW - 7200)
    waits = job("waits", gpus=4, expected_start=ExpectedStart(earliest=NOW + 450, latest=NOW + 675))
    later = job("later", expected_start=ExpectedStart(earliest=NOW + 4000, latest=NOW + 5000))
    unknown = job("unknown", worker=on("unknown", "n", 2))  # as of a pod of a job that has not started
    cluster = Cluster([waits, later, before, ended, grown, unknown])
    cluster.sizes = {
        "grown": [(NOW - 5400, 1.0), (NOW - 1800, 2.0)],
        "ended": [(NOW - 1800, 1.0), (NOW - 900, 0.0)],
        "before": [(NOW - 9000, 1.0), (NOW - 7200, 0.0)],
    }
    shown = cluster.show("/timeline")
    rows = shown.lists["timeline"]
    assert list(rows) == ["line-uid-grown", "line-uid-ended", "line-uid-waits"]
    assert 'd="M0 10h400v10h-400zM400 0h400v20h-400z"' in rows["line-uid-grown"]
    assert 'd="M400 0h200v20h-200z"' in rows["line-uid-ended"]
    assert "1.5 <small>GPU-hours" in rows["line-uid-grown"]
    assert '<rect class="starts" x="900" y="3" width="50"' in rows["line-uid-waits"]
    assert "4 GPUs, waits" in rows["line-uid-waits"]
    assert next(iter(cluster.show("/timeline?span=day").lists["timeline"])) == "line-uid-grown"
    assert "line-uid-before" in cluster.show("/timeline?span=day").lists["timeline"]
    assert not cluster.show("/timeline?project=team-b").lists["timeline"]
    assert len(cluster.show("/timeline?size=2&page=2").lists["timeline"]) == 1


def test_a_moment_is_not_shown_by_a_power_of_ten() -> None:
    cluster = Cluster([job("failed", started_at=NOW - 60, finished_at=NOW - 59.9)])
    cluster.sizes = {"failed": [(NOW - 60, 1.0), (NOW - 59.9, 0.0)]}
    assert "&lt; 0.001 <small>GPU-hours" in cluster.show("/timeline").lists["timeline"]["line-uid-failed"]


def test_gpu_hours_within_the_guarantee_and_borrowed_add_up_to_all_as_they_are_shown() -> None:
    usage = Usage(project="p", at=0, width_s=60, seconds=60.0, held=2.0, borrowed=0.99, wanted=2.0, guaranteed=1.0)
    (row,) = gpu_hours_of([usage])
    assert (row.guaranteed, row.borrowed, row.total) == (0.01, 0.02, 0.03)


@pytest.mark.parametrize("project", ["", "team-a"])
def test_gpu_hours_and_shares_are_those_of_the_measured_usage(project: str) -> None:
    cluster = Cluster()
    cluster.used = [
        Usage(project=name, at=0, width_s=30, seconds=3600, held=held, borrowed=held - 1, wanted=held, guaranteed=1)
        for name, held in (("team-a", 3.0), ("team-b", 1.0))
    ]
    text = " ".join(cluster.show(f"/timeline?project={project}").parts["hours"].split())
    share = "75" if not project else "100"
    half = "50" if not project else "100"
    assert f"<td>3</td><td>1</td><td>2</td><td>{half} %</td><td>{share} %</td>" in text
    assert ("team-b" in text) == (not project)


def test_gpu_hours_by_user_and_type_have_a_cost_where_there_are_prices() -> None:
    cluster = Cluster()
    assert " hidden>" in cluster.show("/timeline").parts["user-hours"]
    cluster.held = [
        HeldHours(project="team-a", user="eve", gpu_type="H100", gpu_hours=10.0),
        HeldHours(project="team-a", gpu_hours=2.5),
        HeldHours(project="team-b", user="bob", gpu_type="T4", gpu_hours=1.0),
    ]

    def shown(query: str) -> str:
        return " ".join(cluster.show(f"/timeline?{query}").parts["user-hours"].split())

    assert "<td>eve</td><td>H100</td><td>10</td></tr>" in shown("")
    assert "Cost" not in shown("")
    priced = shown("price=H100%3D4,0.5")
    assert "<td>eve</td><td>H100</td><td>10</td><td>40.00</td>" in priced
    assert "<td>-</td><td>-</td><td>2.5</td><td>1.25</td>" in priced
    assert "<td>13.5</td><td>41.75</td>" in priced
    assert "<td>bob</td><td>T4</td><td>1</td><td>-</td>" in shown("price=H100%3D4")
    assert "bob" not in shown("project=team-a")
    assert "eve" in shown("price=much")
