"""Which browsers may see the pages, and the checks that every request passes.

What follows is about the embedded cluster; on Kubernetes a proxy names the user (cluster/kubernetes/web).

`gpuquota ui` asks for a link over the daemon's socket, which only its user reaches. The link opens once, within two
minutes, and gives the browser a cookie that is valid for `SESSION_VALID_S`, also after a restart of the daemon: digests
of the cookies are stored, and their key. `gpuquota ui --log-out` makes all of them invalid.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.server.transport.connections import BODY_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp.typedefs import Handler, Middleware

    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.user_site import UserSite

AGAIN: Final = "Run gpuquota ui in a terminal to open the page."
COOKIE: Final = "gpuquota"
LINK_VALID_S: Final = 120.0
MAX_LINKS: Final = 100
MAX_SESSIONS: Final = 100
SESSION_VALID_S: Final = 14 * 86_400.0
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_READS: Final = frozenset({"GET", "HEAD"})


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused: the status, a sentence, and what its user can do."""

    status: int
    sentence: str
    step: str = ""


class Sessions(msgspec.Struct):
    """What is stored: the key of the digests, and until when each browser's cookie is valid, by its digest."""

    key: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))
    until: dict[str, float] = {}


class Access:
    """The links that were not opened yet, and the browsers that opened one. `clock` returns seconds since the epoch.

    `sessions` are those of an earlier server, and `save` stores them after each change.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        sessions: Sessions | None = None,
        save: Callable[[Sessions], object] = lambda _: None,
    ) -> None:
        self._clock, self._save = clock, save
        self._sessions = sessions or Sessions()
        self._links: dict[str, float] = {}

    @property
    def admits_some(self) -> bool:
        """Whether a browser has a cookie that is valid."""
        return any(end > self._clock() for end in self._sessions.until.values())

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
        cookie, until = secrets.token_urlsafe(32), self._sessions.until
        until[self._digest(cookie)] = self._clock() + SESSION_VALID_S
        for name in [name for name, end in until.items() if end <= self._clock()]:
            del until[name]
        while len(until) > MAX_SESSIONS:
            del until[next(iter(until))]
        self._save(self._sessions)
        return cookie

    def admits(self, cookie: str) -> bool:
        """Whether the cookie was given by `enter`, and is still valid."""
        return bool(cookie) and self._sessions.until.get(self._digest(cookie), 0.0) > self._clock()

    def cookie_of(self, request: web.Request) -> str:
        """Return the cookie of a request that is valid; "" if none is.

        There may be others of the name: servers on other ports of the host can set some, which shall lock nobody out.
        """
        pairs = (
            pair.strip().partition("=") for line in request.headers.getall("Cookie", ()) for pair in line.split(";")
        )
        return next((value for name, _, value in pairs if name == COOKIE and self.admits(value)), "")

    def log_out(self) -> None:
        """Make all cookies and links invalid."""
        self._sessions, self._links = Sessions(), {}
        self._save(self._sessions)

    def form_token(self, cookie: str) -> str:
        """Return what each form of this browser has to contain."""
        return self._digest(f"form {cookie}")

    def _digest(self, text: str) -> str:
        return hmac.new(self._sessions.key.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()


class Door(Protocol):
    """Who a request is from, and what they are shown."""

    async def refusal(self, request: web.Request) -> Refusal | None:
        """Return why the request's sender sees nothing; None for one who is let in."""

    def site_for(self, request: web.Request) -> UserSite:
        """Return what the sender, who was let in, is shown."""

    def form_token(self, request: web.Request) -> str:
        """Return what each form of the sender has to contain."""


@dataclass(frozen=True)
class SessionDoor:
    """Lets in the browsers that opened a link of `access`, from where `trusted` says so; all are shown the same."""

    access: Access
    shown: UserSite
    trusted: Callable[[web.Request], bool] = lambda _: True

    async def refusal(self, request: web.Request) -> Refusal | None:
        """Return that the browser has no valid cookie, or that another user's program sends the request."""
        if not self.trusted(request):
            return Refusal(403, "The request is from a program of another user of this machine.")
        if self.access.cookie_of(request):
            return None
        return Refusal(401, "This browser has not been let in, or was logged out.", AGAIN)

    def site_for(self, _request: web.Request) -> UserSite:
        """Return what all are shown."""
        return self.shown

    def form_token(self, request: web.Request) -> str:
        """Return the token of the browser's cookie."""
        return self.access.form_token(self.access.cookie_of(request))


def headers(*, framed: bool) -> dict[str, str]:
    """Return the headers of every answer; `framed`: a page of the same origin may show the pages in a frame."""
    ancestors, options = ("'self'", "SAMEORIGIN") if framed else ("'none'", "DENY")
    policy = f"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors {ancestors}; object-src 'none'"
    return {"Content-Security-Policy": policy, "X-Frame-Options": options, **_HEADERS}


def guarded(door: Door, site: SiteConfig, refuse: Callable[[web.Request, Refusal], web.Response]) -> Middleware:
    """Return a middleware that lets in requests for one of the site's origins, from their own pages, through `door`.

    `refuse` makes the answer to all others. `/enter` and `/static/` need no identity.
    """
    enter, static = f"{site.path}/enter", f"{site.path}/static/"

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        found = _misdirected(request, site.origins)
        if found is None and request.path != enter and not request.path.startswith(static):
            found = await door.refusal(request) or await _forged(request)
        return await handler(request) if found is None else refuse(request, found)

    async def _forged(request: web.Request) -> Refusal | None:
        if request.method in _READS:
            return None
        token = str((await _form(request)).get("token", ""))
        if hmac.compare_digest(door.form_token(request).encode(), token.encode(errors="replace")):
            return None
        return Refusal(403, "The form is not from a page that this browser was given.")

    return guard


async def _form(request: web.Request) -> Mapping[str, object]:
    """Return the fields of a form. Raises HTTPRequestTimeout for one that does not arrive."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.post()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _misdirected(request: web.Request, origins: frozenset[str]) -> Refusal | None:
    """Return what is wrong with the name that the request is for, or with the page that it comes from."""
    host = request.headers.get("Host", "")
    own = {origin for origin in origins if origin.partition("://")[2] == host}
    if not own:
        return Refusal(421, "This server is not the one that the address names.")
    if not _own_origin(request, own):
        return Refusal(403, "The request comes from a page of another origin.")
    return None


def _own_origin(request: web.Request, own: set[str]) -> bool:
    """Return whether the request is from a page of this server, or from a user who opened an address."""
    origin = request.headers.get("Origin")
    if origin is not None or request.method not in _READS:
        return origin in own
    site = request.headers.get("Sec-Fetch-Site", "none")
    return site in {"none", "same-origin"} or request.headers.get("Sec-Fetch-Mode") == "navigate"
