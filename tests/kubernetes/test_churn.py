"""Churn of all kinds with failovers, watched by an independent observer: nothing that it checks is ever violated."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.polling import until
from tools.observer.churn import Churn
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

SECONDS = float(os.environ.get("CHURN_SECONDS", "80"))
PER_SECOND = float(os.environ.get("CHURN_PER_SECOND", "10"))
KILLED_EVERY_S = 20.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_churn_with_failovers_violates_nothing(electing: Controlled) -> None:
    nodes = electing.add_nodes(4, gpus=4)
    teams = [
        electing.team("churn", guaranteed=4),
        electing.team("churn", guaranteed=4),
        electing.team("churn", guaranteed=2, limit=6),
    ]
    leader, standby = electing.start(), electing.start()
    running, killed_at = [leader, standby], 0.0

    def failover(elapsed: float) -> None:
        """Kill the older process, which leads, from time to time."""
        nonlocal killed_at
        if elapsed - killed_at > KILLED_EVERY_S:
            killed_at = elapsed
            oldest = running.pop(0)
            oldest.kill()
            oldest.wait()
            running.append(electing.start())

    with Watching(electing.cluster.kubeconfig) as watching:
        churn = Churn(electing.cluster.api, teams, nodes, seed=1)
        churn.run(SECONDS, PER_SECOND, failover)
        churn.settle()
        until(lambda: not stuck(electing, teams), lambda: stuck(electing, teams), 90)
        found = watching.violations()
    seen = watching.observer
    sys.stderr.write(f"{churn.done}; {seen.admissions} admissions, {seen.evictions} evictions, {seen.moves} moves\n")
    assert not found, "\n".join(map(str, found))
    assert watching.observer.admissions > len(teams)
    assert all(process.poll() is None for process in running)


def stuck(electing: Controlled, teams: list[str]) -> list[str]:
    """Pods that were admitted, and are not bound."""
    pods = [pod for team in teams for pod in electing.pods(team).values()]
    sent = [pod for pod in pods if not pod["spec"].get("schedulingGates") and not pod["spec"].get("nodeName")]
    return [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in sent]
