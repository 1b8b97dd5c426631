"""Which browsers may see the pages of an embedded cluster.

`gpuquota ui` asks for a link over the daemon's socket, which only its user reaches. The link opens once, within two
minutes, and gives the browser a cookie that is valid until the daemon ends.

Browsers send a cookie to every port of a host, so another user of the machine who serves a page on another port would
receive it. The cookie is therefore bound to a path that begins with a random word (kept in the cluster's directory, so
that an open page finds the next daemon), and a page that does not have the word in its address never receives it.
Rejected: the cookie alone, and a name of its own below `localhost`, which not every browser resolves.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kfp_gpuquota.server.transport.connections import BODY_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp.typedefs import Handler, Middleware

COOKIE: Final = "gpuquota"
LINK_VALID_S: Final = 120.0
MAX_LINKS: Final = 100
MAX_SESSIONS: Final = 100
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_READS: Final = frozenset({"GET", "HEAD"})


class Access:
    """The links that were not opened yet, and the browsers that opened one. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._links: dict[str, float] = {}
        self._sessions: dict[str, None] = {}

    def new_link(self) -> str:
        """Return a token that `enter` takes once."""
        self._links = {name: end for name, end in self._links.items() if end > self._clock()}
        token = secrets.token_urlsafe(32)
        self._links[self._digest(token)] = self._clock() + LINK_VALID_S
        while len(self._links) > MAX_LINKS:
            del self._links[next(iter(self._links))]
        return token

    def enter(self, token: str) -> str | None:
        """Return a new cookie for an unused token, else None."""
        end = self._links.pop(self._digest(token), 0.0)
        if end <= self._clock():
            return None
        cookie = secrets.token_urlsafe(32)
        self._sessions[self._digest(cookie)] = None
        while len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return cookie

    def admits(self, cookie: str) -> bool:
        """Whether the cookie was given by `enter` of this server."""
        return bool(cookie) and self._digest(cookie) in self._sessions

    def form_token(self, cookie: str) -> str:
        """Return what each form of this browser has to contain."""
        return self._digest(f"form {cookie}")

    def accepts_form(self, cookie: str, token: str) -> bool:
        """Whether a form comes from a page that this browser was given."""
        return hmac.compare_digest(self.form_token(cookie).encode(), token.encode(errors="replace"))

    def _digest(self, text: str) -> str:
        return hmac.new(self._key, text.encode(errors="replace"), hashlib.sha256).hexdigest()


def guarded(
    access: Access, base: str, hosts: frozenset[str], refuse: Callable[[web.Request, int, str], web.Response]
) -> Middleware:
    """Return a middleware that lets in requests for one of the `hosts`, from their own pages, with a cookie.

    `refuse(request, status, sentence)` makes the answer to all others. `/enter` and `/static/` need no cookie.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        return _refusal(request) or await _handled(request, handler)

    def _refusal(request: web.Request) -> web.Response | None:
        if request.headers.get("Host", "") not in hosts:
            return refuse(request, 421, "This server is not the one that the address names.")
        if not _own_origin(request):
            return refuse(request, 403, "The request comes from a page of another origin.")
        open_to_all = request.path == f"{base}/enter" or request.path.startswith(f"{base}/static/")
        if not open_to_all and not access.admits(request.cookies.get(COOKIE, "")):
            return refuse(request, 401, "This browser has not been let in since the cluster's daemon started.")
        return None

    async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in _READS:
            form = await _form(request)
            if not access.accepts_form(request.cookies.get(COOKIE, ""), str(form.get("token", ""))):
                return refuse(request, 403, "The form is not from a page that this browser was given.")
        return await handler(request)

    return guard


async def _form(request: web.Request) -> Mapping[str, object]:
    """Return the fields of a form. Raises HTTPRequestTimeout for one that does not arrive."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.post()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _own_origin(request: web.Request) -> bool:
    """Return whether the request is from a page of this server, or from a user who opened an address."""
    origin = request.headers.get("Origin")
    if origin is not None or request.method not in _READS:
        return origin == f"http://{request.headers.get('Host', '')}"
    site = request.headers.get("Sec-Fetch-Site", "none")
    return site in {"none", "same-origin"} or request.headers.get("Sec-Fetch-Mode") == "navigate"
