"""GET /debug/state: a dump of what the planner sees, for those whom the API server allows to get that URL.

Two conditions, both necessary. The request comes from this pod's own loopback interface, as one through `kubectl
port-forward` does: the port has no TLS, and a token must not cross the cluster's network in the clear. And its bearer
token is of a user who may `get` the non-resource URL /debug/state (TokenReview, then SubjectAccessReview).

Rejected: the API server's proxy to pods, which removes the user's token, so that the pod could not tell who asks.
"""

from __future__ import annotations

import ipaddress
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.controller.token_review import refusal, refused
from kfp_gpuquota.cluster.kubernetes.objects.labels import DEBUG_STATE as PATH
from kfp_gpuquota.scheduler.dump import take_dump
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.scheduler.forecast import RunTime

ROLE: Final = "gpuquota-debug-state"


class Planned(Protocol):
    """A controller that has a state to dump, and to suppose changes of."""

    def current_state(self) -> scheduler.State | None:
        """Return the state that the next plan is made of; None until all objects are listed."""

    def run_times(self, now: float) -> Callable[[str], RunTime]:
        """Return what is known of a job's run time, as a function of its uid."""


def route(connection: Connection, leader: Callable[[], Planned | None]) -> web.RouteDef:
    """Return the route; `leader()` is the controller of this process, None while it does not lead."""

    async def serve(request: web.Request) -> web.Response:
        if not _is_local(request.remote):
            return refused(403, "only through a port forward to this pod: gpuquota debug state")
        return await refusal(connection, request, PATH, role=ROLE) or _dump(leader())

    return web.get(PATH, serve)


def _dump(leader: Planned | None) -> web.Response:
    state = None if leader is None else leader.current_state()
    if state is None:
        return refused(503, "this replica does not lead, or has not listed all objects yet")
    content = msgspec.json.encode(take_dump(state, time.time(), __version__))
    return web.Response(body=content, content_type="application/json")


def _is_local(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
