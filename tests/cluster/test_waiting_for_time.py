"""Decisions of the embedded cluster that wait for time to pass, with nothing happening until then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

COOL_DOWN_S = 1.0


@pytest.fixture
def two_teams(embedded_cluster: EmbeddedCluster) -> EmbeddedCluster:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    return embedded_cluster


def test_a_job_that_just_grew_is_lent_what_became_idle_when_its_cool_down_is_over(
    two_teams: EmbeddedCluster,
) -> None:
    two_teams.submit("notebook", project="team-b", kind="build")
    two_teams.wait_for_phase("notebook", "Running", "team-b")
    two_teams.submit("train", gpus=1, min_gpus=1, max_gpus=2, cool_down_s=COOL_DOWN_S)
    two_teams.wait_for_phase("train", "Running")
    for _ in range(2):
        two_teams.client.delete_job("team-b", "notebook")
        grown = two_teams.wait_for("train", lambda job: job.status.gpus == 2)
        two_teams.submit("notebook", project="team-b", kind="build")
        two_teams.wait_for_phase("notebook", "Running", "team-b")
    first, second = [w.started_at for w in grown.status.workers if w.index][-2:]
    assert second - first >= COOL_DOWN_S


def test_a_job_gives_way_to_a_guarantee_when_its_minimum_run_time_is_over(
    two_teams: EmbeddedCluster,
) -> None:
    started = two_teams.submit("train", gpus=2, min_run_time_s=3.0).status.submitted_at
    two_teams.wait_for_phase("train", "Running")
    two_teams.submit("notebook", project="team-b", kind="build")
    waiting = two_teams.wait_for("notebook", lambda job: job.status.reason is not None, "team-b")
    assert waiting.status.reason is not None
    assert waiting.status.reason.code == "min-run-time"
    two_teams.wait_for_phase("notebook", "Running", "team-b")
    eviction = two_teams.job("train").status.last_eviction
    assert eviction is not None
    assert eviction.at - started >= 1.0
