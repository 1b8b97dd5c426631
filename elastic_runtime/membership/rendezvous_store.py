"""torch's rendezvous store, kept by the coordinator: no worker hosts what the others need."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elastic_runtime.membership import background
from elastic_runtime.torch_internals import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_runtime.membership.environment import Environment

DEFAULT_TIMEOUT = timedelta(minutes=5)
_AWAY = (OSError, http.client.HTTPException, ValueError)
_CONNECTION_TIMEOUT_S = 320.0  # above the longest wait the coordinator allows


class CoordinatorStore(Store):
    """The space of one generation. Raises dist.DistStoreError where a wait ends without a value, as torch's do."""

    def __init__(self, environment: Environment, generation: int) -> None:
        super().__init__()
        self._environment, self._generation = environment, generation
        self._timeout_s = DEFAULT_TIMEOUT.total_seconds()
        self._local = threading.local()

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._ask("set", key=key, value=_encode(value))

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values, once all are there."""
        return [base64.b64decode(v) for v in self._ask("get", keys=keys, timeout_s=self._timeout_s)]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        self._ask("set", keys=keys, values=[_encode(value) for value in values])

    def add(self, key: str, value: int) -> int:
        """Add to a number that starts at 0."""
        return int(self._ask("add", key=key, amount=value))

    def append(self, key: str, value: str | bytes) -> None:
        """Extend a value."""
        self._ask("append", key=key, value=_encode(value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._ask("check", keys=keys))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Store where the value is as expected, or expected empty and missing; the value afterwards."""
        answer = self._ask("compare_set", key=key, expected=_encode(expected_value), value=_encode(desired_value))
        return base64.b64decode(answer)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask("delete", key=key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("count"))

    def set_timeout(self, timeout: timedelta) -> None:
        """The time limit of `get` and `wait` where none is given."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The time limit of `get` and `wait` where none is given."""
        return timedelta(seconds=self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        self._ask("wait", keys=keys, timeout_s=timeout.total_seconds() if timeout else self._timeout_s)

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set work."""
        return True

    def clone(self) -> CoordinatorStore:
        """Another one of the same space."""
        return CoordinatorStore(self._environment, self._generation)

    def _ask(self, operation: str, **fields: object) -> Any:
        try:
            return self._exchange(operation, json.dumps(fields))
        except _AWAY:
            self._local.connection = None  # the coordinator restarted or closed an idle connection: once more
            try:
                background.check()
                return self._exchange(operation, json.dumps(fields))
            except _AWAY as error:
                self._local.connection = None
                raise dist.DistStoreError(f"the coordinator's store is away: {error}") from error

    def _exchange(self, operation: str, asked: str) -> Any:
        connection, path = self._connected().given
        headers = {"Authorization": f"Bearer {self._environment.token()}", "Content-Type": "application/json"}
        connection.request("POST", f"{path}/store/{self._generation}/{operation}", asked, headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise dist.DistStoreError(f"{operation} in generation {self._generation}: {response.status} {body[:300]!r}")
        return json.loads(body)

    def _connected(self) -> _OfThread:
        stored: _OfThread | None = getattr(self._local, "connection", None)
        if stored is None:
            stored = self._local.connection = _OfThread(*self._environment.connect(_CONNECTION_TIMEOUT_S))
            background.interrupted_by(partial(_shut_down, stored.given[0]))
        return stored


class _OfThread:
    """A thread's connection and the path there; closed when the thread ends."""

    def __init__(self, connection: http.client.HTTPConnection, path: str) -> None:
        self.given = connection, path

    def __del__(self) -> None:
        self.given[0].close()


def _shut_down(connection: http.client.HTTPConnection) -> None:
    """Make a request that waits for its answer fail."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):  # not connected any more
            connection.sock.shutdown(socket.SHUT_RDWR)


def _encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
