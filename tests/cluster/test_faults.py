"""What may go wrong around an embedded cluster: each fault has a sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import JobSpec, Phase, Project, ReasonCode
from kfp_gpuquota.api.wire import Lease
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.start import await_stop, ensure_running
from kfp_gpuquota.cluster.local.workers.shim import start_time
from kfp_gpuquota.errors import ClusterStartError, StateFileError
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster


@pytest.fixture
def team(embedded_cluster: EmbeddedCluster) -> EmbeddedCluster:
    embedded_cluster.project("team-a", 2)
    return embedded_cluster


# The state file and the directory


def test_a_state_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    with sqlite3.connect(home.database) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    before = home.database.read_bytes()
    with pytest.raises(ClusterStartError, match=r"newer version \(format 99, this one knows \d+\); upgrade"):
        ensure_running(home)
    assert home.database.read_bytes() == before


def test_a_state_file_that_is_none_is_left_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.database.write_bytes(b"this is no database, but perhaps somebody's thesis" * 100)
    with pytest.raises(ClusterStartError, match="not a database"):
        ensure_running(home)
    assert home.database.read_bytes().startswith(b"this is no database")


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for unusable in (tmp_path / "file" / "home", Path("/proc/gpuquota")):
        with pytest.raises(StateFileError, match="choose another with the environment variable GPUQUOTA_HOME"):
            ensure_running(Home(unusable))


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    foreign = Path("/")
    if os.geteuid() == 0:
        foreign = tmp_path / "home"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
    with pytest.raises(StateFileError, match="belongs to another user"):
        ensure_running(Home(foreign))


def test_a_directory_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    with running_cluster(tmp_path / "home") as cluster:
        assert cluster.home.root.stat().st_mode & 0o777 == 0o700


def test_another_user_of_the_machine_reads_neither_token_nor_logs_nor_state() -> None:
    with tempfile.TemporaryDirectory() as shared, running_cluster(Path(shared) / "home") as cluster:
        Path(shared).chmod(0o755)
        cluster.project("team-a", 1)
        job = cluster.submit("job", "sh", "-c", "echo secret; sleep infinity")
        cluster.wait_for_phase("job", "Running")
        log = cluster.home.worker(job.uid, f"{job.uid}-0") / "log"
        for path in (cluster.home.token_file, cluster.home.database, log, cluster.home.job_token_file(job.uid)):
            assert path.exists()
            assert path.stat().st_mode & 0o077 == 0 or cluster.home.root.stat().st_mode & 0o077 == 0
            if os.geteuid() == 0:
                assert b"Permission denied" in as_nobody("cat", str(path))


def as_nobody(*command: str) -> bytes:
    return subprocess.run(command, user=65534, capture_output=True, check=False).stderr


def test_a_full_disk_refuses_what_is_new_and_loses_nothing(team: EmbeddedCluster) -> None:
    team.submit("before")
    team.wait_for_phase("before", "Running")
    with full_disk(team.client.health().pid):
        with pytest.raises(StateFileError, match="nothing was changed: free some space"):
            team.submit("refused")
        with pytest.raises(StateFileError):
            team.client.create_project(Project(name="team-b", guaranteed=1))
        assert [job.spec.name for job in team.client.list_jobs().jobs] == ["before"]
    assert team.job("before").status.phase is Phase.RUNNING
    team.submit("after", "true")
    team.wait_for_phase("after", "Succeeded")


def test_the_end_of_a_worker_on_a_full_disk_is_recorded_when_there_is_space_again(
    team: EmbeddedCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = team.submit("job", "sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; exit 5")
    team.wait_for_phase("job", "Running")
    exit_file = team.home.worker(job.uid, f"{job.uid}-0") / "exit.json"
    with full_disk(team.client.health().pid):
        gate.touch()
        while not exit_file.exists():
            time.sleep(0.01)
    assert team.wait_for_phase("job", "Failed").status.exit_code == 5


@pytest.mark.slow
def test_a_lease_that_ends_while_nothing_can_be_written_cancels_its_job_later(team: EmbeddedCluster) -> None:
    spec = JobSpec(name="job", project="team-a", command=("sleep", "infinity"), gpus=1, grace_period_s=1.0)
    team.client.submit(spec, lease=Lease(holder="me", duration_s=0.1))
    with contextlib.closing(sqlite3.connect(team.home.database, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        until(lambda: ": its lease has ended, which is recorded" in team.home.log_file.read_text())
        database.execute("ROLLBACK")
    reason = team.wait_for("job", lambda job: job.status.phase.final).status.reason
    assert reason is not None
    assert reason.code is ReasonCode.LEASE_ENDED


class full_disk:  # noqa: N801 (reads like a statement)
    """The process can write no byte more to any file."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> None:
        self.before = resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, self.before)


# Processes, daemons


def test_a_pid_that_was_given_to_somebody_else_is_not_taken_for_the_worker(team: EmbeddedCluster) -> None:
    job = team.submit("job")
    team.wait_for_phase("job", "Running")
    directory = team.home.worker(job.uid, f"{job.uid}-0")
    identity = json.loads((directory / "process.json").read_text())
    team.kill_daemon()
    unrelated = subprocess.Popen(["sleep", "infinity"])
    try:
        os.kill(identity["shim_pid"], 9)
        reused = {**identity, "shim_pid": unrelated.pid, "shim_start": start_time(unrelated.pid) - 1}
        (directory / "process.json").write_text(json.dumps(reused))
        assert team.wait_for_phase("job", "Failed").status.exit_code == 137
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


def test_a_daemon_killed_between_its_decision_and_the_process_starts_it_later(team: EmbeddedCluster) -> None:
    job = team.submit("job", "sh", "-c", "exit 6")
    team.wait_for_phase("job", "Failed")
    worker = f"{job.uid}-0"
    team.client.stop_cluster()
    await_stop(team.home)
    with sqlite3.connect(team.home.database) as database:  # as it was right after the decision was committed
        for table, key, phase in (("workers", "id", "Starting"), ("jobs", "uid", "Starting")):
            name = worker if table == "workers" else job.uid
            (body,) = database.execute(f"SELECT body FROM {table} WHERE {key} = ?", (name,)).fetchone()
            record = json.loads(body)
            part = record["worker"] if table == "workers" else record["status"]
            part.update(phase=phase, exit_code=None, finished_at=None)
            record.pop("intent", None)
            database.execute(f"UPDATE {table} SET body = ? WHERE {key} = ?", (json.dumps(record), name))
    database.close()
    shutil.rmtree(team.home.worker(job.uid, worker))
    assert team.wait_for_phase("job", "Failed").status.exit_code == 6


def test_many_clients_at_once_start_one_daemon(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    code = "from kfp_gpuquota.cluster.connect import connect; print(connect().health().pid)"
    environment = {**os.environ, "GPUQUOTA_HOME": str(home.root)}
    callers = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    output = {caller.communicate(timeout=TIMEOUT_S)[0].strip() for caller in callers}
    assert len(output) == 1
    connect(environment).stop_cluster()
    await_stop(home)


# The clock


@pytest.mark.parametrize("jump", [-86_400, 86_400])
def test_a_clock_that_jumps_ends_no_lease_and_no_job(jumping_clock: Path, tmp_path: Path, jump: int) -> None:
    with running_cluster(tmp_path / "home", new_interpreter=True) as cluster:
        cluster.project("team-a", 1)
        spec = cluster.submit("other", "true").spec
        leased = type(spec)(name="leased", project="team-a", command=("sleep", "infinity"), grace_period_s=1.0)
        cluster.client.submit(leased, lease=Lease(holder="me", duration_s=3600))
        cluster.wait_for_phase("leased", "Running")
        jumping_clock.write_text(str(jump))
        cluster.submit("later", "true", project="team-a")
        cluster.client.cancel_job("team-a", "later")
        cluster.client.renew_lease("team-a", "leased", Lease(holder="me", duration_s=3600))
        assert cluster.job("leased").status.phase is Phase.RUNNING
        # The cluster's time follows the machine's forward, and continues when the machine's is set back.
        assert abs(cluster.job("later").status.submitted_at - time.time() - max(jump, 0)) < 3600
        jumping_clock.write_text("0")
