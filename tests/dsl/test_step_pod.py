"""The run and the step that are read from a step's pod on a KFP backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kfp_gpuquota.dsl.spec import step_pod
from kfp_gpuquota.dsl.spec.naming import label_value

RECORDINGS = "GPUQUOTA_KFP_RECORDINGS"


def pod(node: str, **labels: str) -> dict[str, Any]:
    annotations = {"workflows.argoproj.io/node-name": node} if node else {}
    return {"metadata": {"name": "digits-x7v6d-executor-1234", "annotations": annotations, "labels": labels}}


@pytest.mark.parametrize(
    ("node", "task", "name"),
    [
        ("digits-x7v6d.root.train.executor", "digits-x7v6d.root.train", "train"),
        ("digits-x7v6d.root.train.executor(1)", "digits-x7v6d.root.train", "train"),
        ("d.root.for-loop-1.iteration(3:3).train.executor(0)", "d.root.for-loop-1.iteration(3:3).train", "train"),
        ("d(0).root(0).train(0).executor(2)", "d.root.train", "train"),
        ("d(1).root(0).loop-2(0).it(3:3)(0).train(1).executor(0)", "d.root.loop-2.it(3:3).train", "train"),
        ("d(0).root(0).exit-handler-1.onExit(0).tidy(0).executor(0)", "d.root.exit-handler-1.onExit.tidy", "tidy"),
        ("", "digits-x7v6d-executor-1234", "digits-x7v6d-executor-1234"),
    ],
)
def test_a_step_is_known_by_its_node_less_the_attempt(node: str, task: str, name: str) -> None:
    assert step_pod.task(pod(node)) == task
    assert step_pod.name(task) == name


def test_attempts_share_a_place_and_iterations_do_not() -> None:
    places = [step_pod.task(pod(f"d.root.loop.iteration({i}:{i}).train.executor({n})")) for i in (0, 1) for n in (0, 1)]
    assert places[0] == places[1] != places[2] == places[3]


@pytest.mark.skipif(not os.environ.get(RECORDINGS), reason=f"{RECORDINGS} names no recordings of a KFP backend")
def test_recorded_steps_keep_their_place_over_attempts_and_are_told_apart() -> None:
    recorded = json.loads((Path(os.environ[RECORDINGS]) / "node-names.json").read_text())
    steps = [one for one in recorded if "driver" not in one["what"]]
    assert len(steps) > 30
    places: dict[str, set[tuple[str, int | None]]] = {}
    for one in steps:
        task = step_pod.task(pod(one["node_name"]))
        places.setdefault(task, set()).add((one["node_name"].rpartition("(")[0], one["attempt"]))
        assert label_value(step_pod.name(task)) == step_pod.name(task), one["node_name"]
    for task, attempts in places.items():  # one node each, in one or more attempts
        assert len({node for node, _ in attempts if node}) <= 1, (task, attempts)
    assert {len(attempts) for attempts in places.values()} == {1, 2}


@pytest.mark.parametrize(
    ("text", "label"), [("gpu-step(0)", "gpu-step-0"), ("Süß step", "S-step"), ("-a-", "a"), ("x" * 80, "x" * 63)]
)
def test_any_text_becomes_a_labels_value(text: str, label: str) -> None:
    assert label_value(text) == label


def test_the_run_is_the_labels_and_else_its_workflow() -> None:
    assert step_pod.run_id(pod("", **{"pipeline/runid": "8c", "workflows.argoproj.io/workflow": "d-x7"})) == "8c"
    assert step_pod.run_id(pod("", **{"workflows.argoproj.io/workflow": "d-x7"})) == "d-x7"
    assert step_pod.workflow(pod("")) == step_pod.run_id(pod("")) == ""


def test_what_a_step_makes_is_owned_by_its_workflow_and_by_nothing_else() -> None:
    workflow = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "name": "d-x7",
        "uid": "u",
        "controller": True,
    }
    made = pod("d-x7.root.train.executor")
    assert step_pod.owner(made) is None
    made["metadata"]["ownerReferences"] = [{**workflow, "blockOwnerDeletion": True}]
    assert step_pod.owner(made) == {field: workflow[field] for field in ("apiVersion", "kind", "name", "uid")}
    made["metadata"]["ownerReferences"] = [{**workflow, "apiVersion": "batch/v1", "kind": "Job"}]
    assert step_pod.owner(made) is None


def test_a_step_with_set_timeout_has_timed_out_once_its_pod_has_run_for_so_long() -> None:
    made = {"spec": {"activeDeadlineSeconds": 120}, "status": {"startTime": "2026-11-22T12:40:00Z"}}
    began = 1795351200.0
    assert not step_pod.timed_out(made, began + 100)
    assert step_pod.timed_out(made, began + 120)
    assert not step_pod.timed_out({"spec": {}, "status": made["status"]}, began + 1e6)
    assert not step_pod.timed_out({"spec": made["spec"], "status": {}}, began + 1e6)
