"""Requests of tests, and of a cluster's setup, to its API server: dicts in, dicts out, by the official client's pool.

Unlike `user_client.calls.Calls`, it raises what the server answers as it is, and acts as any identity.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection, url
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kfp_gpuquota.cluster.kubernetes.user_client.connection import Response

Object = dict[str, Any]
Headers = list[tuple[str, str]]  # not a dict: Impersonate-Group may come several times

JSON: Final = "application/json"
APPLY: Final = "application/apply-patch+yaml"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
WATCH_S: Final = 30.0
PROBE_EVERY_S: Final = 0.02
BUSY_S: Final = 30.0
TIMEOUT_S: Final = 300.0  # the machine may be shared: what works is soon there


class ApiError(Exception):
    """The API server refused; `status` is its HTTP status, `reason` the stable word, `message` its sentence."""

    def __init__(self, status: int, body: Object) -> None:
        self.status, self.body = status, body
        self.reason, self.message = str(body.get("reason", "")), str(body.get("message", ""))
        super().__init__(f"{status} {self.reason}: {self.message}")


class Api:
    """Requests as one identity. Paths are the API's own: /api/v1/namespaces/default/pods/NAME."""

    def __init__(self, connection: Connection, headers: Headers | None = None) -> None:
        self._connection = connection
        self._headers = connection.headers() if headers is None else headers

    @classmethod
    def of_kubeconfig(cls, path: Path) -> Api:
        """The client that a kubeconfig describes."""
        return cls(Connection.open(str(path)))

    def as_user(self, user: str, *groups: str, extra: dict[str, str] | None = None) -> Api:
        """The same server as another user (impersonation, so RBAC and admission see that user, with `extra` fields)."""
        more = [(f"Impersonate-Extra-{quote(name, safe='')}", value) for name, value in (extra or {}).items()]
        return Api(self._connection, [*self._headers, *_impersonation(user, list(groups)), *more])

    def with_token(self, token: str) -> Api:
        """The same server with another bearer token, for example a service account's."""
        return Api(self._connection, [("Authorization", f"Bearer {token}")])

    def get(self, path: str, **query: str) -> Object:
        """One object or a list."""
        return self.request("GET", path, query=query)

    def text(self, path: str, **query: str) -> str:
        """What is no JSON, as a container's log."""
        status, answer = self._exchange("GET", url(path, query), None, self._headers)
        if status >= http.client.BAD_REQUEST:
            raise ApiError(status, _decoded(answer))
        return answer.decode(errors="replace")

    def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a collection."""
        return list(self.get(path, **query)["items"])

    def create(self, path: str, body: Object, **query: str) -> Object:
        """POST to a collection (or a subresource)."""
        return self.request("POST", path, body, query=query)

    def replace(self, path: str, body: Object) -> Object:
        """PUT the object and return the stored one."""
        return self.request("PUT", path, body)

    def patch(self, path: str, body: Any, kind: str = MERGE_PATCH, **query: str) -> Object:
        """PATCH of any kind."""
        return self.request("PATCH", path, body, content_type=kind, query=query)

    def apply(self, path: str, body: Object, manager: str = "test") -> Object:
        """Server-side apply, by force."""
        return self.patch(path, body, APPLY, fieldManager=manager, force="true")

    def delete(self, path: str, grace_s: int | None = None, **query: str) -> Object:
        """DELETE the object; grace_s=0 removes a pod's object immediately. A missing object is no error."""
        body = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            return self.request("DELETE", path, body, query=query)
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise
            return {}

    def exists(self, path: str) -> bool:
        """Whether GET answers."""
        try:
            self.get(path)
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise
            return False
        return True

    def healthy(self) -> bool:
        """Return whether the API server reports that it is ready."""
        try:
            return self.text("/readyz") == "ok"
        except (ApiError, OSError):
            return False

    def until_served(self, collection: str, timeout_s: float = TIMEOUT_S) -> None:
        """Return when a new kind can be listed: after its definition is established, storage still takes a moment."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get(collection, limit="1")
            except ApiError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PROBE_EVERY_S)
            else:
                return

    def until(self, path: str, condition: Callable[[Object], object], timeout_s: float = TIMEOUT_S) -> Object:
        """The object at `path` as soon as `condition` holds for it (followed by a watch, not polled).

        For an object that lacks a field which the condition reads, such as its status, it does not hold yet.
        """
        for kind, found in self.watch(*_one(path), timeout_s=timeout_s):
            with contextlib.suppress(KeyError):
                if kind != "DELETED" and condition(found):
                    return found
        state = self.get(path) if self.exists(path) else "it does not exist"
        raise TimeoutError(f"{path}: not within {timeout_s:g} s: {json.dumps(state)[:4000]}")

    def until_gone(self, path: str, timeout_s: float = TIMEOUT_S) -> None:
        """Return when nothing is at `path`."""
        collection, query = _one(path)
        version = self.get(collection, **query)
        if not version["items"]:
            return
        query["resourceVersion"] = version["metadata"]["resourceVersion"]
        if not any(kind == "DELETED" for kind, _ in self.watch(collection, query, timeout_s=timeout_s)):
            raise TimeoutError(f"{path}: still there after {timeout_s:g} s: {json.dumps(self.get(path))[:4000]}")

    def watch(
        self, collection: str, query: dict[str, str] | None = None, timeout_s: float = WATCH_S
    ) -> Iterator[tuple[str, Object]]:
        """(ADDED, MODIFIED or DELETED, object) until `timeout_s` is over; what exists comes first."""
        deadline = time.monotonic() + timeout_s
        whole = {**(query or {}), "watch": "1", "timeoutSeconds": str(int(timeout_s) + 1)}
        target = url(collection, whole)
        with (
            contextlib.suppress(ClusterUnavailableError),  # no event within the time
            self._sent("GET", target, self._headers, timeout_s=timeout_s) as answer,
        ):
            if answer.status >= http.client.BAD_REQUEST:
                raise ApiError(answer.status, _decoded(answer.read()))
            for line in answer.lines():
                event = json.loads(line)
                yield event["type"], event["object"]
                if time.monotonic() > deadline:
                    return

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = JSON,
        query: dict[str, str] | None = None,
    ) -> Object:
        """One request. Raises ApiError for every answer that is not a success."""
        target = url(path, query or {})
        content = None if body is None else json.dumps(body).encode()
        status, answer = self._exchange(method, target, content, [*self._headers, ("Content-Type", content_type)])
        if status >= http.client.BAD_REQUEST:
            raise ApiError(status, _decoded(answer))
        return _decoded(answer)

    def _exchange(self, method: str, target: str, body: bytes | None, headers: Headers) -> tuple[int, bytes]:
        """Return status and body. Raises ConnectionError."""
        try:
            with self._sent(method, target, headers, body) as answer:
                return answer.status, answer.read()
        except ClusterUnavailableError as error:
            raise ConnectionError(error.message) from error

    @contextlib.contextmanager
    def _sent(
        self, method: str, target: str, headers: Headers, body: bytes | None = None, *, timeout_s: float = WATCH_S
    ) -> Iterator[Response]:
        """Yield the answer to a request, which is repeated while a server that has just started reads its storage.

        Not where an eviction is put off: that has the same status, and is an answer.
        """
        deadline, eviction = time.monotonic() + BUSY_S, target.partition("?")[0].endswith("/eviction")
        while True:
            with self._connection.send(method, target, headers, body, timeout_s=timeout_s) as answer:
                busy = answer.status == http.client.TOO_MANY_REQUESTS and not eviction
                if not busy or time.monotonic() > deadline:
                    yield answer
                    return
                answer.read()
            time.sleep(PROBE_EVERY_S)


def _impersonation(user: str, groups: list[str]) -> list[tuple[str, str]]:
    return [("Impersonate-User", user), *(("Impersonate-Group", group) for group in groups)]


def _one(path: str) -> tuple[str, dict[str, str]]:
    collection, _, name = path.rpartition("/")
    return collection, {"fieldSelector": f"metadata.name={name}"}


def _decoded(content: bytes) -> Object:
    try:
        return msgspec.convert(json.loads(content), dict[str, Any])
    except (ValueError, msgspec.ValidationError):
        return {"message": content.decode(errors="replace")}
