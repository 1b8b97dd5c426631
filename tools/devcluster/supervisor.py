"""The process above all others of one devcluster: starts them, starts them again when they die, ends them in order.

`python -m tools.devcluster.supervisor DIR`: one line on standard output when the cluster is ready or could not start.
It ends on SIGTERM, and an attached one also when its standard input does, which is when its starter ends, however that
came about. Its children are killed by the kernel when it is killed itself; containers alone are left then, for `down`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tools.devcluster import binaries, control_plane, fake_nodes, node, processes
from tools.devcluster.api import Api, ApiError
from tools.devcluster.layout import SUPERVISOR, Layout, Options, Ports, free_ports

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tools.devcluster.processes import Program

START_S: Final = 90.0
PROBE_EVERY_S: Final = 0.02
RESTART_AFTER_S: Final = 0.2
LAST_FIRST: Final = (
    "kwok",
    "kube-scheduler",
    "kube-controller-manager",
    "kubelet",
    "containerd",
    "kube-apiserver",
    "etcd",
)


class StartError(Exception):
    """A program did not come up; the message holds the end of its log."""


class Supervisor:
    """All programs of one devcluster."""

    def __init__(self, layout: Layout, options: Options) -> None:
        self.layout, self.options = layout, options
        self.folder = binaries.provide()
        self.ports: Ports = free_ports()
        self.bridge, self.prefix = "", "127.0.0"
        self.programs: dict[str, Program] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Everything, in order; returns when the cluster takes work. Raises StartError."""
        address = self._make_network()
        control_plane.prepare(self.layout, self.ports, address)
        self._launch(control_plane.store(self.folder, self.layout, self.ports))
        self._launch(control_plane.api_server(self.folder, self.layout, self.ports, self.options, address))
        api = Api.of_kubeconfig(self.layout.kubeconfig)
        self._await("kube-apiserver", api.healthy)
        for program in control_plane.controllers(self.folder, self.layout, self.options):
            self._launch(program)
        if self.options.kwok_nodes is not None:
            self._launch(fake_nodes.kwok(self.folder, self.layout))
            fake_nodes.add(api, self.options.kwok_nodes, self.options.gpus_per_node)
        if self.options.kubelet:
            self._start_node(api)
        api.until("/api/v1/namespaces/default/serviceaccounts/default", lambda _found: True)

    def tend(self) -> None:
        """Restart programs that have died and are not paused, until the parent process exits."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, lambda _number, _frame: None)
        starter = [sys.stdin.fileno()] if self.options.attached else []
        while True:
            readable, _, _ = select.select([reader, *starter], [], [])
            if reader not in readable:
                return
            os.read(reader, 4096)
            self._start_again()

    def end(self) -> None:
        """End containers first, then their runtime, then the control plane; kill whatever is left."""
        for name in ("kwok", "kube-scheduler", "kube-controller-manager"):
            self._stop(name)
        if "kubelet" in self.running:
            try:
                node.remove_pods(Api.of_kubeconfig(self.layout.kubeconfig))
            except (ApiError, OSError, TimeoutError) as error:
                sys.stderr.write(f"pods are swept away, since deleting them failed: {error}\n")
        for name in LAST_FIRST:
            self._stop(name)
        if self.options.kubelet:
            node.sweep(self.layout, self.bridge)

    def _make_network(self) -> str:
        if not self.options.kubelet:
            return "127.0.0.1"
        self.bridge, self.prefix = node.make_bridge()
        (self.layout.root / "bridge").write_text(self.bridge)
        return f"{self.prefix}.1"

    def _start_node(self, api: Api) -> None:
        node.prepare(self.layout, self.ports, self.bridge, self.prefix)
        self._launch(node.runtime(self.layout))
        self._await("containerd", lambda: node.runtime_answers(self.layout))
        node.import_images(self.layout)
        control_plane.allow_kubelet_access(api)
        flags = self.options.flags.get("kubelet", [])
        self._launch(node.kubelet(self.folder, self.layout, self.prefix, flags))
        node.add_gpus(api, self.options.gpus)

    def _launch(self, program: Program) -> None:
        self.programs[program.name] = program
        self.running[program.name] = processes.start(program, self.layout)

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            dead = next((one for one, process in self.running.items() if process.poll() is not None), None)
            if dead is not None or time.monotonic() > deadline:
                raise StartError(f"{dead or name} did not start:\n{_tail(self.layout.log(dead or name))}")
            time.sleep(PROBE_EVERY_S)

    def _start_again(self) -> None:
        for name, process in list(self.running.items()):
            if process.poll() is not None and not self.layout.hold_file(name).exists():
                time.sleep(RESTART_AFTER_S)  # a program that dies at once must not take the machine with it
                self._launch(self.programs[name])

    def _stop(self, name: str) -> None:
        if (process := self.running.pop(name, None)) is not None:
            processes.stop(process)
            self.layout.pid_file(name).unlink(missing_ok=True)


def main(directory: str) -> int:
    """Run one devcluster until a signal ends it."""
    layout = Layout(root=Path(directory))
    options = msgspec.json.decode(layout.options.read_bytes(), type=Options)
    processes.write_pid(layout.pid_file(SUPERVISOR), os.getpid())
    supervisor = Supervisor(layout, options)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    try:
        supervisor.start()
    except (StartError, ApiError, OSError, RuntimeError, TimeoutError) as error:
        _say({"error": str(error)})
        return 1
    else:
        _say({"kubeconfig": str(layout.kubeconfig)})
        supervisor.tend()
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.end()
        layout.pid_file(SUPERVISOR).unlink(missing_ok=True)


def _say(line: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
