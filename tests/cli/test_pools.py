"""Node pools through the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from tests.cli.conftest import Cli
from tests.conftest import running_cluster

if TYPE_CHECKING:
    from pathlib import Path

SLEEP = ("--", "sleep", "infinity")


def test_a_job_waits_for_its_pool_while_others_are_idle(tmp_path: Path) -> None:
    config = ClusterConfig(nodes=3, gpus_per_node=1, pools={"fast": 1, "slow": 1})
    with running_cluster(tmp_path / "home", config) as cluster:
        cli = Cli(cluster)
        cli("project create team-a --pool fast=1:1")
        cli("config project team-a")
        cli("submit", "first", "--node-pool", "fast", *SLEEP)
        assert cluster.wait_for_phase("first", "Running").status.workers[0].node == "node-0"
        cli("submit", "second", "--node-pool", "fast", *SLEEP)
        waiting = cluster.wait_for("second", lambda job: job.status.reason is not None)
        assert waiting.status.reason is not None
        assert "project team-a (node pool fast) holds 1 of its limit of 1" in waiting.status.reason.message
        cli("submit", "third", *SLEEP)
        assert cluster.wait_for_phase("third", "Running").status.workers[0].node == "node-2"
        cli("project set team-a --pool slow=0:4")
        assert "fast: 1 of at most 1, slow: 0 of at most 4" in cli("project list -o wide")
        assert "POOL" in cli("list nodes")
        for words, sentence in (
            ("submit x --node-pool none -- true", "no node is in it; the cluster's node pools: fast, slow"),
            ("submit x --node-pool slow --node node-0 -- true", "it is not in node pool 'slow'"),
            ("submit x --node-pool fast -g 2 -- true", "may hold at most 1 GPU of node pool fast"),
            ("project set team-a --pool fast", "a node pool's quota is given as POOL=GUARANTEED"),
        ):
            answer = cli.run(words)
            assert (answer.code, sentence in answer.err) == (2, True), answer
