"""The launcher against a real cluster: attach, retry, stop, fail, wait."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import JobSpec, Phase, ReasonCode, WorkerPhase
from kfp_gpuquota.dsl.launcher.main import EXIT_TAKEN_OVER
from tests.dsl.steps import Step

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import EmbeddedCluster

WAIT_FOR_GATE = 'while [ ! -e gate ]; do sleep 0.02; done; echo through; echo 42 > "$0"'


@pytest.fixture
def cluster(embedded_cluster: EmbeddedCluster) -> EmbeddedCluster:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.project("team-b", 1)
    return embedded_cluster


def _names(cluster: EmbeddedCluster) -> list[str]:
    return sorted(job.spec.name for job in cluster.client.list_jobs().jobs)


def test_a_step_ends_as_its_job_ends_and_its_output_is_in_place(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    launcher = step.start()
    launcher.read_until("gpuquota: training with 1 GPU")
    (tmp_path / "gate").touch()
    code, log = launcher.wait()
    lines = log.rstrip().split("\n")
    assert code == 0, log
    assert lines[0].startswith("gpuquota: job train-")
    assert lines[0].endswith(" in project team-a")
    assert lines[-2] == "[0] through"
    assert lines[-1].startswith("gpuquota: succeeded after ")
    assert step.result.read_text() == "42\n"
    assert not list(tmp_path.rglob(".gpuquota"))


def test_the_job_is_what_the_environment_says(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    options = {"GPUQUOTA_GPUS": "2", "GPUQUOTA_MIN_GPUS": "1", "GPUQUOTA_PRIORITY": "7", "GPUQUOTA_NAME": "tuned"}
    Step(cluster, tmp_path, "true", environment=options).run()
    (job,) = cluster.client.list_jobs().jobs
    spec = job.spec
    assert (spec.gpus, spec.smallest, spec.priority, spec.labels) == (
        2,
        1,
        7,
        {"pipeline-run": "run-1", "pipeline-task": "train"},
    )
    assert spec.name.startswith("tuned-")


def test_a_number_of_gpus_that_only_the_run_knows(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, 'echo "$RUNAI_NUM_OF_GPUS" > "$0"')
    code, log = step.run("--gpus=2.0")
    assert (code, step.result.read_text()) == (0, "2\n"), log


def test_a_step_whose_run_asks_for_no_gpu_runs_on_the_cpu_without_a_job(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    step = Step(cluster, tmp_path, 'echo "devices:$CUDA_VISIBLE_DEVICES" > "$0"; exit 7')
    code, log = step.run("--gpus=0")
    assert (code, step.result.read_text(), _names(cluster)) == (7, "devices:\n", []), log
    assert "gpuquota: the step asks for 0 GPUs: it runs on the CPU, without quota" in log


def test_the_users_environment_reaches_the_worker_and_our_constants_do_not(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    secret = {"API_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "7"}
    step = Step(cluster, tmp_path, 'env | sort > "$0"', environment=secret)
    assert step.run()[0] == 0
    seen = dict(line.split("=", 1) for line in step.result.read_text().splitlines() if "=" in line)
    (job,) = cluster.client.list_jobs().jobs
    assert (seen["API_TOKEN"], seen["JOB_NAME"], seen["CUDA_VISIBLE_DEVICES"]) == ("secret", job.spec.name, "")
    assert not [name for name in seen if name.startswith("GPUQUOTA_")]
    assert "API_TOKEN" not in job.spec.environment


def test_a_retried_step_finds_its_running_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    first = step.start()
    first.read_until("training with")
    first.process.kill()
    first.wait()
    second = step.start()
    second.read_until("training with")
    (tmp_path / "gate").touch()
    code, log = second.wait()
    assert (code, len(_names(cluster))) == (0, 1), log
    assert "[0] through" in log
    assert step.result.read_text() == "42\n"


def test_the_result_of_a_job_that_ended_while_nobody_watched_is_taken_over(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    first = step.start()
    first.read_until("training with")
    first.process.kill()
    first.wait()
    (tmp_path / "gate").touch()
    cluster.wait_for_phase(_names(cluster)[0], Phase.SUCCEEDED)
    assert not step.result.exists()
    code, log = step.run()
    assert (code, len(_names(cluster)), step.result.read_text()) == (0, 1, "42\n"), log


def test_a_step_that_is_done_with_runs_anew_when_it_is_started_anew(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, 'echo $$ > "$0"')
    step.run()
    before = step.result.read_text()
    assert step.run()[0] == 0
    assert step.result.read_text() != before
    first, second = _names(cluster)
    assert second == f"{first}-2"


def test_two_runs_never_share_a_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    for run in ("run-1", "run-2"):
        assert Step(cluster, tmp_path, "true", run_id=run).run()[0] == 0
    assert len({name.rsplit("-", 1)[1] for name in _names(cluster)}) == 2


def test_a_failing_step_ends_with_the_jobs_exit_code_and_says_why(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, "echo no good >&2; exit 3")
    code, log = step.run()
    assert code == 3
    assert "[0] no good" in log
    assert log.rstrip().endswith("gpuquota: failed with exit code 3: worker 0 ended with exit code 3: no good")
    assert not list(tmp_path.rglob(".gpuquota"))


def test_a_retry_after_a_failure_is_a_new_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, '[ -e gate ] && echo 1 > "$0"')
    assert step.run()[0] == 1
    (tmp_path / "gate").touch()
    code, log = step.run()
    assert (code, len(_names(cluster))) == (0, 2), log


def test_a_launcher_that_is_told_to_stop_leaves_the_job_to_the_next_attempt(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    first = step.start()
    first.read_until("training with")
    assert first.send(signal.SIGTERM)[0] == 128 + signal.SIGTERM
    assert cluster.job(_names(cluster)[0]).status.phase is Phase.RUNNING
    second = step.start()
    second.read_until("training with")
    (tmp_path / "gate").touch()
    code, log = second.wait()
    assert (code, len(_names(cluster))) == (0, 1), log


def test_a_person_who_interrupts_the_step_cancels_its_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    launcher = Step(cluster, tmp_path, "sleep infinity").start()
    launcher.read_until("training with")
    assert launcher.send(signal.SIGINT)[0] == 128 + signal.SIGINT
    job = cluster.wait_for_phase(_names(cluster)[0], Phase.CANCELLED)
    assert job.status.reason
    assert job.status.reason.code is ReasonCode.LEASE_ENDED


def test_a_job_that_is_cancelled_fails_its_step(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    launcher = Step(cluster, tmp_path, "sleep infinity").start()
    launcher.read_until("training with")
    cluster.client.cancel_job("team-a", _names(cluster)[0])
    code, log = launcher.wait()
    assert (code, "gpuquota: cancelled" in log) == (1, True), log


def test_a_job_that_is_deleted_fails_its_step_and_leaves_nothing_behind(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    launcher = Step(cluster, tmp_path, "sleep infinity").start()
    launcher.read_until("training with")
    (name,) = _names(cluster)
    cluster.client.delete_job("team-a", name)
    code, log = launcher.wait()
    assert (code, f"the job {name!r} was deleted" in log) == (1, True), log
    assert not list(tmp_path.rglob(".gpuquota"))


def test_two_attempts_at_once_share_the_job_and_both_have_its_result(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    attempts = [step.start(), step.start()]
    for attempt in attempts:
        attempt.read_until("training with")
    (tmp_path / "gate").touch()
    ended = [attempt.wait() for attempt in attempts]
    assert [code for code, _ in ended] == [0, 0], ended
    assert (len(_names(cluster)), step.result.read_text()) == (1, "42\n")


def test_an_attempt_whose_job_was_taken_over_ends_quietly_and_the_job_goes_on(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE, environment={"GPUQUOTA_LEASE_S": "1.5"})
    first = step.start()
    first.read_until("training with")
    second = step.start()
    second.read_until("training with")
    code, log = first.wait()
    assert (code, log.rstrip().splitlines()[-1]) == (
        EXIT_TAKEN_OVER,
        "gpuquota: another attempt of this step has taken over the job and continues it; this attempt exits",
    )
    assert not step.result.exists()
    (tmp_path / "gate").touch()
    code, log = second.wait()
    assert (code, len(_names(cluster)), step.result.read_text()) == (0, 1, "42\n"), log


def test_an_attempt_whose_job_was_taken_over_cannot_end_it_any_more(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    first, second = step.start(), None
    first.read_until("training with")
    second = step.start()
    second.read_until("training with")
    code, log = first.send(signal.SIGINT)
    assert (code, "ends with its present lease" in log) == (128 + signal.SIGINT, False), log
    (tmp_path / "gate").touch()
    code, log = second.wait()
    assert (code, len(_names(cluster))) == (0, 1), log


def test_an_attempt_that_finds_its_job_being_stopped_starts_a_new_one(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    stubborn = "[ -e gate ] && exit 0; trap '' TERM; echo ready; while [ ! -e gate ]; do sleep 0.02; done"
    step = Step(cluster, tmp_path, stubborn)
    first = step.start()
    first.read_until("[0] ready")
    first.send(signal.SIGINT)
    cluster.wait_for_phase(_names(cluster)[0], Phase.STOPPING)
    second = step.start()
    second.read_until("-2 in project team-a")
    (tmp_path / "gate").touch()
    code, log = second.wait()
    assert code == 0, log


def test_a_step_that_has_run_for_its_max_runtime_is_stopped(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    step = Step(cluster, tmp_path, "sleep infinity", environment={"GPUQUOTA_MAX_RUNTIME_S": "1"})
    code, log = step.run()
    assert (code, "it has run for 1 s, which is its maximum run time" in log) == (1, True), log


def test_a_waiting_step_says_why_and_runs_when_it_can(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    filler = JobSpec(name="filler", project="team-a", command=("sleep", "infinity"), priority=90, grace_period_s=1.0)
    cluster.client.submit(filler)
    cluster.submit("theirs", project="team-b")
    cluster.wait_for_phase("filler", Phase.RUNNING)
    cluster.wait_for_phase("theirs", Phase.RUNNING, "team-b")
    launcher = Step(cluster, tmp_path, WAIT_FOR_GATE).start()
    assert len(launcher.read_until("waiting: ")) > len("gpuquota: waiting: ")
    cluster.client.delete_job("team-a", "filler")
    launcher.read_until("training with 1 GPU")
    (tmp_path / "gate").touch()
    code, log = launcher.wait()
    assert code == 0, log


def test_a_preempted_step_does_not_end(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    cluster.submit("mine")
    cluster.wait_for_phase("mine", Phase.RUNNING)
    launcher = Step(cluster, tmp_path, WAIT_FOR_GATE).start()
    launcher.read_until("training with")  # over quota
    cluster.submit("theirs", project="team-b")
    launcher.read_until("waiting: ")
    (tmp_path / "gate").touch()
    cluster.client.delete_job("team-b", "theirs")
    code, log = launcher.wait()
    assert code == 0, log
    assert log.count("gpuquota: training with 1 GPU") == 2  # that it stops may take too little time to be seen
    assert "[0] through" in log


def test_a_daemon_that_is_killed_and_started_again_does_not_disturb_the_step(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    step = Step(cluster, tmp_path, WAIT_FOR_GATE)
    launcher = step.start()
    launcher.read_until("training with")
    cluster.kill_daemon()
    (tmp_path / "gate").touch()
    code, log = launcher.wait()
    assert (code, step.result.read_text(), len(_names(cluster))) == (0, "42\n", 1), log


def test_a_step_that_starts_while_the_cluster_is_unavailable_waits_for_it(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    later = tmp_path / "later.sock"
    token = cluster.home.token_file
    away = {"GPUQUOTA_URL": f"unix://{later}", "GPUQUOTA_TOKEN_FILE": str(token)}
    step = Step(cluster, tmp_path, 'echo 42 > "$0"', environment=away)
    launcher = step.start()
    launcher.read_until("this step waits for the cluster")
    later.symlink_to(cluster.home.socket_file)
    code, log = launcher.wait()
    assert (code, step.result.read_text(), len(_names(cluster))) == (0, "42\n", 1), log


def test_the_log_of_the_worker_that_failed_is_shown_when_another_one_was_followed(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    script = '[ "$POD_INDEX" = 0 ] && sleep infinity; echo rank one is broken; exit 5'
    two = {"GPUQUOTA_GPUS": "2", "GPUQUOTA_GPUS_PER_WORKER": "1"}
    code, log = Step(cluster, tmp_path, script, environment=two).run()
    assert (code, "[1] rank one is broken" in log) == (5, True), log


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GPUQUOTA_PROJECT": ""}, "this step names no project"),
        ({"GPUQUOTA_PROJECT": "team-x"}, "team-x"),
        ({"GPUQUOTA_GPUS": "64"}, "error: step 'train': gpus is 64, but one worker runs on one node"),
        ({"GPUQUOTA_GPUS": "many"}, "GPUQUOTA_* variables are invalid"),
        ({"GPUQUOTA_LEASE_S": "0"}, "GPUQUOTA_LEASE_S is 0, but it must be between 1 and 86400 s"),
    ],
)
def test_what_cannot_run_is_one_clear_line_and_exit_code_2(
    cluster: EmbeddedCluster, tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    code, log = Step(cluster, tmp_path, "true", environment=environment).run()
    assert (code, len(log.splitlines()), message in log) == (2, 1, True), log
    assert not list(tmp_path.rglob(".gpuquota"))


def test_more_than_the_projects_limit_names_the_step_and_the_limit(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    cluster.project("small", 0, limit=1)
    code, log = Step(cluster, tmp_path, "true", environment={"GPUQUOTA_PROJECT": "small", "GPUQUOTA_GPUS": "2"}).run()
    assert (code, log) == (
        2,
        "gpuquota: error: step 'train': gpus is 2, but project 'small' may hold at most 1 GPU; ask for less, or raise "
        "its limit: gpuquota project set small --limit 2\n",
    )


def test_an_elastic_step_that_never_joins_elastic_runtime_is_warned(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    elastic = {"GPUQUOTA_MIN_GPUS": "1", "GPUQUOTA_MAX_GPUS": "2"}
    launcher = Step(cluster, tmp_path, WAIT_FOR_GATE, environment=elastic).start()
    launcher.read_until("training with")
    (name,) = _names(cluster)
    cluster.wait_for(name, lambda job: [worker.phase for worker in job.status.workers] == [WorkerPhase.RUNNING] * 2)
    (tmp_path / "gate").touch()
    code, log = launcher.wait()
    assert (code, log.count("warning")) == (0, 1), log
    assert "gpuquota: warning: none of its 2 workers has called elastic_runtime.init(): each of them does" in log


def test_the_launcher_never_imports_kfp() -> None:
    program = "import sys, kfp_gpuquota.dsl.launcher.main; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'kfp_gpuquota'" in loaded
    assert not [name for name in ("'kfp'", "'torch'", "'aiohttp'", "'numpy'") if name in loaded]
