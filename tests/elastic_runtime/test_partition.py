"""A network that fails a worker on all sides at once: its peers and the coordinator lose it, and it is alive."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.elastic_runtime.harness import JOB, LIMITS, Cluster
from tests.elastic_runtime.training import Gate, Plan, train, trained_alone
from tests.polling import until

if TYPE_CHECKING:
    from kfp_gpuquota.membership import Member, Membership


def train_with_a_fuse(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """SIGUSR2 ends every connection of the process, in the middle of whatever it does."""
    signal.signal(signal.SIGUSR2, lambda *_: end_all_connections())
    train(plan, index, directory, gate)


def end_all_connections() -> None:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
            connection.getpeername()  # not one that listens: gloo ends the process where that fails
            connection.shutdown(socket.SHUT_RDWR)


def machine_of(cluster: Cluster) -> Membership:
    return cluster.coordinator.call(lambda service: service.machine(JOB))


def member(cluster: Cluster, worker: str) -> Member:
    return machine_of(cluster).members[worker]


def failed(cluster: Cluster) -> set[str]:
    base = machine_of(cluster).base
    return set(base.failed) if base else set()


def break_all(cluster: Cluster, worker: str) -> None:
    cluster.kill(worker, signal.SIGUSR2)


@pytest.mark.slow
def test_of_two_that_lose_each_other_and_the_coordinator_the_first_to_be_back_waits_for_the_other(
    tmp_path: Path,
) -> None:
    plan = Plan(body=train_with_a_fuse)
    reference: dict[str, Any] = trained_alone(train, plan, tmp_path / "alone")
    with Cluster(tmp_path, plan, limits=replace(LIMITS, failure_s=5.0), relayed=True) as cluster:
        assert cluster.relay
        cluster.start(0, 1)
        before = member(cluster, "w0").connected_at
        break_all(cluster, "w0")
        until(lambda: member(cluster, "w0").connected_at not in {None, before}, cluster.logs)
        cluster.relay.hold(["w1"], 3600)
        break_all(cluster, "w1")
        until(lambda: member(cluster, "w1").lost_at is not None, cluster.logs)
        cluster.let_go()
        until(lambda: "w0" in failed(cluster), cluster.logs)
        cluster.relay.heal()
        cluster.wait_for_end(0, 1)
        assert cluster.kills == []
        cluster.check_result(reference)
