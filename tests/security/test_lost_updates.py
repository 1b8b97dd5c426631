"""Two concurrent changes of one project: neither is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Project
from kfp_gpuquota.errors import ConflictError
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster


def test_a_change_on_top_of_what_is_not_there_any_more_is_refused(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 1)
    client = embedded_cluster.client
    before = client.get_project("team-a").project
    client.set_project(Project(name="team-a", guaranteed=2), expected=before)
    with pytest.raises(ConflictError, match="was changed by somebody else in the meantime"):
        client.set_project(Project(name="team-a", guaranteed=1, limit=5), expected=before)
    assert client.get_project("team-a").project == Project(name="team-a", guaranteed=2)
    client.set_project(Project(name="team-a", guaranteed=1))


def test_commands_that_change_different_fields_at_once_all_count(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 0)
    fields = {"--guaranteed": "2", "--limit": "7", "--priority": "55", "--weight": "3", "--cpu": "1"}
    code = "from kfp_gpuquota.cli.main import main; main()"
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", code, "project", "set", "team-a", field, value],
            env={**os.environ, **embedded_cluster.environment},
            stdout=subprocess.DEVNULL,
        )
        for field, value in fields.items()
    ]
    assert [command.wait(TIMEOUT_S) for command in commands] == [0] * len(commands)
    found = embedded_cluster.client.get_project("team-a").project
    assert (found.guaranteed, found.limit, found.priority, found.over_quota_weight) == (2, 7, 55, 3)
    assert found.guaranteed_cpu == 1
