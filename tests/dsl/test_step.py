"""What a launcher reads from its arguments and its environment."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.connect import Settings, save_settings
from kfp_gpuquota.dsl.launcher.step import Step, passed_on, step_from
from kfp_gpuquota.errors import InvalidFieldError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

EXECUTOR_INPUT = json.dumps({"outputs": {"outputFile": "/root/train/executor_output.json"}})


def _step(environment: dict[str, str], **changed: Any) -> Step:
    given = {
        "image": "",
        "pod_resources": None,
        "volumes": None,
        "task": "run-1/train",
        "gpus": None,
        "executor_input": EXECUTOR_INPUT,
        "argv": ["true"],
    }
    given.update(changed)
    return step_from(argparse.Namespace(**given), {"GPUQUOTA_PROJECT": "team-a", **environment})


def test_the_run_and_the_tasks_name_make_the_jobs_name() -> None:
    assert len({_step({}, task=task).job_name for task in ("run-1/train", "run-2/train", "run-1/tune")}) == 3


def test_a_name_given_by_the_author_begins_the_jobs_name() -> None:
    assert _step({}).job_name.startswith("train-")
    assert _step({"GPUQUOTA_NAME": "tuned"}).job_name.startswith("tuned-")


def test_a_tasks_name_may_hold_anything() -> None:
    assert _step({}, task="run-1/for-loop/1/train").labels == {
        "pipeline-run": "run-1",
        "pipeline-task": "for-loop-1-train",  # a label's value
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/w/local_outputs/digits-pipeline-2026-11-22-12-40-48-123456/train/executor_output.json", "digits-pipeline"),
        ("/tmp/kfp_outputs/output_metadata.json", ""),
        ("", ""),
    ],
)
def test_kfp_locals_folder_has_the_pipelines_name(path: str, name: str) -> None:
    step = _step({}, executor_input=json.dumps({"inputs": {}, "outputs": {"outputFile": path}}))
    assert step.labels.get("pipeline-name", "") == name


def test_the_configured_project_is_the_last_resort(tmp_path: Path) -> None:
    home = {"GPUQUOTA_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match=r"this step names no project.*gpuquota config project PROJECT"):
        _step({"GPUQUOTA_PROJECT": "", **home})
    save_settings(Settings(project="team-c"), home)
    assert _step({"GPUQUOTA_PROJECT": "", **home}).project == "team-c"
    assert _step(home).project == "team-a"


@pytest.mark.parametrize(("text", "gpus"), [("2", 2), ("2.0", 2)])
def test_a_number_of_gpus_from_the_run_replaces_the_decorators(text: str, gpus: int) -> None:
    assert _step({"GPUQUOTA_GPUS": "1"}, gpus=text).options.gpus == gpus


@pytest.mark.parametrize("text", ["", "two", "1.5", "nan", "inf", "-1"])
def test_a_number_of_gpus_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="gpus"):
        _step({}, gpus=text)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"outputs": {}}', '{"outputs": null}', "3"])
def test_an_executor_input_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="--executor-input"):
        _step({}, executor_input=text)


def test_identity_and_devices_are_the_clusters_to_say() -> None:
    given = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
        "PYTHONPATH": "/src",
        "JOB_NAME": "x",
        "ELASTIC_WORKER_ID": "x",
        "RUNAI_NUM_OF_GPUS": "9",
        "CUDA_VISIBLE_DEVICES": "0",
        "GPUQUOTA_GPUS": "1",
        "BASH_FUNC_which%%": "() { :; }",
    }
    assert passed_on(given) == {"PATH": "/bin", "OMP_NUM_THREADS": "3", "PYTHONPATH": "/src"}
