"""`gpuquota report` of the embedded cluster, which has the history itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import pytest

from tests.polling import until

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client
    from tests.cli.conftest import Cli


@pytest.mark.slow
def test_the_embedded_cluster_reports_from_its_own_history(cli: Cli) -> None:
    header = "project,guaranteed_gpu_hours,borrowed_gpu_hours,gpu_hours,unused_gpu_hours\n"
    assert cli("report", "--since", "7d", "-o", "csv") == header
    cli("project create team-a --guaranteed 1")
    cli("submit", "hold", "-p", "team-a", "-g", "2", "-l", "gpuquota.dev/user=eve", "--", "sleep", "infinity")
    until(lambda: cast("Client", cli.cluster.client).gpu_hours(3600.0))  # two samples
    (row,) = json.loads(cli("report", "--since", "1h", "-o", "json"))
    assert row["project"] == "team-a"
    assert "GPU-HOURS" in cli("report")
    (held,) = json.loads(cli("report", "--since", "1h", "--by", "user", "--price", "3600", "-o", "json"))
    assert (held["project"], held["user"]) == ("team-a", "eve")
    assert held["cost"] == pytest.approx(3600 * held["gpu_hours"], abs=20)
    answer = cli.run("report", "--since", "2y")
    assert (answer.code, "for example 30d" in answer.err) == (2, True)
