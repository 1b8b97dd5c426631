"""Moves that gather free GPUs, on the real API server: their cost is stored first, and another leader counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from tests.kubernetes.controlled import holds, is_leaving
from tests.polling import until

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

POLICY = f"{QUOTA_POLICIES}/default"


def test_workers_move_in_the_window_within_a_budget_that_outlives_the_controller(controlled: Controlled) -> None:
    api, nodes = controlled.cluster.api, controlled.add_nodes(2, 2)
    team = controlled.team(guaranteed=4)
    paths: dict[str, str] = {}

    def rule(**more: Any) -> None:
        spec = {"window": "00:00-24:00", "minAgeSeconds": 1, "maxGpuMinutesPerGpu": 1000, **more}
        api.patch(POLICY, {"spec": {"defragmentation": spec if more else None}})

    def used() -> set[str]:
        """Return the nodes on which all jobs run; none while a worker is under way."""
        pods = controlled.pods(team).values()
        settled = len(pods) == len(paths) and all(holds(pod) and not is_leaving(pod) for pod in pods)
        return {pod["spec"]["nodeName"] for pod in pods} if settled else set()

    def start(*names: str) -> None:
        for name in names:
            paths[name] = controlled.job(team, name, gpus=1)
            controlled.wait(used, controlled.log)

    def delete(*names: str) -> None:
        for name in names:
            api.delete(paths.pop(name))
        controlled.wait(lambda: len(controlled.pods(team)) == len(paths))

    def reserved() -> float:
        return float(api.get(POLICY).get("status", {}).get("defragmentation", {}).get("gpuSeconds", 0.0))

    controlled.on_close.append(rule)
    controlled.start()
    start("a", "b", "c", "d")
    delete("b", "d")
    assert used() == set(nodes)
    before = reserved()
    rule(budgetGpuMinutes=60)
    controlled.wait(lambda: len(used()) == 1, controlled.log)
    first = reserved()
    assert first >= before + 60, "a restart counts as a minute"
    moved = until(lambda: [name for name, path in paths.items() if api.get(path)["status"].get("moves")])
    (name,) = moved
    assert "to gather free GPUs, window 00:00-24:00" in api.get(paths[name])["status"]["lastMove"]["message"]

    rule(budgetGpuMinutes=first / 60)
    controlled.kill()
    controlled.start()
    start("e")
    delete(name)
    start("f")
    delete("f")
    assert len(used()) == 2, "the budget is spent, and another leader counts it"
    rule(budgetGpuMinutes=60)
    controlled.wait(lambda: len(used()) == 1, controlled.log)
    assert reserved() >= first + 60
