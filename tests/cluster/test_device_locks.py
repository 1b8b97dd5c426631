"""Two clusters of one machine do not hand out the same GPU."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.cluster.local.workers import device_locks
from kfp_gpuquota.errors import ConflictError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

NODES = (Node(name="node-0", devices=(Device(index=0, model="A100", uuid="GPU-1"), Device(index=1, model="slot"))),)


class Machine:
    """Clusters of one machine; no other test sees their locks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._prefix = folder, f"gpuquota-test-{uuid.uuid4().hex}"

    def hold(self, cluster: str) -> AbstractContextManager[tuple[int, ...]]:
        return device_locks.hold(NODES, self.folder / cluster, prefix=self._prefix, earlier=self.folder)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_cluster_is_refused_with_user_and_process_of_the_first(machine: Machine) -> None:
    with machine.hold("first") as locks:
        assert len(locks) == 1, "only real GPUs are locked"
        with pytest.raises(ConflictError) as refused, machine.hold("second"):
            pass
    message = str(refused.value)
    assert "GPU 0 (A100, GPU-1) is in use by a cluster of user" in message
    assert f"(started as process {os.getpid()})" in message
    with machine.hold("second"):
        pass


def test_a_gpu_stays_taken_while_a_job_runs_and_its_own_cluster_returns_to_it(machine: Machine) -> None:
    with machine.hold("mine") as locks:
        shim = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=locks
        )
    try:
        with pytest.raises(ConflictError), machine.hold("theirs"):
            pass
        for _ in range(20):  # a daemon that is restarted again and again, each time beside the same job
            with machine.hold("mine"):
                pass
        with machine.hold("mine"):
            shim.communicate(b"\n")
            with pytest.raises(ConflictError), machine.hold("theirs"):
                pass
        with machine.hold("theirs"):
            pass
    finally:
        shim.kill()
        shim.wait()


def test_inodes_of_another_boot_are_nobodys(machine: Machine) -> None:
    with machine.hold("mine"):
        record = machine.folder / "other"
        record.write_text(json.dumps({"boot": "another", "inodes": list(range(1 << 12))}))
        record.write_bytes((machine.folder / "mine").read_bytes().replace(b'"boot":"', b'"boot":"x'))
        with pytest.raises(ConflictError), machine.hold("other"):
            pass


def test_a_lock_of_an_earlier_version_counts_while_a_process_holds_it(machine: Machine) -> None:
    path = machine.folder / "gpuquota-GPU-1.lock"
    path.write_text(json.dumps({"uid": os.getuid() + 1, "home": "/home/other", "pid": 1}))
    with machine.hold("mine"):
        pass
    with path.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="in use by another cluster"), machine.hold("mine"):
            pass
    with machine.hold("mine"):
        pass
