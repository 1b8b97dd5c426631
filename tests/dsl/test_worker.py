"""The worker's side: outputs go to a place of its own, everything else stays as KFP made it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.dsl.pipelines.route import masked
from kfp_gpuquota.dsl.worker import start

if TYPE_CHECKING:
    from pathlib import Path

TAG = ".gpuquota/train-0123456789/uid-0"
EXECUTOR_INPUT = {
    "inputs": {"parameterValues": {"epochs": 3}, "artifacts": {"data": {"artifacts": [{"uri": "/root/load/data"}]}}},
    "outputs": {
        "parameters": {"accuracy": {"outputFile": "/root/train/accuracy"}},
        "artifacts": {
            "model": {"artifacts": [{"name": "model", "uri": "minio://bucket/run/train/model"}]},
            "model_card": {
                "artifacts": [{"name": "model_card", "uri": "/root/train/model_card", "customPath": "/c/d"}]
            },
        },
        "outputFile": "/root/train/executor_output.json",
    },
}


def test_every_output_is_redirected_and_no_input_is() -> None:
    mine = start.redirected(EXECUTOR_INPUT, TAG)
    assert mine == {
        "inputs": EXECUTOR_INPUT["inputs"],
        "outputs": {
            "parameters": {"accuracy": {"outputFile": f"/root/train/{TAG}/accuracy"}},
            "artifacts": {
                "model": {"artifacts": [{"name": "model", "uri": f"minio://bucket/run/train/{TAG}/model"}]},
                "model_card": {
                    "artifacts": [
                        {
                            "name": "model_card",
                            "uri": f"/root/train/{TAG}/model_card",
                            "customPath": f"/c/{TAG}/d",
                        }
                    ]
                },
            },
            "outputFile": f"/root/train/{TAG}/executor_output.json",
        },
    }


def test_redirecting_leaves_the_given_executor_input_alone() -> None:
    before = json.dumps(EXECUTOR_INPUT)
    start.redirected(EXECUTOR_INPUT, TAG)
    assert json.dumps(EXECUTOR_INPUT) == before


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.from_regex(r"(/[a-z ]{1,5}){1,4}", fullmatch=True)
    )
)
def test_a_redirected_path_is_the_final_one_with_the_tag_taken_out(outputs: dict[str, str]) -> None:
    given_input = {"outputs": {"parameters": {k: {"outputFile": v} for k, v in outputs.items()}, "outputFile": "/o/e"}}
    mine = start.redirected(given_input, TAG)
    back = {k: v["outputFile"].replace(f"{TAG}/", "") for k, v in mine["outputs"]["parameters"].items()}
    assert back == outputs


@pytest.mark.parametrize(
    ("placeholder", "value"),
    [
        ("{{$}}", json.dumps(EXECUTOR_INPUT)),
        ("{{$.outputs.output_file}}", "/root/train/executor_output.json"),
        ("{{$.outputMetadataUri}}", "/root/train/executor_output.json"),
        ("--out={{$.outputs.parameters['accuracy'].output_file}}", "--out=/root/train/accuracy"),
        ("{{$.outputs.artifacts['model'].uri}}", "minio://bucket/run/train/model"),
        ("{{$.outputs.artifacts['model'].path}}", "/minio/bucket/run/train/model"),
        ("{{$.outputs.artifacts['model_card'].path}}", "/c/d"),
        ("{{$.outputs.artifacts['no'].uri}}", "{{$.outputs.artifacts['no'].uri}}"),
        ("{{$.outputs.parameters['no'].output_file}}", "{{$.outputs.parameters['no'].output_file}}"),
        ("a {{$.outputs.output_file}} {{$}}", f"a /root/train/executor_output.json {json.dumps(EXECUTOR_INPUT)}"),
    ],
)
def test_a_disguised_placeholder_is_filled_in_by_the_worker(placeholder: str, value: str) -> None:
    assert "{{$" not in masked(placeholder)
    assert start.resolved(masked(placeholder), EXECUTOR_INPUT) == value


@pytest.mark.parametrize(
    "element",
    [
        "{{$.inputs.parameters['epochs']}}",
        "{{$.inputs.artifacts['data'].path}}",
        "{{$.pipeline_job_uuid}}",
        "{{$.outputs.artifacts['model'].metadata['key']}}",
        "print(f'{{$x}}', '{{}}', '$')",
        "",
    ],
)
def test_what_is_not_an_outputs_placeholder_stays_with_kfp(element: str) -> None:
    assert masked(element) == element


@given(st.text())
def test_text_without_a_placeholder_reaches_the_command_unchanged(text: str) -> None:
    if "{{$" not in text and "{{gpuquota" not in text:
        assert start.resolved(masked(text), EXECUTOR_INPUT) == text


def _run(step_file: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", start.__file__, str(step_file)]
    variables = {"PATH": os.environ["PATH"], "ELASTIC_WORKER_ID": "w-0", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def _step(directory: Path, argv: list[str], environment: dict[str, str] | None = None) -> Path:
    outputs = {
        "parameters": {"x": {"outputFile": str(directory / "out" / "x")}},
        "outputFile": str(directory / "e.json"),
    }
    content = {
        "tag": ".gpuquota/j",
        "argv": argv,
        "environment": environment or {},
        "executor_input": {"outputs": outputs},
    }
    (directory / "step.json").write_text(json.dumps(content))
    return directory / "step.json"


def test_the_worker_becomes_the_original_command(tmp_path: Path) -> None:
    argv = [
        "sh",
        "-c",
        'echo "$0" "$GREETING" > "$1"; exit 7',
        "zero",
        masked("{{$.outputs.parameters['x'].output_file}}"),
    ]
    ended = _run(_step(tmp_path, argv, {"GREETING": "good day"}), GREETING="overridden")
    assert (ended.returncode, ended.stderr) == (7, "")
    assert (tmp_path / "out" / ".gpuquota" / "j" / "w-0" / "x").read_text() == "zero good day\n"


def test_a_program_that_does_not_exist_ends_as_in_a_shell(tmp_path: Path) -> None:
    ended = _run(_step(tmp_path, ["no-such-program"]))
    assert (ended.returncode, ended.stderr) == (
        127,
        "gpuquota: cannot run 'no-such-program': No such file or directory\n",
    )


def test_the_command_ignores_no_signal_that_python_ignores(tmp_path: Path) -> None:
    done = _run(_step(tmp_path, ["grep", "SigIgn", "/proc/self/status"]))
    ignored, by_python = int(done.stdout.split()[1], 16), (signal.SIGPIPE, signal.SIGXFSZ)
    assert not [one for one in by_python if ignored & 1 << one - 1], (
        "a program whose reader has ended would go on writing"
    )
