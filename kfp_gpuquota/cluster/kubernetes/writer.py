"""Carries out writes in parallel, a bounded number at a time, and says what became of each."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.connection import ApiError
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.connection import Connection
    from kfp_gpuquota.cluster.kubernetes.writes import Write

PARALLEL: Final = 24

log = logging.getLogger(__name__)


class Writer:
    """A queue of writes and as many tasks as may run at a time.

    Tasks live while there is something to do, so an idle controller has none. `done(answer)` or `failed(error)` is
    called in the event loop; a write that is refused is not tried again here, because the state it was based on is
    what has to be looked at again.
    """

    def __init__(self, connection: Connection, parallel: int = PARALLEL) -> None:
        self._connection, self._parallel = connection, parallel
        self._waiting: asyncio.Queue[tuple[Write, Callable[[bytes], None], Callable[[Exception], None]]] = (
            asyncio.Queue()
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        """Carry it out soon."""
        self._waiting.put_nowait((write, done, failed))
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
        while not self._waiting.empty():
            write, done, failed = self._waiting.get_nowait()
            try:
                answer = await self._connection.call(
                    write.verb, write.path, write.body, content_type=write.content_type
                )
            except (ApiError, ClusterUnavailableError) as error:
                log.info("%s %s was refused: %s", write.verb, write.about, error)
                failed(error)
            else:
                done(answer)
