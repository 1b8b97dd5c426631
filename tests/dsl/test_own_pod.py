"""What a step's pod on a KFP backend says of its run and of its place in it."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.dsl import own_pod


def pod(node: str, **labels: str) -> dict[str, Any]:
    annotations = {"workflows.argoproj.io/node-name": node} if node else {}
    return {"metadata": {"name": "digits-x7v6d-executor-1234", "annotations": annotations, "labels": labels}}


@pytest.mark.parametrize(
    ("node", "task", "name"),
    [
        ("digits-x7v6d.root.train.executor", "digits-x7v6d.root.train", "train"),
        ("digits-x7v6d.root.train.executor(1)", "digits-x7v6d.root.train", "train"),
        ("d.root.for-loop-1.iteration(3:3).train.executor(0)", "d.root.for-loop-1.iteration(3:3).train", "train"),
        ("", "digits-x7v6d-executor-1234", "digits-x7v6d-executor-1234"),
    ],
)
def test_a_step_is_known_by_its_node_less_the_attempt(node: str, task: str, name: str) -> None:
    assert own_pod.task(pod(node)) == task
    assert own_pod.name(task) == name


def test_attempts_share_a_place_and_iterations_do_not() -> None:
    places = [own_pod.task(pod(f"d.root.loop.iteration({i}:{i}).train.executor({n})")) for i in (0, 1) for n in (0, 1)]
    assert places[0] == places[1] != places[2] == places[3]


def test_the_run_is_the_labels_and_else_its_workflow() -> None:
    assert own_pod.run_id(pod("", **{"pipeline/runid": "8c", "workflows.argoproj.io/workflow": "d-x7"})) == "8c"
    assert own_pod.run_id(pod("", **{"workflows.argoproj.io/workflow": "d-x7"})) == "d-x7"
    assert own_pod.workflow(pod("")) == own_pod.run_id(pod("")) == ""
