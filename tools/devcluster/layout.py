"""What a devcluster is made of: its options, its folder, its ports. Data only."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Final

import msgspec

ADMIN: Final = "admin"
SUPERVISOR: Final = "supervisor"
SERVICE_RANGE: Final = "10.96.0.0/16"
SERVICE_ADDRESS: Final = "10.96.0.1"  # the first of the range: the Service `kubernetes`
# Below the range from which the kernel takes ports for outgoing connections, so that none of those is in the way.
PORTS: Final = range(20_000, 32_000)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. `gpus` are the real node's, `gpus_per_node` those of each of the `kwok_nodes`.

    None of these is without KWOK, 0 of them with it, for nodes that are added later.

    `flags` are more flags for a program, by its name: {"kube-apiserver": ["--v=4"]}. With `attached` the cluster ends
    when its parent process ends. `etcd` is the data directory of an earlier cluster, whose objects this one begins
    with; it is copied.
    """

    kubelet: bool = False
    gpus: int = 2
    kwok_nodes: int | None = None
    gpus_per_node: int = 8
    flags: dict[str, list[str]] = {}
    attached: bool = True
    etcd: str = ""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """One free port for each server."""

    api: int
    etcd: int
    etcd_peer: int
    kubelet: int
    kubelet_health: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything of one devcluster lies; all paths are absolute."""

    root: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.root / "kubeconfig"

    @property
    def options(self) -> Path:
        """What was asked for, for the supervisor to read."""
        return self.root / "options.json"

    @property
    def authority(self) -> Path:
        """The certificate authority of the API server."""
        return self.root / "certificates" / "ca.crt"

    @property
    def sockets(self) -> Path:
        """Return the node's directory for sockets: not below `root`, since their paths have at most 107 characters."""
        return Path("/var/lib/devcluster") / hashlib.sha256(bytes(self.root)).hexdigest()[:12]

    @property
    def etcd(self) -> Path:
        """All objects of the cluster."""
        return self.root / "etcd"

    @property
    def containerd_socket(self) -> Path:
        """Where the node's container runtime answers."""
        return self.sockets / "containerd.sock"

    def forget(self) -> None:
        """Remove what a cluster that ran here before has stored: each start is a new cluster."""
        for name in ("addresses", "certificates", "containerd", "etcd", "kubeconfigs", "logs", "opt", "run"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for path in (*self.root.glob("*.log"), *self.root.glob("*.hold")):
            path.unlink()

    def kubeconfig_of(self, user: str) -> Path:
        """Return the kubeconfig of a component or of a requested user."""
        return self.root / "kubeconfigs" / user.replace(":", "_").replace("/", "_")

    def pid_file(self, name: str) -> Path:
        """One line: the process id and when it started, in ticks since boot."""
        return self.root / f"{name}.pid"

    def hold_file(self, name: str) -> Path:
        """While it is there, the supervisor does not start the program again."""
        return self.root / f"{name}.hold"

    def log(self, name: str) -> Path:
        """Return the program's log."""
        return self.root / f"{name}.log"


def free_ports() -> Ports:
    """Return different ports without a listener."""
    names = Ports.__struct_fields__
    return msgspec.convert(dict(zip(names, _free(len(names)), strict=True)), Ports)


def free_port() -> int:
    """Return a port without a listener."""
    return _free(1)[0]


def _free(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = random.choice(PORTS)  # noqa: S311
        if _reserve(port):
            ports.append(port)
    return ports


def _reserve(port: int) -> bool:
    """Return whether nothing listens at the port and no other process was given it; this one keeps it to its end."""
    directory = Path(tempfile.gettempdir()) / f"gpuquota-ports-{os.getuid()}"
    directory.mkdir(exist_ok=True)
    lock = os.open(directory / str(port), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", port))  # noqa: S104
    except OSError:
        os.close(lock)
        return False
    return True
