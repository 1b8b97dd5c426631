"""A devcluster from the outside: start it, use it, disturb it, stop it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tools.devcluster import binaries, control_plane, node, processes
from tools.devcluster.api import Api
from tools.devcluster.layout import SUPERVISOR, Layout, Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STOP_S: Final = 60.0
START_ATTEMPTS: Final = 3


class ClusterError(Exception):
    """The cluster did not start, or a command against it failed."""


class DevCluster:
    """A running cluster. `api` is the administrator's client."""

    def __init__(self, layout: Layout, supervisor: subprocess.Popen[bytes] | None) -> None:
        self.layout = layout
        self.api = Api.of_kubeconfig(layout.kubeconfig)
        self._supervisor = supervisor

    @classmethod
    def start(cls, directory: Path, options: Options | None = None) -> DevCluster:
        """Start a cluster in `directory`, which is made; returns when it takes work.

        Raises binaries.UnavailableError where this machine cannot, ClusterError where it should have.
        """
        options = options or Options()
        if lack := binaries.missing(kubelet=options.kubelet):
            raise binaries.UnavailableError(lack)
        binaries.provide()
        layout = Layout(root=directory.resolve())
        layout.root.mkdir(parents=True, exist_ok=True)
        if processes.read_pid(layout.pid_file(SUPERVISOR)) is not None:
            raise ClusterError(f"a cluster runs in {layout.root} already")
        _clean(layout)
        layout.forget()
        layout.options.write_bytes(msgspec.json.encode(options))
        for attempt in range(START_ATTEMPTS):
            if options.etcd:
                shutil.copytree(options.etcd, layout.etcd)
            supervisor = _launch(layout, attached=options.attached)
            assert supervisor.stdout is not None
            answer = json.loads(supervisor.stdout.readline() or '{"error": "the supervisor died"}')
            if "error" not in answer:
                return cls(layout, supervisor)
            _close(supervisor)
            # ports are free when they are chosen, and may not be any more when they are opened
            if "address already in use" not in answer["error"] or attempt == START_ATTEMPTS - 1:
                raise ClusterError(f"{answer['error']}\n{layout.log(SUPERVISOR).read_text()}")
            layout.forget()
        raise AssertionError("the last attempt raises")

    @classmethod
    def of(cls, directory: Path) -> DevCluster:
        """Return the cluster that another process started in `directory`."""
        return cls(Layout(root=directory.resolve()), None)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's, mode 0600."""
        return self.layout.kubeconfig

    @property
    def server(self) -> str:
        """The API server's URL on this machine."""
        return str(json.loads(self.kubeconfig.read_bytes())["clusters"][0]["cluster"]["server"])

    def stop(self) -> None:
        """End everything and return when all processes have exited."""
        stop(self.layout.root)
        if self._supervisor is not None:
            _close(self._supervisor)

    def kubectl(self, *arguments: str, stdin: str = "", user: str = "") -> str:
        """Standard output of one kubectl command, optionally as another user; raises ClusterError with its message."""
        identity = ["--as", user] if user else []
        done = subprocess.run(
            [binaries.provide() / "kubectl", f"--kubeconfig={self.kubeconfig}", *identity, *arguments],
            input=stdin.encode(),
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.decode().strip()}")
        return done.stdout.decode()

    def make_namespace(self, name: str, labels: Mapping[str, str] | None = None) -> str:
        """A namespace in which pods can be created at once: its ServiceAccount is there."""
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": dict(labels or {})}})
        self.api.until(f"/api/v1/namespaces/{name}/serviceaccounts/default", lambda _found: True)
        return name

    def service_account_token(self, namespace: str, name: str) -> str:
        """A token with which to be that ServiceAccount for an hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return str(self.api.create(path, {"spec": {"expirationSeconds": 3600}})["status"]["token"])

    def kubeconfig_of_service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig of a ServiceAccount, to run a program with just its rights."""
        return self._write_kubeconfig(
            f"{namespace}_{name}", {"token": self.service_account_token(namespace, name)}, namespace
        )

    def kubeconfig_of_user(self, user: str, *groups: str, namespace: str = "default") -> Path:
        """A kubeconfig of any user, by impersonation."""
        admin = json.loads(self.kubeconfig.read_bytes())["users"][0]["user"]
        return self._write_kubeconfig(user, {**admin, "as": user, "as-groups": list(groups)}, namespace)

    def container_log(self, namespace: str, pod: str, container: str) -> str:
        """The log of a container on the real node."""
        return self.api.text(f"/api/v1/namespaces/{namespace}/pods/{pod}/log", container=container)

    def import_image(self, archive: Path) -> None:
        """Load an image into the real node; pods use it with imagePullPolicy Never."""
        node.import_image(self.layout, archive)

    def signal_container(self, container: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the first process of a container on the real node; one that has ended is no error."""
        node.signal_container(self.layout, container, number)

    def await_healthy(self, timeout_s: float = 60.0) -> None:
        """Return when the API server takes requests, after it was away."""
        deadline = time.monotonic() + timeout_s
        while not self.api.healthy():
            if time.monotonic() > deadline:
                raise ClusterError(f"the API server is not ready after {timeout_s:g} s")
            time.sleep(0.02)

    def kill(self, program: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one program, as "kube-apiserver"; one that ends is started again."""
        pid = processes.read_pid(self.layout.pid_file(program))
        if pid is None:
            raise ClusterError(f"{program} does not run")
        os.kill(pid, number)

    @contextmanager
    def away(self, program: str) -> Iterator[None]:
        """Without one program for a while: it is ended, and started again at the end."""
        pid = processes.read_pid(self.layout.pid_file(program))
        self.layout.hold_file(program).touch()
        self.kill(program, signal.SIGKILL)
        assert pid is not None
        processes.await_end(pid, STOP_S)
        try:
            yield
        finally:
            self.layout.hold_file(program).unlink()
            self.kill(SUPERVISOR, signal.SIGHUP)

    @contextmanager
    def frozen(self, program: str) -> Iterator[None]:
        """With one program stopped in its tracks: connections stay open and nothing answers."""
        self.kill(program, signal.SIGSTOP)
        try:
            yield
        finally:
            self.kill(program, signal.SIGCONT)

    def _write_kubeconfig(self, name: str, user: dict[str, Any], namespace: str) -> Path:
        path = self.layout.kubeconfig_of(name)
        control_plane.write_secret(path, control_plane.kubeconfig(self.layout, self.server, user, namespace))
        return path


def stop(directory: Path) -> None:
    """End the cluster in `directory`, also what a killed supervisor has left; nothing to do is no error."""
    layout = Layout(root=directory.resolve())
    pid = processes.read_pid(layout.pid_file(SUPERVISOR))
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if not processes.await_end(pid, STOP_S):
            raise ClusterError(f"the supervisor {pid} does not end; {layout.log(SUPERVISOR)} may show why")
    _clean(layout)


def _close(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.wait(STOP_S)
    for pipe in (supervisor.stdin, supervisor.stdout):
        if pipe is not None:
            pipe.close()


def _clean(layout: Layout) -> None:
    # the kernel has killed the children of a supervisor that was killed; containers and their mounts have stayed
    bridge = layout.root / "bridge"
    if bridge.exists():
        node.sweep(layout, bridge.read_text())
        bridge.unlink()


def _launch(layout: Layout, *, attached: bool) -> subprocess.Popen[bytes]:
    repository = Path(__file__).parents[2]
    with layout.log(SUPERVISOR).open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tools.devcluster.supervisor", str(layout.root)],
            cwd=repository,
            stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
