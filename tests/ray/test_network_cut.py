"""The network between a worker and the daemon, on a real Ray cluster: nothing passes, and no connection ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.elastic_runtime.relay import Relay
from tests.polling import until
from tests.ray.conftest import log_of
from tests.ray.cut_off_training import check_result, is_alive, pids, steps_applied, workers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import EmbeddedCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = str(Path(__file__).parents[2])
CUT_OFF = "1"
FOR_EVER_S = 3600.0


@pytest.fixture
def relay(cluster: EmbeddedCluster) -> Iterator[Relay]:
    """Carries the connections of workers 0 and 1 to the daemon's membership service."""

    served = msgspec.json.decode((cluster.home.root / "membership.json").read_bytes())
    with Relay(lambda: int(served["port"]), served["here"]) as relay:
        yield relay


def test_a_short_cut_costs_nothing_and_a_worker_that_stays_cut_off_is_ended_before_it_is_replaced(
    cluster: EmbeddedCluster, relay: Relay, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    cluster.submit("holds", "sleep", "3600", project="team-b", gpus=2)
    cluster.wait_for_phase("holds", "Running", project="team-b")
    lanes = {number: relay.open_lane(number) for number in ("0", CUT_OFF)}
    script = (*forked_python, "-m", "tests.ray.cut_off_training", json.dumps(lanes), str(tmp_path))
    size = {"gpus": 1, "min_gpus": 1, "max_gpus": 3, "cool_down_s": 0}
    cluster.submit("train", *script, working_directory=ROOT, **size)  # type: ignore[arg-type]
    until(lambda: workers_of(tmp_path) == 2, lambda: cluster.job("train"))
    workers, generation = pids(tmp_path), cluster.job("train").status.generation

    relay.hold([CUT_OFF], FOR_EVER_S)
    at = len(steps_applied(tmp_path))
    until(lambda: len(steps_applied(tmp_path)) > at + 60, "the training goes on: its workers still reach each other")
    relay.heal()
    assert pids(tmp_path) == workers
    assert cluster.job("train").status.generation == generation

    relay.hold([CUT_OFF], FOR_EVER_S)
    cluster.client.delete_job("team-b", "holds")  # the training grows: another worker waits for the one that is cut off

    def is_replaced() -> bool:
        holders = [device for view in cluster.client.list_nodes() for device in view.held.values()]
        assert all(len(held) <= 1 for held in holders), holders
        grown = workers_of(tmp_path) == 3
        assert not (grown and is_alive(workers[CUT_OFF])), "its replacement trains, and it still runs"
        return grown

    until(is_replaced, lambda: cluster.job("train").status)
    relay.heal()
    (tmp_path / "go").touch()
    job = cluster.wait_for("train", lambda job: job.status.phase.final)
    assert job.status.phase == "Succeeded", job.status
    check_result(tmp_path, log_of(cluster, "train"))
    assert job.status.restarts == 1
