"""Who sends a request to one of the controller's own URLs, and whether they may: TokenReview, SubjectAccessReview."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

REVIEWED_WITHIN_S: Final = 10.0
_TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 (a path)
_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

log = logging.getLogger(__name__)


class User(msgspec.Struct, frozen=True):
    """The user of a token, as authenticated by the API server."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: User = User()
    audiences: tuple[str, ...] = ()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


async def refusal(
    connection: Connection, request: web.Request, path: str, *, role: str, audience: str = ""
) -> web.Response | None:
    """Return the refusal; None if the user of the request's bearer token may use the non-resource URL `path`.

    `audience` is whom the token has to be for, "": the API server. `role` is the ClusterRole that gives the right.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme != "Bearer" or not token:
        return refused(401, "a bearer token is missing")
    try:
        return await _reviewed(connection, token, path, request.method.lower(), role, audience)
    except (ApiError, ClusterUnavailableError, msgspec.DecodeError) as error:
        log.error("a request for %s could not be reviewed: %s", path, error)
        return refused(503, "the API server could not be asked whether the token's user may do this")


def refused(status: int, why: str) -> web.Response:
    """Return an answer of one sentence."""
    return web.Response(status=status, text=f"{why}\n")


async def _reviewed(
    connection: Connection, token: str, path: str, verb: str, role: str, audience: str
) -> web.Response | None:
    asked = {"token": token, **({"audiences": [audience]} if audience else {})}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": asked}
    answer = await connection.call("POST", _TOKEN_REVIEWS, body, retry_for_s=REVIEWED_WITHIN_S)
    status = msgspec.json.decode(answer, type=_TokenReview).status
    if not status.authenticated or (audience and audience not in status.audiences):
        return refused(401, "the API server does not know the token")
    user = status.user
    spec = {
        "user": user.username,
        "uid": user.uid,
        "groups": user.groups,
        "extra": user.extra,
        "nonResourceAttributes": {"path": path, "verb": verb},
    }
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = await connection.call("POST", _ACCESS_REVIEWS, body, retry_for_s=REVIEWED_WITHIN_S)
    if not msgspec.json.decode(answer, type=_AccessReview).status.allowed:
        return refused(403, f"{user.username} may not {verb} {path}; bind the ClusterRole {role}")
    log.info("%s asks for %s", user.username, path)
    return None
