"""Renews the Lease in a thread of its own, with a connection of its own.

What the controller's event loop does (a list of 100,000 pods, a plan with ten thousand starts) delays no renewal, and a
busy machine delays it only as long as it delays every thread. Rejected: a process of its own, for which the fence of
each write would have to be read from shared memory.

Invariant: the thread renews only while the event loop has run within ALIVE_S. A leader whose loop hangs does nothing,
so it must not keep the Lease.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.client.leader.leader_election import LeaderElection

ALIVE_S: Final = 60.0
BEAT_S: Final = 1.0

log = logging.getLogger(__name__)


class Renewal:
    """The thread. `connect()` returns a connection, which is used in the thread only."""

    def __init__(
        self,
        election: LeaderElection,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        alive_s: float = ALIVE_S,
    ) -> None:
        self._election, self._connect, self._alive_s = election, connect, alive_s
        self._beat_at = election.clock()
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False

    async def hold(self) -> None:
        """Return when this process must not lead any more. Cancelling it ends the thread."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def run() -> None:
            try:
                asyncio.run(self._hold())
            except asyncio.CancelledError:
                pass  # this process ends
            except BaseException:
                log.exception("the renewal of the lease failed")
            finally:
                loop.call_soon_threadsafe(end)

        thread = threading.Thread(target=run, name="lease", daemon=True)
        thread.start()
        try:
            while not ended.done():
                self._beat_at = self._election.clock()
                await asyncio.wait([ended], timeout=BEAT_S)
        finally:
            self._cancel()
            await asyncio.shield(asyncio.to_thread(thread.join))

    def is_alive(self) -> bool:
        """Return whether the event loop has run recently."""
        return self._election.clock() - self._beat_at < self._alive_s

    async def _hold(self) -> None:
        self._thread_loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._cancelled:  # before this thread had begun
            return
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(self._connect())
            await self._election.hold(connection, self.is_alive)

    def _cancel(self) -> None:
        self._cancelled = True
        loop, task = self._thread_loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)
