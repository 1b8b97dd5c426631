"""Sends requests to the API server in parallel, a bounded number at a time, and reports the result of each.

Invariants:

- A request that is to be retried waits in the queue, not in a slot: a tenant whose requests always fail (the eviction
  API returns 500 for a pod with two PodDisruptionBudgets) costs one call for each attempt and delays no other tenant.
- Each lane has slots of its own: releasing GPUs never waits for status updates.
- Within a lane namespaces are served in turn, and no namespace takes the last `RESERVED` slots if it has others.
- `done` or `failed` is called exactly once for each request, unless this process may not write any more. If `done`
  raises, `failed` is called with its exception, so that assumptions about the object are undone.

Rejected: a global priority queue, since a burst of urgent requests of one tenant would starve all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import RETRY_FOR_S, ApiError, is_retryable
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import NO_FENCE, StaleLeaseError
from kfp_gpuquota.cluster.kubernetes.client.process.logging_setup import because_of, cause, fields
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane
from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.backoff import Backoff
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.client.leader.fence import Fence
    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write

SLOTS: Final = {
    Lane.ADMIT: 24,
    Lane.RELEASE: 24,
    Lane.CREATE: 16,
    Lane.STATUS: 6,
    Lane.EVENT: 2,
    Lane.LOOK_UP: 8,
    Lane.OTHER: 6,
}
RESERVED: Final = 2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """One queued write. `backoff` counts from the first attempt on."""

    write: Write
    done: Callable[[bytes], None]
    failed: Callable[[Exception], None]
    cause: str
    backoff: Backoff | None = None


@dataclass(slots=True)
class _Queue:
    """One lane: waiting requests by namespace, in turn; `running` counts calls in flight by namespace."""

    slots: int
    waiting: dict[str, deque[_Request]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    def put(self, request: _Request) -> None:
        self.waiting.setdefault(request.write.namespace, deque()).append(request)

    def take(self) -> _Request | None:
        """Return the next request that may run, if any; its namespace moves to the end of the queue."""
        free = self.slots - sum(self.running.values())
        if free <= 0:
            return None
        for namespace, requests in self.waiting.items():
            in_flight = self.running.get(namespace, 0)
            if in_flight and free <= min(RESERVED, self.slots - 1):
                continue
            request = requests.popleft()
            del self.waiting[namespace]
            if requests:
                self.waiting[namespace] = requests
            self.running[namespace] = in_flight + 1
            return request
        return None

    def finished(self, namespace: str) -> None:
        """Count a call of the namespace as ended."""
        self.running[namespace] -= 1
        if not self.running[namespace]:
            del self.running[namespace]


class Writer:
    """Queues of requests. Tasks exist while there are requests, so an idle controller has none.

    Transient failures (5xx, 429 except of disruption budgets, no response) are retried with exponential backoff for
    `retry_for_s`. A refused request is not retried here: the caller has to decide again from the current state. After
    `fence` has closed nothing is sent, and neither `done` nor `failed` is called: the new leader decides again.
    """

    def __init__(
        self,
        connection: Connection,
        slots: Mapping[Lane, int] = SLOTS,
        *,
        fence: Fence = NO_FENCE,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        self._connection, self._fence, self._retry_for_s = connection, fence, retry_for_s
        self._lanes = {lane: _Queue(count) for lane, count in slots.items()}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._closed = False

    def submit(self, write: Write, done: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        """Queue a request; `done` or `failed` is called with its result."""
        self._enqueue(_Request(write, done, failed, cause()))

    @property
    def depth(self) -> dict[Lane, int]:
        """Return the number of requests that wait for a slot, by lane."""
        return {lane: sum(map(len, queue.waiting.values())) for lane, queue in self._lanes.items()}

    async def close(self) -> None:
        """Drop all requests: the next leader reads the state from the API server."""
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
        """Start calls while there are free slots."""
        while not self._closed and (request := queue.take()) is not None:
            task = asyncio.create_task(self._work(queue, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, queue: _Queue, request: _Request) -> None:
        """Send this request, then others of its lane: a new task for each would cost as much as a call."""
        following: _Request | None = request
        while following is not None:
            namespace = following.write.namespace
            try:
                with because_of(following.cause):
                    await self._send(following)
            finally:
                queue.finished(namespace)
            following = None if self._closed else queue.take()
        self._start(queue)

    async def _send(self, request: _Request) -> None:
        write = request.write
        extra = fields(verb=write.verb, path=write.path, object=write.about)
        backoff = request.backoff = request.backoff or self._connection.backoff(self._retry_for_s)
        try:
            async with asyncio.timeout(write.limit_s):
                answer = await self._connection.call(
                    write.verb,
                    write.path,
                    write.body,
                    content_type=write.content_type,
                    retry_for_s=0.0,
                    fence=self._fence,
                )
        except TimeoutError:
            self._refused(request, backoff, ClusterUnavailableError(f"no answer in {write.limit_s:g} s"))
        except StaleLeaseError as error:
            log.error("%s", error, extra=extra)
        except (ApiError, ClusterUnavailableError) as error:
            self._refused(request, backoff, error)
        except InvalidFieldError as error:
            log.error("%s %s was not sent: %s", write.verb, write.about, error, extra=extra)
            _report(request.failed, error, write)
        else:
            log.log(write.level, "%s %s", write.verb, write.path, extra=extra)
            self._succeeded(request, answer)

    def _refused(self, request: _Request, backoff: Backoff, error: ApiError | ClusterUnavailableError) -> None:
        """Retry a request that may succeed later. A look-up is not: its caller decides when to ask again."""
        write = request.write
        if is_retryable(error) and not backoff.exhausted and write.lane is not Lane.LOOK_UP:
            self._retry(request, backoff, error)
            return
        extra = fields(verb=write.verb, path=write.path, object=write.about)
        log.info("%s %s was refused: %s", write.verb, write.about, error, extra=extra)
        _report(request.failed, error, write)

    def _succeeded(self, request: _Request, answer: bytes) -> None:
        try:
            request.done(answer)
        except Exception as error:
            log.exception("the response to %s %s could not be processed", request.write.verb, request.write.about)
            _report(request.failed, error, request.write)

    def _retry(self, request: _Request, backoff: Backoff, error: Exception) -> None:
        """Queue the request again after a pause; its slot is free in the meantime."""
        after = error.retry_after_s if isinstance(error, ApiError) else None
        timer: asyncio.TimerHandle

        def again() -> None:
            self._timers.discard(timer)
            self._enqueue(request)

        timer = asyncio.get_running_loop().call_later(backoff.next_s(after or 0.0), again)
        self._timers.add(timer)


def _report(failed: Callable[[Exception], None], error: Exception, write: Write) -> None:
    """Call `failed`; its own exception must not end the task that sends other requests."""
    try:
        failed(error)
    except Exception:
        log.exception("the failure of %s %s could not be processed", write.verb, write.about)
