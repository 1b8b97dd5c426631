"""Node pools through the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.scheduler.dump import decode_dump, load_state
from kfp_gpuquota.scheduler.state.model import GPU
from kfp_gpuquota.web.views.teams import tree
from tests.cli.conftest import Cli
from tests.conftest import running_cluster

if TYPE_CHECKING:
    from pathlib import Path

SLEEP = ("--", "sleep", "infinity")


def test_what_a_project_holds_in_a_pool_is_compared_with_its_quota_there(tmp_path: Path) -> None:
    config = ClusterConfig(nodes=3, gpus_per_node=4, pools={"fast": 1, "slow": 1})
    with running_cluster(tmp_path / "home", config) as cluster:
        cli = Cli(cluster)
        cli("project create team-a --guaranteed 2 --pool fast=2:3")
        cli("config project team-a")
        cli("submit", "fixed", "-g", "2", "--node-pool", "fast", "--interactive", *SLEEP)
        for name, words in (("more", "--node-pool fast"), ("slow", "-g 2 --node-pool slow"), ("own", "-g 3")):
            cli("submit", name, *words.split(), *SLEEP)
        for name in ("fixed", "more", "slow", "own"):
            cluster.wait_for_phase(name, "Running")
        (view,) = cluster.client.list_projects()
        assert (view.allocated, view.over_quota, view.lent) == (8, 1 + 2 + 1, 0)
        state = load_state(decode_dump(cluster.client.debug_state()))
        held = [(queue.held[0], queue.deserved[0]) for queue in state.queues_of("team-a")]
        assert view.over_quota * GPU == sum(max(0.0, has - guaranteed) for has, guaranteed in held)
        (team,) = tree([view])
        assert (team.amounts.guaranteed, team.amounts.own, team.amounts.borrowed, team.amounts.unused) == (4, 4, 4, 0)
        cli("project set team-a --guaranteed 0")  # nothing that it holds there cannot be preempted
        for words, sentence in (
            ("--pool fast=1:3", "holds 2 GPUs of node pool fast in jobs that cannot be preempted, more than"),
            ("--pool fast=2:2", "holds 3 GPUs of node pool fast, more than the new limit 2"),
            ("--limit 2", "holds 3 GPUs, more than the new limit 2"),
        ):
            answer = cli.run(f"project set team-a {words}")
            assert (answer.code, sentence in answer.err) == (2, True), answer


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
