"""Checks a compiled pipeline before it runs: which steps are routed, with which GPUs, and what would fail. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api import Kind, Node, Project
from kfp_gpuquota.cluster.admission import check_fits
from kfp_gpuquota.dsl.pipelines.route import GPUS_ARGUMENT, is_routed, route_pipeline
from kfp_gpuquota.dsl.spec.options import PROJECT, StepOptions, from_environment
from kfp_gpuquota.errors import DefinitionError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Json = dict[str, Any]


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A step routed through the quota of `project` ("": none named). GPUs are None where a parameter sets them.

    `request` is what it asks for as a text: "2", "0.5" for a part of a GPU, "4Gi"; `gpus` are whole devices.
    """

    step: str
    project: str
    request: str = ""
    gpus: int | None
    min_gpus: int | None
    max_gpus: int | None
    kind: Kind
    quota: Project | None = None


class PipelineCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check. `unrouted` are the steps that stay unchanged."""

    pipeline: str
    routed: tuple[StepCheck, ...]
    unrouted: tuple[str, ...]
    problems: tuple[str, ...]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a cluster's state that limit a job."""

    projects: dict[str, Project]
    nodes: tuple[Node, ...]


def check_pipeline(
    spec: Json,
    project: str | None = None,
    *,
    configured: str = "",
    cluster: Cluster | None = None,
    platform: Sequence[Json] = (),
) -> PipelineCheck:
    """Check a compiled pipeline (KFP's PipelineSpec as JSON) as `route_pipeline(spec, project)` would route it.

    `configured` is the default project where it will run, for steps that name none. `platform` are the documents after
    the PipelineSpec, with the settings of kfp-kubernetes. Without `cluster` no quota is checked.
    Raises DefinitionError for an invalid `project` name.
    """
    route_pipeline({}, project)
    executors: Json = spec["deploymentSpec"].get("executors", {})
    routed, unrouted, problems = [], [], []
    for step, label in sorted(steps_of(spec)):
        try:
            container = _routed(executors, label, project, platform)
            found = _step_check(step, container, configured, cluster) if container else None
        except (DefinitionError, InvalidFieldError) as error:
            problems.append(_of_step(step, error.message))
            continue
        if found is None:
            unrouted.append(step)
        else:
            routed.append(found)
            problems += [_of_step(step, problem) for problem in _problems(found, _options(container), cluster)]
    name = str(spec["pipelineInfo"]["name"])
    return PipelineCheck(
        pipeline=name, routed=tuple(routed), unrouted=tuple(unrouted), problems=tuple(dict.fromkeys(problems))
    )


def steps_of(spec: Json) -> Iterator[tuple[str, str]]:
    """Yield (name, executor) of every step; inside a loop, a condition or a nested pipeline the name is a path."""
    yield from _steps_of(spec.get("components", {}), spec["root"]["dag"], "")


def _steps_of(components: Json, dag: Json, prefix: str) -> Iterator[tuple[str, str]]:
    for task in dag.get("tasks", {}).values():
        component = components[task["componentRef"]["name"]]
        name = prefix + task["taskInfo"]["name"]
        if "dag" in component:
            yield from _steps_of(components, component["dag"], f"{name}/")
        else:
            yield name, component["executorLabel"]


def _routed(executors: Json, label: str, project: str | None, platform: Sequence[Json]) -> Json | None:
    """Return the step's container after routing; None for a step that stays unchanged."""
    spec = route_pipeline({"deploymentSpec": {"executors": {label: executors[label]}}}, project, platform=platform)
    container: Json | None = spec["deploymentSpec"]["executors"][label].get("container")
    return container if container and is_routed(container.get("command")) else None


def _step_check(step: str, container: Json, configured: str, cluster: Cluster | None) -> StepCheck:
    options = _options(container)
    spec = options.job_spec(name="step", project="project", command=("true",))
    constant = all(not argument.startswith(GPUS_ARGUMENT) for argument in container["args"])
    project = _environment(container).get(PROJECT) or configured
    return StepCheck(
        step=step,
        project=project,
        request=spec.asks if constant else "",
        gpus=spec.gpus if constant else None,
        min_gpus=spec.smallest if constant else None,
        max_gpus=spec.largest if constant else None,
        kind=spec.kind,
        quota=cluster.projects.get(project) if cluster else None,
    )


def _options(container: Json | None) -> StepOptions:
    return from_environment(_environment(container or {}))


def _environment(container: Json) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}


def _problems(found: StepCheck, options: StepOptions, cluster: Cluster | None) -> Iterator[str]:
    if not found.project:
        yield (
            "it names no project; add --project PROJECT, write @gpuquota.pipeline(project=...), or set a default: "
            "gpuquota config project PROJECT"
        )
    elif cluster and not found.quota:
        yield (
            f"project {found.project!r} does not exist; create it with: "
            f"gpuquota project create {found.project} --guaranteed N"
        )
    elif cluster and found.quota and found.gpus is not None:
        yield from _beyond_quota(options, found.quota, cluster)


def _beyond_quota(options: StepOptions, quota: Project, cluster: Cluster) -> Iterator[str]:
    spec = options.job_spec(name="step", project=quota.name, command=("true",))
    try:
        check_fits(spec, quota, cluster.nodes)
    except InvalidFieldError as error:
        yield error.message
        return
    if not spec.may_be_preempted and spec.smallest > quota.guaranteed:
        yield (
            f"it cannot be preempted, so it stays inside the quota, and its {spec.smallest} GPUs are more than the "
            f"{quota.guaranteed} guaranteed to project {quota.name!r}: it would never start; request fewer, or: "
            f"gpuquota project set {quota.name} --guaranteed {spec.smallest}"
        )


def _of_step(step: str, message: str) -> str:
    """Return the message with the step's name in front, unless it has it already (routing and decorators add it)."""
    return message if message.startswith(("step ", "component ")) else f"step {step!r}: {message}"
