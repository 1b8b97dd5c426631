"""Two users' clusters of one machine, in a directory as /tmp is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.cluster.local.workers.device_locks import Holder, hold
from tests.security.other_user import NOBODY, as_root

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = as_root

GPU = (Node(name="node-0", devices=(Device(index=0, model="A100", uuid="GPU-1"),)),)
MINE = Holder(uid=os.geteuid(), home="/root/gpuquota", pid=1)
THEIRS = f"""
import os, sys
from pathlib import Path
from tests.security.test_device_locks import GPU, Holder, hold
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    with hold(GPU, Holder(uid={NOBODY}, home="/home/theirs", pid=os.getpid()), Path(sys.argv[1])):
        print("held")
except Exception as error:
    print(error)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users may write to, with the sticky bit."""
    with tempfile.TemporaryDirectory(prefix="gpuquota-locks-", dir="/tmp") as directory:
        Path(directory).chmod(0o1777)
        yield Path(directory)


def held_by_the_other_user(directory: Path) -> str:
    """What another user's cluster prints that takes the GPU: "held", or the refusal."""
    program = [sys.executable, "-c", THEIRS, str(directory)]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_a_gpu_of_one_users_cluster_is_refused_to_another_user_until_it_is_free(shared: Path) -> None:
    with hold(GPU, MINE, shared):
        refused = held_by_the_other_user(shared)
        assert "GPU 0 (A100, GPU-1) is in use by the cluster of user root in /root/gpuquota (pid 1)" in refused
    assert held_by_the_other_user(shared) == "held", "the file is root's, and its lock is free"


def test_a_lock_that_another_user_has_created_is_taken_when_it_is_free(shared: Path) -> None:
    assert held_by_the_other_user(shared) == "held"
    (lock,) = shared.iterdir()
    assert lock.stat().st_uid == NOBODY
    with hold(GPU, MINE, shared):
        assert "in use by the cluster of user root" in held_by_the_other_user(shared)
