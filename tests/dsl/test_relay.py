"""Files to and from workers in other pods: complete, in parts, and not readable by others."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.certificates import issue, new_authority
from kfp_gpuquota.dsl.launcher import relay as relay_module
from kfp_gpuquota.dsl.launcher.log_stream import ENDED
from kfp_gpuquota.dsl.launcher.relay import Relay, send_file
from kfp_gpuquota.dsl.launcher.staging import Staging
from kfp_gpuquota.dsl.worker import start as worker_module
from kfp_gpuquota.errors import JobFailedError
from kfp_gpuquota.server.transport.tls import load_pair
from tests.kubernetes.conftest import skip_or_fail
from tests.polling import TIMEOUT_S, until
from tools import worker_program
from tools.devcluster import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOOTSTRAP = Path(__file__).with_name("release_0_2") / "bootstrap.txt"


@pytest.fixture(scope="module")
def program() -> Path:
    """The workers' program, which the launcher's image brings."""
    try:
        return worker_program.provide()
    except UnavailableError as lack:
        skip_or_fail(lack)


class ElsewhereRelay(Relay):
    """A relay whose workers have their inputs below another folder: here one file system is that of both pods."""

    root: Path

    def work(self, worker: str) -> dict[str, Any]:
        found = super().work(worker)
        return {**found, "inputs": [f"{self.root}/pod{path}" for path in found["inputs"]]}

    def readable(self, path: str) -> Path | None:
        return super().readable(path.removeprefix(f"{self.root}/pod"))


class Step:
    """A step with one input artifact (a directory) and one output, in a launcher's pod at `root`."""

    def __init__(self, root: Path, program: Path) -> None:
        self.root, self.program = root, program
        self.arrived = Path(f"{root}/pod{root}/in/data")
        (root / "in" / "data" / "deep").mkdir(parents=True)
        (root / "in" / "data" / "deep" / "a.txt").write_text("hello")
        (root / "in" / "data" / "run.sh").write_text("#!/bin/sh\n")
        (root / "in" / "data" / "run.sh").chmod(0o755)
        (root / "secret").write_text("not yours")
        self.executor_input: dict[str, Any] = {
            "inputs": {"artifacts": {"data": {"artifacts": [{"name": "data", "uri": str(root / "in" / "data")}]}}},
            "outputs": {
                "outputFile": str(root / "out" / "executor_output.json"),
                "artifacts": {"model": {"artifacts": [{"name": "model", "uri": str(root / "out" / "model")}]}},
            },
        }
        self.staging = Staging(self.executor_input, "job-1")
        self.environment: dict[str, str] = {}
        self.relay: Relay | None = None
        self.address = "127.0.0.1"
        self.mount = root / "mount"
        self.completed: Callable[[str], None] = lambda _worker: None

    def serve(self, *argv: str) -> Relay:
        self.staging.create(list(argv), self.environment)
        return self.restart()

    def restart(self) -> Relay:
        """A launcher that was made again: another port, the same token; the mounted Secret follows."""
        token = ""
        if self.relay:
            token = self.relay.token
            self.relay.close()
        made = ElsewhereRelay(self.executor_input, self.staging, self.address, token, self.completed, self.program)
        made.root, self.relay = self.root, made
        self.mount.mkdir(exist_ok=True)
        (self.mount / "url").write_text(self.relay.url)
        (self.mount / "token").write_text(self.relay.token)
        (self.mount / "ca.crt").write_text(self.relay.authority)
        return self.relay

    def ask(self, method: str, path: str, token: str = "", body: bytes | None = None) -> tuple[int, bytes]:
        assert self.relay
        connection = http.client.HTTPSConnection(host_of(self.relay), timeout=TIMEOUT_S, context=trusting(self.relay))
        connection.request(method, path, body, {"Authorization": f"Bearer {token or self.relay.token}"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def host_of(relay: Relay) -> str:
    return relay.url.removeprefix("https://")


def trusting(relay: Relay) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=relay.authority)


@pytest.fixture
def step(tmp_path: Path, program: Path) -> Iterator[Step]:
    made = Step(tmp_path, program)
    yield made
    if made.relay:
        made.relay.close()


def worker(step: Step, *options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A worker as its pod starts it."""
    with started(step, *options, environment=environment) as running:
        try:
            output, errors = running.communicate(timeout=TIMEOUT_S)
        finally:
            running.kill()
    return subprocess.CompletedProcess(running.args, running.returncode, output, errors)


def started(step: Step, *options: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [step.program, "run", *options, str(step.mount)],
        cwd=step.root,
        env={"PATH": os.environ["PATH"], "GPUQUOTA_POD_NAME": "w0", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def staged(step: Step, *parts: str) -> Path:
    """Return a path in the folder to which worker w0 writes its outputs."""
    return Path(step.root, "out", ".gpuquota", "job-1", "w0", *parts)


def test_a_worker_runs_the_command_and_its_outputs_come_home(step: Step) -> None:
    model = step.root / "out" / "model"
    script = (
        "import sys, pathlib; out = pathlib.Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True); "
        f"source = pathlib.Path({str(step.arrived)!r}, 'deep', 'a.txt'); "
        "out.joinpath('weights').write_text(source.read_text())"
    )
    step.serve(sys.executable, "-c", script, "{{gpuquota.outputs.artifacts['model'].path}}")
    done = worker(step)
    assert done.returncode == 0, done.stderr
    step.staging.publish_outputs("w0")
    assert (model / "weights").read_text() == "hello"


def test_a_launcher_learns_that_a_worker_has_sent_everything(step: Step) -> None:
    completed: list[str] = []
    step.completed = completed.append
    step.serve(sys.executable, "-c", "print('hello')")
    done = worker(step)
    assert completed == ["w0"]
    assert done.stdout.splitlines()[-1] == f"{ENDED}0"


def test_a_worker_that_is_killed_in_the_middle_of_a_file_leaves_no_traceback_in_the_steps_log(
    step: Step, capfd: pytest.CaptureFixture[str]
) -> None:
    relay = step.serve("true")
    mine = worker_module.redirected(step.executor_input, f"{step.staging.tag}/w0")
    target = mine["outputs"]["artifacts"]["model"]["artifacts"][0]["uri"]
    host, port = host_of(relay).split(":")
    plain = socket.create_connection((host, int(port)))
    with trusting(relay).wrap_socket(plain, server_hostname=host) as connection:
        head = f"PUT /file?path={target} HTTP/1.1\r\nAuthorization: Bearer {relay.token}\r\nContent-Length: 1000000"
        connection.sendall(f"{head}\r\n\r\nabc".encode())
        until(lambda: list(Path(target).parent.glob("*.part")))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not list(Path(target).parent.glob("*.part")))
    relay.close()
    assert capfd.readouterr().err == ""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What workers list as all of their files."""
    lists: list[Any] = []
    complete = relay_module._Handler._complete

    def noted(handler: Any, length: int) -> None:
        body = handler.rfile.read(length)
        lists.append(json.loads(body))
        handler.rfile = io.BytesIO(body)
        complete(handler, length)

    monkeypatch.setattr(relay_module._Handler, "_complete", noted)
    return lists


def test_outputs_are_sent_again_to_a_launcher_that_was_made_anew_in_the_meantime(
    step: Step, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writable = Relay.writable

    def known(relay: Relay, path: str) -> Path | None:
        """The first launcher exits before it could confirm, and its pod's files are lost."""
        return writable(relay, f"{path}-of-another-pod" if len(sent) == 1 else path)

    monkeypatch.setattr(Relay, "writable", known)
    step.serve(*WRITE_MODEL)
    assert worker(step).returncode == 0
    assert sent == [[[str(staged(step, "model")), 1]]] * 2


WRITE_MODEL = ("sh", "-c", 'printf w > "$0"', "{{gpuquota.outputs.artifacts['model'].path}}")


KEEP_ELSEWHERE = """
import json, pathlib, sys
result, uri, custom, kind = sys.argv[1:]
custom = pathlib.Path(custom)
if kind == "folder":
    (custom / "deep").mkdir(parents=True)
    (custom / "deep" / "weights").write_text("w")
elif kind == "file":
    custom.write_text("w")
pathlib.Path(uri).parent.mkdir(exist_ok=True, parents=True)
artifact = {"name": "model", "uri": uri, "metadata": {"big": 12345678901234567890}, "custom_path": str(custom)}
pathlib.Path(result).write_text(json.dumps({"artifacts": {"model": {"artifacts": [artifact]}}}))
"""


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_an_artifact_that_the_command_keeps_at_a_path_of_its_own_is_sent_from_there(step: Step, kind: str) -> None:
    custom = step.root / "pod" / "of-its-own"
    placeholders = "{{gpuquota.outputs.output_file}}", "{{gpuquota.outputs.artifacts['model'].uri}}"
    step.serve(sys.executable, "-c", KEEP_ELSEWHERE, *placeholders, str(custom), kind)
    assert worker(step).returncode == 0
    if kind == "nothing":
        with pytest.raises(JobFailedError, match="its worker has left nothing there"):
            step.staging.publish_outputs("w0")
        return
    step.staging.publish_outputs("w0")
    (artifact,) = json.loads((step.root / "out" / "executor_output.json").read_text())["artifacts"]["model"][
        "artifacts"
    ]
    model = step.root / "out" / "model"
    assert artifact == {"name": "model", "uri": str(model), "metadata": {"big": 12345678901234567890}}
    assert (model / "deep" / "weights" if kind == "folder" else model).read_text() == "w"


def test_an_output_that_came_in_pieces_is_not_complete(step: Step) -> None:
    step.serve("true")
    body = json.dumps([(str(step.staging.root / "w0" / "gone"), 3)]).encode()
    assert step.ask("PUT", "/complete?worker=w0", body=body)[0] == 409


def test_an_input_arrives_whole_with_its_modes(step: Step) -> None:
    step.serve("true")
    assert worker(step).returncode == 0
    assert (step.arrived / "deep" / "a.txt").read_text() == "hello"
    script = step.arrived / "run.sh"
    assert (script.read_text(), script.stat().st_mode & 0o777) == ("#!/bin/sh\n", 0o755)
    assert {path.name for path in step.arrived.rglob("*")} == {"deep", "a.txt", "run.sh"}


def test_the_folders_of_outputs_exist_before_the_command_starts(step: Step) -> None:
    step.executor_input["outputs"]["parameters"] = {"x": {"outputFile": str(step.root / "elsewhere" / "x")}}
    step.serve("sh", "-c", 'printf 1 > "$0"', "{{gpuquota.outputs.parameters['x'].output_file}}")
    assert worker(step).returncode == 0
    step.staging.publish_outputs("w0")
    assert (step.root / "elsewhere" / "x").read_text() == "1"


def test_the_commands_exit_code_is_the_workers(step: Step) -> None:
    step.serve("sh", "-c", "exit 7")
    assert worker(step).returncode == 7
    step.serve("no-such-program")
    done = worker(step)
    assert done.returncode == 127
    assert 'gpuquota: cannot run "no-such-program": executable file not found in $PATH' in done.stderr


SHOW_RUNTIME = ("python3", "-c", "import elastic_runtime; print(elastic_runtime.__file__)")


def test_an_image_without_elastic_runtime_gets_it_and_one_that_has_it_keeps_its_own(step: Step) -> None:
    step.serve(*SHOW_RUNTIME)
    given, own = step.root / "given", step.root / "own"
    for folder in (given, own):
        (folder / "elastic_runtime").mkdir(parents=True)
        (folder / "elastic_runtime" / "__init__.py").touch()
    bare = venv(step.root)
    without = worker(step, f"--runtime={given}", environment={"PATH": bare, "PYTHONPATH": "/nowhere"})
    assert f"{given}/elastic_runtime" in without.stdout, without.stderr
    having = worker(step, f"--runtime={given}", environment={"PATH": bare, "PYTHONPATH": str(own)})
    assert f"{own}/elastic_runtime" in having.stdout, having.stderr


def venv(root: Path) -> str:
    """Return a PATH with a Python that has no packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    return f"{root}/venv/bin:{os.environ['PATH']}"


def test_a_worker_that_the_last_release_started_goes_on_with_the_program_of_this_one(step: Step) -> None:
    step.serve(*SHOW_RUNTIME)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BOOTSTRAP.read_text(), step.mount],
        cwd=step.root,
        env={"PATH": venv(step.root), "GPUQUOTA_POD_NAME": "w0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == [f"{ENDED}0"], done.stderr
    assert ".zip/elastic_runtime" in done.stdout
    found = json.loads(step.ask("GET", "/step")[1])  # what one asks for that had begun
    executor_input = step.executor_input
    assert found == {
        "tag": step.staging.tag,
        "argv": [*SHOW_RUNTIME],
        "environment": {},
        "executor_input": executor_input,
    }


def test_the_program_and_elastic_runtime_are_copied_for_all_users(tmp_path: Path, program: Path) -> None:
    image, volume = tmp_path / "opt", tmp_path / "volume"
    (image / "bin").mkdir(parents=True)
    (image / "bin" / "gpuquota-worker").write_bytes(program.read_bytes())
    (image / "bin" / "gpuquota-worker").chmod(0o755)
    (image / "runtime" / "elastic_runtime").mkdir(parents=True)
    (image / "runtime" / "elastic_runtime" / "__init__.py").touch(mode=0o644)
    volume.mkdir()
    for _ in range(2):  # an init container may be started again
        subprocess.run([image / "bin" / "gpuquota-worker", "install", volume], umask=0o077, check=True)
    assert (volume / "gpuquota-worker").read_bytes() == program.read_bytes()
    modes = {path.name: path.stat().st_mode & 0o777 for path in volume.rglob("*")}
    assert modes == {"gpuquota-worker": 0o755, "runtime": 0o755, "elastic_runtime": 0o755, "__init__.py": 0o644}


@pytest.mark.parametrize(("phase", "request_"), [("downloading", "_send_file"), ("uploading", "_receive")])
def test_a_worker_is_stopped_at_once_during_a_transfer_and_says_which(
    step: Step, monkeypatch: pytest.MonkeyPatch, phase: str, request_: str
) -> None:
    reached, release = threading.Event(), threading.Event()

    def held(*_: object) -> None:
        reached.set()
        release.wait(TIMEOUT_S)

    monkeypatch.setattr(relay_module._Handler, request_, held)
    step.serve(*WRITE_MODEL)
    with started(step) as running:
        assert reached.wait(TIMEOUT_S)
        running.send_signal(signal.SIGTERM)
        assert f"gpuquota: stopped by signal 15 (terminated) while {phase} the step's" in running.communicate()[1]
    release.set()
    assert running.returncode == 128 + signal.SIGTERM


def as_first_process(step: Step) -> None:
    """Let the worker be process 1, as in its pod: the kernel then delivers only signals that it handles."""
    if os.geteuid() != 0:
        skip_or_fail("a process namespace needs root")
    inside = step.root / "inside"
    inside.write_text(f'#!/bin/sh\nexec unshare --pid --mount-proc --fork {step.program} "$@"\n')
    inside.chmod(0o755)
    step.program = inside


def test_a_worker_is_stopped_at_once_while_it_waits_for_the_launcher(step: Step) -> None:
    as_first_process(step)
    step.mount.mkdir()
    os.mkfifo(step.mount / "url")
    with started(step) as running:
        descriptor = os.open(step.mount / "url", os.O_WRONLY)  # returns when the worker reads the launcher's address
        (first,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert "while waiting for the step's launcher" in running.communicate()[1]
    os.close(descriptor)
    assert running.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("code", [0, 7])
def test_the_command_receives_the_signal_and_decides_itself(step: Step, code: int) -> None:
    ready = step.root / "ready"
    step.serve("sh", "-c", f"trap 'echo saved; exit {code}' TERM; touch {ready}; while :; do sleep 0.02; done")
    with started(step) as running:
        until(ready.exists)
        running.send_signal(signal.SIGTERM)
        output, errors = running.communicate()
    assert output == f"saved\n{ENDED}{code}\n"
    assert (running.returncode, "while running the step's command" in errors) == (code, code != 0)


def test_processes_whose_parents_have_ended_are_collected(step: Step) -> None:
    as_first_process(step)
    orphan = "(sleep 0 & echo $! > pid)"
    step.serve("sh", "-c", f"{orphan}; while [ -e /proc/$(cat pid) ]; do sleep 0.02; done; echo collected")
    done = worker(step)
    assert f"collected\n{ENDED}0\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/file?path={root}/secret", 404),
        ("GET", "/file?path={root}/in/data/../../secret", 404),
        ("GET", "/file?path=/etc/passwd", 404),
        ("GET", "/list?path={root}", 404),
        ("PUT", "/file?path={root}/secret", 403),
        ("PUT", "/file?path={root}/out/model", 403),
        ("PUT", "/file?path={root}/out/.gpuquota/job-1/../../model", 403),
        ("PUT", "/file?path={root}/out/.gpuquota/job-2/w0/model", 403),
        ("GET", "/nothing", 404),
    ],
)
def test_a_jobs_token_opens_its_own_files_and_nothing_else(step: Step, method: str, path: str, status: int) -> None:
    step.serve("true")
    assert step.ask(method, path.format(root=step.root), body=b"x" if method == "PUT" else None)[0] == status
    assert (step.root / "secret").read_text() == "not yours"


def test_without_the_token_nothing_is_open(step: Step) -> None:
    step.serve("true")
    assert step.ask("GET", "/step", token="wrong")[0] == 401


def test_whoever_speaks_no_tls_gets_no_answer(step: Step) -> None:
    relay = step.serve("true")
    connection = http.client.HTTPConnection(host_of(relay), timeout=TIMEOUT_S)
    connection.request("GET", "/step", headers={"Authorization": f"Bearer {relay.token}"})
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        connection.getresponse()


def test_a_client_that_says_nothing_keeps_no_other_waiting(step: Step) -> None:
    host, port = host_of(step.serve("true")).split(":")
    with socket.create_connection((host, int(port))):
        assert worker(step).returncode == 0


class Impostor:
    """A server at the relay's address that records what it receives, over TLS with another certificate, or without."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls, self.received, self.refused = tls, b"", 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"  # no answer to it may be in clear
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    secure = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
                    self.received += secure.recv(1 << 16)
                    secure.close()
                except OSError:
                    pass
            self.refused += 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.mark.parametrize("secure", [True, False])
def test_no_token_is_sent_to_a_server_without_the_relays_certificate(step: Step, secure: bool) -> None:
    relay = step.serve("true")
    pair = issue(new_authority("gpuquota-relay", time.time()), ["127.0.0.1"], time.time())
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(tls, pair.certificate, pair.key)
    impostor = Impostor(tls if secure else None)
    (step.mount / "url").write_text(impostor.url)
    done = worker(step, "--timeout=0.5s")
    impostor.close()
    assert (done.returncode, impostor.refused > 0) == (1, True)
    assert "gpuquota: the step's launcher does not answer" in done.stderr
    assert relay.token.encode() not in impostor.received
    assert b"HTTP/1.1" not in impostor.received


def test_a_transfer_that_breaks_leaves_nothing_and_is_repeated(step: Step) -> None:
    relay = step.serve("true")
    place = step.root / "out" / ".gpuquota" / "job-1" / "w0" / "model"
    connection = http.client.HTTPSConnection(host_of(relay), timeout=TIMEOUT_S, context=trusting(relay))
    connection.putrequest("PUT", f"/file?path={place}")
    connection.putheader("Authorization", f"Bearer {relay.token}")
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    connection.send(b"half")
    connection.close()
    assert step.ask("PUT", f"/file?path={place}", body=b"whole")[0] == 201
    until(lambda: not list(place.parent.glob("*.part")))
    assert place.read_bytes() == b"whole"


def test_a_launcher_that_was_made_anew_is_found(step: Step) -> None:
    step.serve("echo", "found")
    assert step.relay
    step.relay.close()
    with started(step) as running:
        step.restart()
        assert "found" in running.communicate()[0]


def test_a_launcher_that_stays_away_is_given_up(step: Step) -> None:
    step.serve("true").close()
    step.relay = None
    done = worker(step, "--timeout=0.2s")
    assert done.returncode == 1
    assert "gpuquota: the step's launcher does not answer" in done.stderr


def test_of_a_file_that_changes_while_it_is_sent_no_byte_more_than_announced_is_sent(tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    grown.write_bytes(b"announced" + b" and written later")
    here, there = socket.socketpair()
    with here, there, grown.open("rb") as file:
        send_file(here, file, len(b"announced"))
        with pytest.raises(ConnectionError, match="82 bytes shorter"):
            send_file(here, file, 100)
        here.close()
        assert there.makefile("rb").read() == b"announced and written later"


def test_a_large_file_is_whole_in_nobodys_memory(step: Step) -> None:
    size = 200 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step.serve("truncate", f"--size={size}", "{{gpuquota.outputs.artifacts['model'].path}}")
    with started(step) as running:
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0
    assert staged(step, "model").stat().st_size == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
    assert used.ru_maxrss - before < 50 << 10  # it began as a copy of this process


def test_an_imported_artifact_that_kfp_does_not_download_is_none_of_the_relays(step: Step) -> None:
    imported = {"name": "weights", "uri": "https://example.com/weights.bin"}  # KFP's launcher leaves it where it is
    step.executor_input["inputs"]["artifacts"]["weights"] = {"artifacts": [imported]}
    step.serve(sys.executable, "-c", "print('ran')")
    done = worker(step)
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout


def connected(step: Step, source: str = "127.0.0.1") -> socket.socket:
    """Return a connection that has sent nothing."""
    assert step.relay
    host, _, port = host_of(step.relay).partition(":")
    return socket.create_connection((host, int(port)), 20, source_address=(source, 0))


def ended(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_connections_without_the_token_are_few_and_keep_no_worker_out(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MAX_UNPROVEN_OF_ONE", 8)
    monkeypatch.setattr(relay_module, "MAX_UNPROVEN", 20)
    step.serve("echo")
    before = threading.active_count()
    silent = [connected(step, "127.0.0.2") for _ in range(30)]
    assert all(ended(one) for one in silent[8:]), "no more than so many from one address"
    others = [connected(step, f"127.0.0.{number}") for number in range(10, 40)]
    until(lambda: threading.active_count() - before <= 20)
    assert sum(map(ended, others[:10])) == 10, "the oldest are closed for newer ones"
    assert step.ask("GET", "/step")[0] == 200
    for one in (*silent, *others):
        one.close()


def test_a_connection_that_does_not_send_the_token_is_closed_in_time_however_often_it_sends_a_byte(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "PROOF_TIMEOUT_S", 1.0)
    relay = step.serve("echo")
    slow = trusting(relay).wrap_socket(connected(step), server_hostname="127.0.0.1")
    kept = http.client.HTTPSConnection(host_of(relay), timeout=TIMEOUT_S, context=trusting(relay))
    kept.request("GET", "/step", headers={"Authorization": f"Bearer {relay.token}"})
    assert kept.getresponse().read()

    def closed() -> bool:
        try:
            slow.sendall(b"G")
            slow.settimeout(0.05)
            return slow.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    until(closed)
    kept.request("GET", "/step", headers={"Authorization": f"Bearer {relay.token}"})
    assert kept.getresponse().status == 200, "a connection that has sent the token may be idle"
    kept.close()


def odd_entries(step: Step, folder: Path) -> dict[str, Callable[[Path], None]]:
    """Return what can be in a folder beside files and folders, by a name that says what it is."""
    return {
        "a link to a file outside": lambda path: path.symlink_to(step.root / "secret"),
        "a link to a folder outside": lambda path: path.symlink_to(step.root),
        "a link to the folder that has it": lambda path: path.symlink_to(folder),
        "a link to nothing": lambda path: path.symlink_to(folder / "missing"),
        "a link to itself": lambda path: path.symlink_to(path),
        "a pipe": os.mkfifo,
    }


ODD = ["a link to a file outside", "a link to a folder outside", "a link to the folder that has it",
       "a link to nothing", "a link to itself", "a pipe"]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_input_with_something_that_no_worker_can_have_is_refused_by_its_name(step: Step, odd: str) -> None:
    data = step.root / "in" / "data"
    path = data / "deep" / "odd"
    odd_entries(step, data / "deep")[odd](path)
    step.serve("echo")
    listed, reason = step.ask("GET", f"/list?path={data}")
    assert (listed, str(path) in reason.decode()) == (403, True), reason
    if "outside" in odd:
        read, body = step.ask("GET", f"/file?path={path}")
        through, _ = step.ask("GET", f"/file?path={path}/secret")
        assert (read, through, b"not yours" in body) == (404, 404, False)


def test_links_within_an_input_are_sent_as_what_they_lead_to(step: Step) -> None:
    data = step.root / "in" / "data"
    (data / "linked").symlink_to("run.sh")
    (data / "folder").symlink_to(data / "deep")
    step.serve("echo")
    assert worker(step).returncode == 0
    arrived = {str(path.relative_to(step.arrived)) for path in step.arrived.rglob("*") if path.is_file()}
    assert arrived == {"deep/a.txt", "folder/a.txt", "linked", "run.sh"}
    assert not any(path.is_symlink() for path in step.arrived.rglob("*"))


@pytest.mark.parametrize("odd", ODD[1:])
def test_an_output_with_something_that_cannot_be_sent_is_an_error_that_names_it(step: Step, odd: str) -> None:
    model = staged(step, "model")
    model.mkdir(parents=True)  # before the command: its volume is the same here
    odd_entries(step, model)[odd](model / "odd")
    step.serve("true")
    done = worker(step)
    assert (done.returncode, f"gpuquota: the output {model}/odd is " in done.stderr) == (1, True), done.stderr


def test_links_within_an_output_are_sent_as_what_they_lead_to(step: Step, sent: list[Any]) -> None:
    model = staged(step, "model")
    (model / "step-2").mkdir(parents=True)
    (model / "step-2" / "weights").write_text("w")
    (model / "latest").symlink_to(model / "step-2")
    (model / "best").symlink_to(step.root / "secret")
    step.serve("true")
    assert worker(step).returncode == 0
    sizes = {"best": 9, "latest/weights": 1, "step-2/weights": 1}
    assert sent == [[[str(model / name), size] for name, size in sizes.items()]]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/complete?worker=w0", b"[" * 100_000), ("/complete?worker=w0", b"{}x"), ("/complete?worker=w0", b"[1]")],
)
def test_a_request_that_cannot_be_read_is_refused(step: Step, path: str, body: bytes) -> None:
    step.serve("echo")
    assert step.ask("PUT", path, body=body)[0] == 400


def test_a_mode_that_is_no_number_is_refused(step: Step) -> None:
    step.serve("echo")
    target = f"{step.staging.directories()[0]}/x"
    assert step.ask("PUT", f"/file?path={target}&mode=rwx", body=b"x")[0] == 400


def test_an_input_within_another_one_hides_nothing_of_it(step: Step) -> None:
    data = step.root / "in" / "data"
    part = {"name": "part", "uri": str(data / "deep")}
    inputs = step.executor_input["inputs"]["artifacts"]
    step.executor_input["inputs"]["artifacts"] = {"a-part": {"artifacts": [part]}, **inputs}
    step.serve("true")
    assert worker(step).returncode == 0
    assert {path.name for path in step.arrived.rglob("*")} == {"deep", "a.txt", "run.sh"}


def test_files_with_the_longest_names_arrive(step: Step, sent: list[Any]) -> None:
    name = "n" * 255
    (step.root / "in" / "data" / name).touch()
    staged(step, "model").mkdir(parents=True)
    (staged(step, "model") / name).touch()
    step.serve("true")
    done = worker(step, "--timeout=1s")
    assert done.returncode == 0, done.stderr
    assert (step.arrived / name).exists()
    assert sent == [[[str(staged(step, "model", name)), 0]]]


@pytest.fixture
def full_disk() -> Iterator[int]:
    """A disk that takes so many bytes of a file, the last ones in a write of a part: a limit of this process."""
    size = 3 << 19
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.parametrize("size", [2 << 20, 200 << 20])
def test_an_output_for_which_the_launcher_has_no_space_fails_the_worker_with_that(
    step: Step, full_disk: int, size: int
) -> None:
    model = "{{gpuquota.outputs.artifacts['model'].path}}"
    step.serve("sh", "-c", f'ulimit -S -f unlimited; truncate --size={size} "$0"', model)
    done = worker(step)
    assert done.returncode == 1
    assert "507 [Errno 27] File too large" in done.stderr
    assert size > full_disk


def test_an_input_that_the_launcher_cannot_read_fails_the_worker_with_that(step: Step) -> None:
    data = step.root / "in" / "data"
    (data / "n").symlink_to("n" * 300)
    step.serve("true")
    listed, reason = step.ask("GET", f"/list?path={data}")
    assert (listed, b"File name too long" in reason) == (500, True)


def test_why_a_file_is_refused_arrives_while_it_is_still_sent(step: Step) -> None:
    step.serve("true")
    body = bytes(32 << 20)
    assert step.ask("PUT", f"/file?path={step.root}/secret", body=body) == (403, b"Forbidden")


def test_a_link_on_a_volume_of_both_pods_leads_no_upload_out_of_the_outputs(step: Step) -> None:
    step.serve("true")
    staged(step).mkdir(parents=True)
    staged(step, "model").symlink_to(step.root)
    assert step.ask("PUT", f"/file?path={staged(step, 'model', 'secret')}", body=b"mine")[0] == 403
    assert (step.root / "secret").read_text() == "not yours"


def test_the_launcher_may_read_every_output_and_no_other_user_more_than_the_workers(step: Step) -> None:
    step.serve("true")
    assert step.ask("PUT", f"/file?path={staged(step, 'model')}&mode=40", body=b"w")[0] == 201
    assert staged(step, "model").stat().st_mode & 0o777 == 0o640


def test_a_launcher_in_a_cluster_of_ipv6_is_reached(step: Step) -> None:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        step.address = "::1"  # where this machine has it
    step.serve(*WRITE_MODEL)
    done = worker(step, "--timeout=1s")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["/file?path={data}/%00", "/list?path={data}/%00"])
def test_a_path_that_cannot_be_one_is_refused(step: Step, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    step.serve("echo")
    assert step.ask("GET", path.format(data=step.root / "in" / "data"))[0] == 400
    assert capfd.readouterr().err == ""
