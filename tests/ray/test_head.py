"""The head of a Ray cluster is lost, or belongs to another daemon."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import start_with
from kfp_gpuquota.cluster.ray.config import RayConfig
from kfp_gpuquota.errors import ClusterStartError
from tests.polling import until
from tests.ray.conftest import cluster_on, ray_nodes

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

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
