"""The head of a Ray cluster is lost, or belongs to another daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.check_results import Level
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.operations import LocalOperations
from kfp_gpuquota.cluster.local.start import start_with
from kfp_gpuquota.cluster.ray.config import RayConfig
from kfp_gpuquota.errors import ClusterStartError
from tests.polling import until
from tests.ray.conftest import cluster_on, ray_nodes, wait_for_nodes
from tests.web.conftest import visitor_of
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

LOGGING = ("sh", "-c", 'echo "begin $$" >> "$STARTS"; trap "exit 0" TERM; while :; do sleep 0.1; done')


def test_jobs_start_again_on_the_nodes_of_a_new_head_after_their_first_workers_have_ended(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with contextlib.ExitStack() as stack:
        with ray_nodes(1) as before:
            port = int(before.address.rpartition(":")[2])
            cluster = stack.enter_context(cluster_on(before))
            cluster.project("team-a", 1)
            with pytest.raises(ClusterStartError, match="is managed by another daemon already"):
                start_with(Home(tmp_path / "second"), ClusterConfig(ray=RayConfig(address=before.address)))
            cluster.submit("train", *LOGGING, environment={"STARTS": str(starts)})
            first = cluster.wait_for_phase("train", "Running").status.workers[0]
        with ray_nodes(1, port=port):

            def again(job: Job) -> bool:
                worker = job.status.workers[-1] if job.status.workers else first
                if worker.id == first.id or worker.pid is None:
                    return False
                assert not Path(f"/proc/{first.pid}").exists()
                return True

            cluster.wait_for("train", again)
            until(lambda: starts.read_text().count("begin") == 2, "a second start")
            stack.close()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a Redis, in which a head keeps its state."""
    program = shutil.which("redis-server")
    if program is None:
        lack = "no redis-server (Debian's package has it)"
        (pytest.fail if os.environ.get("GPUQUOTA_REQUIRE_KUBERNETES") else pytest.skip)(lack)
    port = str(free_port())
    options = ("--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
        yield f"127.0.0.1:{port}"
        process.terminate()


def test_a_head_with_redis_is_restarted_and_every_worker_goes_on(
    redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    monkeypatch.setenv("RAY_REDIS_ADDRESS", redis)
    with ray_nodes(2) as nodes, cluster_on(nodes) as cluster:
        cluster.project("team-a", 2)
        cluster.submit("train", *LOGGING, environment={"STARTS": str(starts)})
        first = cluster.wait_for_phase("train", "Running").status.workers[0]
        head = nodes.cluster.head_node
        visitor = visitor_of(cluster)
        visitor.enter()
        assert cluster.client.health().problem == ""
        head.kill_gcs_server()
        until(lambda: "Ray" in cluster.client.health().problem, cluster.client.health)
        until(lambda: 'id="problem" class="problem" role="alert">Ray' in visitor.get("/queue").text, "a banner")
        findings = LocalOperations(cluster.home, lambda: cluster.client, elsewhere=False).check()
        (found,) = (one for one in findings if one.check == "connection")
        assert found.level == Level.FAIL
        head.start_gcs_server()
        until(lambda: not cluster.client.health().problem, cluster.client.health)
        before = lease_of(cluster)
        until(lambda: lease_of(cluster) > before, "the worker's lease is renewed")
        wait_for_nodes(cluster, 1)
        cluster.submit("next", "true")
        cluster.wait_for_phase("next", "Succeeded")
        assert cluster.job("train").status.workers[0].pid == first.pid
        cluster.client.cancel_job("team-a", "train")
        cluster.wait_for_phase("train", "Cancelled")
    assert starts.read_text().count("begin") == 1


def lease_of(cluster: EmbeddedCluster) -> float:
    """When the lease of the only worker ends, in seconds since boot."""
    (lease,) = (cluster.home.root / "nodes").glob("jobs/*/workers/*/lease")
    return float(lease.read_text())
