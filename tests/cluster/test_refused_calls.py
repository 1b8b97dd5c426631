"""A kernel, a container's filter or a file system that lacks something: it works without, or says what is missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.workers import shim
from tests.cluster.test_shim import Shim, a_shim, is_running
from tests.conftest import EmbeddedCluster, kill_processes_of
from tests.polling import TIMEOUT_S
from tests.refused_calls import refusing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["a_shim"]
PROGRAM = str(Path(sys.executable).with_name("gpuquota"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Of a cluster that is killed at the end."""
    yield Home(tmp_path / "home")
    kill_processes_of(tmp_path / "home")


def start(home: Home, calls: Mapping[str, int]) -> subprocess.CompletedProcess[str]:
    """Start a cluster that is refused these calls."""
    command = refusing(calls, PROGRAM, "cluster", "start", "--gpus-per-node", "1", "--cpu-slots")
    environment = {**os.environ, "GPUQUOTA_HOME": str(home.root)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"pidfd_open": errno.ENOSYS}, "needs Linux 5.3 or newer"),
        ({"pidfd_open": errno.EPERM}, "the filter of this container, refuses pidfd_open (Operation not permitted)"),
        ({"flock": errno.ENOLCK}, "has no locks (No locks available); set GPUQUOTA_HOME to a directory on a disk"),
    ],
)
def test_a_cluster_says_what_it_cannot_do_without(home: Home, calls: dict[str, int], message: str) -> None:
    ended = start(home, calls)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_cluster_works_without_what_it_can_do_without(home: Home) -> None:
    calls = {"fallocate": errno.EOPNOTSUPP, "keyctl": errno.ENOSYS}
    assert start(home, calls).returncode == 0
    cluster = EmbeddedCluster(home, connect({"GPUQUOTA_HOME": str(home.root)}))
    cluster.project("team-a", 1)
    cluster.submit("job", "true")
    cluster.wait_for_phase("job", "Succeeded")
    cluster.client.stop_cluster()


def test_a_shim_without_locks_starts_nothing_and_fails(tmp_path: Path) -> None:
    """It took that for another shim's lock, and its job was starting for good."""
    one = Shim(tmp_path, refusing({"flock": errno.ENOLCK}))
    one.start("touch", str(tmp_path / "ran"))
    assert one.process is not None
    assert one.process.wait(TIMEOUT_S) not in {0, shim.EXIT_LOCKED}
    assert not (tmp_path / "process.json").exists()


ADOPT = """
import asyncio, sys
from pathlib import Path
from kfp_gpuquota.cluster.local.workers.shims import Shims

async def main():
    return Shims(None).adopt("worker", Path(sys.argv[1]))

try:
    print(asyncio.run(main()))
except OSError as error:
    print(error.strerror)
"""


def test_a_worker_that_cannot_be_looked_at_now_has_not_ended(a_shim: Shim) -> None:
    """A daemon without descriptors took it for one that has, and killed what it had started."""
    a_shim.start("sleep", "infinity")
    worker = a_shim.worker()
    for calls, answer in (({"pidfd_open": errno.EMFILE}, "Too many open files"), ({}, "running")):
        command = refusing(calls, sys.executable, "-c", ADOPT, str(a_shim.directory))
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == answer
    assert is_running(worker)
