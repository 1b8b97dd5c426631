"""The message of a job that waits changes when its cause does, not with every amount in it."""

from __future__ import annotations

import asyncio

from tests.kubernetes.detached import JOBS, Detached, detached
from tests.polling import until_async


def message(test: Detached) -> str:
    reason = test.controller.elastic.book.jobs["job"].status.reason
    return reason.message if reason else ""


def test_amounts_change_the_message_after_a_while_only_and_another_cause_at_once() -> None:
    now = 1_800_000_000.0

    written: list[str] = []

    async def planned(test: Detached) -> None:
        await asyncio.sleep(0)
        await until_async(lambda: not test.controller.plans.busy)
        written[:] = [path for _, path, _ in test.connection.asked if path.partition("?")[0].endswith("/job/status")]

    def answered(verb: str, path: str, body: object) -> bytes:
        return b"{}"

    async def scenario() -> list[str]:
        nonlocal now
        async with detached(clock=lambda: now) as test:
            test.connection.answer = answered  # type: ignore[method-assign]
            test.node(gpus=4)
            test.team("a")
            for number in range(3):
                test.pod("a", f"p{number}", node="node")
            template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
            metadata = {"name": "job", "namespace": "a", "uid": "job", "generation": 1}
            test.see(JOBS, {"metadata": metadata, "spec": {"gpus": 4, "template": template}})
            await test.start()
            await planned(test)
            found = [message(test)]
            for _ in range(20):  # a cluster where something happens: the amounts are different each time
                test.pod("a", "more", node="node")
                await planned(test)
                test.see("/api/v1/pods", {"metadata": {"name": "more", "namespace": "a", "uid": "a-more"}}, "DELETED")
                await planned(test)
            found.append(message(test))
            assert len(written) <= 2, "one patch of the message for one cause, whatever the amounts"
            test.see("/api/v1/pods", {"metadata": {"name": "p0", "namespace": "a", "uid": "a-p0"}}, "DELETED")
            await planned(test)
            found.append(message(test))
            now += 301
            test.controller.wake()
            await planned(test)
            found.append(message(test))
            test.node(gpus=3)
            await planned(test)
            return [*found, message(test)]

    first, busy, soon, later, other = asyncio.run(scenario())
    assert "1 is idle" in first
    assert busy == soon == first
    assert len(written) <= 4
    assert "2 are idle" in later
    assert "the largest node has 3" in other
