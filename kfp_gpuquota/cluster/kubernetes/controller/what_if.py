"""POST /what-if: what a job would change if it were submitted. The web page asks, for a user that it has reviewed.

Served over TLS on a port of its own, to tokens that are for this controller only (`AUDIENCE`) and whose user may `post`
the non-resource URL /what-if: the web page's account. The page names the namespaces whose jobs its user may list. Of
other jobs the answer has numbers, and no names: these do not leave this process.

Plans are made in a forked child, one at a time. Whoever asks while `MAX_WAITING` others wait is asked to come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.api.wire import Supposition
from kfp_gpuquota.cluster import whatif
from kfp_gpuquota.cluster.kubernetes.client.http.sockets import listen
from kfp_gpuquota.cluster.kubernetes.client.process.forked import computed
from kfp_gpuquota.cluster.kubernetes.controller.token_review import refusal, refused
from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUDIENCE, MAX_BODY_BYTES, PATH, Question
from kfp_gpuquota.errors import ClusterUnavailableError, UsageError
from kfp_gpuquota.server.transport.accepting import LimitedSite
from kfp_gpuquota.server.transport.connections import BODY_TIMEOUT_S, LimitedRunner, Limits

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.controller.debug_state import Planned
    from kfp_gpuquota.scheduler.forecast import RunTime

ROLE: Final = "gpuquota-what-if"
SERVICE: Final = "gpuquota-controller"
JOB: Final = "this-job"
LIMIT_S: Final = 10.0
MAX_WAITING: Final = 16
REVIEWS_AT_ONCE: Final = 8
SHUTDOWN_S: Final = 1.0

log = logging.getLogger(__name__)


class WhatIfs:
    """Answers questions from the state of the controller that leads; `leader()` is None while another process does."""

    def __init__(self, leader: Callable[[], Planned | None], limit_s: float = LIMIT_S) -> None:
        self._leader, self._limit_s = leader, limit_s
        self._free = asyncio.Semaphore()
        self._waiting = 0

    async def answer(self, question: Question) -> bytes:
        """Return the Outlook as JSON.

        Raises UsageError for a job that cannot be, and ClusterUnavailableError where this process does not lead or
        has too much to do.
        """
        if self._waiting >= MAX_WAITING:
            raise ClusterUnavailableError(f"{MAX_WAITING} others wait for an answer already; ask again in a moment")
        self._waiting += 1
        try:
            async with self._free:
                return await self._planned(question)
        finally:
            self._waiting -= 1

    async def _planned(self, question: Question) -> bytes:
        leader = self._leader()
        state = None if leader is None else leader.current_state()
        if leader is None or state is None:
            raise ClusterUnavailableError("this controller does not lead, or has not listed all objects yet")
        supposed = supposition(state, question)
        try:
            return await computed(lambda: outlook_of(state, supposed, question, leader.run_times), self._limit_s)
        except TimeoutError:
            raise ClusterUnavailableError(f"the plan took longer than {self._limit_s:g} s") from None


def supposition(state: scheduler.State, question: Question) -> Supposition:
    """Return what is asked as a job. Raises UsageError for one that cannot be, or of a team without a GpuQuota."""
    if question.namespace not in state.projects:
        raise UsageError(f"namespace {question.namespace!r} has no GpuQuota, so none of its jobs would start")
    spec = JobSpec(
        name=JOB,
        project=question.namespace,
        command=("true",),
        gpus=question.gpus,
        min_gpus=question.min_gpus,
        kind=question.kind,
    )
    return Supposition(submit=(spec,))


def outlook_of(
    state: scheduler.State,
    supposed: Supposition,
    question: Question,
    run_times: Callable[[float], Callable[[str], RunTime]],
) -> bytes:
    """Return the answer as JSON. Pure but for the clock."""
    visible, now = None if question.visible is None else {question.namespace, *question.visible}, time.time()
    return msgspec.json.encode(whatif.outlook_for_user(state, supposed, now, visible, run_times(now)))


@asynccontextmanager
async def serving(
    port: int, tls: ssl.SSLContext, connection: Connection, leader: Callable[[], Planned | None]
) -> AsyncIterator[int]:
    """Serve the web page; yield the port."""
    answers, reviews = WhatIfs(leader), asyncio.Semaphore(REVIEWS_AT_ONCE)

    async def serve(request: web.Request) -> web.Response:
        async with reviews:  # each request to the port makes this process ask the API server
            refused_ = await refusal(connection, request, PATH, role=ROLE, audience=AUDIENCE)
        return refused_ or await _answered(answers, request)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post(PATH, serve)
    runner = LimitedRunner(app, Limits(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await LimitedSite(runner, listen(port), tls).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _answered(answers: WhatIfs, request: web.Request) -> web.Response:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
        question = msgspec.json.decode(body, type=Question)
        content = await answers.answer(question)
    except TimeoutError:
        return refused(408, "the request's body did not arrive")
    except (msgspec.DecodeError, RecursionError) as error:
        return refused(400, f"the question cannot be read: {error}")
    except UsageError as error:
        return refused(error.http_status, error.message)
    except ClusterUnavailableError as error:
        log.warning("what-if: %s", error.message)
        return refused(error.http_status, error.message)
    return web.Response(body=content, content_type="application/json")
