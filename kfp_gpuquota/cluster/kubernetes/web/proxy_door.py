"""Who a request is from: a proxy that has authenticated the user names the user in a header.

The header counts only on connections from the networks that were configured as the proxy's, since anybody else could
write it, too. The header with the user's groups is read only if one is configured: a proxy that does not know of it
would pass on what the browser has sent.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.web.rights import Identity
from kfp_gpuquota.cluster.kubernetes.web.user_source import UserSource
from kfp_gpuquota.web.access import Refusal
from kfp_gpuquota.web.user_site import UserSite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from kfp_gpuquota.cluster.kubernetes.web.options import Network, Options
    from kfp_gpuquota.web.site_config import SiteConfig

MAX_USERS: Final = 1000
KEPT_S: Final = 600.0
MAX_NAME: Final = 256
MAX_GROUPS: Final = 256
_SYSTEM: Final = "system:"


class ProxyDoor:
    """`web.access.Door` for users whom a proxy names in a header.

    `source_of(user)` makes what a user is shown; with what was rendered of it that is kept for the last `MAX_USERS` of
    them, and `KEPT_S` after a user's last request or message of an open stream: it may be some MB.
    """

    def __init__(
        self,
        site: SiteConfig,
        source_of: Callable[[Identity], UserSource],
        options: Options,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._site, self._source_of = site, source_of
        self._header, self._groups_header = options.user_header, options.groups_header
        self._proxies: Sequence[Network] = options.trusted_proxy
        self._key = secrets.token_bytes(32)
        self._sites: dict[Identity, tuple[float, UserSite]] = {}
        self._clock = clock

    async def refusal(self, request: web.Request) -> Refusal | None:
        """Return why the sender is not let in: no trusted proxy names a person, or nothing may be seen."""
        if not self._is_proxy(request.remote):
            return Refusal(401, "The connection is not from a proxy that may say who its user is.")
        user = self.user_of(request)
        if not user:
            return Refusal(401, f"The proxy has not named a user (header {self._header}).")
        source = self.site_for(request).source
        assert isinstance(source, UserSource)
        await source.refresh()
        if source.sees_nothing:
            return Refusal(403, f"{user} may not list the ElasticJobs of any namespace.")
        return None

    def site_for(self, request: web.Request) -> UserSite:
        """Return what the user is shown: the same as before, unless the user's groups have changed."""
        user = Identity(self.user_of(request), self._groups_of(request))
        now = self._clock()
        known = self._sites.pop(user, None)
        found = known[1] if known is not None else UserSite(self._source_of(user), self._site)
        self._sites[user] = now, found  # as the one that was used last
        for other, (used_at, _) in [*self._sites.items()]:
            if len(self._sites) <= MAX_USERS and used_at > now - KEPT_S:
                break
            del self._sites[other]
        return found

    def form_token(self, request: web.Request) -> str:
        """Return a token for the user's forms, which is valid as long as this process runs."""
        return hmac.new(self._key, self.user_of(request).encode(), hashlib.sha256).hexdigest()

    def user_of(self, request: web.Request) -> str:
        """Return the user's name; "" where no trusted proxy gives exactly one, or it cannot be a person's."""
        names = request.headers.getall(self._header, [])
        if not self._is_proxy(request.remote) or len(names) != 1:
            return ""
        return names[0] if _is_usable(names[0]) else ""

    def _groups_of(self, request: web.Request) -> tuple[str, ...]:
        """Return the user's groups: a list with commas between them, in one header or several."""
        if not self._groups_header or not self._is_proxy(request.remote):
            return ()
        named = ",".join(request.headers.getall(self._groups_header, [])).split(",")
        groups = {group for text in named if _is_usable(group := text.strip())}
        return tuple(sorted(groups)[:MAX_GROUPS])

    def _is_proxy(self, remote: str | None) -> bool:
        if not remote:
            return False
        address = ipaddress.ip_address(remote.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._proxies)


def _is_usable(name: str) -> bool:
    """Return whether it can be the name of a person or of their group; those of the cluster's own are refused."""
    return bool(name) and name.isprintable() and len(name) <= MAX_NAME and not name.startswith(_SYSTEM)
