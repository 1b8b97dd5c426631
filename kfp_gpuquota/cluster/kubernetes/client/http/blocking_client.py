"""Blocking client of an API server for single-threaded programs: the command line and a pipeline step's launcher.

It uses the standard library only, as `server.client` does: importing aiohttp would add 0.25 s to each command. It
retries connection errors, 429 and 5xx with exponential backoff and the server's Retry-After. After the server was
unreachable, it retries 403 for a while as well: an API server denies all requests until it has loaded its RBAC roles.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from kfp_gpuquota.backoff import Backoff
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
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.client.http.credentials import Credentials

Json = dict[str, Any]

CALL_TIMEOUT_S: Final = 15.0
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_STARTING_S: Final = 30.0
_RETRYABLE: Final = frozenset({429, 500, 502, 503, 504})
_KINDS: Final = {404: NotFoundError, 409: ConflictError, 401: UnauthorizedError, 403: UnauthorizedError}


class Calls:
    """Blocking calls to one API server; after `retry_for_s` without a response they raise ClusterUnavailableError.

    A refused call raises NotFoundError, AlreadyExistsError, ConflictError, UnauthorizedError, or UsageError for an
    invalid object.
    """

    def __init__(self, credentials: Credentials, *, retry_for_s: float) -> None:
        self.credentials = credentials
        self._retry_for_s = retry_for_s
        self._starting_until = 0.0
        self._connection: http.client.HTTPConnection | None = None
        self._owner_pid = os.getpid()

    def get(self, path: str, **query: object) -> Json:
        """Return an object or a list."""
        return self._json("GET", path, query)

    def create(self, path: str, body: Json) -> Json:
        """Create an object. A retried creation may find its own first attempt: AlreadyExistsError."""
        return self._json("POST", path, {}, body)

    def patch(self, path: str, body: Json | list[Json]) -> Json:
        """Patch an object: by JSON patch operations (a list), or by a merge patch."""
        return self._json("PATCH", path, {}, body, JSON_PATCH if isinstance(body, list) else MERGE_PATCH)

    def delete(self, path: str, **options: object) -> None:
        """Delete an object and its dependents; `options` are fields of Kubernetes' DeleteOptions."""
        self._json("DELETE", path, {}, {"propagationPolicy": "Background", **options})

    def open(self, path: str, timeout_s: float, **query: object) -> http.client.HTTPResponse:
        """Open a stream (a watch or a followed log) on a connection of its own. The caller closes it."""
        connection = self._new_connection(timeout_s)
        try:
            connection.request("GET", _url(path, query), headers=self._headers())
            response = connection.getresponse()
        except (OSError, http.client.HTTPException):
            self._note_unreachable()
            raise
        if response.status >= 300:
            raise _refusal(response.status, response.read())
        return response

    def _json(
        self, method: str, path: str, query: Mapping[str, object], body: object = None, kind: str = "application/json"
    ) -> Json:
        encoded = None if body is None else json.dumps(body)
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, limit_s=self._retry_for_s)
        while True:
            after_s = 0.0
            try:
                status, raw, after_s = self._attempt(method, _url(path, query), encoded, kind)
            except (OSError, http.client.HTTPException) as failure:
                self._close()
                self._note_unreachable()
                if backoff.exhausted:
                    raise _unavailable(self.credentials.server, failure) from failure
            else:
                if status == 401:
                    self.credentials.invalidate_token()
                if not self._is_retryable(status) or backoff.exhausted:
                    return _answer(status, raw)
            time.sleep(backoff.next_s(after_s))

    def _attempt(self, method: str, url: str, body: str | None, kind: str) -> tuple[int, bytes, float]:
        if self._connection is None or self._owner_pid != os.getpid():
            self._connection, self._owner_pid = self._new_connection(CALL_TIMEOUT_S), os.getpid()
        self._connection.request(method, url, body=body, headers={**self._headers(), "Content-Type": kind})
        with self._connection.getresponse() as response:  # closed here, for the reason given in `server.client`
            after = response.headers.get("Retry-After", "")
            return response.status, response.read(), float(after) if after.isdecimal() else 0.0

    def _new_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.credentials.server)
        if self.credentials.tls is None:
            return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        return http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=timeout_s, context=self.credentials.tls
        )

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "gpuquota", **dict(self.credentials.headers)}
        if token := self.credentials.token():
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _note_unreachable(self) -> None:
        self._starting_until = time.monotonic() + _STARTING_S

    def _is_retryable(self, status: int) -> bool:
        """Return whether a later attempt may have another result."""
        return status in _RETRYABLE or (status == http.client.FORBIDDEN and time.monotonic() < self._starting_until)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _url(path: str, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _answer(status: int, raw: bytes) -> Json:
    if status >= 300:
        raise _refusal(status, raw)
    answer: Json = json.loads(raw) if raw else {}
    return answer


def _refusal(status: int, raw: bytes) -> GpuQuotaError:
    try:
        body = json.loads(raw)
    except ValueError:  # of a kind that it does not serve it says so in plain text
        unknown = NotFoundError if status == http.client.NOT_FOUND else RunError
        return unknown(f"the API server responded with {status}: {raw[:200].decode(errors='replace').strip()}")
    message, reason = body.get("message", ""), body.get("reason", "")
    if reason == "AlreadyExists":
        return AlreadyExistsError(message)
    if kind := _KINDS.get(status):
        return kind(message)
    if status in _RETRYABLE:  # even after all retries
        return ClusterUnavailableError(f"the API server responds with {status}: {message}")
    return UsageError(message) if status in {400, 422} else RunError(message)


def _unavailable(server: str, failure: Exception) -> ClusterUnavailableError:
    return ClusterUnavailableError(f"the API server {server} does not respond ({failure}); see: kubectl cluster-info")
