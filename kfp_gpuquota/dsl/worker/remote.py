"""The start program of a worker in its own pod: downloads the step's inputs, runs its command, uploads its outputs.

It uses only the standard library and `start.py`: the relay (`relay.py`) serves both modules as `gpuquota_remote` to any
Python that the user's image has. The relay's address, token and certificate authority are files in a directory mounted
from a Secret. They are read again for each request, because a launcher that was replaced has others. Every connection
is TLS, whatever the address says, and nothing is sent before the relay's certificate was verified.
"""

from __future__ import annotations

import http.client
import importlib.machinery
import json
import os
import signal
import ssl
import stat
import subprocess
import sys
import time
from typing import Any
from urllib.parse import quote, urlsplit

from . import start

Json = dict[str, Any]

CHUNK_SIZE = 1 << 20
CONFLICT, UNAVAILABLE = 409, 503
IDLE_TIMEOUT_S = 120.0
RELAY_TIMEOUT_S = 900.0  # a launcher is replaced within this time, or its job is cancelled
MAX_PAUSE_S = 10.0


CONNECT_TIMEOUT_S = 10.0
MAX_UPLOAD_ROUNDS = 5
ENDED = "gpuquota: the step's command has ended with exit code "
"""The last line of a worker's log, followed by the code: a reader of the log need not wait for the end of the pod."""


class RelayError(Exception):
    """The relay has refused a request with an HTTP status (retrying is useless), or has not answered in time."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RelayClient:
    """Client of the relay; retries with growing pauses while the relay does not answer."""

    def __init__(self, directory: str, timeout_s: float = RELAY_TIMEOUT_S) -> None:
        self._directory, self._timeout_s = directory, timeout_s

    def read(self, path: str) -> bytes:
        """Return the whole body of a small response."""
        content: bytes = self._with_retries(lambda: self._request("GET", path).read())
        return content

    def download(self, path: str, target: str, size: int, mode: int) -> None:
        """Download a file of an input to `target`."""
        self._with_retries(lambda: self._download(path, target, size, mode))

    def upload(self, source: str, target: str) -> None:
        """Upload a file of an output."""
        self._with_retries(lambda: self._upload(source, target))

    def complete(self, worker_name: str, files: list[tuple[str, int]]) -> bool:
        """Return whether the relay has all of these files; the relay of a replaced launcher has not."""
        body = json.dumps(files).encode()
        try:
            self._with_retries(
                lambda: self._request("PUT", f"/complete?worker={quote(worker_name, safe='')}", body, len(body))
            )
        except RelayError as error:
            if error.status != CONFLICT:
                raise
            return False
        return True

    def _with_retries(self, attempt: Any) -> Any:
        give_up_at, pause_s = time.monotonic() + self._timeout_s, 0.2
        while True:
            try:
                return attempt()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() + pause_s > give_up_at:
                    raise RelayError(f"the step's launcher does not answer: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _request(self, method: str, path: str, body: Any = None, size: int = 0) -> http.client.HTTPResponse:
        address = urlsplit(self._read_setting("url"))
        tls = ssl.create_default_context(cafile=os.path.join(self._directory, "ca.crt"))  # noqa: PTH118
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, timeout=CONNECT_TIMEOUT_S, context=tls
        )
        connection.connect()  # with a short timeout: the address of a launcher that was deleted does not answer
        connection.sock.settimeout(IDLE_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._read_setting('token')}"}
        if body is not None:
            headers["Content-Length"] = str(size)
        connection.request(method, path, headers=headers)
        if isinstance(body, bytes):
            connection.sock.sendall(body)
        elif size:
            send_file(connection.sock, body, size)
        response = connection.getresponse()
        if response.status == UNAVAILABLE:
            raise ConnectionError("the launcher cannot accept the request now")
        if response.status >= 300:
            reason = response.read(200).decode(errors="replace")
            raise RelayError(f"{method} {path}: {response.status} {reason}", response.status)
        return response

    def _read_setting(self, name: str) -> str:
        with open(os.path.join(self._directory, name), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            return file.read().strip()

    def _download(self, path: str, target: str, size: int, mode: int) -> None:
        response = self._request("GET", f"/file?path={quote(path, safe='')}")
        buffer = memoryview(bytearray(CHUNK_SIZE))
        written = 0
        with open(f"{target}.part", "wb", buffering=0) as file:  # noqa: PTH123
            while got := response.readinto(buffer):
                file.write(buffer[:got])
                written += got
        if written != size:
            raise ConnectionError(f"{path} ended after {written} of {size} bytes")
        os.chmod(f"{target}.part", mode)  # noqa: PTH101
        os.replace(f"{target}.part", target)  # noqa: PTH105

    def _upload(self, source: str, target: str) -> None:
        with open(source, "rb") as file:  # noqa: PTH123
            facts = os.fstat(file.fileno())
            path = f"/file?path={quote(target, safe='')}&mode={facts.st_mode & 0o777:o}"
            self._request("PUT", path, file, facts.st_size)


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


def main(directory: str) -> int:
    """Run the step, and return its command's exit code, or 1 where its files cannot be transferred."""
    relay = RelayClient(directory)
    try:
        step = json.loads(relay.read("/step"))
        fetch_inputs(relay, step["executor_input"])
        mine = start.redirected(step["executor_input"], f"{step['tag']}/{os.environ[start.POD_NAME]}")
        code = run(step, mine)
        if code == 0:
            send_outputs(relay, mine)
    except RelayError as error:
        sys.stderr.write(f"gpuquota: {error}\n")
        return 1
    sys.stdout.write(f"{ENDED}{code}\n")
    return code


def fetch_inputs(relay: RelayClient, executor_input: Json) -> None:
    """Download every input artifact to the path where the step's command reads it."""
    listed = executor_input.get("inputs", {}).get("artifacts", {}).values()
    for artifact in (artifact for each in listed for artifact in each.get("artifacts", [])):
        root = start.input_path(artifact)
        if "/" not in root or os.path.exists(root):  # noqa: PTH110 (it exists on a shared volume)
            continue
        for relative, size, mode in json.loads(relay.read(f"/list?path={quote(root, safe='')}")):
            target = os.path.join(root, relative) if relative else root  # noqa: PTH118
            os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            relay.download(target, target, size, mode)


def run(step: Json, mine: Json) -> int:
    """Run the original command as a child process, and return its exit code."""
    for owner, key in start.output_locations(mine):
        os.makedirs(os.path.dirname(start.local_path(owner[key])), exist_ok=True)  # noqa: PTH103, PTH120
    argv = [start.resolved(element, mine) for element in step["argv"]]
    environment = {**os.environ, **step["environment"]}
    if (
        importlib.machinery.PathFinder.find_spec("elastic_runtime", sys.path[1:]) is None
    ):  # the image's own version is preferred
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], environment.get("PYTHONPATH")]))
    try:
        child = subprocess.Popen(argv, env=environment)
    except OSError as error:
        sys.stderr.write(f"gpuquota: cannot run {argv[0]!r}: {error.strerror}\n")
        return start.EXIT_NOT_FOUND
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    return code if code >= 0 else 128 - code


def send_outputs(relay: RelayClient, mine: Json) -> None:
    """Upload all files that the command has written to this worker's output directories. Raises RelayError."""
    paths = [start.local_path(owner[key]) for owner, key in start.output_locations(mine)]
    directories = dict.fromkeys(os.path.dirname(path) for path in paths)  # noqa: PTH120
    for _ in range(MAX_UPLOAD_ROUNDS):
        files = [file for directory in directories for file in output_files(directory)]
        for file in files:
            relay.upload(file, file)
        sizes = [(file, os.path.getsize(file)) for file in files]  # noqa: PTH202
        if relay.complete(os.environ[start.POD_NAME], sizes):
            return
    raise RelayError(f"the step's launcher was replaced {MAX_UPLOAD_ROUNDS} times during the upload of the outputs")


def output_files(directory: str) -> list[str]:
    """Return all files below a directory. Raises RelayError with the name of what cannot be sent."""
    found = entries(directory)
    for file in found:
        if why := not_transferable(file):
            raise RelayError(f"the output {file} {why}")
    return found


def entries(directory: str) -> list[str]:
    """Return all that is below a directory but folders: files, pipes, and links, those to folders included."""
    found = []
    for path, folders, files in os.walk(directory):
        linked = (name for name in folders if os.path.islink(os.path.join(path, name)))  # noqa: PTH114, PTH118
        found += [os.path.join(path, name) for name in (*files, *linked)]  # noqa: PTH118
    return found


def not_transferable(path: str) -> str:
    """Return why this is nothing that can be transferred, "" for a file."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError:
        return "is a link to nothing"
    if stat.S_ISDIR(mode):
        return "is a link to a folder; copy the folder instead"
    return "" if stat.S_ISREG(mode) else "is no file"
