"""One of several controllers leads; after its exit another one leads when the Lease of 15 s has expired."""

from __future__ import annotations

import socket
import time

import pytest

from tests.kubernetes.controlled import LEASE, Controlled
from tests.polling import TIMEOUT_S
from tools.devcluster.layout import free_port

TAKEN_OVER_WITHIN_S = 20.0


@pytest.mark.slow
def test_a_standby_takes_over_from_a_leader_that_was_killed(electing: Controlled) -> None:
    electing.add_nodes(1, gpus=4)
    team = electing.team(guaranteed=4)
    leader = electing.start()
    electing.until_bound(electing.pod(team, "first"))
    standby = electing.start()
    electing.until_bound(electing.pod(team, "second"))
    assert electing.log().count("; workers are served") == 1  # the standby stands by
    leader.kill()
    leader.wait()
    killed = time.monotonic()
    path = electing.pod(team, "third")
    electing.until_bound(path)
    assert time.monotonic() - killed < TAKEN_OVER_WITHIN_S
    assert standby.poll() is None


def test_a_standby_is_ready_only_when_its_webhook_listens(electing: Controlled) -> None:
    electing.start()
    port = free_port()
    electing.start(f"--webhook-port={port}")  # returns as soon as it is ready
    with socket.create_connection(("127.0.0.1", port), 5):
        pass


def test_a_leader_that_is_told_to_stop_lets_go_at_once(electing: Controlled) -> None:
    electing.add_nodes(1, gpus=4)
    team = electing.team(guaranteed=4)
    leader = electing.start()
    electing.until_bound(electing.pod(team, "first"))
    electing.start()
    leader.terminate()
    assert leader.wait(TIMEOUT_S) == 0
    asked = time.monotonic()
    electing.until_bound(electing.pod(team, "second"))
    assert time.monotonic() - asked < 8.0  # far less than the lease lasts


def test_a_leader_whose_lease_somebody_took_ends(electing: Controlled) -> None:
    electing.start()
    electing.cluster.api.until(LEASE, lambda lease: lease["spec"]["holderIdentity"])
    electing.cluster.api.patch(LEASE, {"spec": {"holderIdentity": "somebody-else"}})
    assert electing.processes[0].wait(TIMEOUT_S) == 3
    electing.processes.clear()
