"""What a worker in a pod of its own starts with: it fetches the step's inputs, runs its command, and sends its outputs.

The standard library only, and nothing of this package but the module beside it: the relay (`relay.py`) hands both out
as `gpuquota_remote` to whatever Python the user's image has. Its address and token lie in a directory, mounted from a
Secret, and are read again at each attempt: a launcher that was made anew has another address.
"""

from __future__ import annotations

import http.client
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any
from urllib.parse import quote, urlsplit

from . import start

Json = dict[str, Any]

PIECE = 1 << 20
CONFLICT, UNAVAILABLE = 409, 503
SILENCE_S = 120.0
PATIENCE_S = 900.0  # a launcher is made anew within this time, or its job is cancelled anyway
LONGEST_PAUSE_S = 10.0


CONNECTS_WITHIN_S = 10.0
SENDS = 5
ENDED = "gpuquota: the step's command has ended with exit code "
"""The last line of a worker's log, with the code: whoever follows the log need not wait for its pod's end."""


class RelayError(Exception):
    """The relay refused a request, with its HTTP status: no use in repeating it."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RelayClient:
    """Requests to the relay, repeated with growing pauses while it does not answer."""

    def __init__(self, directory: str, patience_s: float = PATIENCE_S) -> None:
        self._directory, self._patience_s = directory, patience_s

    def read(self, path: str) -> bytes:
        """A small answer, whole."""
        content: bytes = self._patiently(lambda: self._ask("GET", path).read())
        return content

    def download(self, path: str, target: str, size: int, mode: int) -> None:
        """A file of an input."""
        self._patiently(lambda: self._download(path, target, size, mode))

    def upload(self, source: str, place: str) -> None:
        """A file of an output."""
        self._patiently(lambda: self._upload(source, place))

    def complete(self, worker_name: str, files: list[tuple[str, int]]) -> bool:
        """Whether the launcher that answers now has all of these files; a launcher that was made anew has not."""
        body = json.dumps(files).encode()
        try:
            self._patiently(lambda: self._ask("PUT", f"/complete?worker={quote(worker_name)}", body, len(body)))
        except RelayError as error:
            if error.status != CONFLICT:
                raise
            return False
        return True

    def _patiently(self, attempt: Any) -> Any:
        give_up_at, pause_s = time.monotonic() + self._patience_s, 0.2
        while True:
            try:
                return attempt()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() + pause_s > give_up_at:
                    raise RelayError(f"the step's launcher does not answer: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _ask(self, method: str, path: str, body: Any = None, size: int = 0) -> http.client.HTTPResponse:
        address = urlsplit(self._said("url"))
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=CONNECTS_WITHIN_S)
        connection.connect()  # nothing answers at the address of a launcher that is gone, until the new one's is known
        connection.sock.settimeout(SILENCE_S)
        headers = {"Authorization": f"Bearer {self._said('token')}"}
        if body is not None:
            headers["Content-Length"] = str(size)
        connection.request(method, path, headers=headers)
        if isinstance(body, bytes):
            connection.sock.sendall(body)
        elif size:
            connection.sock.sendfile(body, 0, size)
        response = connection.getresponse()
        if response.status == UNAVAILABLE:
            raise ConnectionError("the launcher cannot take it now")
        if response.status >= 300:
            said = response.read(200).decode(errors="replace")
            raise RelayError(f"{method} {path}: {response.status} {said}", response.status)
        return response

    def _said(self, name: str) -> str:
        with open(os.path.join(self._directory, name), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            return file.read().strip()

    def _download(self, path: str, target: str, size: int, mode: int) -> None:
        response = self._ask("GET", f"/file?path={quote(path)}")
        buffer = memoryview(bytearray(PIECE))
        written = 0
        with open(f"{target}.part", "wb", buffering=0) as file:  # noqa: PTH123
            while got := response.readinto(buffer):
                file.write(buffer[:got])
                written += got
        if written != size:
            raise ConnectionError(f"{path} ended after {written} of {size} bytes")
        os.chmod(f"{target}.part", mode)  # noqa: PTH101
        os.replace(f"{target}.part", target)  # noqa: PTH105

    def _upload(self, source: str, place: str) -> None:
        with open(source, "rb") as file:  # noqa: PTH123
            facts = os.fstat(file.fileno())
            path = f"/file?path={quote(place)}&mode={facts.st_mode & 0o777:o}"
            self._ask("PUT", path, file, facts.st_size)


def main(directory: str) -> int:
    """Run the step; returns its command's exit code, or 1 where its files cannot be moved."""
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
    """Every input artifact to the place where the step's command looks for it."""
    listed = executor_input.get("inputs", {}).get("artifacts", {}).values()
    for artifact in (artifact for each in listed for artifact in each.get("artifacts", [])):
        root = start.input_path(artifact)
        if "/" not in root or os.path.exists(root):  # noqa: PTH110 (there by a volume that is shared)
            continue
        for relative, size, mode in json.loads(relay.read(f"/list?path={quote(root)}")):
            target = os.path.join(root, relative) if relative else root  # noqa: PTH118
            os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            relay.download(target, target, size, mode)


def run(step: Json, mine: Json) -> int:
    """The original command as a child, for its outputs are to be sent when it has ended."""
    for place, key in start.output_locations(mine):
        os.makedirs(os.path.dirname(start.local_path(place[key])), exist_ok=True)  # noqa: PTH103, PTH120
    argv = [start.revealed(element, mine) for element in step["argv"]]
    environment = {**os.environ, **step["environment"]}
    if importlib.machinery.PathFinder.find_spec("elastic_runtime", sys.path[1:]) is None:  # the image's own goes first
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
    """All that the command has written into this worker's own places. Raises RelayError."""
    places = [start.local_path(place[key]) for place, key in start.output_locations(mine)]
    directories = dict.fromkeys(os.path.dirname(place) for place in places)  # noqa: PTH120
    for _ in range(SENDS):
        files = [
            os.path.join(path, name)  # noqa: PTH118
            for directory in directories
            for path, _, names in os.walk(directory)
            for name in names
        ]
        for file in files:
            relay.upload(file, file)
        sizes = [(file, os.path.getsize(file)) for file in files]  # noqa: PTH202
        if relay.complete(os.environ[start.POD_NAME], sizes):
            return
    raise RelayError(f"the step's launcher was replaced {SENDS} times while the outputs were sent")
