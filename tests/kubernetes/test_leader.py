"""One of several controllers leads; after its exit another one leads when the Lease of 15 s has expired."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.controlled import Controlled
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

LEASE = "/apis/coordination.k8s.io/v1/namespaces/gpuquota-system/leases/gpuquota-controller"
TAKEN_OVER_WITHIN_S = 20.0


@pytest.fixture
def controlled(system_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    """Controllers that elect a leader."""
    running = Controlled(system_cluster, tmp_path, arguments=["--leader-elect"])
    yield running
    running.close()
    if system_cluster.api.exists(LEASE):
        system_cluster.api.delete(LEASE)


@pytest.mark.slow
def test_a_standby_takes_over_from_a_leader_that_was_killed(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    leader = controlled.start()
    controlled.until_bound(controlled.pod(team, "first"))
    standby = controlled.start()
    controlled.until_bound(controlled.pod(team, "second"))
    assert controlled.log().count("; workers are served") == 1  # the standby stands by
    leader.kill()
    leader.wait()
    killed = time.monotonic()
    path = controlled.pod(team, "third")
    controlled.until_bound(path)
    assert time.monotonic() - killed < TAKEN_OVER_WITHIN_S
    assert standby.poll() is None


def test_a_standby_is_ready_only_when_its_webhook_listens(controlled: Controlled) -> None:
    controlled.start()
    port = free_port()
    controlled.start(f"--webhook-port={port}")  # returns as soon as it is ready
    with socket.create_connection(("127.0.0.1", port), 5):
        pass


def test_a_leader_that_is_told_to_stop_lets_go_at_once(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    leader = controlled.start()
    controlled.until_bound(controlled.pod(team, "first"))
    controlled.start()
    leader.terminate()
    assert leader.wait(30) == 0
    asked = time.monotonic()
    controlled.until_bound(controlled.pod(team, "second"))
    assert time.monotonic() - asked < 8.0  # far less than the lease lasts


def test_a_leader_whose_lease_somebody_took_ends(controlled: Controlled) -> None:
    controlled.start()
    controlled.cluster.api.until(LEASE, lambda lease: lease["spec"]["holderIdentity"])
    controlled.cluster.api.patch(LEASE, {"spec": {"holderIdentity": "somebody-else"}})
    assert controlled.processes[0].wait(20) == 3
    controlled.processes.clear()
