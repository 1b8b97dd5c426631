"""One name per step and run, the same for all its attempts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.api.validation import check_name
from kfp_gpuquota.dsl.spec.naming import job_name, numbered


def _executor_input(attempt: int = 0, epochs: int = 3) -> dict[str, Any]:
    logs = {"artifacts": [{"uri": f"minio://bucket/run/train/executor-logs-{attempt}"}]}
    model = {"artifacts": [{"uri": "minio://bucket/run/train/model"}]}
    return {
        "inputs": {"parameterValues": {"epochs": epochs}},
        "outputs": {"artifacts": {"model": model, "executor-logs": logs}, "outputFile": "/tmp/out.json"},
    }


def _name(*, run: str = "run-1", task: str = "train", **executor_input: int) -> str:
    return job_name("train", run_id=run, task=task, executor_input=_executor_input(**executor_input))


def test_a_retried_step_has_its_first_attempts_name() -> None:
    assert _name(attempt=0) == _name(attempt=1)


def test_iterations_of_a_loop_with_the_same_inputs_differ_by_the_place_of_their_logs() -> None:
    one, other = (
        {"outputs": {"artifacts": {"executor-logs": {"artifacts": [{"uri": f"minio://b/run/{salt}/executor-logs-0"}]}}}}
        for salt in ("1f", "2e")
    )
    names = [job_name("x", run_id="r", task="t", executor_input=given) for given in (one, other)]
    assert names[0] != names[1]


def test_two_runs_tasks_or_inputs_never_share_a_name() -> None:
    names = {_name(), _name(run="run-2"), _name(task="train-2"), _name(epochs=4)}
    assert len(names) == 4


def test_the_order_in_which_kfp_lists_things_does_not_matter() -> None:
    first = {"inputs": {"a": 1, "b": 2}, "outputs": {}}
    second = {"outputs": {}, "inputs": {"b": 2, "a": 1}}
    assert job_name("x", run_id="r", task="t", executor_input=first) == job_name(
        "x", run_id="r", task="t", executor_input=second
    )


@given(st.text(), st.integers(1, 999))
def test_any_label_makes_a_valid_name(label: str, number: int) -> None:
    check_name("name", numbered(job_name(label, run_id="r", task="t", executor_input={}), number))


def test_a_readable_label_stays_readable() -> None:
    assert _name().startswith("train-")
    assert job_name("Train Digits!", run_id="r", task="t", executor_input={}).startswith("train-digits-")
