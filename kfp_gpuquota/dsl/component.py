"""`gpuquota.component`, the decorator for a component, and `gpuquota.set_gpus`, which changes the GPUs of one task."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, overload

from kfp import dsl
from kfp.dsl import base_component, structures
from kfp.dsl import placeholders as kfp_placeholders
from kfp.dsl.component_task_config import TaskConfigField, TaskConfigPassthrough
from kfp.dsl.pipeline_task import PipelineTask, TaskState

from kfp_gpuquota.dsl.pipelines import route
from kfp_gpuquota.dsl.spec.options import ARGUMENTS, StepOptions, checked, from_environment, to_environment
from kfp_gpuquota.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfp.pipeline_spec import pipeline_spec_pb2

Component: TypeAlias = base_component.BaseComponent
_SIZES: Final = ("gpus", "min_gpus", "max_gpus")


def _pipeline_spec(self: Component) -> pipeline_spec_pb2.PipelineSpec:
    """Return the pipeline spec of the edited component; one loaded from YAML would return its original text."""
    with base_component.BlockPipelineTaskRegistration():
        return self.component_spec.to_pipeline_spec()


def _no_signature(self: Component) -> object:
    """Raise DefinitionError: @dsl.component and @dsl.pipeline read the signature of what they decorate first.

    Without this, KFP fails inside `inspect` with a message about code objects.
    """
    raise DefinitionError(f"component {self.name!r}: put @gpuquota.component(...) above @dsl.component, not below it")


_OVERRIDES: Final = {"pipeline_spec": property(_pipeline_spec), "__signature__": property(_no_signature)}


@overload
def component(target: Callable[..., Any] | Component, **options: Any) -> Component: ...
@overload
def component(
    target: None = None,
    *,
    gpus: int = 1,
    min_gpus: int | None = None,
    max_gpus: int | None = None,
    gpus_per_worker: int | None = None,
    fraction: float | None = None,
    fraction_limit: float | None = None,
    memory: str | None = None,
    memory_limit: str | None = None,
    compute: float | None = None,
    devices: int | None = None,
    gpu_type: str | Sequence[str] | None = None,
    interactive: bool = False,
    preemptible: bool | None = None,
    priority: int | None = None,
    max_runtime: str | float | None = None,
    max_restarts: int | None = None,
    restart_window: str | float | None = None,
    checkpoint: str | None = None,
    resource_claim_template: str | None = None,
    extended_resources: dict[str, int] | None = None,
    name: str | None = None,
    **kfp_keywords: Any,
) -> Callable[[Callable[..., Any] | Component], Component]: ...


def component(
    target: Callable[..., Any] | Component | None = None,
    *,
    gpus: int = 1,
    min_gpus: int | None = None,
    max_gpus: int | None = None,
    gpus_per_worker: int | None = None,
    fraction: float | None = None,
    fraction_limit: float | None = None,
    memory: str | None = None,
    memory_limit: str | None = None,
    compute: float | None = None,
    devices: int | None = None,
    gpu_type: str | Sequence[str] | None = None,
    interactive: bool = False,
    preemptible: bool | None = None,
    priority: int | None = None,
    max_runtime: str | float | None = None,
    max_restarts: int | None = None,
    restart_window: str | float | None = None,
    checkpoint: str | None = None,
    resource_claim_template: str | None = None,
    extended_resources: dict[str, int] | None = None,
    name: str | None = None,
    **kfp_keywords: Any,
) -> Component | Callable[[Callable[..., Any] | Component], Component]:
    """Run a step's work as a job in its team's GPU quota.

    Put it above `@dsl.component` or `@dsl.container_component`, apply it to a component loaded from YAML, or decorate
    a plain function: then other keywords are passed to `dsl.component`. The given component is not changed.

    `gpus` is the number of GPUs that the step requests; with `min_gpus` or `max_gpus` the job is elastic. Instead of
    whole GPUs a step can request a share of each of `devices` GPUs (default 1): `fraction`, up to `fraction_limit`
    while the rest of the GPU is idle, or `memory` ('4Gi'), up to `memory_limit`; `compute` is its part of the computing
    power. `gpu_type` is the GPU product in the nodes' labels; of several, the first that is free. An `interactive` step
    stays inside the guaranteed quota and is never preempted. `max_runtime` is a number of seconds or a text such as
    '2h': the run time of all starts. The job fails after `max_restarts` (3) ends of its own workers without
    `restart_window` ('6h') between two of them. `checkpoint` names a PersistentVolumeClaim for checkpoints on
    Kubernetes. `resource_claim_template` names the ResourceClaimTemplate of which each worker gets a claim there,
    instead of `nvidia.com/gpu`. `extended_resources` are requested by each worker's pod in addition to its GPUs:
    {"rdma/hca": 1}. `name` is the prefix of the job's name (default: the step's name).

    Raises DefinitionError, which names the component and the argument.
    """
    arguments = locals()
    given = {argument: arguments[argument] for argument in ARGUMENTS}

    def decorate(target: Callable[..., Any] | Component) -> Component:
        label = str(getattr(target, "name", None) or getattr(target, "__name__", target))
        options = checked(label, given)
        return _decorated(_as_component(label, target, kfp_keywords), options)

    return decorate if target is None else decorate(target)


def set_gpus(task: PipelineTask, gpus: int, *, min: int | None = None, max: int | None = None) -> PipelineTask:  # noqa: A002
    """Set the GPUs of one task: `gpus`, elastic between `min` and `max` where they are given. Returns the task.

    A task whose component is not decorated is routed through the quota from then on. Raises DefinitionError.
    """
    label = task.component_spec.name
    container = task.container_spec
    if container is None:
        raise DefinitionError(f"task {label!r} is not one container: set_gpus needs a step, not a pipeline or importer")
    if task.state is TaskState.FINAL:
        raise DefinitionError(f"task {label!r} has run already: call set_gpus inside a pipeline")
    sizes = {"gpus": gpus, "min_gpus": min, "max_gpus": max}
    environment = dict(container.env or {})
    if route.is_routed(container.command):
        before = from_environment(environment)
        kept = {f: getattr(before, f) for f in StepOptions.__struct_fields__ if f not in _SIZES}
        container.env = {**_without_options(environment), **to_environment(checked(label, {**kept, **sizes}))}
    else:
        _wrap(label, container, checked(label, sizes))
    return task


def _as_component(label: str, target: Callable[..., Any] | Component, kfp_keywords: dict[str, Any]) -> Component:
    if not isinstance(target, base_component.BaseComponent):
        if not callable(target):
            raise DefinitionError(f"@gpuquota.component is for components and functions, not for {target!r}")
        return cast("Component", dsl.component(target, **kfp_keywords))
    if kfp_keywords:
        raise DefinitionError(
            f"component {label!r}: unknown argument {sorted(kfp_keywords)[0]!r}; pass KFP's own arguments to "
            "@dsl.component below"
        )
    return target


def _decorated(given: Component, options: StepOptions) -> Component:
    spec = given.component_spec
    _check_kind(spec)
    edited = copy.deepcopy(given)
    edited.__class__ = type(type(given).__name__, (type(given),), dict(_OVERRIDES))
    _wrap(spec.name, edited.component_spec.implementation.container, options)
    _pass_environment(edited.component_spec)
    return edited


def _check_kind(spec: structures.ComponentSpec) -> None:
    implementation = spec.implementation
    if implementation.graph is not None:
        raise DefinitionError(
            f"{spec.name!r} is a pipeline: decorate its steps with @gpuquota.component(...), and the pipeline with "
            "@gpuquota.pipeline(project=...)"
        )
    if implementation.container is None:
        raise DefinitionError(f"component {spec.name!r} runs no container, so it cannot use GPUs")
    if route.is_routed(implementation.container.command):
        raise DefinitionError(
            f"component {spec.name!r} is decorated with @gpuquota.component twice; for another size of one task use "
            "gpuquota.set_gpus(task, ...)"
        )


def _wrap(label: str, container: structures.ContainerSpecImplementation, options: StepOptions) -> None:
    route.check_command(label, container.command)
    argv = [
        kfp_placeholders.convert_command_line_element_to_string(element)
        for element in [*(container.command or []), *(container.args or [])]
    ]
    container.command = list(route.COMMAND)
    container.args = route.launcher_arguments(argv)
    container.env = {**_as_dict(container.env), **to_environment(options)}


def _as_dict(environment: Any) -> dict[str, str]:
    """Return the environment by name. For a compiled component KFP's loader keeps YAML's list of name and value."""
    if isinstance(environment, list):
        return {entry["name"]: entry.get("value", "") for entry in environment}
    return dict(environment or {})


def _without_options(environment: dict[str, str]) -> dict[str, str]:
    ours = {f"GPUQUOTA_{field.upper()}" for field in StepOptions.__struct_fields__}
    return {name: value for name, value in environment.items() if name not in ours}


def _pass_environment(spec: structures.ComponentSpec) -> None:
    """Add the environment to the component's `task_config_passthroughs`, where it has any.

    A component that lists passthroughs receives only those parts of its task's configuration.
    """
    listed = spec.task_config_passthroughs
    if listed and all(passthrough.field is not TaskConfigField.ENV for passthrough in listed):
        listed.append(TaskConfigPassthrough(field=TaskConfigField.ENV, apply_to_task=True))
