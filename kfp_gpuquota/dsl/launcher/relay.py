"""Transfers a step's files to workers in other pods and back, where no volume is shared: HTTPS from the launcher's pod.

Each relay has a certificate of an authority of its own, made when it starts. Workers read the authority's certificate
from the job's Secret, as they do the token, and send nothing to a server without such a certificate. Files are sent and
received in chunks and never whole in memory. A job's token permits reading the step's inputs and the workers' program,
and writing below the job's own staging directories. Nothing else of the pod can be reached.

The client is `images/launcher/worker`, a static program that this pod's image brings. What KFP's executor input means
is decided here, so that it need not know.

A connection has a thread. It counts as unproven until it has sent the token, for `PROOF_TIMEOUT_S` at most; so many of
them are open from one address, and in all, beyond which the oldest one is closed.

| request                    | answer                                                              |
|----------------------------|---------------------------------------------------------------------|
| `GET /work?worker=W`       | JSON: a worker's "argv", "inputs", folders of "outputs", "artifacts" by URI, "result" |
| `GET /list?path=P`         | JSON: [[relative path, size, mode], ...] of an input, a file or a directory |
| `GET /file?path=P`         | a file of an input                                                  |
| `PUT /file?path=P&mode=M`  | writes a file of a staged output                                    |
| `PUT /complete?worker=W`   | 201 if all files of the body's list ([[path, size], ...]) have arrived, else 409 |

A worker whose command has succeeded sends the last request when it has uploaded all its outputs. The launcher may have
been replaced by then, in a pod without these files: the worker then uploads all of them again.

Workers of a job that release 0.2 submitted ask for `/step` (the step file), `/package` and `/program` instead
(`earlier_workers.py`).
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import os
import secrets
import socket
import ssl
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, urlsplit

from kfp_gpuquota.cluster import certificates
from kfp_gpuquota.dsl.launcher import earlier_workers
from kfp_gpuquota.dsl.launcher.input_files import CHUNK_SIZE, NotTransferableError, listing, really_within, within
from kfp_gpuquota.dsl.launcher.staging import PRIVATE_FILE
from kfp_gpuquota.dsl.spec.pod_template import PROGRAM
from kfp_gpuquota.dsl.worker import start
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.server.transport.tls import load_pair

if TYPE_CHECKING:
    import io
    from collections.abc import Callable

    from kfp_gpuquota.dsl.launcher.staging import Staging

Json = dict[str, Any]

PROOF_TIMEOUT_S: Final = 10.0
"""For the handshake, and for the head of the first request."""
MAX_CONNECTIONS: Final = 512
MAX_UNPROVEN: Final = 64
MAX_UNPROVEN_OF_ONE: Final = 16
IDLE_TIMEOUT_S: Final = 120.0
MAX_LIST: Final = 16 << 20


class Relay:
    """HTTPS server for one job's files on `address` until `close`. Raises OSError where it cannot listen there.

    `completed(worker)` is called when all outputs of a worker have arrived; where it raises, the worker tries again.
    `authority` is the PEM certificate by which workers recognise it.
    """

    def __init__(
        self,
        executor_input: Json,
        staging: Staging,
        address: str,
        token: str = "",
        completed: Callable[[str], None] = lambda _worker: None,
        program: Path = Path(PROGRAM),
    ) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.inputs = [Path(path) for path in input_paths(executor_input)]
        self.outputs = [Path(directory) for directory in staging.directories()]
        self.step_file = staging.step_file
        self.completed, self.program = completed, program
        authority, tls = _identity(address)
        self.authority = authority.decode()
        self._server = _Server((address, 0), self, tls)
        self._thread = threading.Thread(target=self._server.serve_forever, name="relay", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The relay's URL, for the workers."""
        host, port = str(self._server.server_address[0]), self._server.server_address[1]
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def close(self) -> None:
        """Stop the server and abort the transfers in progress."""
        self._server.shutdown()
        self._server.server_close()

    def work(self, worker: str) -> Json:
        """Return what a worker runs, downloads and uploads. Raises ValueError for a name that is none."""
        if worker in {"", ".", ".."} or "/" in worker:
            raise ValueError(worker)
        argv, mine = start.work_of(json.loads(self.step_file.read_bytes()), worker)
        return {
            "argv": argv,
            "inputs": [str(path) for path in self.inputs],
            "outputs": start.output_folders(mine),
            "result": mine["outputs"]["outputFile"],
            "artifacts": start.artifact_paths(mine),
        }

    def readable(self, path: str) -> Path | None:
        """Return the path if it is an input or inside one, also where it leads by links, else None."""
        return really_within(path, self.inputs)

    def writable(self, path: str) -> Path | None:
        """Return the path if it is below a staging directory of this job, also where links lead to it, else None.

        A link in its place would be replaced, so where that leads does not count.
        """
        found = within(path, self.outputs)
        return None if found is None or really_within(str(found.parent), self.outputs) is None else found


def _identity(address: str) -> tuple[bytes, ssl.SSLContext]:
    """Return the certificate of a new authority, and the TLS context of a server at this address that it vouches for.

    The authority's key is not kept. A step may run for months, so neither certificate is renewed.
    """
    now, tls = time.time(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority = certificates.new_authority("gpuquota-relay", now)
    pair = certificates.issue(authority, [address], now, certificates.AUTHORITY_VALID_S)
    load_pair(tls, pair.certificate, pair.key)
    return authority.certificate, tls


def input_paths(executor_input: Json) -> list[str]:
    """Return the paths of the step's input artifacts in this pod."""
    listed = executor_input.get("inputs", {}).get("artifacts", {}).values()
    artifacts = (artifact for each in listed for artifact in each.get("artifacts", []))
    return [start.input_path(artifact) for artifact in artifacts if "/" in artifact.get("uri", "")]


class _Unproven:
    """The connections that have not sent the token yet. The accepting thread and those of connections share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[socket.socket, tuple[str, float]] = {}

    def add(self, connection: socket.socket, source: str) -> bool:
        """Add a connection; False where its source has too many. The oldest one of all is closed for it if need be."""
        with self._lock:
            if sum(other == source for other, _ in self._since.values()) >= MAX_UNPROVEN_OF_ONE:
                return False
            if len(self._since) >= MAX_UNPROVEN:
                self._end(min(self._since, key=lambda one: self._since[one][1]))
            self._since[connection] = source, time.monotonic()
            return True

    def replace(self, connection: socket.socket, wrapped: socket.socket) -> None:
        """Note that the connection has another object from now on; it may have been closed meanwhile."""
        with self._lock:
            if (found := self._since.pop(connection, None)) is not None:
                self._since[wrapped] = found

    def remove(self, connection: socket.socket) -> None:
        """Note that the connection is proven, or has ended."""
        with self._lock:
            self._since.pop(connection, None)

    def end_late(self) -> None:
        """Close those whose time is over: a timeout of a socket would begin again with each byte."""
        with self._lock:
            for connection, (_, since) in list(self._since.items()):
                if time.monotonic() - since > PROOF_TIMEOUT_S:
                    self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._since.pop(connection, None)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], relay: Relay, tls: ssl.SSLContext) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.relay, self._tls = relay, tls
        self.unproven = _Unproven()
        self._open = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether one more connection from this address is served."""
        if not self._open.acquire(blocking=False):
            return False
        if not self.unproven.add(request, str(client_address[0])):
            self._open.release()
            return False
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Make the TLS handshake and answer requests, in a thread of its own."""
        connection = request
        try:
            request.settimeout(PROOF_TIMEOUT_S)
            connection = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            self.unproven.replace(request, connection)
        except OSError:  # it was closed while it waited for its turn
            self.shutdown_request(connection)
        else:
            super().process_request_thread(connection, client_address)
        finally:
            self._open.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.unproven.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Do what is due, twice a second."""
        self.unproven.end_late()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a worker that exited during a request: the cluster reports its exit."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S

    def setup(self) -> None:
        """Make the TLS handshake. Raises OSError where the client does not complete it in time."""
        self.request.do_handshake()
        super().setup()

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def _answer(self, handle: Callable[[], None]) -> None:
        if not self._allowed():
            return
        try:
            handle()
        except (ValueError, TypeError, RecursionError):  # a path, a number, or JSON, that is none
            self._refuse(HTTPStatus.BAD_REQUEST)

    def _get(self) -> None:
        asked = urlsplit(self.path)
        relay = cast("_Server", self.server).relay
        match asked.path:
            case "/work":
                self._send_work()
            case "/step":
                self._send_file(relay.step_file)
            case "/package":
                self._send(earlier_workers.package())
            case "/program":
                self._send_file(relay.program)
            case "/list" if found := relay.readable(self._path()):
                self._send_listing(found)
            case "/file" if found := relay.readable(self._path()):
                self._send_file(found)
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _send_work(self) -> None:
        try:
            work = cast("_Server", self.server).relay.work(self._query("worker"))
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST)
        else:
            self._send(json.dumps(work).encode())

    def _send_listing(self, root: Path) -> None:
        try:
            found = listing(root)
        except NotTransferableError as error:
            self._refuse(HTTPStatus.FORBIDDEN, str(error))  # a worker that lacks a file would fail later
        except OSError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        else:
            self._send(json.dumps(found).encode())

    def _put(self) -> None:
        length = self.headers.get("Content-Length", "")
        if urlsplit(self.path).path == "/complete":
            self._complete(int(length) if length.isdecimal() else MAX_LIST + 1)
            return
        target = cast("_Server", self.server).relay.writable(self._path())
        if target is None or not length.isdecimal():
            self._refuse(HTTPStatus.FORBIDDEN if target is None else HTTPStatus.LENGTH_REQUIRED)
            return
        mode = int(self._query("mode") or "0", 8) & 0o777 | PRIVATE_FILE  # this user, another one, publishes it
        try:
            self._receive(target, int(length), mode)
        except (ConnectionError, TimeoutError, ssl.SSLError):
            raise  # the worker tries again
        except OSError as error:  # no further attempt could mend it
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, str(error))
        else:
            self._send(b"", HTTPStatus.CREATED)

    def _complete(self, length: int) -> None:
        """Handle PUT /complete: 201 if the listed files have arrived, else 409, and the worker uploads them again."""
        if length > MAX_LIST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        relay = cast("_Server", self.server).relay
        found = [(relay.writable(name), size) for name, size in json.loads(self.rfile.read(length))]
        if not all(path and path.is_file() and path.stat().st_size == size for path, size in found):
            self._send(b"", HTTPStatus.CONFLICT)
            return
        try:
            relay.completed(self._query("worker"))
        except GpuQuotaError:
            self._send(b"", HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self._send(b"", HTTPStatus.CREATED)

    def log_message(self, *_: object) -> None:
        """Log nothing: requests do not belong in the user's log of the step."""

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        allowed = hmac.compare_digest(given.encode(), cast("_Server", self.server).relay.token.encode())
        if allowed:
            cast("_Server", self.server).unproven.remove(self.request)
        else:
            self._refuse(HTTPStatus.UNAUTHORIZED)
        return allowed

    def _path(self) -> str:
        return self._query("path")

    def _query(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def _refuse(self, status: HTTPStatus, reason: str = "") -> None:
        self.close_connection = True  # an unread body would be parsed as the next request
        self._send((reason or status.phrase).encode(errors="replace"), status)
        if self.command == "PUT":
            self._discard()

    def _discard(self) -> None:
        """Read what the client still sends: a connection that is closed before that is reset, and the answer lost."""
        end = time.monotonic() + PROOF_TIMEOUT_S
        self.connection.settimeout(PROOF_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < end and self.connection.recv(CHUNK_SIZE):
                pass

    def _send(self, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            send_file(self.connection, file, size)

    def _receive(self, target: Path, size: int, mode: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{secrets.token_hex(4)}.part")  # the file's own name may be of the longest
        try:
            with temporary.open("wb") as file:
                _copy(self.rfile, file, size)
            temporary.chmod(mode)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def send_file(connection: Any, file: Any, size: int) -> None:
    """Send the next `size` bytes of a file, also of one that still grows. Raises ConnectionError where it has fewer.

    `sendfile` of a TLS socket sends 8 KiB at a time.
    """
    buffer = memoryview(bytearray(CHUNK_SIZE))
    while size:
        got = file.readinto(buffer[: min(size, CHUNK_SIZE)])
        if not got:
            raise ConnectionError(f"a file became {size} bytes shorter while it was sent")
        connection.sendall(buffer[:got])
        size -= got


def _copy(source: Any, target: io.BufferedWriter, size: int) -> None:
    """Copy `size` bytes in chunks through one buffer. Raises ConnectionError where the sender closes too early."""
    buffer = memoryview(bytearray(min(CHUNK_SIZE, max(1, size))))
    while size > 0:
        got = source.readinto(buffer[: min(len(buffer), size)])
        if not got:
            raise ConnectionError("the sender closed the connection in the middle of a file")
        target.write(buffer[:got])
        size -= got
