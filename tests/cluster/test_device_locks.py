"""Two clusters of one machine do not hand out the same GPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.cluster.local.workers.device_locks import Holder, hold
from kfp_gpuquota.cluster.local.workers.shim import start_time
from kfp_gpuquota.errors import ConflictError, DeviceError

if TYPE_CHECKING:
    from pathlib import Path

NODES = (Node(name="node-0", devices=(Device(index=0, model="A100", uuid="GPU-1"), Device(index=1, model="slot"))),)
MINE = Holder(uid=os.getuid(), home="/home/me/gpuquota", pid=os.getpid(), started=start_time(os.getpid()))
THEIRS = Holder(uid=0, home="/root/gpuquota", pid=1)


def test_a_second_cluster_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with hold(NODES, THEIRS, tmp_path) as locks:
        assert len(locks) == 1, "only real GPUs are locked"
        with pytest.raises(ConflictError) as refused, hold(NODES, MINE, tmp_path):
            pass
    assert "GPU 0 (A100, GPU-1) is in use by the cluster of user root in /root/gpuquota (pid 1)" in str(refused.value)
    with hold(NODES, MINE, tmp_path):
        pass


def test_every_user_can_see_the_lock(tmp_path: Path) -> None:
    with hold(NODES, MINE, tmp_path):
        (file,) = tmp_path.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o666


def test_a_gpu_stays_taken_while_a_job_runs_and_its_own_cluster_returns_to_it(tmp_path: Path) -> None:
    with hold(NODES, MINE, tmp_path) as locks:
        shim = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=locks
        )
    try:
        with pytest.raises(ConflictError), hold(NODES, THEIRS, tmp_path):
            pass
        with hold(NODES, MINE, tmp_path):
            shim.communicate(b"\n")
            with pytest.raises(ConflictError), hold(NODES, THEIRS, tmp_path):
                pass
    finally:
        shim.kill()
        shim.wait()


def test_a_gpu_of_a_daemon_that_runs_stays_taken_while_nobody_has_its_lock(tmp_path: Path) -> None:
    with hold(NODES, MINE, tmp_path):
        pass
    with pytest.raises(ConflictError), hold(NODES, THEIRS, tmp_path):
        pass
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(f'"started":{MINE.started}'.encode(), b'"started":1'))
    with hold(NODES, THEIRS, tmp_path):
        pass


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "gpuquota-GPU-1.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="cannot be opened"), hold(NODES, MINE, tmp_path):
        pass
