"""A burst of changes is decided as one before anything loses work; in simulated time."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.cluster.kubernetes.planner.bounded import Planned
from kfp_gpuquota.cluster.kubernetes.planner.process import InlinePlanner
from kfp_gpuquota.cluster.kubernetes.planner.settling import LONGEST_S, SETTLE_S, Settling
from tests.kubernetes import detached as watches
from tests.kubernetes.detached import detached
from tests.kubernetes.test_restarts import make_node, set_quota
from tests.kubernetes.twin_world import Twin, World, running
from tests.simulation.loop import SimulatedLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

APART_S = 0.1
"""Between the requests of one command."""


def submit(world: World, name: str, gpus: int) -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
    meta = {"name": name, "namespace": "a", "uid": name, "generation": 1}
    world.put(watches.JOBS, {"metadata": meta, "spec": {"gpus": gpus, "template": template}})


def pods(world: World) -> dict[str, bool]:
    """The names of the pods that exist, and whether each is being deleted."""
    found = world.objects[watches.PODS].values()
    return {pod["metadata"]["name"]: "deletionTimestamp" in pod["metadata"] for pod in found}


async def delete(world: World, twin: Twin, name: str) -> None:
    world.drop(watches.JOBS, f"a/{name}")
    await twin.settle(losses=False)
    world.end_terminating()
    await twin.settle(losses=False)


def play(scenario: Callable[[World, Twin], Awaitable[Any]]) -> Any:
    """Play it on two full nodes of four GPUs, with four jobs of two GPUs, while one of four waits."""

    async def run() -> Any:
        world = World()
        for node in ("n0", "n1"):
            make_node(world, node)
        set_quota(world, "a", 12)
        async with running(world) as twin:
            world.twin = twin
            for number in range(4):
                submit(world, f"job{number}", 2)
                await twin.settle(losses=False)
                world.run_pods()
                await twin.settle(losses=False)
            submit(world, "whole", 4)
            await twin.settle(losses=False)
            assert sorted(pods(world)) == [f"job{number}-0" for number in range(4)]
            return await scenario(world, twin)

    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def halves(world: World) -> list[str]:
    """Return one job of each node."""
    nodes: dict[str, str] = {}
    for pod in world.objects[watches.PODS].values():
        nodes.setdefault(pod["spec"]["nodeName"], pod["metadata"]["name"].removesuffix("-0"))
    return sorted(nodes.values())


def test_deleting_several_jobs_moves_no_other_job_for_one_of_them() -> None:
    async def scenario(world: World, twin: Twin) -> dict[str, bool]:
        for name in (*halves(world), "whole"):
            await delete(world, twin, name)
            await asyncio.sleep(APART_S)
        await asyncio.sleep(2.0)
        await twin.settle(losses=False)
        return pods(world)

    found = play(scenario)
    assert list(found.values()) == [False, False]
    assert all(name.endswith("-0") for name in found), found  # a worker that was moved has the next number


def test_a_job_is_moved_for_another_one_when_nothing_changes_any_more() -> None:
    async def scenario(world: World, twin: Twin) -> list[int]:
        for name in halves(world):
            await delete(world, twin, name)
        moving = [sum(pods(world).values())]
        await asyncio.sleep(2 * SETTLE_S)
        await twin.settle(losses=False)
        return [*moving, sum(pods(world).values())]

    assert play(scenario) == [0, 1]


def test_what_fits_starts_at_once() -> None:
    async def scenario(world: World, twin: Twin) -> tuple[bool, float]:
        for name in halves(world):
            await delete(world, twin, name)
        began = asyncio.get_running_loop().time()
        submit(world, "small", 1)
        await twin.settle(losses=False)
        return "small-0" in pods(world), asyncio.get_running_loop().time() - began

    started, took_s = play(scenario)
    assert started
    assert took_s < SETTLE_S


def test_a_loss_is_delayed_no_longer_although_each_plan_chooses_another_victim() -> None:
    settling, reason = Settling(), Reason(code=ReasonCode.RECLAIMED, message="reclaimed")
    plans = (scheduler.Plan(evict=(scheduler.Evict("job", (f"worker{n}",), reason),)) for n in range(100))
    carried_out = [n * APART_S for n, plan in enumerate(plans) if settling.settled(plan, {}, n * APART_S)[0].evict]
    pauses = [after - before for before, after in itertools.pairwise([0.0, *carried_out])]
    assert pauses
    assert max(pauses) <= LONGEST_S + 2 * APART_S


def test_growth_on_promised_devices_keeps_the_rest_of_the_promise_while_losses_settle() -> None:
    first, second, third = (Placement(f"n{n}", (0,)) for n in range(3))
    reason = Reason(code=ReasonCode.RECLAIMED, message="reclaimed")
    plan = scheduler.Plan(
        bind=(scheduler.Bind("starts", (first,), reason),),
        resize=(scheduler.Resize("grows", (first,), (), 1, 2, reason),),
        evict=(scheduler.Evict("other", ("worker",), reason),),
        promises={"grows": (second,), "new": (third,)},
    )
    settled, _ = Settling().settled(plan, {"grows": (first, second), "starts": (first,), "waits": (third,)}, 0.0)
    assert settled.promises == {"grows": (second,), "waits": (third,)}


class OftenOutdated(InlinePlanner):
    """Evicts a pod; two of three plans start a job as well that was deleted meanwhile, so that they evict nothing."""

    def __init__(self, state: scheduler.State, pod: str) -> None:
        super().__init__(state)
        self._pod, self._plans = pod, itertools.count()
        self.outdated = True

    async def plan(self, now: float) -> Planned:
        reason = Reason(code=ReasonCode.RECLAIMED, message="reclaimed")
        late = next(self._plans) % 3 != 2
        bind = (scheduler.Bind("deleted", (Placement("node", (1,)),), reason),) if late else ()
        plan = scheduler.Plan(bind=bind, evict=(scheduler.Evict(self._pod, (self._pod,), reason),))
        return Planned(plan, {}, [], 0.0, more=False)


def test_a_loss_is_carried_out_although_most_plans_are_outdated_when_they_arrive() -> None:
    async def play() -> bool:
        async with detached() as cluster:
            cluster.node("node", 2)
            cluster.team("team")
            pod = cluster.pod("team", "pod", node="node")
            await cluster.start()
            controller = cluster.controller
            controller.plans._planner = OftenOutdated(controller.snapshot.state, pod)
            for number in range(12):
                await controller.plans.plan_once(number * APART_S)
            return controller.snapshot.plain.members[pod].evicted

    assert asyncio.run(play())
