"""Churn of all kinds with failovers, watched by an independent observer: nothing that it checks is ever violated."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.kuberay import Operator, ray_path
from tests.polling import until
from tools.observer.churn import Churn
from tools.observer.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kubernetes.controlled import Controlled
    from tools.devcluster import DevCluster

SECONDS = float(os.environ.get("CHURN_SECONDS", "25"))
PER_SECOND = float(os.environ.get("CHURN_PER_SECOND", "10"))
KILLED_EVERY_S = 20.0
OPERATOR_PAUSE_S = 0.5
STEADY_S = 300.0
"""From this length on no leader is killed in the last two thirds, and its memory is measured in the last third."""
GROWTH = 1.1


@pytest.fixture
def operators(ray_cluster: DevCluster, electing: Controlled) -> Iterator[Callable[[str], None]]:
    """Starts a double of KubeRay's operator for a team; what it operates is removed with it."""
    running: list[tuple[str, Operator]] = []
    yield lambda team: running.append((team, Operator(ray_cluster.api, team, OPERATOR_PAUSE_S)))
    for team, operator in running:
        operator.close()
        for cluster in ray_cluster.api.items(ray_path(team, "rayclusters")):
            ray_cluster.api.delete(ray_path(team, "rayclusters", cluster["metadata"]["name"]))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_churn_with_failovers_violates_nothing(electing: Controlled, operators: Callable[[str], None]) -> None:
    nodes = electing.add_nodes(4, gpus=4)
    teams = [
        electing.team("churn", guaranteed=4),
        electing.team("churn", guaranteed=4),
        electing.team("churn", guaranteed=2, limit=6),
    ]
    for team in teams:
        operators(team)
    leader, standby = electing.start(), electing.start()
    running, killed_at = [leader, standby], 0.0

    memory: list[tuple[float, int]] = []

    def beside(elapsed: float) -> None:
        """Kill the older process, which leads, from time to time; measure one that stays."""
        nonlocal killed_at
        steady = SECONDS >= STEADY_S and elapsed > SECONDS / 3
        if steady:
            memory.append((elapsed, resident_kib(running[0].pid)))
        elif elapsed - killed_at > KILLED_EVERY_S:
            killed_at = elapsed
            oldest = running.pop(0)
            oldest.kill()
            oldest.wait()
            running.append(electing.start())

    with Watching(electing.cluster.kubeconfig) as watching:
        churn = Churn(electing.cluster.api, teams, nodes, seed=1, ray=True)
        churn.run(SECONDS, PER_SECOND, beside)
        churn.settle()
        until(lambda: not stuck(electing, teams), lambda: stuck(electing, teams), 90)
        found = watching.violations()
    seen = watching.observer
    sys.stderr.write(f"{churn.done}; {seen.admissions} admissions, {seen.evictions} evictions, {seen.moves} moves\n")
    assert not found, "\n".join(map(str, found))
    if memory:
        warm, last = (typical(memory, SECONDS * part) for part in (4 / 6, 5 / 6))
        sys.stderr.write(f"leader: {warm / 1024:.1f} MiB after the warm-up, {last / 1024:.1f} MiB at the end\n")
        assert last <= warm * GROWTH
    assert watching.observer.admissions > len(teams)
    assert all(process.poll() is None for process in running)


def resident_kib(pid: int) -> int:
    """Return the memory of a process and of its children, of which the planner is one."""
    own = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    total = int(own[1] if own else 0)
    for child in (one for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()):
        with contextlib.suppress(FileNotFoundError):  # a child that has just ended
            total += resident_kib(int(child))
    return total


def typical(memory: list[tuple[float, int]], since: float) -> float:
    """Return the median of a sixth of the time."""
    return statistics.median(kib for at, kib in memory if since <= at < since + SECONDS / 6)


def stuck(electing: Controlled, teams: list[str]) -> list[str]:
    """Pods that were admitted, and are not bound."""
    pods = [pod for team in teams for pod in electing.pods(team).values()]
    sent = [pod for pod in pods if not pod["spec"].get("schedulingGates") and not pod["spec"].get("nodeName")]
    return [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in sent]
