"""A machine of its own for a raylet: a network namespace with an address, and a cable that can be pulled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ray.conftest import STORE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator


class Machine:
    """`here` is this machine's address on the cable, `there` the one of the other end."""

    def __init__(self) -> None:
        number = os.getpid() % (1 << 14)  # two test runs at once have different names and addresses
        self._name = f"gpuquota-{number}"
        self._cable = f"gq{number}"
        network = f"198.18.{number >> 6}"  # RFC 2544: for tests of networks
        self.here, self.there = (f"{network}.{(number & 63) * 4 + host}" for host in (1, 2))
        self._raylets: list[subprocess.Popen[bytes]] = []

    def set_up(self) -> None:
        """Make the namespace. Raises CalledProcessError without the right to do so."""
        far = f"{self._cable}x"
        _ip("netns", "add", self._name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", far, "netns", self._name)
        _ip("address", "add", f"{self.here}/30", "dev", self._cable)
        _ip("link", "set", self._cable, "up")
        _ip("-n", self._name, "address", "add", f"{self.there}/30", "dev", far)
        _ip("-n", self._name, "link", "set", far, "up")
        _ip("-n", self._name, "link", "set", "lo", "up")

    def start_raylet(self, head: str, gpus: int) -> None:
        """Start a raylet there, as a user does on another machine."""
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}", "--block")
        shape = (f"--node-ip-address={self.there}", "--num-cpus=0", f"--num-gpus={gpus}")
        command = ("ip", "netns", "exec", self._name, *ray, *shape, f"--object-store-memory={STORE_BYTES}")
        self._raylets.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def has(self, pid: int) -> bool:
        """Return whether this process runs there."""
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()

    def pull_cable(self) -> None:
        """From now on nothing passes, and no connection ends."""
        _ip("link", "set", self._cable, "down")

    def plug_in(self) -> None:
        """Let packets pass again."""
        _ip("link", "set", self._cable, "up")

    def remove(self) -> None:
        """End what runs there, and remove the namespace with its end of the cable."""
        there = subprocess.run(["ip", "netns", "pids", self._name], capture_output=True, text=True, check=False)
        for pid in map(int, there.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for raylet in self._raylets:
            raylet.wait()
        subprocess.run(["ip", "netns", "delete", self._name], check=False)


@contextlib.contextmanager
def other_machine() -> Iterator[Machine]:
    """A machine beside this one; without the right to make one, the test is skipped, or fails where all must run."""
    if shutil.which("ip") is None:
        _lacking("no ip program (Debian's iproute2 has it)")
    machine = Machine()
    try:
        try:
            machine.set_up()
        except subprocess.CalledProcessError as error:
            _lacking(f"no network namespace can be made: {error.stderr.decode().strip()}")
        yield machine
    finally:
        machine.remove()


def _lacking(lack: str) -> None:
    (pytest.fail if os.environ.get("GPUQUOTA_REQUIRE_KUBERNETES") else pytest.skip)(lack)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
