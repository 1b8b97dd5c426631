"""A machine without disk space, inodes or descriptors: nothing is lost, and waiting work continues afterwards."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import Phase
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.errors import StateFileError
from kfp_gpuquota.server.cluster_api import follow_log
from tests.cluster.test_shim import Shim
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S, until
from tests.security.other_user import as_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import EmbeddedCluster

MIB = 1 << 20


@contextlib.contextmanager
def small_disk(path: Path, options: str) -> Iterator[Path]:
    """A file system in memory."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path) -> Path:
    """Take all that is left."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


@as_root
def test_a_job_that_succeeds_on_a_full_disk_has_succeeded(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with small_disk(tmp_path / "disk", "size=32m") as disk, running_cluster(disk / "home") as cluster:
        cluster.project("team-a", 1)
        cluster.submit("job", "sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; echo the end")
        worker = cluster.wait_for_phase("job", "Running").status.workers[0]
        filler = fill(disk)
        gate.touch()
        until((cluster.home.worker(worker.job_uid, worker.id) / "exit.json").exists)
        filler.unlink()
        assert cluster.wait_for("job", lambda job: job.status.phase.final).status.phase is Phase.SUCCEEDED


@as_root
def test_on_a_full_disk_a_job_can_be_deleted_and_a_new_one_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=32m") as disk, running_cluster(disk / "home") as cluster:
        cluster.project("team-a", 2)
        cluster.submit("large", "sh", "-c", "head -c 3000000 /dev/zero; sleep infinity")
        cluster.wait_for_phase("large", "Running")
        fill(disk)
        with pytest.raises(StateFileError, match="free some space"):
            submit_many(cluster)
        cluster.client.delete_job("team-a", "large")
        until(lambda: all(job.spec.name != "large" for job in cluster.client.list_jobs().jobs))
        (disk / "filler").unlink()


def submit_many(cluster: EmbeddedCluster) -> None:
    for number in range(500):
        cluster.submit(f"new-{number}", gpus=2)


@as_root
def test_a_job_that_prints_without_end_fills_no_disk_and_its_last_lines_are_kept(tmp_path: Path) -> None:
    config = ClusterConfig(gpus_per_node=1, log_limit_mib=4)
    with small_disk(tmp_path / "disk", "size=48m") as disk, running_cluster(disk / "home", config) as cluster:
        cluster.project("team-a", 1)
        cluster.submit("job", "sh", "-c", f"head -c {200 * MIB} /dev/zero | tr '\\0' y; echo the end")
        job = cluster.wait_for_phase("job", "Succeeded")
        log = cluster.home.worker(job.uid, f"{job.uid}-0") / "log"
        assert log.stat().st_size == 200 * MIB + len("the end\n")
        assert log.stat().st_blocks * 512 < 8 * MIB
        shown = b"".join(follow_log(cluster.client, "team-a", "job"))
        assert 3 * MIB < len(shown) < 8 * MIB
        assert shown.endswith(b"the end\n")
        assert b"\0" not in shown


@as_root
@pytest.mark.parametrize("options", ["size=32m,nr_inodes=60"])
def test_a_job_that_cannot_be_started_for_lack_of_inodes_starts_when_there_are_some(
    tmp_path: Path, options: str
) -> None:
    with small_disk(tmp_path / "disk", options) as disk, running_cluster(disk / "home") as cluster:
        cluster.project("team-a", 1)
        taken = []
        with contextlib.suppress(OSError):
            for number in range(100):
                (disk / f"file-{number}").touch()
                taken.append(disk / f"file-{number}")
        cluster.submit("job", "true")
        waiting = cluster.wait_for("job", says_that_it_is_tried_again)
        assert waiting.status.phase is Phase.STARTING
        for path in taken:
            path.unlink()
        cluster.wait_for_phase("job", "Succeeded")


@as_root
def test_a_daemon_that_is_killed_when_no_inode_is_left_is_started_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=32m,nr_inodes=60") as disk, running_cluster(disk / "home") as cluster:
        cluster.project("team-a", 1)
        files = [disk / f"file-{number}" for number in range(100)]
        with contextlib.suppress(OSError):
            for path in files:
                path.touch()
        cluster.kill_daemon()
        assert [view.project.name for view in cluster.client.list_projects()] == ["team-a"]
        for path in files:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_job_that_cannot_be_started_for_lack_of_descriptors_starts_when_there_are_some(
    embedded_cluster: EmbeddedCluster,
) -> None:
    embedded_cluster.project("team-a", 1)
    with no_descriptors(embedded_cluster.client.health().pid):
        embedded_cluster.submit("job", "true")
        waiting = embedded_cluster.wait_for("job", says_that_it_is_tried_again)
        assert waiting.status.phase is Phase.STARTING
    embedded_cluster.wait_for_phase("job", "Succeeded")


def test_a_job_that_waits_to_be_tried_again_can_be_deleted(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.project("team-a", 1)
    with no_descriptors(embedded_cluster.client.health().pid):
        embedded_cluster.submit("job", "true")
        embedded_cluster.wait_for("job", says_that_it_is_tried_again)
        embedded_cluster.client.delete_job("team-a", "job")
    until(lambda: not embedded_cluster.client.list_jobs().jobs)


def says_that_it_is_tried_again(job: object) -> bool:
    reason = job.status.reason  # type: ignore[attr-defined]
    return reason is not None and "it is tried again in" in reason.message


def test_a_log_without_a_limit_is_kept_whole(tmp_path: Path) -> None:
    shim = Shim(tmp_path)
    shim.start("sh", "-c", f"head -c {3 * MIB} /dev/zero")
    assert shim.read("exit.json")["code"] == 0
    assert (tmp_path / "log").stat().st_size == 3 * MIB


def test_a_shim_that_finds_no_room_for_the_exit_record_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "exit.reserve").mkdir()
    ran = tmp_path / "ran"
    shim = Shim(tmp_path)
    shim.start("touch", str(ran))
    assert shim.process is not None
    assert shim.process.wait(TIMEOUT_S) not in {0, 75}
    assert not ran.exists()
    assert not (tmp_path / "process.json").exists()


def test_an_exit_that_cannot_be_recorded_at_once_is_recorded_later(tmp_path: Path) -> None:
    gate, reserve = tmp_path / "gate", tmp_path / "exit.reserve"
    shim = Shim(tmp_path)
    shim.start("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; exit 3")
    worker = shim.read("process.json")["pid"]
    reserve.rename(tmp_path / "away")
    gate.touch()
    until(lambda: not Path(f"/proc/{worker}").exists(), "the end of the worker")
    (tmp_path / "away").rename(reserve)
    assert shim.read("exit.json")["code"] == 3
