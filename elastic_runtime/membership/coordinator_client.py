"""The connection to the coordinator: events out, orders in, over one HTTP request that stays open.

The loop never waits for it. A reader thread connects, reads orders and connects again with growing pauses; a writer
thread sends the queued events, and a heartbeat each second. After a reconnection no old event is repeated: `standing()`
returns the current state. While the coordinator is unavailable, training continues at its size.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from elastic_runtime.errors import CoordinatorError, ElasticError
from elastic_runtime.membership.orders import Order
from elastic_runtime.membership.peer_interface import choose_interface

if TYPE_CHECKING:
    import http.client
    from collections.abc import Callable

    from elastic_runtime.membership.environment import Environment
    from elastic_runtime.membership.generations import Generation

    Event = dict[str, Any]

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""A worker must be back within 2 s of its peers (`Limits.failure_s`), so pauses are shorter."""
WARN_AFTER_S = 10.0
REFUSED_S = 300.0
"""The time for which a refused token that was accepted before is retried: a pod sees a new Secret after minutes."""

_LAST_CHUNK = b"0\r\n\r\n"

_log = logging.getLogger("elastic_runtime")


class Coordinator:
    """The client of one worker's connection. `on_order` is called in the reader thread, and must return soon."""

    def __init__(
        self,
        environment: Environment,
        on_order: Callable[[Order], None],
        standing: Callable[[], list[Event]],
        on_refused: Callable[[ElasticError], None],
    ) -> None:
        self._environment = environment
        self._on_order, self._standing, self._on_refused = on_order, standing, on_refused
        self._incarnation = uuid.uuid4().hex
        self._outbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._connection: http.client.HTTPConnection | None = None
        self._greeting = (
            threading.Lock()
        )  # events that are sent while a connection begins follow its first ones, and are not dropped
        self._replacing = threading.Lock()  # held for an assignment only
        self._away = Away()
        self._accepted_at: float | None = None
        self._finished_sending = False  # the request was ended on this connection
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="elastic-orders", daemon=True)
        self._writer = threading.Thread(target=self._write, name="elastic-events", daemon=True)

    @property
    def worker(self) -> str:
        """This worker's id."""
        return self._environment.worker_id

    def start(self) -> None:
        """Connect in the background, and reconnect whenever the connection is lost."""
        self._reader.start()
        self._writer.start()

    def send(self, event: str, **fields: object) -> None:
        """Queue an event; it is lost if the coordinator is not connected (see `EventOutbox.publish`)."""
        self._outbox.put({"event": event, "worker": self.worker, **fields})

    def close(self, timeout_s: float = 5.0) -> None:
        """End the request, and wait until the coordinator has read all events before the end, or `timeout_s`."""
        if self._closing.is_set() or not self._reader.is_alive():
            return
        self._closing.set()
        self._outbox.put(None)
        self._ended.wait(timeout_s)
        self._ended.set()
        self._drop()

    # The reader's thread

    def _read(self) -> None:
        pause = FIRST_PAUSE_S
        try:
            while not self._ended.is_set():
                try:
                    for line in self._connected():
                        pause = FIRST_PAUSE_S
                        self._away.end()
                        self._accepted_at = time.monotonic()
                        if line.strip():
                            self._on_order(Order.parse(json.loads(line)))
                    if self._finished_sending:
                        return
                    self._away.note("it closed the connection")
                except CoordinatorError as refusal:
                    self._on_refused(refusal)
                    return
                except Exception as error:  # noqa: BLE001  (whatever answers there may answer anything)
                    self._away.note(f"{type(error).__name__}: {error}")
                self._drop()
                (self._ended if self._closing.is_set() else self._closing).wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            self._ended.set()

    def _connected(self) -> http.client.HTTPResponse:
        connection, path = self._environment.connect(SILENCE_S)
        connection.connect()
        choose_interface(connection.sock)
        connection.putrequest("POST", f"{path}/workers/{self.worker}?incarnation={self._incarnation}")
        connection.putheader("Authorization", f"Bearer {self._environment.token()}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        with self._greeting:
            self._forget_outbox()
            closing = self._closing.is_set()
            events = [_chunk(event) for event in self._standing()]
            connection.sock.sendall(b"".join([*events, *([_LAST_CHUNK] if closing else [])]))
            with self._replacing:
                self._connection, self._finished_sending = connection, closing
        response = connection.getresponse()
        if response.status == 401 and self._accepted_lately():
            raise OSError(f"the coordinator answered {_message(response)}")
        if response.status in {401, 404, 409}:
            raise CoordinatorError(f"worker {self.worker!r}: the coordinator answered {_message(response)}")
        if response.status != 200:
            raise OSError(f"the coordinator answered {response.status}")
        return response

    def _accepted_lately(self) -> bool:
        return self._accepted_at is not None and time.monotonic() - self._accepted_at < REFUSED_S

    def _forget_outbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()

    # The writer's thread

    def _write(self) -> None:
        while not self._ended.is_set():
            try:
                event = self._outbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                event = {"event": "WorkerHeard", "worker": self.worker}
            with self._greeting:
                connection, finished = self._connection, self._finished_sending
                self._finished_sending = finished or event is None
            if connection is None or connection.sock is None or finished:
                continue
            try:
                connection.sock.sendall(_LAST_CHUNK if event is None else _chunk(event))
            except OSError:
                self._drop(connection)

    def _drop(self, failed: http.client.HTTPConnection | None = None) -> None:
        """Close the connection; where one `failed`, that one, and not what the reader has opened in its place since."""
        with self._replacing:
            connection = failed or self._connection
            if connection is self._connection:
                self._connection = None
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            connection.close()


class Away:
    """Measures how long the coordinator has not answered; logs it once it is long, and when it answers again."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._since: float | None = None
        self._said = False
        self.why = ""

    def note(self, why: str) -> None:
        """Note a failed connection, or an answer that could not be read."""
        self.why = why
        _log.debug("the coordinator is away: %s", why)
        if self._since is None:
            self._since = self._now_s()
        if not self._said and self._now_s() - self._since >= WARN_AFTER_S:
            self._said = True
            _log.warning(
                "the coordinator has been away for %.0f s (%s); a worker that trains goes on at its size, one that "
                "begins or has lost a peer waits for it",
                self._now_s() - self._since,
                why,
            )

    def end(self) -> None:
        """Note that the coordinator answers."""
        if self._said:
            _log.warning("the coordinator is there again")
        self._since, self._said = None, False


def _chunk(event: Event) -> bytes:
    line = json.dumps(event).encode() + b"\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _message(response: http.client.HTTPResponse) -> str:
    body = response.read()
    try:
        return f"{response.status}: {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{response.status}: {body[:200]!r}"


class EventReceiver(Protocol):
    """The coordinator, or a rehearsal's replacement for it."""

    def send(self, event: str, **fields: Any) -> None:
        """Send an event of this worker."""


class EventOutbox:
    """Sends this worker's events, if there is a coordinator. `adopted()` returns the generation in force."""

    coordinator: EventReceiver | None = None

    def __init__(self, worker: str, adopted: Callable[[], Generation | None]) -> None:
        self._worker, self._adopted = worker, adopted
        self._events: dict[str, dict[str, Any]] = {}

    def send(self, event: str, **fields: object) -> None:
        """Send an event once; it is lost if the coordinator is not connected."""
        if self.coordinator:
            self.coordinator.send(event, **fields)

    def publish(self, event: str, **fields: object) -> None:
        """Send an event now, and again on each new connection until it is replaced or retracted."""
        self._events[event] = fields
        self.send(event, **fields)

    def retract(self, event: str) -> None:
        """Stop sending a published event on new connections."""
        self._events.pop(event, None)

    def published(self) -> list[dict[str, Any]]:
        """Return the events that describe this worker to a coordinator it has just connected to."""
        adopted = self._adopted()
        first: dict[str, Any] = {"event": "WorkerJoined"}
        if adopted:
            step = int(self._events.get("ProgressReported", {}).get("step", 0))
            first = {
                "event": "WorkerReconnected", "generation": adopted.number, "members": adopted.members, "step": step
            }  # fmt: skip
        events = [{"event": event, **fields} for event, fields in list(self._events.items())]
        return [{"worker": self._worker, **event} for event in [first, *events]]
