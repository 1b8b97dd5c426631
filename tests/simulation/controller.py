"""The real controller in simulated time, and what must hold after each change of its records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.server.membership.listening import ListeningClock
from kfp_gpuquota.server.membership.service import LONGEST_TICK_S, MembershipService
from tests.kubernetes.detached import QUOTAS, Detached
from tests.kubernetes.twin_world import EPOCH, Answering, World
from tests.simulation.conditions import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.engine.job_book import Change


ENDS_S = 0.3
"""Within this time the status of a quota is written."""


class Mortal(Answering):
    """Answers, but no request to leave after `asks` of them: the controller ends then; what it promises is stored."""

    asks: int | None = None
    ended: Callable[[], None] | None = None

    def answer(self, verb: str, path: str, body: object) -> bytes:
        """Answer, or raise ClusterUnavailableError."""
        if self.asks is not None and (verb == "DELETE" or path.endswith("/eviction")):
            self.asks -= 1
            if self.asks == -1 and self.ended is not None:
                asyncio.get_running_loop().call_later(ENDS_S, self.ended)
        if self.asks is not None and self.asks < 0 and not path.startswith(QUOTAS):
            raise ClusterUnavailableError("the controller ends")
        return super().answer(verb, path, body)


class SimulatedController(Detached):
    """A controller in simulated time, whose requests the world answers."""

    def __init__(
        self,
        world: World,
        fail: Callable[[str], None],
        conditions: Conditions | None = None,
        observe: Callable[[Change], None] = lambda _: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(clock=lambda: EPOCH + loop.time())
        self.connection: Mortal = Mortal(world)
        self.controller._connection = self.connection
        self.controller._writer._connection = self.connection
        self.membership = cast("MembershipService", self.controller.elastic.membership.service)
        self.membership._clock = ListeningClock(loop.time, LONGEST_TICK_S)
        self.book = self.controller.elastic.book
        self._apply, self.book.apply_change = self.book.apply_change, self._observed  # type: ignore[method-assign]
        self._fail, self._conditions, self._observe = fail, conditions or Conditions(), observe

    def _observed(self, change: Change) -> None:
        """Apply a change, and check that all workers of a job that stops have been asked to leave."""
        for wrong in self._conditions.observe(self.book.jobs, change, self.book.clock()):
            self._fail(wrong)
        self._observe(change)
        self._apply(change)
        for record in self.book.workers.values() if self.controller.snapshot.complete else ():
            job = self.book.jobs[record.worker.job_uid]
            if record.alive and not record.released and (job.intent is not Intent.RUN or job.suspended):
                stops = f"{job.spec.name} stops ({job.intent}, {job.status.phase})"
                self._fail(f"{stops}, but {record.worker.id} was not asked to leave")

    async def list(self, world: World) -> None:
        """Read all objects, and plan."""
        for path, bodies in world.objects.items():
            for body in bodies.values():
                self.see(path, body)
        await self.start()
        self.controller.reservations.start()
        self.controller.wake()

    async def stop(self) -> None:
        """End it: what it has not written is lost."""
        self.controller._stop_timers()
        await self.controller._writer.close()
