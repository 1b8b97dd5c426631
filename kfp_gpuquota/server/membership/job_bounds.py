"""What one job may use of the membership service: connections, memory of requests and answers, and time in the loop.

All jobs share one process, and a job's token is in the hands of its user. So whatever a token can make the service hold
is counted against that job and refused beyond its bounds, which grow with the number of workers that the cluster has
given it, never with what they send. A job's work is done one piece at a time, and after `SLICE_S` of it the others get
their turn.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.server.transport.connections import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

SLICE_S: Final = 0.002
CONNECTIONS: Final = 32
CONNECTIONS_A_WORKER: Final = 16
"""One for its orders; each of its threads that uses a generation's store keeps one, and so do the last generations'."""
LARGE_BODIES: Final = 4
"""Bodies above `SMALL_BODY_BYTES` that are read at a time; others wait, and so does their sender."""
SMALL_BODY_BYTES: Final = 8 << 10
HELD_BYTES: Final = 24 << 20
HELD_BYTES_A_WORKER: Final = 256 << 10
"""Memory of waiting requests and of answers that are being sent: 1,000 workers that each wait for 1,000 keys."""


class Turn:
    """`async with turn:` does a piece of a job's work. Pieces of one job follow each other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._started = self._spent_s = 0.0

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        self._started = time.perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._spent_s += time.perf_counter() - self._started
        try:
            if self._spent_s >= SLICE_S:
                self._spent_s = 0.0
                await asyncio.sleep(0)
        finally:
            self._lock.release()


class JobBounds:
    """One job's use. `workers`: the number that the cluster has given it, kept up to date by the service."""

    def __init__(self) -> None:
        self.workers = 0
        self.turn = Turn()
        self.large_bodies = asyncio.Semaphore(LARGE_BODIES)
        self._connections: dict[Connection, None] = {}  # in the order in which they were opened
        self._held = 0

    def admit(self, request: web.Request) -> None:
        """Count the connection of an authorized request, at the cost of an idle one if there are too many.

        Raises ClusterUnavailableError if all of them have requests.
        """
        connection = request.protocol
        if not isinstance(connection, Connection):
            return  # a server that limits no connections
        if connection not in self._connections:
            most = CONNECTIONS + CONNECTIONS_A_WORKER * self.workers
            if len(self._connections) >= most and not self._end_idle():
                raise ClusterUnavailableError(f"the job has {most} connections already")
        connection.prove(self._connections)

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count memory while it is held. Raises ClusterUnavailableError where that is too much for the job."""
        most = HELD_BYTES + HELD_BYTES_A_WORKER * self.workers
        if self._held + size > most:
            raise ClusterUnavailableError(
                f"the job's waiting requests and answers hold {self._held} of {most} bytes; {size} more do not fit"
            )
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    def _end_idle(self) -> bool:
        oldest = next((one for one in self._connections if one.idle), None)
        if oldest is not None:
            del self._connections[oldest]
            oldest.end()
        return oldest is not None
