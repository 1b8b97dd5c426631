"""The HTTP application: authentication, errors as JSON, and the table of routes over a backend."""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.api.wire import ErrorAnswer, ErrorBody, Health, PageAddress, PageLink
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError, NotFoundError, UnauthorizedError
from kfp_gpuquota.server import openapi
from kfp_gpuquota.server.audit import TARGET, Writing, audited, begin_change
from kfp_gpuquota.server.cluster_api import Backend
from kfp_gpuquota.server.routes import ROUTES, Request, Route, convert_body, decode_body, target_of
from kfp_gpuquota.server.transport.connections import BODY_TIMEOUT_S
from kfp_gpuquota.server.users_memory import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from kfp_gpuquota.server.audit import AuditLog

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES: Final = 1 << 20


class UserBackend(Backend, Protocol):
    """A backend with the rights of one user."""

    def require_admin(self, what: str) -> None:
        """Raise ForbiddenError for a user that is no administrator; `what` completes "only they may"."""


class Access(Protocol):
    """Identifies the user of a request, on a cluster that several share."""

    def cluster_for(self, request: web.Request, begin: Callable[[], None]) -> UserBackend:
        """Return the backend with the rights of the user who sent the request.

        It calls `begin` when it has found that the user may make the change, and before it makes it: what is refused
        takes nothing of the audit log's reserved space.
        """


log = logging.getLogger(__name__)


def build_app(
    backend: Backend,
    *,
    token: str,
    health: Health,
    extra_routes: Iterable[web.RouteDef] = (),
    on_shutdown: Callable[[], None],
    open_page: Callable[[PageAddress | None, bool], Awaitable[PageLink]] | None = None,
    audit: AuditLog | None = None,
    problem: Callable[[], str] = str,
    access: Access | None = None,
) -> web.Application:
    """The application for one cluster.

    `token` opens everything under /v1 but `extra_routes`, which check their own (membership, with a token per job).
    `on_shutdown` is called when a client asks the daemon to stop, `open_page` when one asks for a link to the web page
    (at another address, or after all browsers were logged out), `audit` has a line for each change that a client asks
    for. `problem` returns that of `health` at present. With
    `access` the backend of each request is its user's, and no token is asked for.
    """
    outer = [] if access is None else [bounded(_refused, MAX_BODY_BYTES)]
    outer += [] if audit is None else [audited(audit)]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*outer, _errors])
    checked = _checker(token) if access is None else _unchecked

    def backend_of(request: web.Request, writing: Writing = Writing.AFTER) -> Backend:
        if access is None:
            begin_change(request, writing)
            return backend
        return access.cluster_for(request, lambda: begin_change(request, writing))

    async def healthy(_request: web.Request) -> web.Response:
        return _json(msgspec.structs.replace(health, problem=problem()))

    async def described(_request: web.Request) -> web.Response:
        return _json(openapi.document(health.version))

    async def shutdown(request: web.Request) -> web.Response:
        if access is None:
            begin_change(request, Writing.RESERVED)
        else:
            access.cluster_for(request, lambda: begin_change(request, Writing.RESERVED)).require_admin("stop it")
        on_shutdown()
        return web.Response(status=204)

    async def page(request: web.Request) -> web.Response:
        if open_page is None:
            raise NotFoundError(
                "a cluster that several users share has no web page, since a browser does not show whose it is; use "
                "gpuquota list -w, top and explain"
            )
        begin_change(request)
        return _json(await open_page(_page_address(request.query), request.query.get("log_out") == "true"))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=backend_of(request).metrics(), content_type="text/plain")

    app.add_routes([web.get("/metrics", checked(metrics))])
    app.add_routes([web.route(route.method, route.path, checked(_serve(backend_of, route))) for route in ROUTES])
    app.add_routes([web.get("/v1/health", checked(healthy)), web.get("/v1/openapi.json", checked(described))])
    app.add_routes([web.post("/v1/shutdown", checked(shutdown))])
    app.add_routes([web.post("/v1/page", checked(page)), *extra_routes])
    return app


def _serve(backend_of: Callable[[web.Request, Writing], Backend], route: Route) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        body = None
        if route.body is not None:  # of others nothing is read
            decoded = decode_body(await _body(request))
            request[TARGET] = target_of(decoded)
            body = convert_body(route, decoded)
        version = request.headers.get("If-Match", "")
        backend = backend_of(request, Writing.AFTER if route.method == "GET" else route.audit)
        answer = await route.handler(backend, Request(request.match_info, request.query, body, version))
        if route.answer is None:
            return web.Response(status=204)
        return _json(answer, 201 if route.created else 200)

    return handle


def _page_address(query: Mapping[str, str]) -> PageAddress | None:
    """Return the address of the web page that a request names, if it names one."""
    if "origin" not in query and "base_path" not in query:
        return None
    return PageAddress(origin=query.get("origin", ""), base_path=query.get("base_path", ""))


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _unchecked(handler: Handler) -> Handler:
    return handler


def _checker(token: str) -> Callable[[Handler], Handler]:
    expected = f"Bearer {token}".encode()

    def checked(handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise UnauthorizedError("the token is missing or wrong; the cluster's own is in its file 'token'")
            return await handler(request)

        return handle

    return checked


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GpuQuotaError as error:
        return _refused(error)
    except web.HTTPRequestEntityTooLarge:
        return _error(413, "usage", f"the body is larger than {MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        return _error(error.status, "usage", f"{request.method} {request.path}: {error.reason}")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, "internal", "the server failed; daemon.log in the cluster's directory shows why")


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), status=status, content_type="application/json")


def _refused(error: GpuQuotaError) -> web.Response:
    field, rule = (error.field, error.rule) if isinstance(error, InvalidFieldError) else ("", "")
    return _error(error.http_status, error.code, error.message, field, rule)


def _error(status: int, code: str, message: str, field: str = "", rule: str = "") -> web.Response:
    return _json(ErrorAnswer(error=ErrorBody(code=code, message=message, field=field, rule=rule)), status)
