"""A machine's clock that is set back: what waits for a moment waits no longer than it would have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.steady_clock import SteadyClock
from tests.conftest import running_cluster

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

DAY_S = 86_400.0
SET_BACK = """\
import os, time
machine = time.time
time.time = lambda: machine() - {day} * os.path.exists({flag!r})
"""


def clock(times: list[tuple[float, float]], at_least: float = 0.0) -> SteadyClock:
    """A clock that reads these (machine's time, seconds since boot), one at each call."""
    elapsed = iter([times[0][1], *(boot for _, boot in times)])
    machine = iter([wall for wall, _ in times])
    return SteadyClock(at_least, lambda: next(machine), lambda: next(elapsed))


def test_it_is_the_machines_while_that_goes_forward() -> None:
    steady = clock([(100.0, 0.0), (101.0, 1.0), (500.0, 2.0)])
    assert [steady() for _ in range(3)] == [100.0, 101.0, 500.0]


def test_it_goes_on_where_the_machines_goes_back_and_follows_it_when_that_has_caught_up() -> None:
    steady = clock([(100.0, 0.0), (50.0, 10.0), (60.0, 20.0), (130.0, 80.0), (200.0, 81.0)])
    assert [steady() for _ in range(5)] == [100.0, 110.0, 120.0, 180.0, 200.0]


def test_it_begins_no_earlier_than_the_newest_record() -> None:
    steady = clock([(100.0, 0.0), (103.0, 3.0)], at_least=1000.0)
    assert [steady() for _ in range(2)] == [1000.0, 1003.0]


def test_a_job_grows_after_the_clock_was_set_back_by_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "set-back"
    (tmp_path / "sitecustomize.py").write_text(SET_BACK.format(day=DAY_S, flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running_cluster(tmp_path / "home", ClusterConfig(gpus_per_node=2), new_interpreter=True) as cluster:
        cluster.project("team-a", 1)
        cluster.project("team-b", 1)
        before = cluster.submit("train", gpus=1, min_gpus=1, max_gpus=2, cool_down_s=0.5)
        for moved in (False, True):
            cluster.submit("notebook", project="team-b", kind="build")
            cluster.wait_for_phase("notebook", "Running", "team-b")
            if moved:
                flag.touch()
            cluster.client.delete_job("team-b", "notebook")
            cluster.wait_for("train", lambda job: job.status.gpus == 2)
        later = cluster.submit("later")
        assert later.status.submitted_at > before.status.submitted_at
        cluster.kill_daemon()
        restarted = cluster.submit("after-a-restart")
        assert restarted.status.submitted_at > later.status.submitted_at
