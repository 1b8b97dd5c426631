"""The check of real trainings in random histories notices what it is there to notice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import Job, JobSpec, JobStatus, Phase, Progress, Reason, ReasonCode
from tests.cluster.counting_training import STEPS
from tests.cluster.real_trainings import Trainings

if TYPE_CHECKING:
    from pathlib import Path

RIGHT = {"worker": "0", "step": STEPS, "counted": [1.0], "sha256": "right"}
KILLED = Reason(code=ReasonCode.FITS, message="worker 0 was killed by signal 9")


@pytest.fixture
def checked(tmp_path: Path) -> Trainings:
    return Trainings(("python",), tmp_path, "right")


def training(checked: Trainings, phase: Phase, step: int = STEPS, reason: Reason | None = None) -> Job:
    spec = JobSpec(name="job", project="team-a", command=checked.command)
    return Job(uid="uid", spec=spec, status=JobStatus(phase=phase, reason=reason, progress=Progress(step=step)))


def write(checked: Trainings, **changed: Any) -> None:
    (checked.results / "uid.jsonl").write_text(json.dumps({**RIGHT, **changed}) + "\n")


def test_a_training_that_ended_as_an_undisturbed_one_is_right(checked: Trainings) -> None:
    write(checked)
    checked.check([training(checked, Phase.SUCCEEDED)])


@pytest.mark.parametrize("wrong", [{"counted": [1.0, 2.0]}, {"step": STEPS - 1}, {"sha256": "other"}])
def test_a_sample_consumed_twice_another_step_or_another_result_is_noticed(
    checked: Trainings, wrong: dict[str, Any]
) -> None:
    write(checked, **wrong)
    with pytest.raises(AssertionError, match="uid"):
        checked.check([])


def test_a_success_without_a_result_or_at_another_step_is_noticed(checked: Trainings) -> None:
    with pytest.raises(AssertionError, match="without a result"):
        checked.check([training(checked, Phase.SUCCEEDED)])
    write(checked)
    with pytest.raises(AssertionError, match="succeeded elsewhere"):
        checked.check([training(checked, Phase.SUCCEEDED, STEPS - 1)])


def test_a_failure_is_explained_by_a_fault_of_the_history_only(checked: Trainings) -> None:
    failed = training(checked, Phase.FAILED, reason=KILLED)
    with pytest.raises(AssertionError, match="failed without a fault"):
        checked.check([failed])
    checked.faults = 1
    checked.check([failed])
