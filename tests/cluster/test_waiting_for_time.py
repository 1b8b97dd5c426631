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
