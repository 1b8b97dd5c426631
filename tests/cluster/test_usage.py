"""What projects borrowed, read off the history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api import Order, Phase, Project
from kfp_gpuquota.api.job import USER_LABEL
from kfp_gpuquota.api.wire import Event, EventKind
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.storage.recalled_usage import recalled
from kfp_gpuquota.scheduler.state.usage import key_of
from tests.conftest import EmbeddedCluster, running_cluster
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

PROJECTS = {
    "department": Project(name="department", guaranteed=2),
    "a": Project(name="a", guaranteed=1, parent="department"),
    "b": Project(name="b"),
}
LONG = 1e12


def change(at: float, gpus: float, project: str = "a") -> Event:
    kind = EventKind.WORKER_STARTED if gpus > 0 else EventKind.WORKER_GONE
    return Event(revision=0, at=at, kind=kind, project=project, gpus=gpus)


def borrowed(*history: Event, now: float, half_life_s: float = LONG) -> dict[str, float]:
    events = recalled(history, PROJECTS, now, half_life_s)
    return {event.project: round(event.gpu_seconds, 3) for event in events}


def test_only_what_is_above_the_guarantee_is_borrowed_at_every_level() -> None:
    history = [change(0.0, 4), change(100.0, -4), change(0.0, 0.5, "b"), change(10.0, -0.5, "b")]
    assert borrowed(*history, now=1000.0) == pytest.approx({"department": 200.0, "a": 300.0, "b": 5.0}, rel=1e-3)


def test_what_still_runs_counts_until_now_and_old_usage_fades() -> None:
    assert borrowed(change(0.0, 2, "b"), now=50.0)["b"] == pytest.approx(100.0, rel=1e-3)
    faded = borrowed(change(0.0, 2, "b"), change(1.0, -2, "b"), now=1001.0, half_life_s=1000.0)
    assert faded["b"] == pytest.approx(1.0, rel=1e-2)


def test_what_users_used_is_by_project_and_user() -> None:
    history = [
        msgspec.structs.replace(change(at, gpus, project), user=user)
        for at, gpus, project, user in (
            (0.0, 2, "a", "ann"),
            (50.0, -2, "a", "ann"),
            (0.0, 1, "b", "ann"),
            (90.0, 1, "a", ""),
        )
    ]
    events = {event.project: event.users for event in recalled(history, PROJECTS, 100.0, LONG)}
    assert events["a"] == pytest.approx({key_of("a", "ann"): 100.0, key_of("a", ""): 10.0}, rel=1e-3)
    assert events["b"] == pytest.approx({key_of("b", "ann"): 100.0}, rel=1e-3)


def test_a_worker_whose_start_names_no_user_or_was_deleted_takes_nothing_from_one() -> None:
    """The daemon of an earlier version wrote the start, or it is older than what is kept."""

    def entry(at: float, gpus: float, user: str, worker: str) -> Event:
        return msgspec.structs.replace(change(at, gpus), user=user, worker=worker)

    upgraded = [entry(0.0, 2, "", "old"), entry(50.0, -2, "ann", "old")]
    kept = [entry(50.0, -2, "ann", "older"), entry(60.0, 1, "ann", "new")]
    (a,) = (event.users for event in recalled([*upgraded, *kept], PROJECTS, 100.0, LONG) if event.project == "a")
    assert a == pytest.approx({key_of("a", ""): 100.0, key_of("a", "ann"): 40.0}, rel=1e-3)


def test_a_project_that_is_gone_is_left_out() -> None:
    assert set(borrowed(change(0.0, 2, "gone"), now=1.0)) == set(PROJECTS)


def sizes(cluster: EmbeddedCluster) -> tuple[float, float]:
    allocated = {view.project.name: view.allocated for view in cluster.client.list_projects()}
    return allocated["team-a"], allocated["team-b"]


def test_who_borrowed_yields_to_who_did_not_also_after_the_daemon_was_killed(tmp_path: Path) -> None:
    """A borrowed both GPUs for a while; B, which never did, then has both, and not one of them."""
    config = ClusterConfig(gpus_per_node=2, usage_half_life_s=3600.0)
    with running_cluster(tmp_path / "home", config) as cluster:
        for team in ("team-a", "team-b"):
            cluster.project(team, 0)
        for name in ("a1", "a2"):
            cluster.submit(name, project="team-a")
            cluster.wait_for_phase(name, "Running", "team-a")
        cluster.kill_daemon()
        for name in ("b1", "b2"):
            cluster.submit(name, project="team-b")
        deadline = time.monotonic() + TIMEOUT_S
        while sizes(cluster) != (0, 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sizes(cluster) == (0, 2)


def test_users_of_a_project_take_turns_also_after_the_daemon_was_killed(tmp_path: Path) -> None:
    """Ann's job has used all GPUs for seconds: Bob's, which was submitted later, comes before her next one."""
    config = ClusterConfig(gpus_per_node=8, usage_half_life_s=300.0)
    with running_cluster(tmp_path / "home", config) as cluster:
        cluster.client.create_project(Project(name="team-a", guaranteed=8, order=Order.FAIR_USERS))
        ann, bob = ({USER_LABEL: user} for user in ("ann", "bob"))
        cluster.submit("a1", gpus=8, labels=ann)
        cluster.wait_for_phase("a1", "Running", "team-a")
        cluster.submit("a2", gpus=8, labels=ann)
        cluster.submit("b1", gpus=8, labels=bob)
        job = cluster.wait_for("a2", lambda job: job.status.reason is not None and "bob" in job.status.reason.message)
        assert job.status.reason is not None
        assert "; user ann uses 8 of the 8 GPUs of team-a" in job.status.reason.message
        assert job.status.reason.message.endswith("so bob's job b1 comes first")
        cluster.kill_daemon()
        cluster.client.delete_job("team-a", "a1")
        cluster.wait_for_phase("b1", "Running", "team-a")
        assert cluster.job("a2").status.phase is Phase.PENDING
