"""A status that the controller has written comes back by its own watch: that is no reason for a plan."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.kubernetes.detached import JOBS, QUOTAS, Detached, detached

EVENTS = 20
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "none"}]}}


def see_job(running: Detached, step: int, gpus: int = 1) -> None:
    metadata = {"name": "job", "namespace": "a", "uid": "job", "generation": gpus}
    status: dict[str, Any] = {"phase": "Pending", "progress": {"step": step}}
    running.see(JOBS, {"metadata": metadata, "spec": {"gpus": gpus, "template": TEMPLATE}, "status": status})


def see_quota(running: Detached, waiting: int, guaranteed: int = 4) -> None:
    metadata = {"name": "a", "uid": "quota-a"}
    running.see(QUOTAS, {"metadata": metadata, "spec": {"guaranteed": guaranteed}, "status": {"waiting": waiting}})


async def quiet(running: Detached) -> None:
    """Return when no plan is requested or under way."""
    while running.controller.plans.busy:
        await asyncio.sleep(0)


def test_a_change_of_status_alone_requests_no_plan() -> None:
    async def play() -> None:
        async with detached() as running:
            running.team("a")
            see_job(running, 0)
            await running.start()
            await quiet(running)
            requested = 0
            for number in range(1, EVENTS + 1):
                for see in (see_job, see_quota):
                    see(running, number)
                    requested += running.controller.plans.busy
                    await quiet(running)
            assert requested == 0
            see_job(running, EVENTS, gpus=2)
            assert running.controller.plans.busy
            await quiet(running)
            see_quota(running, EVENTS, guaranteed=5)
            assert running.controller.plans.busy
            await quiet(running)

    asyncio.run(play())
