"""What the pod of a step on a KFP backend says of itself. Argo Workflows makes it; the API server of KFP labels it.

KFP's placeholders for the run and the task are filled in where they are a task's inputs, and in no command (its
`launcher_v2.go` knows those of inputs and outputs). So the step's run and place in it are read here.
"""

from __future__ import annotations

import re
from typing import Any, Final

Json = dict[str, Any]

RUN_LABEL: Final = "pipeline/runid"
WORKFLOW_LABEL: Final = "workflows.argoproj.io/workflow"
NODE_ANNOTATION: Final = "workflows.argoproj.io/node-name"
# With the retryStrategy that KFP ships for Argo (templateDefaults) every level of a node's name carries an attempt:
# run(0).root(0).train(0).executor(0). An iteration has two numbers: iteration-iterations(0:0)(0).
_ATTEMPTS: Final = re.compile(r"\(\d+\)(?=\.|$)")
_ITERATION: Final = re.compile(r"\(\d+:[^)]*\)$")
_EXECUTOR: Final = "executor"
"""The last part of a node's name: every task of a pipeline is a template with a task of this name."""


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
    return _ATTEMPTS.sub("", node).removesuffix(f".{_EXECUTOR}")


def name(task: str) -> str:
    """The step's name: the last part of its place."""
    return _ITERATION.sub("", task.rpartition(".")[2])


def _labels(pod: Json) -> Json:
    labels: Json = pod.get("metadata", {}).get("labels", {})
    return labels
