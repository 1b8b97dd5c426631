"""The embedded cluster's web page: a port on 127.0.0.1 that is opened when `gpuquota ui` asks for it.

Port and path stay the same over restarts of the daemon where that is possible, so that an open page finds the next one.
The daemon itself does not open the port again: until somebody asks, nothing listens.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.api.wire import PageLink
from kfp_gpuquota.cluster.local.home import write_private
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.audit import audited
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits
from kfp_gpuquota.web.setting import Setting

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.server.audit import AuditLog
    from kfp_gpuquota.web.access import Access
    from kfp_gpuquota.web.source import Source

ADDRESS: Final = "127.0.0.1"
SHUTDOWN_TIMEOUT_S: Final = 0.5
BACKLOG: Final = 128

log = logging.getLogger(__name__)


class _Location(msgspec.Struct):
    """Where the page was served last; `word` begins its path."""

    port: int = 0
    word: str = ""


class PageServer:
    """Serves the page from the first `open` on."""

    def __init__(self, home: Home, source: Source, audit: AuditLog) -> None:
        self._home, self._source, self._audit = home, source, audit
        self._access: Access | None = None
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def open(self) -> PageLink:
        """Serve the page if it is not served yet, and return a link that opens once. Raises RunError."""
        try:
            from kfp_gpuquota.web.access import LINK_VALID_S, Access  # noqa: PLC0415 (jinja2: only with a page)
        except ImportError as error:
            raise RunError(f"the web page needs {error.name}; run: pip install 'kfp-gpuquota[cluster]'") from error
        if self._access is None:
            access = Access()
            await self._serve(access)
            self._access = access
        return PageLink(url=f"{self._url}/enter?token={self._access.new_link()}", valid_s=LINK_VALID_S)

    async def close(self) -> None:
        """Close the port, and the streams of all pages."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, access: Access) -> None:
        from kfp_gpuquota.web.access import COOKIE, SessionDoor  # noqa: PLC0415
        from kfp_gpuquota.web.app import build_pages, entering  # noqa: PLC0415
        from kfp_gpuquota.web.visit import Visit  # noqa: PLC0415

        def caller(request: web.Request) -> tuple[int, int]:
            return 0, os.geteuid() if access.admits(request.cookies.get(COOKIE, "")) else -1

        location = self._location()
        listener = _listen(location.port)
        port = listener.getsockname()[1]
        word = location.word or secrets.token_urlsafe(16)
        write_private(self._home.page_file, msgspec.json.encode(_Location(port, word)).decode())
        setting = Setting(f"/{word}", frozenset({f"http://{ADDRESS}:{port}", f"http://localhost:{port}"}))
        application = build_pages(
            SessionDoor(access, Visit(self._source, setting)),
            setting,
            enter=entering(access, setting.base),
            outer=[audited(self._audit, caller)],
        )
        self._runner = LimitedRunner(
            application, Limits(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S, access_log=None
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self._url = f"http://{ADDRESS}:{port}/{word}"
        log.info("serving the web page on %s port %d", ADDRESS, port)

    def _location(self) -> _Location:
        try:
            return msgspec.json.decode(self._home.page_file.read_bytes(), type=_Location)
        except (OSError, msgspec.DecodeError):
            return _Location()


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the port, or on any where that one is taken. Raises RunError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((ADDRESS, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.bind((ADDRESS, 0))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RunError(f"no port of {ADDRESS} can be opened for the web page: {error.strerror}") from error
    return listener
