"""The embedded cluster's web page: a port on 127.0.0.1 that is opened when `gpuquota ui` asks for it.

Port and path stay the same over restarts of the daemon where that is possible, so that an open page finds the next one.
The next daemon opens the port at its start if a browser's cookie is still valid; else nothing listens until somebody
asks.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import socket
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from kfp_gpuquota.api.wire import PageAddress, PageLink
from kfp_gpuquota.cluster.local.home import write_private
from kfp_gpuquota.cluster.local.page.peers import OwnUser
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError, RunError
from kfp_gpuquota.server.audit import audited
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits
from kfp_gpuquota.web.site_config import SiteConfig, base_of, origin_of

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.server.audit import AuditLog
    from kfp_gpuquota.web.access import Access
    from kfp_gpuquota.web.source import Source

ADDRESS: Final = "127.0.0.1"
SHUTDOWN_TIMEOUT_S: Final = 0.5
BACKLOG: Final = 128
_PATH: Final = re.compile(r"(/[A-Za-z0-9._~@-]*)*")

log = logging.getLogger(__name__)


class _Location(msgspec.Struct):
    """Where the page was served last; `word` begins its path, behind the path of a proxy."""

    port: int = 0
    word: str = ""
    address: PageAddress = PageAddress()


class PageServer:
    """Serves the page from the first `open` on."""

    def __init__(self, home: Home, source: Source, audit: AuditLog) -> None:
        self._home, self._source, self._audit = home, source, audit
        self._access: Access | None = None
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._opening = asyncio.Lock()

    async def open(self, address: PageAddress | None = None, log_out: bool = False) -> PageLink:  # noqa: FBT001, FBT002
        """Serve the page if it is not served yet, and return a link that opens once. Raises RunError.

        With an address it is served for that from now on; with `log_out` no browser is let in any more without a link.
        """
        try:
            from kfp_gpuquota.web.access import LINK_VALID_S  # noqa: PLC0415 (jinja2: only with a page)
            from kfp_gpuquota.web.app import build_pages  # noqa: F401, PLC0415
        except ImportError as error:
            raise RunError(f"the web page needs {error.name}; run: pip install 'kfp-gpuquota[cluster]'") from error
        if address is not None:
            _check(address)
        async with self._opening:
            access = await self._opened(address)
        if log_out:
            access.log_out()
        return PageLink(url=f"{self._url}/enter?token={access.new_link()}", valid_s=LINK_VALID_S)

    async def _opened(self, address: PageAddress | None) -> Access:
        """Serve the page at the address, or where it was served last; return who may see it."""
        location = self._location()
        if address is not None and address != location.address:
            location.address = address
            self._write(location)
            await self.close()
        if self._access is None:
            self._access = self._stored_access()
        if self._runner is None:
            await self._serve(self._access, location)
        return self._access

    async def resume(self) -> None:
        """Serve the page again if a browser's cookie is valid that an earlier daemon gave."""
        if not self._home.page_sessions_file.exists():
            return
        try:
            self._access = self._stored_access()
            if self._access.admits_some:
                await self._serve(self._access, self._location())
        except (ImportError, OSError, GpuQuotaError) as error:  # the cluster does not need its page
            log.warning("the web page is not served: %s", error)

    async def close(self) -> None:
        """Close the port, and the streams of all pages."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, access: Access, location: _Location) -> None:
        from kfp_gpuquota.web.access import SessionDoor  # noqa: PLC0415
        from kfp_gpuquota.web.app import MAX_LINE_BYTES, build_pages, entering  # noqa: PLC0415
        from kfp_gpuquota.web.user_site import UserSite  # noqa: PLC0415

        own = OwnUser()

        def caller(request: web.Request) -> tuple[int, int]:
            admitted = own.sent(request) and access.cookie_of(request) != ""
            return 0, os.geteuid() if admitted else -1

        listener = _listen(location.port)
        location.port = port = listener.getsockname()[1]
        location.word = location.word or secrets.token_urlsafe(16)
        self._write(location)
        local, base = f"http://{ADDRESS}:{port}", base_of(location.address.base_path.replace("{port}", str(port)))
        proxied = {origin_of(location.address.origin)} if location.address.origin else set()
        site = SiteConfig(f"{base}/{location.word}", frozenset({local, f"http://localhost:{port}", *proxied}))
        application = build_pages(
            SessionDoor(access, UserSite(self._source, site), own.sent),
            site,
            enter=entering(access, site.base, site.origins),
            outer=[audited(self._audit, caller)],
        )
        self._runner = LimitedRunner(
            application,
            Limits(),
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            access_log=None,
            max_line_size=MAX_LINE_BYTES,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self._url = f"{next(iter(proxied), local)}{site.base}"
        log.info("serving the web page on %s port %d", ADDRESS, port)

    def _stored_access(self) -> Access:
        from kfp_gpuquota.web.access import Access, Sessions  # noqa: PLC0415

        file = self._home.page_sessions_file
        try:
            sessions = msgspec.json.decode(file.read_bytes(), type=Sessions)
        except (OSError, msgspec.DecodeError):
            sessions = None
        return Access(sessions=sessions, save=lambda now: write_private(file, msgspec.json.encode(now).decode()))

    def _write(self, location: _Location) -> None:
        write_private(self._home.page_file, msgspec.json.encode(location).decode())

    def _location(self) -> _Location:
        try:
            return msgspec.json.decode(self._home.page_file.read_bytes(), type=_Location)
        except (OSError, msgspec.DecodeError):
            return _Location()


def _check(address: PageAddress) -> None:
    """Raise InvalidFieldError for an address that no proxy has."""
    if address.origin:
        origin_of(address.origin)
    if not _PATH.fullmatch(unquote(address.base_path).replace("{port}", "")):
        raise InvalidFieldError(
            "base_path",
            address.base_path,
            "it must begin with /, and have only letters, digits and ._~@-",
            hint="like /user/NAME/proxy/absolute/{port}",
        )


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
