"""Real trainings under the real cluster: the step counter never decreases, whatever happens to the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

FEW_STEPS = 30


class Steps:
    """Follow a job's step counter, and fail when it decreases."""

    def __init__(self, cli: Cli, name: str, project: str = "team-a") -> None:
        self.cli, self.name, self.project = cli, name, project
        self.last = 0

    def go_on_with(self, gpus: int) -> None:
        """Return when the job has trained some more steps at this size."""
        deadline = time.monotonic() + TIMEOUT_S
        begin: int | None = None
        while time.monotonic() < deadline:
            job = self.cli.cluster.job(self.name, self.project)
            step = job.status.progress.step if job.status.progress else 0
            assert step >= self.last, f"from step {self.last} back to {step}"
            self.last = step
            if len([w for w in job.status.workers if w.phase == "Running" and w.rank is not None]) == gpus:
                begin = step if begin is None else begin
                if step >= begin + FEW_STEPS:
                    return
            time.sleep(0.05)
        pytest.fail(f"no progress with {gpus} GPUs: {self.cli('describe', self.name, '-p', self.project)}")


def test_a_training_shrinks_for_a_session_and_grows_after_it_without_losing_a_step(
    cli: Cli, training: tuple[str, ...]
) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit", "elastic1", "-g", "1", "--elastic", *training)
    steps = Steps(cli, "elastic1")
    steps.go_on_with(gpus=2)
    cli("submit", "filler1", "-g", "1", "--interactive", "--", "sleep", "infinity")
    cli.await_gpus("team-a", filler1=1)
    steps.go_on_with(gpus=1)
    cli("delete filler1")
    steps.go_on_with(gpus=2)
    changes = cli.cluster.job("elastic1").status.resizes
    assert [(change.from_gpus, change.to_gpus) for change in changes] == [(2, 1), (1, 2)]
    assert [change.lost_steps for change in changes] == [0, 0]


def test_a_training_goes_on_when_a_worker_and_the_daemon_are_killed(cli: Cli, training: tuple[str, ...]) -> None:
    cli("project create team-a --guaranteed 2")
    cli("config project team-a")
    cli("submit", "elastic1", "-g", "1", "--elastic", *training)
    steps = Steps(cli, "elastic1")
    steps.go_on_with(gpus=2)
    cli.cluster.kill_daemon()
    steps.go_on_with(gpus=2)
    first = next(w for w in cli.cluster.job("elastic1").status.workers if w.rank == 0)
    cli("exec", "elastic1", "--", "kill", "-9", str(first.pid))
    cli.cluster.wait_for("elastic1", lambda job: job.status.restarts == 1)
    steps.go_on_with(gpus=2)
    assert cli.cluster.job("elastic1").status.restarts == 1


def test_a_preempted_training_returns_to_the_queue_and_resumes_from_its_checkpoint(
    cli: Cli, training: tuple[str, ...]
) -> None:
    cli("project create team-a --guaranteed 0")
    cli("project create team-b --guaranteed 2")
    cli("submit", "train", "-p", "team-a", "-g", "1", "--min-gpus", "1", "--max-gpus", "2", *training)
    steps = Steps(cli, "train")
    steps.go_on_with(gpus=2)
    cli("submit", "owner", "-p", "team-b", "-g", "2", "--", "sleep", "infinity")
    cli.await_gpus("team-b", owner=2)
    assert cli.cluster.job("train").status.phase == "Pending"
    assert "team-b" in cli("explain train -p team-a")
    cli("delete owner -p team-b")
    steps.go_on_with(gpus=2)
