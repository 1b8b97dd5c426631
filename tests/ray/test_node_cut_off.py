"""Two machines on Ray, of which one is cut off: a raylet in a network namespace, whose cable is pulled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.effort import soaked
from tests.polling import until
from tests.ray.conftest import RayCluster, cluster_on, log_of
from tests.ray.cut_off_training import check_result, is_alive, pids, workers_of
from tests.ray.machine import Machine, other_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.slow, soaked, pytest.mark.xdist_group("ray")]

ROOT = str(Path(__file__).parents[2])
SILENCE_S = 15.0
NOTICED_SOON = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 4}


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Another machine on a cable of its own."""
    with other_machine() as machine:
        yield machine


@pytest.fixture
def nodes(machine: Machine) -> Iterator[RayCluster]:
    """A head, and a raylet with a GPU beside it."""
    nodes = RayCluster(node_ip_address=machine.here)
    try:
        nodes.start(1, _system_config=NOTICED_SOON)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def cluster(nodes: RayCluster) -> Iterator[EmbeddedCluster]:
    with cluster_on(nodes, silence_s=SILENCE_S) as cluster:
        cluster.project("team-a", 2)
        yield cluster


def test_a_training_grows_onto_another_machine_and_when_that_is_cut_off_its_worker_ends_before_it_is_replaced(
    machine: Machine, nodes: RayCluster, cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    script = (sys.executable, "-m", "tests.ray.cut_off_training", "{}", str(tmp_path))
    size = {"gpus": 1, "min_gpus": 1, "max_gpus": 2, "cool_down_s": 0}
    cluster.submit("train", *script, working_directory=ROOT, **size)  # type: ignore[arg-type]
    until(lambda: workers_of(tmp_path) == 1, lambda: cluster.job("train"))
    machine.start_raylet(nodes.address, gpus=1)
    until(lambda: workers_of(tmp_path) == 2, lambda: cluster.job("train"))
    number, cut_off = next((number, pid) for number, pid in pids(tmp_path).items() if machine.has(pid))

    machine.pull_cable()
    until(lambda: workers_of(tmp_path) == 1, "the training goes on without it")

    def counts_as_ended() -> bool:
        runs = is_alive(cut_off)
        phase = next(worker.phase for worker in cluster.job("train").status.workers if worker.index == int(number))
        assert not (runs and phase == "Gone"), "its GPU counts as free while it runs"
        return phase == "Gone"

    until(counts_as_ended, lambda: cluster.job("train").status)
    machine.plug_in()  # Ray ends a raylet that was lost
    machine.start_raylet(nodes.address, gpus=1)
    until(lambda: workers_of(tmp_path) == 2, lambda: cluster.job("train").status)
    (tmp_path / "go").touch()
    job = cluster.wait_for("train", lambda job: job.status.phase.final)
    assert job.status.phase == "Succeeded", job.status
    check_result(tmp_path, log_of(cluster, "train"))
