"""A team's waiting pods beyond a bound wait unseen, the youngest ones, and are seen when others wait no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.detached import PODS, POLICIES, Detached, detached

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BOUND = 3


def scenario(test: Callable[[Detached], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with detached() as running:
            policy = {"metadata": {"name": "default", "uid": "policy"}, "spec": {"maxWaitingPods": BOUND}}
            running.see(POLICIES, policy)
            running.team("a", guaranteed=0)
            running.team("b", guaranteed=0)
            await running.start()
            await test(running)

    asyncio.run(all_of_it())


def born(test: Detached, team: str, number: int, **metadata: object) -> str:
    at = f"2026-01-01T00:00:{number:02}Z"
    name = f"p{number}"
    return test.pod(team, name, metadata={"name": name, "namespace": team, "creationTimestamp": at, **metadata})


def seen(test: Detached) -> set[str]:
    return set(test.controller.snapshot.plain.members)


def gone(test: Detached, uid: str, team: str, name: str) -> None:
    test.see(PODS, {"metadata": {"name": name, "namespace": team, "uid": uid}}, "DELETED")


def test_the_youngest_wait_unseen_with_a_reason_and_other_teams_are_not_affected() -> None:
    async def test(running: Detached) -> None:
        uids = [born(running, "a", number) for number in range(6)]
        other = born(running, "b", 9)
        assert seen(running) == {*uids[:BOUND], other}
        held = {pod.uid: why for pod, why in running.controller.snapshot.unseen.waiting()}
        assert held.keys() == set(uids[BOUND:])
        assert "maxWaitingPods" in held[uids[-1]]

    scenario(test)


def test_the_oldest_is_seen_when_another_one_is_deleted_and_a_deleted_one_is_forgotten() -> None:
    async def test(running: Detached) -> None:
        uids = [born(running, "a", number) for number in (0, 1, 2, 5, 4, 3)]
        gone(running, uids[5], "a", "p3")
        gone(running, uids[0], "a", "p0")
        assert seen(running) == {uids[1], uids[2], uids[4]}

    scenario(test)


def test_a_group_that_is_seen_in_part_is_seen_whole() -> None:
    async def test(running: Detached) -> None:
        group = {"labels": {labels.POD_GROUP: "g"}, "annotations": {labels.POD_GROUP_SIZE: "5"}}
        uids = [born(running, "a", number, **group) for number in range(5)]
        assert seen(running) == set(uids)
        assert not [pod for pod, _ in running.controller.snapshot.unseen.waiting()]
        late = born(running, "a", 6)
        assert late not in seen(running)

    scenario(test)


def test_a_raised_bound_shows_more() -> None:
    async def test(running: Detached) -> None:
        uids = [born(running, "a", number) for number in range(6)]
        policy = {"metadata": {"name": "default", "uid": "policy"}, "spec": {"maxWaitingPods": 5}}
        running.see(POLICIES, policy)
        assert seen(running) == set(uids[:5])

    scenario(test)
