"""Jobs on the nodes of a Ray cluster, and faults of everything between them and the daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api.policy import IdleRule, WorkloadPolicy
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.fractions.activity import SIMULATED_FILE
from tests.conftest import processes_of
from tests.polling import until
from tests.ray.conftest import SILENCE_S, log_of, wait_for_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Job
    from tests.conftest import EmbeddedCluster
    from tests.ray.conftest import RayCluster

pytestmark = [pytest.mark.xdist_group("ray")]

COUNTING = ("sh", "-c", 'echo begin >> "$STARTS"; trap "exit 0" TERM; while :; do sleep 0.1; done')
"""Writes down each start, and runs until it is stopped."""


def start_counting(cluster: EmbeddedCluster, path: Path, name: str = "counted", **more: Any) -> Job:
    """A running job that writes down its starts."""
    cluster.submit(name, *COUNTING, environment={"STARTS": str(path)}, **more)
    return cluster.wait_for_phase(name, "Running")


def starts(path: Path) -> int:
    """How often the job was started."""
    return path.read_text().count("begin") if path.exists() else 0


def pid_of(cluster: EmbeddedCluster, marker: str) -> int:
    """The process of this cluster with the marker in its command line."""
    return until(lambda: next((pid for pid, line in processes_of(cluster.home.root) if marker in line), None), marker)


def actors(cluster: EmbeddedCluster) -> list[str]:
    """The names of the cluster's actors that hold GPUs."""
    import ray  # noqa: PLC0415

    named = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == f"gpuquota-{cluster.home.cluster_id()}"]


@pytest.fixture(scope="module")
def driver(nodes: RayCluster) -> Iterator[Any]:
    """Ray as other users of the same Ray cluster have it."""
    import ray  # noqa: PLC0415

    ray.init(address=nodes.address, namespace="others", log_to_driver=False)
    yield ray
    ray.shutdown()


def test_exit_code_log_and_gpus_of_a_worker_arrive(cluster: EmbeddedCluster) -> None:
    cluster.submit("hello", "sh", "-c", "echo gpus $CUDA_VISIBLE_DEVICES; exit 3", gpus=2)
    job = cluster.wait_for_phase("hello", "Failed")
    assert job.status.exit_code == 3
    assert job.status.reason is not None
    assert job.status.reason.message == "worker 0 ended with exit code 3: gpus 0,1"
    assert log_of(cluster, "hello") == "gpus 0,1\n"


@pytest.mark.slow
def test_other_work_of_ray_sees_the_gpus_as_taken_and_counts_as_used(
    cluster: EmbeddedCluster, driver: Any, tmp_path: Path
) -> None:
    start_counting(cluster, tmp_path / "starts", gpus=1)
    assert driver.available_resources().get("GPU") == 3

    holder = driver.remote(num_cpus=0, num_gpus=2)(Held).remote()
    other = driver.remote(num_cpus=0, num_gpus=1)(Held).remote()
    driver.get([holder.gpus.remote(), other.gpus.remote()])
    until(lambda: sum(sum(view.used.values()) for view in cluster.client.list_nodes()) == 4, "all GPUs are used")
    cluster.submit("waits", "true", project="team-b", gpus=1)
    cluster.wait_for("waits", lambda job: job.status.reason is not None, "team-b")
    assert cluster.job("waits", "team-b").status.phase == "Pending"
    driver.kill(holder)
    driver.kill(other)
    cluster.wait_for_phase("waits", "Succeeded", "team-b")


class Held:
    """An actor of other work on the cluster."""

    def gpus(self) -> list[int]:
        import ray  # noqa: PLC0415

        return [int(each) for each in ray.get_gpu_ids()]


def test_a_part_of_a_gpu_and_a_job_larger_than_any_node_are_refused(cluster: EmbeddedCluster) -> None:
    with pytest.raises(InvalidFieldError, match="a worker holds whole GPUs"):
        cluster.submit("part", "true", gpu_fraction=0.5)
    with pytest.raises(InvalidFieldError, match="its own queue for work without GPUs"):
        cluster.submit("none", "true", gpus=0)
    with pytest.raises(InvalidFieldError, match="the largest has 2 GPUs"):
        cluster.submit("large", "true", gpus=3, project="team-a")


def test_a_daemon_that_was_killed_adopts_its_workers(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    before = start_counting(cluster, tmp_path / "starts", gpus=2)
    cluster.kill_daemon()
    cluster.client.list_jobs()  # starts the next daemon
    after = cluster.wait_for("counted", lambda job: job.status.workers[0].pid is not None)
    assert after.status.workers[0].pid == before.status.workers[0].pid
    wait_for_nodes(cluster, 2)
    cluster.client.cancel_job("team-a", "counted")
    cluster.wait_for_phase("counted", "Cancelled")
    assert starts(tmp_path / "starts") == 1


def test_a_bridge_that_was_killed_is_replaced_and_follows_the_workers(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    start_counting(cluster, tmp_path / "starts")
    bridge = pid_of(cluster, "cluster.ray.bridge")
    os.kill(bridge, signal.SIGKILL)
    until(lambda: pid_of(cluster, "cluster.ray.bridge") != bridge, "another bridge")
    cluster.submit("next", "true", project="team-b")
    cluster.wait_for_phase("next", "Succeeded", "team-b")
    cluster.client.cancel_job("team-a", "counted")
    cluster.wait_for_phase("counted", "Cancelled")
    assert starts(tmp_path / "starts") == 1


@pytest.mark.slow
def test_another_actor_adopts_the_worker_of_an_actor_that_was_killed(
    cluster: EmbeddedCluster, driver: Any, tmp_path: Path
) -> None:
    before = start_counting(cluster, tmp_path / "starts", gpus=2)
    (name,) = [name for name in actors(cluster) if name.split("-")[1] == "2"]
    bridge = pid_of(cluster, "cluster.ray.bridge")
    os.kill(bridge, signal.SIGSTOP)  # it does not know yet that the actor is dead when it is asked for the log
    driver.kill(driver.get_actor(name, f"gpuquota-{cluster.home.cluster_id()}"))
    killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    with ThreadPoolExecutor(1) as pool:
        log = pool.submit(cluster.client.read_log, "team-a", "counted", offset=0, timeout_s=0.0)
        os.kill(bridge, signal.SIGCONT)
        assert log.result().more
    (lease,) = (cluster.home.root / "nodes").glob(f"jobs/{before.uid}/workers/*/lease")
    until(lambda: float(lease.read_text()) > killed_at + SILENCE_S, "another actor renews the lease")
    assert cluster.job("counted").status.workers[0].pid == before.status.workers[0].pid
    assert cluster.job("counted").status.phase == "Running"
    cluster.client.cancel_job("team-a", "counted")
    cluster.wait_for_phase("counted", "Cancelled")
    assert starts(tmp_path / "starts") == 1


@pytest.mark.slow
def test_a_worker_is_ended_whose_gpus_ray_gives_to_other_work_when_its_actor_dies(
    cluster: EmbeddedCluster, driver: Any, tmp_path: Path
) -> None:
    """Not when its lease ends: until then two programs would use one GPU."""
    before = start_counting(cluster, tmp_path / "starts", gpus=2)
    others = [driver.remote(num_cpus=0, num_gpus=2)(Held).remote() for _ in range(2)]
    driver.get(others[0].gpus.remote())
    (name,) = [name for name in actors(cluster) if name.split("-")[1] == "2"]
    driver.kill(driver.get_actor(name, f"gpuquota-{cluster.home.cluster_id()}"))
    driver.get(others[1].gpus.remote())
    after = cluster.wait_for("counted", lambda job: job.status.phase == "Pending")
    assert after.status.last_failure is not None
    assert "were not free" in after.status.last_failure.reason.message
    assert not Path(f"/proc/{before.status.workers[0].pid}").exists()
    for other in others:
        driver.kill(other)
    until(lambda: starts(tmp_path / "starts") == 2, "it starts again")


@pytest.mark.slow
def test_a_worker_is_replaced_only_after_its_lost_node_has_ended_it(
    cluster: EmbeddedCluster, nodes: RayCluster, tmp_path: Path
) -> None:
    extra = nodes.add(1)
    wait_for_nodes(cluster, 3)
    node = next(view.node.name for view in cluster.client.list_nodes() if len(view.node.devices) == 1)
    before = start_counting(cluster, tmp_path / "starts", node=node)
    shim_of = before.status.workers[0].pid
    assert shim_of is not None
    nodes.kill(extra)
    killed_at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(shim_of, 0)  # it outlives its raylet ...
    after = cluster.wait_for("counted", lambda job: job.status.phase == "Pending")
    assert time.monotonic() - killed_at >= SILENCE_S / 2
    assert not Path(f"/proc/{shim_of}").exists()  # ... and its end comes before its replacement
    assert after.status.reason is not None
    assert starts(tmp_path / "starts") == 1
    wait_for_nodes(cluster, 2)


@pytest.mark.slow
def test_an_unused_session_is_suspended_and_one_that_uses_its_gpu_is_not(cluster: EmbeddedCluster) -> None:
    """Each worker's actor measures: here a simulated use, since the nodes have no GPUs. The charts show the same."""
    rule = IdleRule(warn_after_s=1, suspend_after_s=2)
    cluster.client.set_policy(WorkloadPolicy(name="unused", idle=rule))
    try:
        for name, used in (("unused", "0"), ("busy", "35")):
            cluster.submit(name, kind="build")
            (worker,) = cluster.wait_for_phase(name, "Running").status.workers
            (directory,) = (path.parent for path in cluster.home.root.glob(f"nodes/**/{worker.id}/spec.json"))
            (directory / SIMULATED_FILE).write_text(used)
        suspended = cluster.wait_for_phase("unused", "Suspended")
        assert suspended.status.reason is not None
        assert suspended.status.reason.message.startswith("its GPUs had been unused since ")
        assert cluster.job("busy").status.phase == "Running"
        (worker,) = cluster.job("busy").status.workers
        charts = {(one.node, one.device): one.points[-1].percent for one in cluster.client.gpu_use(3600.0)}
        assert charts[worker.node, worker.devices[0]] == 35.0
    finally:
        cluster.client.delete_policy("unused")
