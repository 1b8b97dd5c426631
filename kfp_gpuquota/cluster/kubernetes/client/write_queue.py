"""Carries out requests to the API server in parallel, a bounded number at a time, and reports the result of each.

Invariants:

- A request that is to be repeated waits in the queue, not in a slot: a tenant whose requests always fail (with two
  PodDisruptionBudgets on a pod the eviction API answers 500) costs one call for each attempt and holds up nobody.
- Requests go through lanes by what they do, each with slots of its own: releasing GPUs never waits behind statuses.
- Within a lane namespaces take turns, and no namespace takes the last `RESERVED` slots where it has others.
- `done` or `failed` is called exactly once for each request, unless this process may write no more. Where `done`
  raises, `failed` is called with its exception, so that what was assumed of the object is taken back.

Rejected: a global priority queue, since a burst of urgent requests of one tenant would starve all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.client.async_client import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PATIENCE_S,
    ApiError,
    is_passing,
)
from kfp_gpuquota.cluster.kubernetes.client.fence import NO_FENCE, StaleLeaseError
from kfp_gpuquota.cluster.kubernetes.client.logging_setup import because_of, cause, fields
from kfp_gpuquota.cluster.kubernetes.client.request import Lane
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.client.fence import Fence
    from kfp_gpuquota.cluster.kubernetes.client.request import Write

SLOTS: Final = {Lane.ADMIT: 24, Lane.RELEASE: 24, Lane.CREATE: 16, Lane.STATUS: 6, Lane.EVENT: 2, Lane.OTHER: 6}
RESERVED: Final = 2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """One write on its way. `deadline`: when the first attempt's patience ends, in the loop's time; 0 before it."""

    write: Write
    done: Callable[[bytes], None]
    failed: Callable[[Exception], None]
    cause: str
    pause_s: float = FIRST_PAUSE_S
    deadline: float = 0.0


@dataclass(slots=True)
class _Queue:
    """One lane: requests by namespace, in turn; `running` counts calls under way by namespace."""

    slots: int
    waiting: dict[str, deque[_Request]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    def put(self, request: _Request) -> None:
        self.waiting.setdefault(request.write.namespace, deque()).append(request)

    def take(self) -> _Request | None:
        """The next request that may run; its namespace goes to the end of the line."""
        free = self.slots - sum(self.running.values())
        if free <= 0:
            return None
        for namespace, requests in self.waiting.items():
            here = self.running.get(namespace, 0)
            if here and free <= min(RESERVED, self.slots - 1):
                continue
            request = requests.popleft()
            del self.waiting[namespace]
            if requests:
                self.waiting[namespace] = requests
            self.running[namespace] = here + 1
            return request
        return None

    def finished(self, namespace: str) -> None:
        """A call of the namespace has ended."""
        self.running[namespace] -= 1
        if not self.running[namespace]:
            del self.running[namespace]


class Writer:
    """Queues of requests. Tasks live while there is something to do, so an idle controller has none.

    Answers that a later attempt may change (5xx, 429 but for disruption budgets, no answer) are repeated after growing
    pauses for `patience_s`. A request that is refused is not repeated here, because the state that it was based on is
    what has to be looked at again. Once `fence` is closed nothing is sent, and neither `done` nor `failed` is called:
    the process that leads now decides anew.
    """

    def __init__(
        self,
        connection: Connection,
        slots: Mapping[Lane, int] = SLOTS,
        *,
        fence: Fence = NO_FENCE,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._connection, self._fence, self._patience_s = connection, fence, patience_s
        self._lanes = {lane: _Queue(count) for lane, count in slots.items()}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._closed = False

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        """Carry it out soon."""
        self._enqueue(_Request(write, done, failed, cause()))

    @property
    def depth(self) -> dict[Lane, int]:
        """Requests that wait for a slot, by lane."""
        return {lane: sum(map(len, queue.waiting.values())) for lane, queue in self._lanes.items()}

    async def close(self) -> None:
        """Drop all requests: the next controller reads from the API server what was done."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, request: _Request) -> None:
        queue = self._lanes[request.write.lane]
        queue.put(request)
        self._start(queue)

    def _start(self, queue: _Queue) -> None:
        """Start calls while there are slots."""
        while not self._closed and (request := queue.take()) is not None:
            task = asyncio.create_task(self._work(queue, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, queue: _Queue, request: _Request) -> None:
        """Carry out this request, then others of its lane: a task serves many, since making one costs as much."""
        following: _Request | None = request
        while following is not None:
            namespace = following.write.namespace
            try:
                with because_of(following.cause):
                    await self._carry_out(following)
            finally:
                queue.finished(namespace)
            following = None if self._closed else queue.take()
        self._start(queue)

    async def _carry_out(self, request: _Request) -> None:
        write, loop = request.write, asyncio.get_running_loop()
        extra = fields(verb=write.verb, path=write.path, object=write.about)
        request.deadline = request.deadline or loop.time() + self._patience_s
        try:
            answer = await self._connection.call(
                write.verb,
                write.path,
                write.body,
                content_type=write.content_type,
                patience_s=0.0,
                fence=self._fence,
            )
        except StaleLeaseError as error:
            log.error("%s", error, extra=extra)
        except (ApiError, ClusterUnavailableError) as error:
            if is_passing(error) and loop.time() < request.deadline:
                self._repeat(request, error)
                return
            log.info("%s %s was refused: %s", write.verb, write.about, error, extra=extra)
            _report(request.failed, error, write)
        else:
            log.log(write.level, "%s %s", write.verb, write.path, extra=extra)
            self._succeeded(request, answer)

    def _succeeded(self, request: _Request, answer: bytes) -> None:
        try:
            request.done(answer)
        except Exception as error:
            log.exception("the answer to %s %s could not be used", request.write.verb, request.write.about)
            _report(request.failed, error, request.write)

    def _repeat(self, request: _Request, error: Exception) -> None:
        """Queue it once more after a pause; the slot is free meanwhile."""
        after = error.retry_after_s if isinstance(error, ApiError) else None
        pause = max(after or 0.0, self._connection.jittered(request.pause_s))
        request.pause_s = min(2 * request.pause_s, LONGEST_PAUSE_S)
        timer: asyncio.TimerHandle

        def again() -> None:
            self._timers.discard(timer)
            self._enqueue(request)

        timer = asyncio.get_running_loop().call_later(pause, again)
        self._timers.add(timer)


def _report(failed: Callable[[Exception], None], error: Exception, write: Write) -> None:
    """Call it; its own failure must not end the task that serves other requests."""
    try:
        failed(error)
    except Exception:
        log.exception("the failure of %s %s could not be handled", write.verb, write.about)
