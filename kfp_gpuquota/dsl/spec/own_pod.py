"""What the pod of a step on a KFP backend says of itself. Argo Workflows makes it; the API server of KFP labels it.

KFP's placeholders for the run and the task are filled in where they are a task's inputs, and in no command (its
`launcher_v2.go` knows those of inputs and outputs). So the step's run and place in it are read here.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final

from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows

Json = dict[str, Any]

RUN_LABEL: Final = "pipeline/runid"
WORKFLOW_LABEL: Final = "workflows.argoproj.io/workflow"
NODE_ANNOTATION: Final = "workflows.argoproj.io/node-name"
# An iteration has two numbers: iteration-iterations(0:0).
_CLOCKS_DIFFER_S: Final = 1.0  # the API server's moments are whole seconds
_ITERATION: Final = re.compile(r"\(\d+:[^)]*\)$")


def run_id(pod: Json) -> str:
    """The run's id, else its Workflow's name."""
    return str(_labels(pod).get(RUN_LABEL) or workflow(pod))


def workflow(pod: Json) -> str:
    """The Workflow that made the pod; "" where none did."""
    return str(_labels(pod).get(WORKFLOW_LABEL, ""))


def task(pod: Json) -> str:
    """The step's place in its run, the same for each attempt of it and of all that it is in:
    "run-x7.root.for-loop-1.iteration(0:0).train".
    """
    metadata = pod.get("metadata", {})
    node = metadata.get("annotations", {}).get(NODE_ANNOTATION) or metadata.get("name", "")
    return workflows.place_of(node)


def name(task: str) -> str:
    """The step's name: the last part of its place."""
    return _ITERATION.sub("", task.rpartition(".")[2])


def owner(pod: Json) -> Json | None:
    """A reference to the Workflow that made the pod, for what is to be deleted with the run; None where none did.

    Not to the pod: a pod that is made anew has another UID, and what the one before owns would be deleted.
    """
    for one in pod.get("metadata", {}).get("ownerReferences", []):
        if one.get("kind") == workflows.KIND and one.get("apiVersion", "").startswith(f"{workflows.GROUP}/"):
            return {field: one[field] for field in ("apiVersion", "kind", "name", "uid")}
    return None


def timed_out(pod: Json, now: float) -> bool:
    """Whether the pod has run for its `activeDeadlineSeconds` (KFP's set_timeout), so that the kubelet ends it."""
    deadline_s, started = pod.get("spec", {}).get("activeDeadlineSeconds"), pod.get("status", {}).get("startTime")
    if not deadline_s or not started:
        return False
    return now >= datetime.fromisoformat(started).timestamp() + float(deadline_s) - _CLOCKS_DIFFER_S


def _labels(pod: Json) -> Json:
    labels: Json = pod.get("metadata", {}).get("labels", {})
    return labels
