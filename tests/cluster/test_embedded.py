"""The embedded cluster through its client: real daemon, real SQLite, real processes."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import JobSpec, Phase, Project
from kfp_gpuquota.api.wire import EventKind, Lease, StopAction
from kfp_gpuquota.cluster.local.workers.runtime import read_from
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidFieldError,
    NotFoundError,
)
from kfp_gpuquota.server.cluster_api import follow_log, watch_jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Job, Worker
    from tests.conftest import EmbeddedCluster


@pytest.fixture
def two_teams(embedded_cluster: EmbeddedCluster) -> EmbeddedCluster:
    """Two slots, and two teams with one guaranteed each."""
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    return embedded_cluster


def gpus(cluster: EmbeddedCluster, name: str, count: int, project: str = "team-a") -> None:
    cluster.wait_for(
        name, lambda job: job.status.gpus == count and all(w.phase == "Running" for w in alive(job)), project
    )


def alive(job: Job) -> list[Worker]:
    return [w for w in job.status.workers if w.phase != "Gone"]


# Jobs and their ends


def test_a_job_runs_and_its_exit_code_and_log_are_kept(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job", "sh", "-c", "echo hello; exit 3")
    job = two_teams.wait_for_phase("job", "Failed")
    assert job.status.exit_code == 3
    assert b"".join(follow_log(two_teams.client, "team-a", "job")) == b"hello\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo begins; echo; echo 'ValueError: 3 > 2' >&2; exit 3", "ended with exit code 3: ValueError: 3 > 2"),
        ("echo begins; exit 0 $(kill -9 $$)", "was killed by signal 9"),
        ('echo "Oops: it broke" > $ELASTIC_ERROR_FILE; kill -9 $$', "was killed by signal 9: Oops: it broke"),
        ("ln -s /etc/passwd $ELASTIC_ERROR_FILE; exit 3", "ended with exit code 3"),
        ("mkfifo $ELASTIC_ERROR_FILE; exit 3", "ended with exit code 3"),
        ("printf '\\33[2Jred' > $ELASTIC_ERROR_FILE; exit 3", "ended with exit code 3: \\x1b[2Jred"),
    ],
)
def test_the_reason_of_a_failure_has_the_error_that_ended_the_script(
    two_teams: EmbeddedCluster, script: str, reason: str
) -> None:
    two_teams.submit("job", "sh", "-c", script)
    failed = two_teams.wait_for_phase("job", "Failed").status.reason
    assert failed is not None
    assert failed.message == f"worker 0 {reason}"


def test_a_worker_is_told_who_it_is(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job", "env", environment={"MINE": "1", "JOB_NAME": "not-mine"})
    job = two_teams.wait_for_phase("job", "Succeeded")
    log = b"".join(follow_log(two_teams.client, "team-a", "job")).decode()
    output = dict(line.split("=", 1) for line in log.splitlines() if "=" in line)
    assert (output["JOB_NAME"], output["JOB_UUID"], output["POD_INDEX"]) == ("job", job.uid, "0")
    assert (output["RUNAI_NUM_OF_GPUS"], output["MINE"], output["CUDA_VISIBLE_DEVICES"]) == ("1", "1", "")
    assert Path(output["ELASTIC_TOKEN_FILE"]).stat().st_mode & 0o077 == 0
    assert Path(output["ELASTIC_CHECKPOINT_DIR"]).is_dir()


def test_the_log_can_be_followed_while_the_job_writes_it(two_teams: EmbeddedCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    two_teams.submit("job", "sh", "-c", f"echo one; while [ ! -e {gate} ]; do sleep 0.01; done; echo two")
    chunks = follow_log(two_teams.client, "team-a", "job")
    assert next(chunks) == b"one\n"
    gate.touch()
    assert b"".join(chunks) == b"two\n"


def test_a_name_is_taken_until_its_job_is_deleted(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job", "true")
    with pytest.raises(AlreadyExistsError, match="delete it first: gpuquota delete -p team-a job"):
        two_teams.submit("job", "true")
    two_teams.client.delete_job("team-a", "job")
    while two_teams.client.list_jobs("team-a").jobs:
        time.sleep(0.01)
    two_teams.submit("job", "true")


def test_the_same_request_makes_one_job(two_teams: EmbeddedCluster) -> None:
    spec = two_teams.submit("other", "true").spec
    first = two_teams.client.submit(type(spec)(name="job", project="team-a", command=("true",)), request_id="r-1")
    again = two_teams.client.submit(type(spec)(name="job", project="team-a", command=("true",)), request_id="r-1")
    assert again.uid == first.uid


def test_a_deleted_job_leaves_nothing_behind(two_teams: EmbeddedCluster) -> None:
    job = two_teams.submit("job")
    gpus(two_teams, "job", 1)
    assert two_teams.home.job(job.uid).exists()
    two_teams.client.delete_job("team-a", "job")
    while two_teams.client.list_jobs("team-a").jobs:
        time.sleep(0.01)
    assert not two_teams.home.job(job.uid).exists()
    with pytest.raises(NotFoundError):
        two_teams.job("job")


def test_a_suspended_job_gives_its_gpus_back_and_resumes_with_its_age(two_teams: EmbeddedCluster) -> None:
    submitted = two_teams.submit("job").status.submitted_at
    gpus(two_teams, "job", 1)
    two_teams.client.suspend_job("team-a", "job")
    assert two_teams.wait_for_phase("job", "Suspended").status.gpus == 0
    two_teams.client.resume_job("team-a", "job")
    gpus(two_teams, "job", 1)
    assert two_teams.job("job").status.submitted_at == submitted
    kinds = [event.kind for event in two_teams.client.events().events]
    assert kinds.index(EventKind.JOB_SUSPENDED) < kinds.index(EventKind.JOB_RESUMED)
    assert (kinds.count(EventKind.JOB_SUSPENDED), kinds.count(EventKind.JOB_RESUMED)) == (1, 1)


def test_a_cancelled_job_stays_listed(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job")
    gpus(two_teams, "job", 1)
    two_teams.client.cancel_job("team-a", "job")
    job = two_teams.wait_for_phase("job", "Cancelled")
    assert job.status.reason is not None
    assert job.status.reason.message == "cancelled by a user"


def test_a_suspended_job_is_cancelled_together_with_a_running_one(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("one")
    two_teams.submit("two")
    two_teams.client.suspend_job("team-a", "two")
    two_teams.wait_for_phase("two", "Suspended")
    two_teams.client.stop_jobs("team-a", ["one", "two"], StopAction.CANCEL)
    two_teams.wait_for_phase("one", "Cancelled")
    two_teams.wait_for_phase("two", "Cancelled")


# Quota


def test_an_elastic_job_borrows_gives_back_and_borrows_again(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("train", gpus=1, min_gpus=1, max_gpus=2)
    gpus(two_teams, "train", 2)
    two_teams.submit("notebook", project="team-b", kind="build")
    two_teams.wait_for_phase("notebook", "Running", "team-b")
    gpus(two_teams, "train", 1)
    two_teams.client.delete_job("team-b", "notebook")
    gpus(two_teams, "train", 2)
    sizes = [(change.from_gpus, change.to_gpus) for change in two_teams.job("train").status.resizes]
    assert sizes[-2:] == [(2, 1), (1, 2)]
    assert "team-b" in two_teams.job("train").status.resizes[-2].reason.message


def test_quota_is_not_released_while_a_worker_still_runs(two_teams: EmbeddedCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stubborn = f"trap '' TERM; echo up; while [ ! -e {gate} ]; do sleep 0.01; done"
    two_teams.submit("train", "sh", "-c", stubborn, gpus=2, grace_period_s=60.0)
    gpus(two_teams, "train", 2)
    next(follow_log(two_teams.client, "team-a", "train"))
    two_teams.submit("notebook", project="team-b", kind="build")
    two_teams.wait_for_phase("train", "Stopping")
    assert two_teams.job("notebook", "team-b").status.phase is Phase.PENDING
    assert two_teams.client.get_project("team-a").allocated == 2
    gate.touch()
    two_teams.wait_for_phase("notebook", "Running", "team-b")


def test_a_session_over_quota_waits_and_says_why(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("first", kind="build")
    two_teams.submit("second", kind="build")
    job = two_teams.wait_for("second", lambda job: job.status.reason is not None)
    assert job.status.phase is Phase.PENDING
    assert job.status.reason is not None
    assert job.status.reason.code == "over-quota-build"


def test_what_can_never_fit_is_refused_with_the_next_step(two_teams: EmbeddedCluster) -> None:
    with pytest.raises(InvalidFieldError, match="the largest has 2 GPUs; make it elastic"):
        two_teams.submit("big", gpus=3)
    with pytest.raises(InvalidFieldError, match="room for 2 GPUs"):
        two_teams.submit("wide", gpus=3, gpus_per_worker=1)
    with pytest.raises(InvalidFieldError, match="nodes are node-0"):
        two_teams.submit("elsewhere", node="node-7")
    two_teams.client.set_project(Project(name="team-a", guaranteed=1, limit=1))
    with pytest.raises(InvalidFieldError, match=r"project set team-a --limit 2"):
        two_teams.submit("over", gpus=2)
    assert two_teams.client.list_jobs().jobs == ()


def test_an_unknown_project_is_named_with_the_next_step(embedded_cluster: EmbeddedCluster) -> None:
    with pytest.raises(NotFoundError, match="gpuquota project create team-x --guaranteed N"):
        embedded_cluster.submit("job", project="team-x")


def test_a_project_with_jobs_cannot_be_deleted(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job", "true")
    with pytest.raises(ConflictError, match="still has 1 job"):
        two_teams.client.delete_project("team-a")
    two_teams.client.delete_project("team-b")
    assert [shown.project.name for shown in two_teams.client.list_projects()] == ["team-a"]


def test_a_quota_below_what_sessions_hold_is_refused(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("notebook", kind="build")
    two_teams.wait_for_phase("notebook", "Running")
    with pytest.raises(ConflictError, match="holds 1 GPU in jobs that cannot be preempted"):
        two_teams.client.set_project(Project(name="team-a", guaranteed=0))
    assert two_teams.client.get_project("team-a").project.guaranteed == 1


# Leases


def test_a_job_whose_lease_ends_is_cancelled(two_teams: EmbeddedCluster) -> None:
    spec = two_teams.submit("other", "true").spec
    leased = type(spec)(name="leased", project="team-a", command=("sleep", "infinity"), grace_period_s=1.0)
    two_teams.client.submit(leased, lease=Lease(holder="pod-1", duration_s=0.5))
    job = two_teams.wait_for_phase("leased", "Cancelled")
    assert job.status.reason is not None
    assert "its launcher has ended" in job.status.reason.message


def _leased(cluster: EmbeddedCluster, *commands: str) -> Callable[..., None]:
    """A job that pod-1 holds for a minute; returns `renew(holder, duration_s)`."""
    leased = JobSpec(name="leased", project="team-a", command=commands or ("sleep", "infinity"), grace_period_s=1.0)
    cluster.client.submit(leased, lease=Lease(holder="pod-1", duration_s=60))

    def renew(holder: str, duration_s: float = 60, *, take_over: bool = False) -> None:
        lease = Lease(holder=holder, duration_s=duration_s, take_over=take_over)
        cluster.client.renew_lease("team-a", "leased", lease)

    return renew


@pytest.mark.parametrize("duration_s", [0, 60, 3600])
def test_a_lease_that_was_taken_over_is_neither_renewed_nor_shortened_by_the_former_holder(
    two_teams: EmbeddedCluster, duration_s: float
) -> None:
    renew = _leased(two_teams)
    renew("pod-2", take_over=True)
    with pytest.raises(ConflictError, match=r"held by 'pod-2', so 'pod-1' cannot renew it; leave it alone, or ask"):
        renew("pod-1", duration_s)
    renew("pod-2")
    assert two_teams.job("leased").status.phase is not Phase.CANCELLED


def test_only_the_holder_lets_go_of_a_job(two_teams: EmbeddedCluster) -> None:
    renew = _leased(two_teams)
    with pytest.raises(ConflictError, match="held by 'pod-1'"):
        renew("pod-2", 0)
    renew("pod-1", 0)
    two_teams.wait_for_phase("leased", "Cancelled")


def test_the_holder_of_a_lease_is_remembered_by_the_next_daemon(two_teams: EmbeddedCluster) -> None:
    renew = _leased(two_teams)
    renew("pod-2", take_over=True)
    two_teams.kill_daemon()
    with pytest.raises(ConflictError, match="held by 'pod-2'"):
        renew("pod-1")


def test_a_job_that_is_being_stopped_is_not_taken_over(two_teams: EmbeddedCluster) -> None:
    renew = _leased(two_teams, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert next(follow_log(two_teams.client, "team-a", "leased")) == b"ready\n"
    two_teams.client.cancel_job("team-a", "leased")
    with pytest.raises(ConflictError, match="is being stopped, and cannot be taken over"):
        renew("pod-2", take_over=True)


def test_a_job_without_a_lease_gets_one_only_from_who_takes_it_over(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job")
    with pytest.raises(ConflictError, match="has no lease"):
        two_teams.client.renew_lease("team-a", "job", Lease(holder="pod-1", duration_s=0))
    two_teams.client.renew_lease("team-a", "job", Lease(holder="pod-1", duration_s=0, take_over=True))
    two_teams.wait_for_phase("job", "Cancelled")


# Nothing is lost


def test_a_daemon_killed_at_any_moment_is_replaced_and_adopts_what_runs(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("train", gpus=1, min_gpus=1, max_gpus=2)
    gpus(two_teams, "train", 2)
    pids = {worker.pid for worker in two_teams.job("train").status.workers}
    two_teams.kill_daemon()
    gpus(two_teams, "train", 2)
    assert {worker.pid for worker in two_teams.job("train").status.workers} == pids


def test_what_ended_while_no_daemon_ran_is_learnt(two_teams: EmbeddedCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = two_teams.submit("job", "sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; exit 4")
    gpus(two_teams, "job", 1)
    two_teams.kill_daemon()
    gate.touch()
    exit_file = two_teams.home.worker(job.uid, f"{job.uid}-0") / "exit.json"
    while not exit_file.exists():
        time.sleep(0.01)
    assert two_teams.wait_for_phase("job", "Failed").status.exit_code == 4


def test_jobs_submitted_around_kills_run_exactly_once(two_teams: EmbeddedCluster, tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    names = [f"job-{number}" for number in range(12)]
    for number, name in enumerate(names):
        two_teams.submit(name, "sh", "-c", f"echo {name} >> {tally}; sleep 0.05")
        if number % 4 == 3:
            two_teams.kill_daemon()
    for name in names:
        two_teams.wait_for_phase(name, "Succeeded")
    assert sorted(tally.read_text().split()) == sorted(names)


def test_a_shim_that_was_killed_ends_its_worker_and_the_job_says_so(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job")
    gpus(two_teams, "job", 1)
    worker = two_teams.job("job").status.workers[0].pid
    assert worker is not None
    shim = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(shim, signal.SIGKILL)
    job = two_teams.wait_for_phase("job", "Failed")
    assert job.status.exit_code == 137


def test_a_second_daemon_on_the_same_directory_refuses(two_teams: EmbeddedCluster) -> None:
    with pytest.raises(ConflictError, match="another daemon already runs"), two_teams.home.lock():
        pass


def test_the_directory_its_token_and_its_state_are_private(two_teams: EmbeddedCluster) -> None:
    home = two_teams.home
    assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
    for path in (home.token_file, home.socket_file, home.database):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_waiting_client_goes_on_when_the_daemon_is_replaced(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job")
    gpus(two_teams, "job", 1)
    seen = watch_jobs(two_teams.client, "team-a")
    next(seen)
    killer = threading.Thread(target=two_teams.kill_daemon)
    killer.start()
    assert next(seen).jobs[0].spec.name == "job"
    killer.join()


# History


def test_the_history_tells_how_many_gpus_each_project_held(two_teams: EmbeddedCluster) -> None:
    two_teams.submit("job", "true", gpus=2)
    two_teams.wait_for_phase("job", "Succeeded")
    events = two_teams.client.events().events
    held = [event.gpus for event in events if event.kind in {EventKind.WORKER_STARTED, EventKind.WORKER_GONE}]
    assert held == [2, -2]
    kinds = [event.kind for event in events if event.job == "job"]
    assert kinds[:3] == [EventKind.JOB_SUBMITTED, EventKind.JOB_STARTED, EventKind.WORKER_STARTED]
    assert EventKind.JOB_ENDED in kinds


@pytest.mark.parametrize(
    ("offset", "piece"),
    [(0, (b"abcdef", 0)), (4, (b"ef", 4)), (9, (b"", 9)), (-2, (b"ef", 4)), (-9, (b"abcdef", 0))],
)
def test_a_log_is_read_from_an_offset_or_from_its_end(tmp_path: Path, offset: int, piece: tuple[bytes, int]) -> None:
    (tmp_path / "log").write_bytes(b"abcdef")
    assert read_from(tmp_path / "log", offset) == piece
    assert read_from(tmp_path / "none", offset) == (b"", max(0, offset))
