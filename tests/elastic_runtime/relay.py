"""A TCP relay between each worker and the coordinator: a network that a test can make slow, stop and cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self, TypeVar

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

T = TypeVar("T")

CHUNK = 1 << 16
RESET = struct.pack("ii", 1, 0)  # struct linger: what was not sent is dropped, and the peer gets a reset


class Lane:
    """One worker's way to the coordinator, with all of its connections. Used in the relay's loop only."""

    def __init__(self, coordinator_port: Callable[[], int], host: str) -> None:
        self.delay_s = 0.0
        self.torn = False
        self._coordinator_port, self._host = coordinator_port, host
        self._passing = asyncio.Event()
        self._passing.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._held = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until either side ends it."""
        self._ends.add(writer)
        try:
            there, onward = await asyncio.open_connection(self._host, self._coordinator_port())
        except OSError:
            self._reset(writer)
            return
        self._ends.add(onward)
        ways = [asyncio.create_task(self._carry(reader, onward)), asyncio.create_task(self._carry(there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, onward):
                self._ends.discard(end)
                end.close()

    def hold(self, seconds: float) -> None:
        """Nothing passes for so long; it is late then, not lost. Connections can be made meanwhile."""
        self._held += 1
        self._passing.clear()
        asyncio.get_running_loop().call_later(seconds, self._end_one_hold)

    def cut(self) -> None:
        """Both sides of each connection get a reset, and what was under way is lost."""
        for end in self._ends:
            self._reset(end)

    def heal(self) -> None:
        """What was held comes now."""
        self._passing.set()

    def _end_one_hold(self) -> None:
        self._held -= 1
        if not self._held:
            self.heal()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                await asyncio.sleep(self.delay_s)
                await self._passing.wait()
                if self.torn:
                    self.torn = False
                    writer.write(data[: len(data) // 2])
                    return
                writer.write(data)
                await writer.drain()

    @staticmethod
    def _reset(end: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.transport.abort()


class Relay:
    """`with Relay(port) as relay:` where `port()` returns the coordinator's current port. One lane per worker.

    The coordinator and the lanes are at `host`, an address of this machine.
    """

    def __init__(self, coordinator_port: Callable[[], int], host: str = "127.0.0.1") -> None:
        self._coordinator_port, self._host = coordinator_port, host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._lanes: dict[str, Lane] = {}
        self._servers: list[asyncio.Server] = []

    def open_lane(self, worker: str) -> int:
        """The port on which the coordinator is to be found by this worker."""
        return self._run(self._open(worker))

    def slow(self, workers: Iterable[str], delay_s: float) -> None:
        """Delay every message between these workers and the coordinator from now on, one after another."""

        def delay(lane: Lane) -> None:
            lane.delay_s = delay_s

        self._do(workers, delay)

    def hold(self, workers: Iterable[str], seconds: float) -> None:
        """Silence: no connection ends, and nothing passes for so long."""
        self._do(workers, lambda lane: lane.hold(seconds))

    def cut(self, workers: Iterable[str]) -> None:
        """Reset all of their connections, at once."""
        self._do(workers, Lane.cut)

    def tear(self, workers: Iterable[str]) -> None:
        """Cut the next message of each of them or of the coordinator in half, then close in an orderly way."""

        def tear(lane: Lane) -> None:
            lane.torn = True

        self._do(workers, tear)

    def heal(self) -> None:
        """Release all held connections."""
        self._do(self._lanes, Lane.heal)

    def _do(self, workers: Iterable[str], action: Callable[[Lane], None]) -> None:
        async def do() -> None:
            for worker in workers:
                action(self._lanes[worker])

        self._run(do())

    def _run(self, coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def _open(self, worker: str) -> int:
        lane = self._lanes[worker] = Lane(self._coordinator_port, self._host)
        server = await asyncio.start_server(lane.serve, self._host, 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for lane in self._lanes.values():
            lane.cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
