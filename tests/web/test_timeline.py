"""The Timeline page: who held what when, what is expected, and what it sums up to."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import ExpectedStart
from kfp_gpuquota.api.history import Usage, gpu_hours_of
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
