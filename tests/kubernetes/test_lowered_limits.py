"""A limit that is lowered below what a team holds is enforced after the grace of the QuotaPolicy."""

from __future__ import annotations

import asyncio

from tests.kubernetes.detached import POLICIES, QUOTAS, detached
from tests.polling import until_async


def test_what_exceeds_a_lowered_limit_is_evicted_after_the_grace() -> None:
    async def scenario(grace_s: float) -> list[str]:
        async with detached() as test:
            policy = {"metadata": {"name": "default", "uid": "policy"}, "spec": {"limitGraceSeconds": grace_s}}
            test.see(POLICIES, policy)
            test.node()
            test.team("a", guaranteed=2)
            pods = [test.pod("a", f"p{number}", node="node") for number in range(4)]
            await test.start()
            plain = test.controller.snapshot.plain
            await until_async(lambda: not test.controller.plans.busy and plain.members.keys() == set(pods))
            quota = {"metadata": {"name": "a", "uid": "quota-a"}, "spec": {"guaranteed": 1, "limit": 3}}
            test.see(QUOTAS, quota)
            test.controller._look_at_quotas()
            await until_async(lambda: not test.controller.plans.busy)
            if not grace_s:  # evictions settle
                await until_async(lambda: any(plain.members[uid].evicted for uid in pods))
            return [uid for uid in pods if plain.members[uid].evicted]

    assert len(asyncio.run(scenario(0.0))) == 1
    assert not asyncio.run(scenario(600.0))
