"""Reads a step's run, task and owner from its pod on a KFP backend; Argo Workflows creates the pod, KFP labels it.

KFP's backend fills in its placeholders for the run and the task only in a task's inputs, not in commands (its
`launcher_v2.go` handles those of inputs and outputs only). So they are read from the pod.
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
    """Return the run's id, else its Workflow's name."""
    return str(_labels(pod).get(RUN_LABEL) or workflow(pod))


def workflow(pod: Json) -> str:
    """Return the name of the Workflow that created the pod; "" where there is none."""
    return str(_labels(pod).get(WORKFLOW_LABEL, ""))


def task(pod: Json) -> str:
    """Return the step's path in its run, such as "run-x7.root.for-loop-1.iteration(0:0).train".

    It is the same for every attempt of the step and of the loops and pipelines around it.
    """
    metadata = pod.get("metadata", {})
    node = metadata.get("annotations", {}).get(NODE_ANNOTATION) or metadata.get("name", "")
    return workflows.place_of(node)


def name(task: str) -> str:
    """Return the step's name, the last part of its path."""
    return _ITERATION.sub("", task.rpartition(".")[2])


def owner(pod: Json) -> Json | None:
    """Return an owner reference to the pod's Workflow, for objects that are deleted with the run; None without one.

    The pod is no suitable owner: a later attempt has another pod, and the job would be deleted with the first.
    """
    for one in pod.get("metadata", {}).get("ownerReferences", []):
        if one.get("kind") == workflows.KIND and one.get("apiVersion", "").startswith(f"{workflows.GROUP}/"):
            return {field: one[field] for field in ("apiVersion", "kind", "name", "uid")}
    return None


def timed_out(pod: Json, now: float) -> bool:
    """Return whether the pod has reached its `activeDeadlineSeconds` (KFP's set_timeout), when the kubelet stops it."""
    deadline_s, started = timeout_s(pod), pod.get("status", {}).get("startTime")
    if not deadline_s or not started:
        return False
    return now >= datetime.fromisoformat(started).timestamp() + deadline_s - _CLOCKS_DIFFER_S


def timeout_s(pod: Json) -> float:
    """Return the pod's `activeDeadlineSeconds`, 0 where it has none."""
    return float(pod.get("spec", {}).get("activeDeadlineSeconds") or 0)


def _labels(pod: Json) -> Json:
    labels: Json = pod.get("metadata", {}).get("labels", {})
    return labels
