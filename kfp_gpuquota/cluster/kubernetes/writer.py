"""Carries out writes in parallel, a bounded number at a time, and says what became of each."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.connection import ApiError
from kfp_gpuquota.cluster.kubernetes.fence import NO_FENCE, StaleLeaseError
from kfp_gpuquota.cluster.kubernetes.logs import because_of, cause, fields
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.connection import Connection
    from kfp_gpuquota.cluster.kubernetes.fence import Fence
    from kfp_gpuquota.cluster.kubernetes.writes import Write

PARALLEL: Final = 24

log = logging.getLogger(__name__)


class Writer:
    """A queue of writes and as many tasks as may run at a time.

    Tasks live while there is something to do, so an idle controller has none. `done(answer)` or `failed(error)` is
    called in the event loop; a write that is refused is not tried again here, because the state it was based on is
    what has to be looked at again. Once `fence` is closed nothing is sent, and neither is called: the process that
    leads now decides anew.
    """

    def __init__(self, connection: Connection, parallel: int = PARALLEL, *, fence: Fence = NO_FENCE) -> None:
        self._connection, self._parallel, self._fence = connection, parallel, fence
        self._waiting: deque[tuple[str, Write, Callable[[bytes], None], Callable[[Exception], None]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        """Carry it out soon."""
        self._waiting.append((cause(), write, done, failed))
        if len(self._tasks) < self._parallel:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop what waits, and what is under way: the next controller finds out from the API what was done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting:
            why, write, done, failed = self._waiting.popleft()
            with because_of(why):
                await self._carry_out(write, done, failed)

    async def _carry_out(
        self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]
    ) -> None:
        told = fields(verb=write.verb, path=write.path, object=write.about)
        try:
            answer = await self._connection.call(
                write.verb, write.path, write.body, content_type=write.content_type, fence=self._fence
            )
        except StaleLeaseError as error:
            log.error("%s", error, extra=told)
        except (ApiError, ClusterUnavailableError) as error:
            log.info("%s %s was refused: %s", write.verb, write.about, error, extra=told)
            failed(error)
        else:
            log.log(write.level, "%s %s", write.verb, write.path, extra=told)
            done(answer)
