"""Two users' clusters of one machine: what one of them can forge, and what it cannot."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.cluster.local.workers.device_locks import hold
from kfp_gpuquota.errors import ConflictError
from tests.polling import TIMEOUT_S
from tests.security.other_user import NOBODY, as_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = as_root

GPU = (Node(name="node-0", devices=(Device(index=0, model="A100", uuid="GPU-1"),)),)
AS_NOBODY = f"""
import os, sys
from pathlib import Path
from tests.security.test_device_locks import GPU, hold
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
prefix, shared = sys.argv[1], Path(sys.argv[2])
"""
THEIRS = f"""{AS_NOBODY}
try:
    with hold(GPU, shared / "theirs.json", prefix=prefix, earlier=shared):
        print("held", flush=True)
        sys.stdin.read()
except Exception as error:
    print(error)
"""


class Machine:
    """A directory as /tmp is, and locks that no other test sees."""

    def __init__(self, shared: Path) -> None:
        self.shared, self.prefix = shared, f"gpuquota-test-{uuid.uuid4().hex}"
        self.record = shared / "mine.json"

    def mine(self) -> None:
        """Take the GPU, and release it."""
        with hold(GPU, self.record, prefix=self.prefix, earlier=self.shared):
            pass

    def other_user(self, script: str) -> subprocess.Popen[str]:
        """Run a script as another user; it ends with its standard input."""
        program = [sys.executable, "-c", script, self.prefix, str(self.shared)]
        return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def legacy(self) -> Path:
        """The file by which version 0.2 locked the GPU."""
        return self.shared / "gpuquota-GPU-1.lock"


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="gpuquota-locks-", dir="/tmp") as directory:
        Path(directory).chmod(0o1777)
        yield Machine(Path(directory))


def test_a_gpu_of_one_users_cluster_is_refused_to_another_user_until_it_is_free(machine: Machine) -> None:
    with hold(GPU, machine.record, prefix=machine.prefix, earlier=machine.shared):
        refused = machine.other_user(THEIRS).communicate(timeout=TIMEOUT_S)[0]
        assert f"is in use by a cluster of user root (started as process {os.getpid()})" in refused
    assert machine.other_user(THEIRS).communicate(timeout=TIMEOUT_S)[0].strip() == "held"


def test_a_refusal_names_the_process_that_holds_the_lock_and_ends_with_it(machine: Machine) -> None:
    squatter = machine.other_user(THEIRS)
    assert squatter.stdout is not None
    assert squatter.stdout.readline().strip() == "held"
    with pytest.raises(ConflictError, match=rf"of user \S+ \(started as process {squatter.pid}\)"):
        machine.mine()
    squatter.kill()
    squatter.wait()
    machine.mine()


def _forged(machine: Machine, **holder: object) -> None:
    machine.legacy.write_text(json.dumps({"uid": 0, "home": "/root/gpuquota", "pid": 1, "started": 1, **holder}))


def _foreign_mode(machine: Machine) -> None:
    machine.legacy.touch()
    os.chown(machine.legacy, NOBODY, NOBODY)
    machine.legacy.chmod(0o000)


@pytest.mark.parametrize(
    "forge",
    [
        _forged,
        lambda machine: _forged(machine, uid=NOBODY),
        _foreign_mode,
        lambda machine: os.mkfifo(machine.legacy),
        lambda machine: machine.legacy.symlink_to("/etc/passwd"),
        lambda machine: machine.legacy.symlink_to("/dev/zero"),
        lambda machine: machine.legacy.mkdir(),
    ],
    ids=[
        "names pid 1",
        "names another user",
        "of a foreign mode",
        "a FIFO",
        "a link",
        "a link to a device",
        "a folder",
    ],
)
def test_no_file_in_a_shared_place_blocks_a_gpu(machine: Machine, forge: Callable[[Machine], None]) -> None:
    forge(machine)
    machine.mine()


def test_a_forged_lock_that_names_the_victim_does_not_make_it_go_on_without_one(machine: Machine) -> None:
    locked = machine.other_user(
        f"{AS_NOBODY}\nimport fcntl\nfile = open(shared / 'gpuquota-GPU-1.lock', 'w')\n"
        'file.write(\'{"uid": 0, "home": "/root", "pid": 1}\'); file.flush(); fcntl.flock(file, fcntl.LOCK_EX)\n'
        "print('locked', flush=True); sys.stdin.read()"
    )
    assert locked.stdout is not None
    assert locked.stdout.readline().strip() == "locked"
    with hold(GPU, machine.record, prefix=machine.prefix, earlier=machine.shared):
        assert "is in use" in machine.other_user(THEIRS).communicate(timeout=TIMEOUT_S)[0]
    locked.communicate(timeout=TIMEOUT_S)


def test_sockets_that_only_have_the_name_lock_nothing(machine: Machine) -> None:
    """Names that are bound and do not listen, connections to a lock, and a full queue of them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(f"\0{machine.prefix}/GPU-1/0123456789abcdef")
        machine.mine()
    with hold(GPU, machine.record, prefix=machine.prefix, earlier=machine.shared) as (descriptor,):
        kept = os.dup(descriptor)  # as a job does that the daemon leaves behind
        name = socket.socket(fileno=os.dup(descriptor)).getsockname()
        connections = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(10)]
        for one in connections:
            one.settimeout(0)
            one.connect_ex(name)
    machine.mine()
    for one in connections:
        one.close()
    os.close(kept)
