"""The step that a launcher runs, parsed from its arguments and its environment."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import pipeline_labels
from kfp_gpuquota.api.environment import WORKER_VARIABLES
from kfp_gpuquota.api.validation import MAX_SECONDS, check_range
from kfp_gpuquota.cluster.connect import current_project
from kfp_gpuquota.dsl.spec import pod_resources, pod_volumes
from kfp_gpuquota.dsl.spec.lease import DURATION_S, DURATION_VARIABLE
from kfp_gpuquota.dsl.spec.naming import job_name, label_value
from kfp_gpuquota.dsl.spec.options import PREFIX, PROJECT, StepOptions, from_environment
from kfp_gpuquota.errors import InvalidFieldError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

Json = dict[str, Any]
# The cluster sets the workers' identity and devices; the other variables belong to the launcher or its shell.
_NOT_PASSED_ON: Final = re.compile(
    rf"{PREFIX}.*|RUNAI_.*|{'|'.join(WORKER_VARIABLES)}|(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|_|SHLVL"
)
_LOCAL_RUN: Final = re.compile(r"([^/]+)-\d{4}(?:-\d{2}){5}-\d+/[^/]+/[^/]+$")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Step:
    """One attempt of one step. `argv` is its original command, in which the outputs' placeholders are not replaced yet.

    `task` identifies the step in its run: its `name`, or its full path where loops repeat the name. `pipeline` is the
    pipeline's name, "" where it is not known. `on_cpu`: the run asks for 0 GPUs.
    """

    options: StepOptions
    project: str
    run_id: str
    task: str
    name: str
    argv: list[str]
    executor_input: Json
    environment: dict[str, str]
    lease_s: float
    image: str = ""
    resources: Json | None = None
    volumes: Json = field(default_factory=lambda: pod_volumes.NO_VOLUMES)
    on_cpu: bool = False
    pipeline: str = ""

    @property
    def worker_resources(self) -> Json | None:
        """CPU, memory and extended resources of a worker's pod; None: those of the step's own pod."""
        if not self.options.extended_resources:
            return self.resources
        return pod_resources.with_extended(self.resources or {}, self.options.extended_resources)

    @property
    def job_name(self) -> str:
        """The job's name: the same for every attempt of this step in this run, and unique to it."""
        label = self.options.name or self.name
        return job_name(label, run_id=self.run_id, task=self.task, executor_input=self.executor_input)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the step's job."""
        named = {pipeline_labels.NAME: label_value(self.pipeline)} if label_value(self.pipeline) else {}
        return {pipeline_labels.RUN: label_value(self.run_id), pipeline_labels.TASK: label_value(self.name), **named}


def step_from(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Step:
    """Return the step of the arguments and the environment. Raises UsageError for missing or wrong values."""
    options = from_environment(environment)
    gpus = None if arguments.gpus is None else _whole(arguments.gpus)
    if gpus:
        options = msgspec.structs.replace(options, gpus=gpus)
    executor_input = _decoded(arguments.executor_input)
    run_id, task_name = arguments.task.split("/", 1)
    return Step(
        options=options,
        project="" if gpus == 0 else _project(environment),
        run_id=run_id,
        task=task_name,
        name=task_name,
        argv=arguments.argv,
        executor_input=executor_input,
        environment=passed_on(environment),
        lease_s=_lease_s(environment),
        image=arguments.image,
        resources=pod_resources.parsed(arguments.pod_resources or environment.get(pod_resources.VARIABLE)),
        volumes=pod_volumes.parsed(arguments.volumes),
        on_cpu=gpus == 0,
        pipeline=_local_pipeline(executor_input["outputs"]["outputFile"]),
    )


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the step's environment that is passed on to its workers."""
    return {
        name: value
        for name, value in environment.items()
        if _VARIABLE.fullmatch(name) and not _NOT_PASSED_ON.fullmatch(name)
    }


def _project(environment: Mapping[str, str]) -> str:
    try:
        return current_project(environment=environment)
    except UsageError:
        raise UsageError(
            "this step names no project, so it has no quota to use; write @gpuquota.pipeline(project=...) "
            f"above @dsl.pipeline, set {PROJECT}, or set a default once: gpuquota config project PROJECT"
        ) from None


def _local_pipeline(output_file: object) -> str:
    """Return the name of a pipeline that kfp.local runs from the path of a step's output: NAME-TIME/TASK/FILE."""
    found = _LOCAL_RUN.search(str(output_file))
    return "" if found is None else found[1]


def _lease_s(environment: Mapping[str, str]) -> float:
    text = environment.get(DURATION_VARIABLE) or str(DURATION_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    check_range(DURATION_VARIABLE, seconds, 1, MAX_SECONDS, "s")
    return seconds


def _decoded(text: str) -> Json:
    try:
        decoded: Json = json.loads(text)
        decoded["outputs"]["outputFile"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFieldError("--executor-input", text, f"KFP's executor input must be JSON: {error!r}") from None
    return decoded


def _whole(text: str) -> int:
    """Return a pipeline parameter's text as a whole number: KFP writes 2 or 2.0."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number.is_integer():
        raise InvalidFieldError("gpus", text, "the accelerator limit must be a whole number")
    return int(number)
