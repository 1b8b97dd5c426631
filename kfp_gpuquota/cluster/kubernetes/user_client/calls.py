"""Blocking calls to an API server with the user's own credentials, for the command line and a step's launcher.

Connection errors, 429 and 5xx are retried with exponential backoff and the server's Retry-After. While the server is
starting, so is 403: an API server denies all requests until it has loaded its RBAC roles; one that does so for longer
counts as unavailable. After 401 the credentials are read again, once.

An object of this project's kinds is refused if it has a field that the cluster's kind lacks: an older kind would drop
it, and the job would run on any GPUs.
"""

from __future__ import annotations

import json
import re
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.objects import paths
from kfp_gpuquota.cluster.kubernetes.user_client.connection import url
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ClusterUnavailableError,
    ConflictError,
    GpuQuotaError,
    NotFoundError,
    RunError,
    UnauthorizedError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection, Response

Json = dict[str, Any]
T = TypeVar("T")

RETRY_FOR_S: Final = 30.0
CALL_TIMEOUT_S: Final = 15.0
JSON: Final = "application/json"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_STARTING_S: Final = 30.0
_UNKNOWN: Final = re.compile(r'unknown field "([^"]+)"')
_RETRYABLE: Final = frozenset({429, 500, 502, 503, 504})
_KINDS: Final = {404: NotFoundError, 409: ConflictError, 403: UnauthorizedError}


class Calls:
    """Calls to one API server; after `retry_for_s` without a response they raise ClusterUnavailableError.

    A refused call raises NotFoundError, AlreadyExistsError, ConflictError, UnauthorizedError, or UsageError for an
    invalid object.
    """

    def __init__(self, connection: Connection, *, retry_for_s: float = RETRY_FOR_S) -> None:
        self.connection = connection
        self._retry_for_s = retry_for_s
        self._starting_until = 0.0

    def get(self, path: str, **query: object) -> Json:
        """Return an object or a list."""
        return self.read(path, Json, **query)

    def read(self, path: str, kind: type[T], **query: object) -> T:
        """Return an object or a list, decoded as `kind`: several times as fast as `get` for a list of many objects."""
        return _decoded(self._answer("GET", url(path, query)), kind)

    def create(self, path: str, body: Json, *, dry_run: bool = False) -> Json:
        """Create an object, or with `dry_run` check it and return it as it would be stored.

        A retried creation may find its own first attempt: AlreadyExistsError.
        """
        return _decoded(self._answer("POST", _writing(path, dry_run=dry_run), body), Json)

    def patch(self, path: str, body: Json | list[Json], *, dry_run: bool = False) -> Json:
        """Patch an object, or with `dry_run` check that: by JSON patch operations (a list), or by a merge patch."""
        content_type = JSON_PATCH if isinstance(body, list) else MERGE_PATCH
        return _decoded(self._answer("PATCH", _writing(path, dry_run=dry_run), body, content_type), Json)

    def service_account_token(self, namespace: str, account: str, valid_s: int, audiences: Sequence[str] = ()) -> str:
        """Return a token of a service account, for the API server itself unless audiences are named."""
        path = join("/api/v1/namespaces", namespace, "serviceaccounts", account, "token")
        spec: Json = {"expirationSeconds": valid_s} | ({"audiences": [*audiences]} if audiences else {})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        token: str = self.create(path, body)["status"]["token"]
        return token

    def delete(self, path: str, **options: object) -> None:
        """Delete an object and its dependents; `options` are fields of Kubernetes' DeleteOptions."""
        self._answer("DELETE", path, {"propagationPolicy": "Background", **options})

    def open(self, path: str, timeout_s: float, **query: object) -> Response:
        """Open a stream: a watch, or a followed log. The caller closes it; nothing is retried."""
        try:
            response = self.connection.send("GET", url(path, query), self.connection.headers(), timeout_s=timeout_s)
        except ClusterUnavailableError:
            self._note_unreachable()
            raise
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            starting = response.status == HTTPStatus.FORBIDDEN and self._is_starting()
            raise self._refusal(response.status, response.read(), starting=starting)
        return response

    def _answer(self, method: str, target: str, body: object = None, content_type: str = JSON) -> bytes:
        """Return the body of the response to a call, which is repeated as this module's docstring says."""
        encoded = None if body is None else json.dumps(body).encode()
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, limit_s=self._retry_for_s)
        renewed = False
        while True:
            after_s = 0.0
            try:
                status, raw, after_s = self._attempt(method, target, encoded, content_type)
            except ClusterUnavailableError:
                self._note_unreachable()
                if backoff.exhausted:
                    raise
            else:
                if status == HTTPStatus.UNAUTHORIZED and not renewed:
                    self.connection.renew()
                    renewed = True
                    continue
                starting = status == HTTPStatus.FORBIDDEN and self._is_starting()
                if backoff.exhausted or not (status in _RETRYABLE or starting):
                    if status >= HTTPStatus.MULTIPLE_CHOICES:
                        raise self._refusal(status, raw, starting=starting)
                    return raw
            time.sleep(backoff.next_s(after_s))

    def _attempt(self, method: str, target: str, body: bytes | None, content_type: str) -> tuple[int, bytes, float]:
        headers = [*self.connection.headers(), ("Content-Type", content_type)]
        with self.connection.send(method, target, headers, body, timeout_s=CALL_TIMEOUT_S) as response:
            return response.status, response.read(), response.retry_after_s

    def _note_unreachable(self) -> None:
        self._starting_until = time.monotonic() + _STARTING_S

    def _is_starting(self) -> bool:
        """Return whether the server was unreachable a moment ago, or is not ready: it refuses to say so, too."""
        if time.monotonic() < self._starting_until:
            return True
        try:
            status, _, _ = self._attempt("GET", "/readyz", None, JSON)
        except ClusterUnavailableError:
            status = HTTPStatus.SERVICE_UNAVAILABLE
        if status != HTTPStatus.OK:
            self._note_unreachable()  # it may be ready before the next attempt, and the refusal was none of its own
        return status != HTTPStatus.OK

    def _refusal(self, status: int, raw: bytes, *, starting: bool) -> GpuQuotaError:
        if starting:
            return ClusterUnavailableError(
                f"the API server {self.connection.server} is starting and still refuses all requests: "
                f"{_refusal(status, raw).message}; try again in a minute"
            )
        if status == HTTPStatus.UNAUTHORIZED:
            return UnauthorizedError(
                f"the API server {self.connection.server} does not accept the credentials {self.connection.origin}: "
                "they are missing, or have expired; log in again, and try: kubectl auth whoami"
            )
        return _refusal(status, raw)


def strictly(path: str) -> dict[str, str]:
    """Return the query by which the API server refuses unknown fields of this project's kinds."""
    return {"fieldValidation": "Strict"} if path.startswith(f"{paths.GROUP}/") else {}


def _writing(path: str, *, dry_run: bool) -> str:
    return url(path, {"dryRun": "All" if dry_run else "", **strictly(path)})


def unknown_fields(message: str) -> str:
    """Return why an object was refused that has fields which its kind lacks; "" if that was not the reason."""
    if not (fields := dict.fromkeys(_UNKNOWN.findall(message))):
        return ""
    return (
        f"the cluster's kind has no field {', '.join(fields)}: it is misspelled, or the kinds are older than this "
        "command; an admin updates them with: kubectl apply --server-side --force-conflicts -f charts/kfp-gpuquota/crds"
    )


class _Status(msgspec.Struct, frozen=True):
    """The Status object that the API server returns for a refused call."""

    message: str = ""
    reason: str = ""


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise RunError(f"the answer of the API server cannot be read ({error}); see: kubectl cluster-info") from error


def _refusal(status: int, raw: bytes) -> GpuQuotaError:
    try:
        body = msgspec.json.decode(raw, type=_Status)
    except msgspec.MsgspecError:  # of a kind that it does not serve it says so in plain text; so does a load balancer
        text = raw[:200].decode(errors="replace").strip()
        unknown = {HTTPStatus.NOT_FOUND: NotFoundError, **dict.fromkeys(_RETRYABLE, ClusterUnavailableError)}
        return unknown.get(status, RunError)(f"the API server responded with {status}: {text}")
    if body.reason == "AlreadyExists":
        return AlreadyExistsError(body.message)
    if kind := _KINDS.get(status):
        return kind(body.message)
    if status in _RETRYABLE:  # even after all retries
        return ClusterUnavailableError(f"the API server responds with {status}: {body.message}")
    return UsageError(unknown_fields(body.message) or body.message) if status in {400, 422} else RunError(body.message)
