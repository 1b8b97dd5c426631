"""Plans in a process of its own: the controller's event loop waits for no plan.

    controller: events ─► state            ┐
                  └─────► planner process  ┴─► plan ─► checked against the controller's state ─► carried out

Invariant: the process has applied the events that the controller's state had when it was forked and all that followed,
so both states are equal up to the last event that was sent. The lease, the webhook and the watches are served while it
plans; what has changed meanwhile can make decisions obsolete (scheduler/actions/revalidate.py).

The process is forked when the first plan is requested, and again after it has died or has not answered for HANG_S:
then it is killed, and the failure counts as a plan that failed. A fork has the whole state at once. Rejected: a program
of its own that is sent the state, which would have to be written down completely, and read for seconds on a cluster of
100,000 pods at each start; a thread, which competes with the event loop for the interpreter.

The price is memory: pages that either process changes are copied, so the two need up to the state's size more than one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import time
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.cluster.kubernetes.client.process.forked import computed
from kfp_gpuquota.cluster.kubernetes.planner.bounded import BoundedPlanner, Planned
from kfp_gpuquota.cluster.kubernetes.planner.child import LENGTH, Failed, Request, forked, packed
from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota import scheduler

HANG_S: Final = 60.0
ASIDE_S: Final = 30.0

log = logging.getLogger(__name__)


class PlannerError(RunError):
    """The planner's process has failed, has ended, or does not answer."""


class Planner(Protocol):
    """Makes plans of the controller's state."""

    @property
    def outdated(self) -> bool:
        """Return whether events followed those that the last plan is of."""

    def feed(self, event: scheduler.Event) -> None:
        """Record an event that was applied to the controller's state."""

    async def plan(self, now: float) -> Planned:
        """Return the plan at `now`. Raises PlannerError."""

    async def aside(self, compute: Callable[[], bytes]) -> bytes:
        """Return what `compute()` returns, computed where it delays no plan.

        Raises TimeoutError, OSError and ClusterUnavailableError.
        """

    async def close(self) -> None:
        """End it."""


class InlinePlanner:
    """Plans in the event loop itself: for tests, and where no process can be forked."""

    def __init__(self, state: scheduler.State) -> None:
        self._planner = BoundedPlanner(state, time.monotonic)
        self.outdated = False

    def feed(self, event: scheduler.Event) -> None:
        """Record that the state has changed."""
        self._planner.applied(event)

    async def plan(self, now: float) -> Planned:
        """Return the plan at `now`."""
        return self._planner.plan(now)

    async def aside(self, compute: Callable[[], bytes]) -> bytes:
        """Return what `compute()` returns."""
        return compute()

    async def close(self) -> None:
        """Do nothing."""


class PlannerProcess:
    """The planner's process. `state` is the controller's, from which it is forked."""

    def __init__(self, state: scheduler.State, hang_s: float = HANG_S) -> None:
        self._state, self._hang_s = state, hang_s
        self._events: list[scheduler.Event] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.pid = 0

    @property
    def outdated(self) -> bool:
        """Return whether events followed those that the last plan is of."""
        return bool(self._events)

    def feed(self, event: scheduler.Event) -> None:
        """Keep an event for the process; before it is forked, the state has it."""
        if self.pid:
            self._events.append(event)

    async def plan(self, now: float) -> Planned:
        """Return the plan at `now`. Raises PlannerError."""
        if not self.pid:
            await self._start()
        assert self._reader is not None
        assert self._writer is not None
        events, self._events = self._events, []
        try:
            async with asyncio.timeout(self._hang_s):
                rules = self._state.ledger
                request = Request(
                    events,
                    now,
                    rules.reclaim_shelter_s,
                    rules.moves,
                    rules.reserve_after_s,
                    rules.half_life_s,
                    rules.defragmentation,
                )
                self._writer.write(packed(request))
                length = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
                answer: Planned | Failed = pickle.loads(await self._reader.readexactly(length))  # noqa: S301 - ours
        except TimeoutError:
            await self.close()
            raise PlannerError(f"the planner's process has not answered for {self._hang_s:g} s: it is killed") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            pid = self.pid
            await self.close()
            raise PlannerError(f"the planner's process {pid} has ended: {error or type(error).__name__}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if isinstance(answer, Failed):
            raise PlannerError(f"the plan failed:\n{answer.traceback}")
        return answer

    async def aside(self, compute: Callable[[], bytes]) -> bytes:
        """Return what `compute()` returns in a process of its own, which has the controller's state."""
        return await computed(compute, ASIDE_S)

    async def close(self) -> None:
        """Kill the process; the next plan starts another one."""
        pid, writer = self.pid, self._writer
        self.pid, self._reader, self._writer = 0, None, None
        self._events.clear()
        if writer is not None:
            writer.close()
        if pid:
            os.kill(pid, signal.SIGKILL)
            await asyncio.shield(asyncio.to_thread(os.waitpid, pid, 0))

    async def _start(self) -> None:
        own, other = socket.socketpair()
        try:
            self.pid = forked(self._state, other, own)
        except OSError as error:
            own.close()
            raise PlannerError(f"no process can be started: {error}") from error
        finally:
            other.close()
        self._events.clear()
        own.setblocking(False)  # noqa: FBT003 - the standard library's parameter
        self._reader, self._writer = await asyncio.open_connection(sock=own)
        log.info("the planner's process is %d", self.pid)
