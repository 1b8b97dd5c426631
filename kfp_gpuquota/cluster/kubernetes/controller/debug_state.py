"""GET /debug/state: a dump of what the planner sees, for those whom the API server allows to get that URL.

Two conditions, both necessary. The request comes from this pod's own loopback interface, as one through `kubectl
port-forward` does: the port has no TLS, and a token must not cross the cluster's network in the clear. And its bearer
token is of a user who may `get` the non-resource URL /debug/state (TokenReview, then SubjectAccessReview).

Rejected: the API server's proxy to pods, which removes the user's token, so that the pod could not tell who asks.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.objects.labels import DEBUG_STATE as PATH
from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.scheduler.dump import take_dump
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

REVIEWED_WITHIN_S: Final = 10.0
_TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 (a path)
_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

log = logging.getLogger(__name__)


class Planned(Protocol):
    """A controller that has a state to dump."""

    def current_state(self) -> scheduler.State | None:
        """Return the state that the next plan is made of; None until all objects are listed."""


class User(msgspec.Struct, frozen=True):
    """The user of a token, as authenticated by the API server."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: User = User()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


def route(connection: Connection, leader: Callable[[], Planned | None]) -> web.RouteDef:
    """Return the route; `leader()` is the controller of this process, None while it does not lead."""

    async def serve(request: web.Request) -> web.Response:
        if not _is_local(request.remote):
            return _refused(403, "only through a port forward to this pod: gpuquota debug state")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            return _refused(401, "a bearer token is missing")
        try:
            refusal = await _review(connection, token)
        except (ApiError, ClusterUnavailableError, msgspec.DecodeError) as error:
            log.error("a request for %s could not be reviewed: %s", PATH, error)
            return _refused(503, "the API server could not be asked whether the token's user may read this")
        return refusal or _dump(leader())

    return web.get(PATH, serve)


async def _review(connection: Connection, token: str) -> web.Response | None:
    """Return the refusal, None if the token's user may read the state."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    answer = await connection.call("POST", _TOKEN_REVIEWS, body, retry_for_s=REVIEWED_WITHIN_S)
    status = msgspec.json.decode(answer, type=_TokenReview).status
    if not status.authenticated:
        return _refused(401, "the API server does not know the token")
    user = status.user
    spec = {
        "user": user.username,
        "uid": user.uid,
        "groups": user.groups,
        "extra": user.extra,
        "nonResourceAttributes": {"path": PATH, "verb": "get"},
    }
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = await connection.call("POST", _ACCESS_REVIEWS, body, retry_for_s=REVIEWED_WITHIN_S)
    if not msgspec.json.decode(answer, type=_AccessReview).status.allowed:
        return _refused(403, f"{user.username} may not get {PATH}; bind the ClusterRole gpuquota-debug-state")
    log.info("%s reads %s", user.username, PATH)
    return None


def _dump(leader: Planned | None) -> web.Response:
    state = None if leader is None else leader.current_state()
    if state is None:
        return _refused(503, "this replica does not lead, or has not listed all objects yet")
    content = msgspec.json.encode(take_dump(state, time.time(), __version__))
    return web.Response(body=content, content_type="application/json")


def _is_local(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")
