"""Bringing one worker's outputs home."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kfp_gpuquota.dsl.launcher.staging import Staging
from kfp_gpuquota.dsl.worker.start import redirected
from kfp_gpuquota.errors import JobFailedError


@pytest.fixture
def executor_input(tmp_path: Path) -> dict[str, Any]:
    step, bucket = tmp_path / "train", tmp_path / "bucket"
    return {
        "outputs": {
            "parameters": {"where": {"outputFile": str(step / "where")}},
            "artifacts": {"model": {"artifacts": [{"name": "model", "uri": str(bucket / "model")}]}},
            "outputFile": str(step / "executor_output.json"),
        }
    }


def _write_outputs(executor_input: dict[str, Any], staging: Staging, worker: str) -> None:
    """What a function does that saves a model as a directory, and returns its path."""
    outputs = redirected(executor_input, f"{staging.tag}/{worker}")["outputs"]
    model = Path(outputs["artifacts"]["model"]["artifacts"][0]["uri"])
    (model / "weights").mkdir(parents=True)
    (model / "weights" / "0.bin").write_text(f"weights of {worker}")
    model.with_suffix(".md").write_text("written beside the artifact")
    where = Path(outputs["parameters"]["where"]["outputFile"])
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(str(model))
    artifact = {"name": "model", "uri": str(model), "metadata": {"best": f"{model}/weights/0.bin", "epochs": 3}}
    Path(outputs["outputFile"]).write_text(
        json.dumps({"parameterValues": {"Output": str(model)}, "artifacts": {"model": {"artifacts": [artifact]}}})
    )


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_only_the_result_workers_outputs_come_home_and_nothing_stays_behind(
    tmp_path: Path, executor_input: dict[str, Any]
) -> None:
    staging = Staging(executor_input, "train-1")
    staging.create(["true"], {})
    for worker in ("w-0", "w-1"):
        _write_outputs(executor_input, staging, worker)
    staging.publish_outputs("w-1")
    assert _files(tmp_path) == {
        "train/where",
        "train/executor_output.json",
        "bucket/model/weights/0.bin",
        "bucket/model.md",
    }
    assert (tmp_path / "bucket/model/weights/0.bin").read_text() == "weights of w-1"
    assert not list(tmp_path.rglob(".gpuquota"))
    assert not staging.exists()


def test_what_kfp_reads_names_the_final_places(tmp_path: Path, executor_input: dict[str, Any]) -> None:
    staging = Staging(executor_input, "train-1")
    staging.create(["true"], {})
    _write_outputs(executor_input, staging, "w-0")
    staging.publish_outputs("w-0")
    model = str(tmp_path / "bucket" / "model")
    artifact = {"name": "model", "uri": model, "metadata": {"best": f"{model}/weights/0.bin", "epochs": 3}}
    assert json.loads((tmp_path / "train/executor_output.json").read_text()) == {
        "parameterValues": {"Output": model},
        "artifacts": {"model": {"artifacts": [artifact]}},
    }
    assert (tmp_path / "train/where").read_text() == model


def test_lists_of_files_in_an_artifact_name_the_final_places(tmp_path: Path, executor_input: dict[str, Any]) -> None:
    """As a data set's description does, and the index of a checkpoint."""
    staging = Staging(executor_input, "train-1")
    staging.create(["true"], {})
    folder = tmp_path / "bucket" / staging.tag / "w-1"
    (folder / "model").mkdir(parents=True)
    listed, binary, other = folder / "model" / "files.txt", folder / "model" / "0.bin", f"{folder}0/model"
    listed.write_text(f"path: {folder}\n{folder}/model/0.bin {folder}/model/é.bin {other}")
    listed.chmod(0o750)
    binary.write_bytes(bytes(1) + str(folder).encode())
    (folder / "model" / "empty").touch()
    staging.publish_outputs("w-1")
    final = tmp_path / "bucket"
    listed = final / "model" / "files.txt"
    assert listed.read_text() == f"path: {final}\n{final}/model/0.bin {final}/model/é.bin {other}"
    assert stat.S_IMODE(listed.stat().st_mode) == 0o750
    assert (final / "model" / "0.bin").read_bytes() == bytes(1) + str(folder).encode()
    assert _files(final) == {"model/files.txt", "model/0.bin", "model/empty"}


def test_a_result_replaces_what_an_earlier_attempt_left(tmp_path: Path, executor_input: dict[str, Any]) -> None:
    (tmp_path / "bucket/model").mkdir(parents=True)
    (tmp_path / "bucket/model/stale.bin").write_text("stale")
    staging = Staging(executor_input, "train-1")
    staging.create(["true"], {})
    _write_outputs(executor_input, staging, "w-0")
    staging.publish_outputs("w-0")
    assert _files(tmp_path / "bucket/model") == {"weights/0.bin"}


def test_two_attempts_that_bring_one_result_home_do_not_disturb_each_other(
    tmp_path: Path, executor_input: dict[str, Any]
) -> None:
    staging = Staging(executor_input, "train-1")
    staging.create(["true"], {})
    _write_outputs(executor_input, staging, "w-0")
    attempts = [
        threading.Thread(target=Staging(executor_input, "train-1").publish_outputs, args=["w-0"]) for _ in range(8)
    ]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join()
    assert (tmp_path / "bucket/model/weights/0.bin").read_text() == "weights of w-0"
    assert not staging.exists()


def test_artifacts_of_a_command_that_knows_nothing_of_kfp_are_named_for_it(
    tmp_path: Path, executor_input: dict[str, Any]
) -> None:
    staging = Staging(executor_input, "train-1")
    staging.create(["true"], {})
    staging.publish_outputs("w-0")
    assert _files(tmp_path) == {"train/executor_output.json"}
    artifact = {"name": "model", "uri": str(tmp_path / "bucket" / "model")}
    assert json.loads((tmp_path / "train/executor_output.json").read_text()) == {
        "artifacts": {"model": {"artifacts": [artifact]}}
    }


def test_links_among_outputs_lead_to_where_those_were_moved(tmp_path: Path, executor_input: dict[str, Any]) -> None:
    staging = Staging(executor_input, "job-1")
    staging.create([], {})
    mine = redirected(executor_input, f"{staging.tag}/w0")
    model = Path(mine["outputs"]["artifacts"]["model"]["artifacts"][0]["uri"])
    (model / "step-2").mkdir(parents=True)
    (model / "step-2" / "weights").write_text("w")
    (model / "latest").symlink_to(model / "step-2")
    (model / "best").symlink_to("step-2")
    (model / "elsewhere").symlink_to(tmp_path)
    staging.publish_outputs("w0")
    final = Path(executor_input["outputs"]["artifacts"]["model"]["artifacts"][0]["uri"])
    assert [(final / name / "weights").read_text() for name in ("latest", "best")] == ["w", "w"]
    assert (final / "elsewhere").readlink() == tmp_path


def test_a_worker_that_wrote_nothing_brings_nothing(tmp_path: Path) -> None:
    staging = Staging({"outputs": {"outputFile": str(tmp_path / "train" / "executor_output.json")}}, "train-1")
    staging.create(["true"], {})
    staging.publish_outputs("w-0")
    assert _files(tmp_path) == set()


def test_another_jobs_staging_is_left_alone(executor_input: dict[str, Any]) -> None:
    mine, other = Staging(executor_input, "train-1"), Staging(executor_input, "train-2")
    mine.create(["true"], {})
    other.create(["true"], {})
    mine.discard()
    assert (mine.exists(), other.exists()) == (False, True)


def test_the_step_file_may_hold_secrets_and_is_private(executor_input: dict[str, Any]) -> None:
    staging = Staging(executor_input, "train-1")
    staging.create(["python3", "train.py"], {"API_TOKEN": "secret"})
    assert stat.S_IMODE(staging.step_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(staging.root.stat().st_mode) == 0o700
    assert json.loads(staging.step_file.read_text()) == {
        "tag": ".gpuquota/train-1",
        "argv": ["python3", "train.py"],
        "environment": {"API_TOKEN": "secret"},
        "executor_input": executor_input,
    }


@pytest.mark.parametrize("field", ["custom_path", "customPath"])
def test_an_output_that_the_command_keeps_elsewhere_must_be_here(
    tmp_path: Path, executor_input: dict[str, Any], field: str
) -> None:
    def publish(model: Path) -> None:
        staging = Staging(executor_input, "train-1")
        staging.create(["true"], {})
        outputs = redirected(executor_input, f"{staging.tag}/w-0")["outputs"]
        _write_outputs(executor_input, staging, "w-0")
        artifact = {"name": "model", "uri": outputs["artifacts"]["model"]["artifacts"][0]["uri"], field: str(model)}
        Path(outputs["outputFile"]).write_text(json.dumps({"artifacts": {"model": {"artifacts": [artifact]}}}))
        staging.publish_outputs("w-0")

    publish(tmp_path)  # as on a volume of both pods; KFP uploads it from there
    with pytest.raises(JobFailedError, match=r"output 'model' at .*/only-at-the-worker, and its worker has left"):
        publish(tmp_path / "only-at-the-worker")
    assert not list(tmp_path.rglob(".gpuquota"))
