"""The membership service: elastic jobs' machines over HTTP, to be mounted in the server's application.

    service = MembershipService(notices)
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)

One connection per worker carries everything: `POST /v1/membership/{job}/workers/{worker}?incarnation=ID`, whose
request body is a stream of the worker's events and whose response is a stream of its orders, both JSON lines. The
first event names the worker; the end of the body ends the session, and is answered by the end of the response. A blank
line is sent to the worker every 2 s, so that both sides notice the other's end. `.../store/{generation}/{operation}`
is the rendezvous store.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.errors import ConflictError, GpuQuotaError, InvalidFieldError, NotFoundError, UnauthorizedError
from kfp_gpuquota.membership import (
    AnnounceCommit,
    AnnounceFinish,
    AnnounceRelease,
    Command,
    Event,
    Kill,
    Limits,
    Membership,
    Order,
    Reserve,
    SendOrder,
    TargetChanged,
    Ticked,
    WorkerDisconnected,
    WorkerEvent,
    WorkerGone,
    WorkerJoined,
    WorkerReconnected,
)
from kfp_gpuquota.server.membership.job_bounds import JobBounds
from kfp_gpuquota.server.membership.listening import ListeningClock
from kfp_gpuquota.server.membership.messages import MAX_INCARNATION_LENGTH, check, check_worker, decode
from kfp_gpuquota.server.membership.rendezvous_store import Store, Total
from kfp_gpuquota.server.membership.store_requests import answer_store_request
from kfp_gpuquota.server.membership.training_reports import ProgressReported, StepsTimed, TrainingReports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from kfp_gpuquota.api import Progress

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TICK_S: Final = 0.25
LONGEST_TICK_S: Final = 1.0
"""A later tick means that this process was delayed: messages of its workers wait to be read."""
HELLO_S: Final = 30.0
"""For a first message, and for a request's body; a worker sends both at once."""
TICKS_A_PING: Final = 8
"""2 s: a worker treats the service as unavailable after 10 s of silence."""

_log = logging.getLogger(__name__)


class NotStoredYetError(Exception):
    """A number is being stored: `generation_reserved` is called again after `MembershipService.resume`."""


class Notices(Protocol):
    """The notifications from the service to the cluster, called in the event loop's thread; they must return soon."""

    def generation_reserved(self, job_uid: str, generation: int) -> None:
        """Store the number durably before returning: it is about to be sent, and must never be used again.

        Raises NotStoredYetError where that takes time: orders wait until `MembershipService.resume` is called.
        """

    def generation_committed(self, job_uid: str, commit: AnnounceCommit) -> None:
        """A generation is in force; repeated with `complete` and the final figures once all members switched."""

    def worker_released(self, job_uid: str, worker: str, step: int) -> None:
        """The worker left by agreement after `step`, or is let go: its process ends with 0, which is not a success.

        It may have requested this itself, because another program asked its process to stop.
        """

    def kill_requested(self, job_uid: str, worker: str, why: str) -> None:
        """End the worker's process with SIGKILL, then report `worker_exited`."""

    def progress_reported(self, job_uid: str, worker: str, progress: Progress) -> None:
        """The worker's own report."""

    def training_finished(self, job_uid: str, worker: str, step: int) -> None:
        """The worker applied the last step."""


class _OrderSlot:
    """The order that stands for one connected worker, and whether it was sent."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.fresh = False  # it was not sent yet
        self.changed = asyncio.Event()
        self.closed = False

    def put(self, order: Order) -> None:
        self.order, self.fresh = order, True
        self.changed.set()

    def ping(self) -> None:
        """Send a blank line soon. One clock for all: a timer for each connection costs more than the line."""
        self.changed.set()

    def close(self) -> None:
        self.closed = True
        self.changed.set()


class _Job:
    """One job: its machine, its store, its connected workers."""

    def __init__(self, token: str, machine: Membership, worker_prefix: str, total: Total) -> None:
        self.token = token.encode()
        self.machine = machine
        self.worker_prefix = worker_prefix
        self.store = Store(total)
        self.bounds = JobBounds()
        self.slots: dict[str, _OrderSlot] = {}
        self.incarnations: dict[str, str] = {}
        self.reports = TrainingReports()
        self.outbox: deque[Command] = deque()  # decided, and not carried out yet
        self.draining = self.stuck = False


class MembershipService:
    """All elastic jobs of one cluster. Not thread-safe: call it in its event loop's thread."""

    def __init__(
        self, notices: Notices, *, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notices = notices
        self._limits = limits or Limits()
        self._clock = ListeningClock(clock, LONGEST_TICK_S)
        self._jobs: dict[str, _Job] = {}
        self._stored = Total()

    # For the cluster

    def open(
        self,
        job_uid: str,
        token: str,
        *,
        min_workers: int = 1,
        first_generation: int = 1,
        running: Sequence[str] = (),
        limits: Limits | None = None,
        trained: Sequence[str] = (),
        worker_prefix: str = "",
        attempt: int = 0,  # noqa: ARG002 - of use to services that keep jobs over their caller's end
        stored: int = 0,  # noqa: ARG002
    ) -> None:
        """Add a job. After a restart: `first_generation` is one more than the highest number reserved,
        `running` are all workers whose processes may still run, `trained` those of them that were in the generation in
        force. `limits`: this job's own. `worker_prefix`: what the ids of its workers begin with, and no other job's do.
        A job that is open already starts again.
        """
        self.close(job_uid)
        machine = Membership(
            min_workers=min_workers,
            first_generation=first_generation,
            limits=limits or self._limits,
            now=self._clock(),
            trained=trained,
        )
        self._jobs[job_uid] = _Job(token, machine, worker_prefix, self._stored)
        if running:
            self._apply(job_uid, TargetChanged(tuple(running)))

    def close(self, job_uid: str) -> None:
        """Remove a job and close the connections of its workers."""
        if job := self._jobs.pop(job_uid, None):
            for slot in job.slots.values():
                slot.close()
            job.store.close()

    def set_target(self, job_uid: str, workers: Sequence[str], reasons: dict[str, str] | None = None) -> None:
        """The workers the job should have; those that are missing are let go at the end of a step.

        Empty: the whole job is evicted: it saves a checkpoint and all of it leaves. A worker that was released is
        not to be wanted again. NotFoundError for a job that is not open.
        """
        self._apply(job_uid, TargetChanged(tuple(workers), reasons or {}))

    def worker_exited(self, job_uid: str, worker: str, *, finished: bool = False) -> None:
        """The worker's process has exited. `finished`: with 0, and without a request to leave."""
        if job_uid in self._jobs:
            self._apply(job_uid, WorkerGone(worker, finished))

    @property
    def connected(self) -> int:
        """Return the number of connected workers."""
        return sum(len(job.slots) for job in self._jobs.values())

    def resume(self, job_uid: str, stored: int = 0) -> None:  # noqa: ARG002 - of use to services in other processes
        """Send what waited for a number to be stored."""
        if job := self._jobs.get(job_uid):
            self._drain(job_uid, job)

    def is_open(self, job_uid: str) -> bool:
        """Return whether the job is open."""
        return job_uid in self._jobs

    def machine(self, job_uid: str) -> Membership:
        """The job's machine, to be read only. NotFoundError for a job that is not open."""
        return self._job(job_uid).machine

    # For the application

    def routes(self) -> list[web.RouteDef]:
        """All under /v1/membership; each request needs the job's own bearer token."""
        base = "/v1/membership/{job}"
        return [
            web.post(f"{base}/workers/{{worker}}", _answering_errors(self._connect)),
            web.post(f"{base}/store/{{generation}}/{{operation}}", _answering_errors(self._store)),
        ]

    async def lifespan(self, _app: web.Application) -> AsyncIterator[None]:
        """For `app.cleanup_ctx`: the machines' clock, and the end of all connections."""
        task = asyncio.create_task(self._tick())
        yield
        task.cancel()
        for job_uid in list(self._jobs):
            self.close(job_uid)

    async def _tick(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            self._clock.listened()
            for number, (job_uid, job) in enumerate(list(self._jobs.items())):
                self._apply(job_uid, Ticked())
                if (tick + number) % TICKS_A_PING == 0:
                    for slot in job.slots.values():
                        slot.ping()

    def _job(self, job_uid: str) -> _Job:
        if job_uid not in self._jobs:
            raise NotFoundError(f"no elastic job {job_uid!r} is open")
        return self._jobs[job_uid]

    def _apply(self, job_uid: str, event: Event) -> None:
        job = self._job(job_uid)
        if isinstance(event, TargetChanged):
            # The most so far: of a job that is evicted all workers still leave by agreement.
            job.bounds.workers = max(job.bounds.workers, len(event.workers))
        job.outbox += job.machine.apply(event, self._clock())
        self._drain(job_uid, job)

    def _drain(self, job_uid: str, job: _Job) -> None:
        """Carry out what was decided, in order. Where the cluster fails to take a notice (a full disk), that one and
        all after it are tried again with the next event: no order may be sent before its number is stored.
        """
        if job.draining:
            return  # called from within a notice
        job.draining = True
        try:
            while job.outbox and self._jobs.get(job_uid) is job:
                self._carry_out(job_uid, job, job.outbox[0])
                job.outbox.popleft()
                job.stuck = False
        except NotStoredYetError as wait:
            _log.debug("not stored yet: %s", wait)
        except Exception:  # noqa: BLE001  (the cluster's own; one job must not take the others' clock with it)
            if not job.stuck:
                _log.exception("job %s: %r could not be carried out; it is tried again", job_uid, job.outbox[0])
            job.stuck = True
        finally:
            job.draining = False

    def _carry_out(self, job_uid: str, job: _Job, command: Command) -> None:
        match command:
            case SendOrder(worker, order):
                if slot := job.slots.get(worker):
                    slot.put(order)
            case Reserve(generation):
                self._notices.generation_reserved(job_uid, generation)
            case Kill(worker, why):
                self._notices.kill_requested(job_uid, worker, why)
            case AnnounceRelease(worker, step):
                self._notices.worker_released(job_uid, worker, step)
            case AnnounceFinish(worker, step):
                self._notices.training_finished(job_uid, worker, step)
            case AnnounceCommit():
                if command.complete:
                    job.store.drop_before(command.generation)
                self._notices.generation_committed(job_uid, command)

    # One worker's connection

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        job_uid, worker = request.match_info["job"], request.match_info["worker"]
        job = self._authorized(request)
        incarnation = request.query.get("incarnation", "")
        check_worker(worker, job.worker_prefix, job.machine)
        _check_incarnation(job, worker, incarnation)
        hello = decode(await _within(HELLO_S, request.content.readline()))
        if not isinstance(hello, WorkerJoined | WorkerReconnected):
            raise InvalidFieldError("event", type(hello).__name__, "the first one names the worker that connects")
        async with job.bounds.turn:
            check(hello, worker, job.worker_prefix, job.machine)
            _check_incarnation(job, worker, incarnation)
            job.incarnations[worker] = incarnation  # only now: a refused worker leaves nothing behind
            slot = self._open_slot(job_uid, job, worker, hello)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await response.prepare(request)
            await self._converse(request, response, job_uid, slot)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the same as the end of the session: the state machine interprets it
        finally:
            self._close_slot(job_uid, worker, slot)
        return response

    def _authorized(self, request: web.Request) -> _Job:
        job = self._jobs.get(request.match_info["job"])
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if job is None or not hmac.compare_digest(given, job.token):
            raise UnauthorizedError("the token does not open this job's membership; read it from ELASTIC_TOKEN_FILE")
        job.bounds.admit(request)
        return job

    def _open_slot(self, job_uid: str, job: _Job, worker: str, hello: WorkerEvent) -> _OrderSlot:
        if old := job.slots.pop(worker, None):
            old.close()
        self._apply(job_uid, hello)
        slot = job.slots[worker] = _OrderSlot()
        job.outbox.append(SendOrder(worker, job.machine.order_for(worker)))
        self._drain(job_uid, job)
        return slot

    def _close_slot(self, job_uid: str, worker: str, slot: _OrderSlot) -> None:
        job = self._jobs.get(job_uid)
        if job and job.slots.get(worker) is slot:
            del job.slots[worker]
            self._apply(job_uid, WorkerDisconnected(worker))

    async def _converse(
        self, request: web.Request, response: web.StreamResponse, job_uid: str, slot: _OrderSlot
    ) -> None:
        sending = asyncio.create_task(_send_orders(response, slot))
        listening = asyncio.create_task(self._listen(request, job_uid))
        try:
            await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, listening):
                task.cancel()
            await asyncio.gather(sending, listening, return_exceptions=True)
        with suppress(ConnectionError):
            await response.write_eof()

    async def _listen(self, request: web.Request, job_uid: str) -> None:
        worker = request.match_info["worker"]
        while line := await request.content.readline():
            if (job := self._jobs.get(job_uid)) is None:
                return
            async with job.bounds.turn:
                if self._jobs.get(job_uid) is not job:
                    return
                self._take(job_uid, job, worker, line)

    def _take(self, job_uid: str, job: _Job, worker: str, line: bytes) -> None:
        """Process one message of a worker."""
        event = decode(line)
        check(event, worker, job.worker_prefix, job.machine)
        if isinstance(event, StepsTimed):
            job.reports.timed(event)
        elif isinstance(event, ProgressReported):
            base = job.machine.base
            progress = job.reports.progress(event, time.time(), base.members if base else ())
            self._notices.progress_reported(job_uid, worker, progress)
        else:
            self._apply(job_uid, event)

    # The store

    async def _store(self, request: web.Request) -> web.StreamResponse:
        job = self._authorized(request)
        return await answer_store_request(request, job.store, job.bounds, job.machine.highest)


def _check_incarnation(job: _Job, worker: str, incarnation: str) -> None:
    if len(incarnation) > MAX_INCARNATION_LENGTH:
        raise InvalidFieldError("incarnation", len(incarnation), f"it has {MAX_INCARNATION_LENGTH} characters at most")
    if job.incarnations.get(worker, incarnation) != incarnation:
        raise ConflictError(f"another process runs as worker {worker!r}; a worker's id is used once")


async def _within(seconds: float, reading: Awaitable[bytes]) -> bytes:
    """Return what is read. Raises web.HTTPRequestTimeout where it does not arrive in time."""
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


async def _send_orders(response: web.StreamResponse, slot: _OrderSlot) -> None:
    while not slot.closed:
        await slot.changed.wait()
        slot.changed.clear()
        line = msgspec.json.encode(slot.order) if slot.fresh else b""
        slot.fresh = False
        await response.write(line + b"\n")


def _answering_errors(handler: Handler) -> Handler:
    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (msgspec.DecodeError, ValueError) as error:
            return _error(400, "usage", str(error))
        except GpuQuotaError as error:
            return _error(error.http_status, error.code, error.message)
        except web.HTTPRequestEntityTooLarge as error:
            return _error(error.status, "usage", f"the body is too large: {error.text}")

    return answered


def _error(status: int, code: str, message: str) -> web.Response:
    """Return a refusal. Its connection ends with it, unless the request was one of a job's own."""
    answer = web.json_response({"error": {"code": code, "message": message}}, status=status)
    if status == UnauthorizedError.http_status:
        answer.force_close()
    return answer
