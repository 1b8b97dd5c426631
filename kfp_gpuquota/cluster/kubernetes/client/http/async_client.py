"""Asynchronous HTTP client of one API server: every call has a time limit, and transient failures are retried.

Connection errors, 429 and 5xx are retried with exponential backoff, jitter and the server's Retry-After. 404, 409, 410
and 422 are left to the caller, because their meaning depends on the call. A retried write may find the result of its
own first attempt (409 for a creation, 404 for a deletion); callers treat these as success.
"""

from __future__ import annotations

import asyncio
import logging
import random
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self, TypeVar

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from kfp_gpuquota.api.request_paths import check_path
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import NO_FENCE, StaleLeaseError
from kfp_gpuquota.errors import ClusterUnavailableError, RunError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from kfp_gpuquota.cluster.kubernetes.client.http.credentials import Credentials
    from kfp_gpuquota.cluster.kubernetes.client.leader.fence import Fence

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0
STREAM_READ_TIMEOUT_S: Final = 150.0  # the server sends a bookmark each minute
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
RETRY_FOR_S: Final = 60.0
CONNECTIONS: Final = 88  # more than the writer's slots, because lists and leases need connections, too
USER_AGENT: Final = "gpuquota-controller"
MISFIT: Final = "failed to create typed patch object"  # what the API server says of an apply that no kind allows
NO_SUCH_PATH: Final = b"404 page not found"  # what the API server says of a group that it does not serve

JSON: Final = "application/json"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"

log = logging.getLogger(__name__)


class ApiError(RunError):
    """The API server refused a call: `status` is the HTTP status, `reason` Kubernetes' (NotFound, Conflict, ...)."""

    code = "api-server"

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message or f"{status} {reason}")
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s

    @property
    def not_found(self) -> bool:
        """Return whether the object of the call does not exist (404)."""
        return self.status == 404


class StatusBody(msgspec.Struct, frozen=True):
    """The Status object that the API server returns for a refused call."""

    reason: str = ""
    message: str = ""
    code: int = 0


class Connection:
    """Calls to one API server. `count(verb, HTTP status)` is called for every response."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        count: Callable[[str, int], None] = lambda _verb, _status: None,
        seed: int | None = None,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        self._credentials, self._count, self._retry_for_s = credentials, count, retry_for_s
        self._random = random.Random(seed)  # noqa: S311 - jitter, not a secret
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=self._credentials.tls or True, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        # A watch stays open for minutes, so it must not take one of the connections that calls share.
        watching = aiohttp.TCPConnector(limit=0, ssl=self._credentials.tls or True, force_close=True)
        self._watching = aiohttp.ClientSession(connector=watching)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()
        await self._watching.close()

    async def call(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        content_type: str = JSON,
        params: Mapping[str, str] | None = None,
        retry_for_s: float | None = None,
        fence: Fence = NO_FENCE,
    ) -> bytes:
        """Return the body of the response; transient failures are retried for at most `retry_for_s`.

        Raises ApiError if the server refuses the call, ClusterUnavailableError if it does not respond in time, and
        StaleLeaseError if `fence` is closed, which is checked before each attempt.
        """
        check_path(path)
        data = None if body is None else msgspec.json.encode(body)
        backoff = self.backoff(self._retry_for_s if retry_for_s is None else retry_for_s)
        while True:
            after_s = 0.0
            if not fence.valid():
                raise StaleLeaseError(f"{verb} {path} was not sent: the lease has expired, another process may lead")
            try:
                return await self._once(verb, path, data, content_type, params)
            except ApiError as error:
                if not is_retryable(error) or backoff.exhausted:
                    raise
                after_s = error.retry_after_s or 0.0
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if backoff.exhausted:
                    raise ClusterUnavailableError(
                        f"{self._credentials.server} did not answer {verb} {path}: {error or type(error).__name__}"
                    ) from error
            await asyncio.sleep(backoff.next_s(after_s))

    async def read(self, path: str, kind: type[T], params: Mapping[str, str] | None = None) -> T:
        """Return an object (or list), decoded as `kind`. Raises the same errors as `call`."""
        answer = await self.call("GET", path, params=params)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise ClusterUnavailableError(f"{path}: the answer cannot be read: {error}") from error

    async def stream(self, path: str, params: Mapping[str, str]) -> AsyncIterator[list[bytes]]:
        """Yield the lines of a watch in the batches in which they arrive, until the server closes it; not retried."""
        rest = b""
        async for chunk in self.chunks(path, params):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield lines

    async def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the body of a long answer (a watch, a log) as it arrives; not retried. Raises ApiError."""
        check_path(path)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=STREAM_READ_TIMEOUT_S)
        url = URL(self._credentials.server + path, encoded=True)
        async with self._watching.get(url, params=params, headers=self._headers(), timeout=timeout) as response:
            self._count("WATCH", response.status)
            if response.status != 200:
                raise self._refusal(response, await response.read())
            async for chunk in response.content.iter_any():
                yield chunk

    def backoff(self, limit_s: float) -> Backoff:
        """Return the pauses between the attempts of a call that may take so long."""
        return Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, limit_s=limit_s, jitter=self._random)

    async def _once(
        self, verb: str, path: str, data: bytes | None, content_type: str, params: Mapping[str, str] | None
    ) -> bytes:
        assert self._session is not None, "use it as a context manager"
        headers = self._headers()
        if data is not None:
            headers["Content-Type"] = content_type
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        url = URL(self._credentials.server + path, encoded=True)
        asked: AbstractAsyncContextManager[aiohttp.ClientResponse] = self._session.request(
            verb, url, data=data, params=params, headers=headers, timeout=timeout
        )
        async with asked as response:
            body = await response.read()
            self._count(verb, response.status)
            if response.status >= 400:
                raise self._refusal(response, body)
            return body

    def _headers(self) -> CIMultiDict[str]:
        # Compression would cost the API server and this process more than the cluster's network costs.
        headers = CIMultiDict(Accept=JSON)
        headers["Accept-Encoding"] = "identity"
        headers["User-Agent"] = USER_AGENT
        if token := self._credentials.token():
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes) -> ApiError:
        if response.status == 401:
            self._credentials.invalidate_token()
        code = response.status
        try:
            status = msgspec.json.decode(body, type=StatusBody)
        except msgspec.DecodeError:
            status = StatusBody(reason=response.reason or "", message=body[:300].decode(errors="replace"))
            if code == HTTPStatus.NOT_FOUND and body.strip() != NO_SUCH_PATH:
                code = HTTPStatus.BAD_GATEWAY  # of what is in front of the API server: it must not hide what exists
        later = response.headers.get("Retry-After", "")
        return ApiError(code, status.reason, status.message, float(later) if later.isdigit() else None)


def is_retryable(error: Exception) -> bool:
    """Return whether a later attempt may succeed: the server is overloaded or unreachable, or the token was rotated.

    The 429 of a disruption budget is not retryable: it may last for days. Nor is the 500 of an apply with a field that
    the kind lacks, which is a fault of the object.
    """
    if not isinstance(error, ApiError):
        return isinstance(error, ClusterUnavailableError)
    if error.status == 500 and MISFIT in error.message:
        return False
    return error.status == 401 or error.status >= 500 or (error.status == 429 and not is_disruption_budget(error))


def is_disruption_budget(error: ApiError) -> bool:
    """Return whether a PodDisruptionBudget refused an eviction, which is a 429 as well."""
    return error.status == 429 and "disruption budget" in error.message
