"""What a tenant or another project owns, and cannot be read, delays nobody else's pods: no plan, and no look-up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane
from kfp_gpuquota.cluster.kubernetes.controller.watches import FOREIGN_KINDS
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Profile
from kfp_gpuquota.cluster.kubernetes.pods import pod_groups
from tests.kubernetes.detached import Detached, Unanswered, detached
from tests.polling import until_async

PYTORCH_JOB = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "controller": True}


class NeverAnswered(Unanswered):
    """An API server that does not answer: the conversion webhook of what is read is down."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = 0

    async def call(self, verb: str, path: str, body: object = None, **_: Any) -> bytes:
        """Hang until the caller gives up."""
        self.asked.append((verb, path, body))
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1
        raise AssertionError


def hang(test: Detached) -> NeverAnswered:
    connection = NeverAnswered()
    test.controller._writer._connection = connection
    return connection


def owned(test: Detached, team: str, name: str) -> str:
    owner = {**PYTORCH_JOB, "name": f"job-{name}", "uid": f"job-{name}"}
    return test.pod(team, name, metadata={"name": name, "namespace": team, "ownerReferences": [owner]})


def test_an_owner_that_cannot_be_read_does_not_delay_the_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_groups, "LOOK_UP_S", 0.05)

    async def scenario() -> None:
        async with detached() as test:
            hang(test)
            test.node()
            test.team("a")
            test.team("b")
            stuck = owned(test, "a", "stuck")
            free = test.pod("b", "free")
            async with asyncio.timeout(5):
                await test.controller.gangs.settled()
            await test.start()
            await until_async(lambda: test.sent(free))
            assert not test.sent(stuck)
            await until_async(lambda: [why for _, why in test.controller.gangs.unknown()])
            ((pod, why),) = test.controller.gangs.unknown()
            assert pod.uid == stuck
            assert "its PyTorchJob job-stuck cannot be read" in why

    asyncio.run(scenario())


def test_look_ups_of_some_namespaces_leave_slots_for_others_and_none_of_the_writes_slots() -> None:
    async def scenario() -> None:
        async with detached() as test:
            connection = hang(test)
            test.node()
            for team in "abcd":
                test.team(team)
            for number in range(12):
                owned(test, "abc"[number % 3], f"stuck-{number}")
            await test.start()
            await until_async(lambda: connection.hanging > 3)
            owned(test, "d", "other")
            await until_async(lambda: any("job-other" in path for _, path, _ in connection.asked))
            waiting = test.controller.queued_writes()
            assert waiting[Lane.OTHER] == waiting[Lane.ADMIT] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("path", sorted(FOREIGN_KINDS))
def test_planning_starts_without_a_kind_of_another_project_that_cannot_be_listed(path: str) -> None:
    async def scenario() -> bool:
        test = Detached()
        assert path in {one.path for one in test.controller.reflectors}
        reflector = Reflector(
            NeverAnswered(), path, Profile, changed=lambda _: None, deleted=lambda _: None, optional=True
        )
        running = asyncio.create_task(reflector.run())
        read = await reflector.synced_or_unread(0.05)
        running.cancel()
        return read

    assert not asyncio.run(scenario())
