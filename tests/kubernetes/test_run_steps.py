"""The steps of a pipeline's run, as the page reads them from the pods that KFP and Argo make."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.web.objects import Objects, step_of
from kfp_gpuquota.web.source import RunStep

RECORDINGS = "GPUQUOTA_KFP_RECORDINGS"
STARTED, ENDED = "2026-01-01T00:00:10Z", "2026-01-01T00:00:25Z"
BEGAN = 1767225600.0


def pod(node: str, phase: str = "Running", uid: str = "u", gpus: int = 0) -> Pod:
    """A pod of a run, whose container has ended if the phase says so."""
    ended = [{"name": "main", "state": {"terminated": {"exitCode": 0, "finishedAt": ENDED}}}]
    labels = {"pipeline/runid": "0a1b", "workflows.argoproj.io/workflow": "digits-v2-x7v6d"}
    made: dict[str, Any] = {
        "metadata": {
            "name": f"p-{uid}", "namespace": "team-a", "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels, "annotations": {"workflows.argoproj.io/node-name": f"digits-v2-x7v6d(0).{node}"},
        },
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": gpus} if gpus else {}}}]},
        "status": {
            "phase": phase, "startTime": STARTED,
            "containerStatuses": ended if phase in {"Succeeded", "Failed"} else [],
        },
    }  # fmt: skip
    return msgspec.convert(made, Pod, strict=False)


@pytest.mark.parametrize(
    ("node", "phase", "task"),
    [
        ("root(0).load(0).executor(0)", "Running", "load"),
        ("root(0).for-loop-2(0).iteration-iterations(1:1)(0).say(0).executor(2)", "Running",
         "for-loop-2.iteration-iterations(1:1).say"),
        ("root(0).load-driver(0)", "Running", None),
        ("root(0).load-driver(0)", "Failed", "load"),
        ("root-driver(0)", "Succeeded", None),
    ],
)  # fmt: skip
def test_executors_are_steps_and_drivers_only_if_they_failed(node: str, phase: str, task: str | None) -> None:
    found = step_of(pod(node, phase))
    assert (found and found.task) == task


def test_a_step_has_its_times_and_the_name_of_its_pipeline() -> None:
    found = step_of(pod("root(0).load(0).executor(0)", "Succeeded"))
    node = "digits-v2-x7v6d(0).root(0).load(0).executor(0)"
    times = {"submitted_at": BEGAN, "started_at": BEGAN + 10, "finished_at": BEGAN + 25}
    assert found == RunStep("0a1b", "team-a", "digits-v2", "load", node, "Succeeded", **times)
    assert step_of(pod("root(0).load(0).executor(0)")).finished_at is None  # type: ignore[union-attr]


def test_of_several_attempts_the_last_one_is_shown_and_deleted_pods_are_not() -> None:
    objects = Objects()
    for attempt, phase in ((0, "Failed"), (1, "Running")):
        objects.put_pod(pod(f"root(0).load(0).executor({attempt})", phase, uid=str(attempt)))
    assert [step.phase for step in objects.run_steps()] == ["Running"]
    before = objects.revision
    objects.drop_pod("1")
    assert [step.phase for step in objects.run_steps()] == ["Failed"]
    assert objects.revision > before
    objects.drop_pod("0")
    assert objects.run_steps() == ()


def test_recorded_pods_are_steps_of_their_pipelines() -> None:
    folder = os.environ.get(RECORDINGS)
    if not folder:
        pytest.skip(f"${RECORDINGS} names no recordings")
    recorded = json.loads((Path(folder) / "pods.json").read_text())
    found = {what: step_of(msgspec.convert(each, Pod, strict=False)) for what, each in recorded.items()}
    shown = {what.partition(",")[0]: step and (step.pipeline, step.task, step.phase) for what, step in found.items()}
    assert shown["plain"] == ("plain", "make", "Running")
    assert shown["k8s-settings"] == ("k8s-settings", "say-it", "Running")
    assert shown["workspace"] == ("workspace", "write-file", "Running")
    assert shown["fails"] is None
