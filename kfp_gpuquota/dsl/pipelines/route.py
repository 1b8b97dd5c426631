"""Routing: edits the steps of a compiled pipeline so that the launcher runs instead of their commands. Pure.

It edits the compiled form (KFP's PipelineSpec as JSON), not the tasks while KFP traces the pipeline's function, because
in the compiled form the steps of nested pipelines, conditions, loops and exit handlers are all entries of
`deploymentSpec.executors`.

Settings of kfp-kubernetes that the workers of a routed step cannot have are rejected instead of dropped. All other
settings are on the step's pod and are copied to the workers' pods (`pod_template.py`).

KFP's placeholders for outputs are masked: only a worker can fill them in, with its own directory. KFP replaces
`{{$...}}` anywhere in a step's command before the step starts. The placeholders for outputs are masked in the original
command, so that they reach the worker unchanged; those for inputs are left to KFP. Replacing the final paths in the
finished command was rejected: an output's path may be a part of another path, or of the author's text.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.annotations import SHARE_ANNOTATIONS
from kfp_gpuquota.api.environment import WORKER_VARIABLES
from kfp_gpuquota.api.validation import check_name
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.dsl.spec import pod_resources, pod_volumes
from kfp_gpuquota.dsl.spec.lease import DURATION_VARIABLE
from kfp_gpuquota.dsl.spec.options import PREFIX, PROJECT, StepOptions, checked, to_environment
from kfp_gpuquota.dsl.spec.pod_template import LAUNCHER_DOMAINS, MOUNT, PROGRAM_MOUNT
from kfp_gpuquota.errors import DefinitionError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


EXECUTOR_INPUT: Final = "{{$}}"
MASK: Final = "gpuquota"

_OUTPUTS = re.compile(
    r"""\{\{\$(?=
        \}\}
      | \.outputs\.output_file\}\}
      | \.outputMetadataUri\}\}
      | \.outputs\.parameters\['[^']+'\]\.output_file\}\}
      | \.outputs\.artifacts\['[^']+'\]\.(?:uri|path)\}\}
    )""",
    re.VERBOSE,
)


def masked(element: str) -> str:
    """Return one element of a command with the placeholders for outputs masked, so that KFP does not replace them."""
    return _OUTPUTS.sub("{{" + MASK, element)


RESERVED_PATHS: Final = (
    MOUNT,
    PROGRAM_MOUNT,
    "/var/run/secrets/gpuquota.dev",
    "/var/lib/gpuquota/checkpoints",
    "/opt/gpuquota/runtime",
)
_VOLUMES: Final = ("pvcMount", "secretAsVolume", "configMapAsVolume", "emptyDirMounts", "genericEphemeralVolume")


def executor_configs(documents: Iterable[Json]) -> Json:
    """Return the Kubernetes configuration of each executor, from the documents after a PipelineSpec."""
    found: Json = {}
    for document in documents:
        kubernetes = document.get("platforms", {}).get("kubernetes", {})
        found |= kubernetes.get("deploymentSpec", {}).get("executors", {})
    return found


def check_config(step: str, config: Json) -> None:
    """Raise DefinitionError for the first setting that would not reach the step's workers."""
    for problem in _problems(config):
        raise DefinitionError(f"step {step!r}: {problem}")


def _problems(config: Json) -> Iterator[str]:
    metadata = config.get("podMetadata", {})
    for part, adder in (("labels", "add_pod_label"), ("annotations", "add_pod_annotation")):
        for name in metadata.get(part, {}):
            domain = name.partition("/")[0]
            if name in SHARE_ANNOTATIONS:
                yield (
                    f"{adder}({name!r}) asks for a part of a GPU, which a routed step asks for in its decorator: "
                    "@gpuquota.component(fraction=...) or (memory=...)"
                )
            elif domain == labels.GROUP or domain in LAUNCHER_DOMAINS:
                yield f"{adder}({name!r}) uses the domain {domain!r}, which belongs to the cluster; choose another name"
    for volume in (volume for field in _VOLUMES for volume in config.get(field, [])):
        path = volume.get("mountPath", "").rstrip("/")
        if path in RESERVED_PATHS:
            yield f"a volume is mounted at {path}, where a worker finds its own files; mount it elsewhere"


Json = dict[str, Any]

COMMAND: Final = ("python3", "-m", "kfp_gpuquota.dsl.launcher")
# kfp.local's SubprocessRunner runs a step only if its command names KFP's executor, as a Python component's own does.
# For all other components the launcher's arguments name it.
EXECUTOR: Final = "kfp.dsl.executor_main"
# One argument instead of two: KFP's time to compile grows with each line of YAML.
TASK: Final = "--task={{$.pipeline_job_uuid}}/{{$.pipeline_task_name}}"
GPUS_ARGUMENT: Final = "--gpus="
IMAGE_ARGUMENT: Final = "--image="
LAUNCHER_IMAGE: Final = "GPUQUOTA_LAUNCHER_IMAGE"
# Variables by which a step's author, or this module, configures the launcher.
LAUNCHER_VARIABLES: Final = frozenset({
    *(PREFIX + field.upper() for field in StepOptions.__struct_fields__),
    PROJECT, DURATION_VARIABLE, LAUNCHER_IMAGE, pod_resources.VARIABLE,
    "GPUQUOTA_CONTEXT", "GPUQUOTA_HOME", "GPUQUOTA_SHARED_SOCKET", "GPUQUOTA_TOKEN_FILE", "GPUQUOTA_URL",
})  # fmt: skip
# Variables that KFP sets on the step's own pod.
POD_VARIABLES: Final = frozenset({"KFP_POD_NAME", "KFP_POD_UID"})
GPU_RESOURCE_SUFFIX: Final = "/gpu"
_OUTSIDE_THE_QUOTA: Final = "tpu"
_PRODUCTS: Final = re.compile(r"(?!NVIDIA_[A-Z0-9_]+$)[\w.-]+(,[\w.-]+)*", re.ASCII)
"""Values of the node label with the product of GPUs; not the names of other clouds' APIs, such as NVIDIA_TESLA_A100."""
_GPU_TYPE: Final = f"{PREFIX}GPU_TYPE"


def is_routed(command: Sequence[object] | None) -> bool:
    """Return whether a container's command is already the launcher."""
    return tuple(command or ())[: len(COMMAND)] == COMMAND


def launcher_arguments(argv: Sequence[str], *, gpus: str = "") -> list[str]:
    """Return the launcher's arguments for a step with the command `argv`; `gpus` is a placeholder for a parameter."""
    stands_in = [] if any(EXECUTOR in element for element in argv) else [f"--stands-in-for={EXECUTOR}"]
    size = [f"{GPUS_ARGUMENT}{gpus}"] if gpus else []
    return [*stands_in, TASK, *size, "--executor-input", EXECUTOR_INPUT, "--", *map(masked, argv)]


def check_command(component: str, command: Sequence[object] | None) -> None:
    """Raise DefinitionError for a container without a command: its image's entry point is not visible here."""
    if not command:
        raise DefinitionError(
            f"component {component!r} has no command: the entry point of its image is not visible here; "
            "write it as in dsl.ContainerSpec(command=[...])"
        )


def route_pipeline(
    spec: Json, project: str | None = None, launcher_image: str | None = None, *, platform: Sequence[Json] = ()
) -> Json:
    """Return a compiled pipeline (KFP's PipelineSpec as JSON, `yaml.safe_load` of its file) with its GPU steps routed.

    Every step that is decorated, or requests GPUs with `set_accelerator_type` and `set_accelerator_limit`, uses the
    quota of `project`; a step that names a project already keeps it. All other steps stay unchanged. Routing is
    idempotent, and the given spec is not changed. Raises DefinitionError.

    With `launcher_image` the launcher of every routed step runs in that image, and the workers run in the step's own
    image, which then need not contain this package. Without it the launcher runs in the step's image, which must.
    `platform` are the documents after the PipelineSpec, with the settings of kfp-kubernetes, which are checked; the
    steps' volumes stay on the launchers' pods (`route_documents` moves them to the workers).
    """
    _check_project(project)
    routed = copy.deepcopy(spec)
    executors: Json = routed.get("deploymentSpec", {}).get("executors", {})
    configs = executor_configs(platform)
    for label, executor in executors.items():
        if "container" in executor:
            step, container = label.removeprefix("exec-"), executor["container"]
            _route_container(step, container, project, launcher_image)
            if is_routed(container.get("command")):
                check_config(step, configs.get(label, {}))
                _swap_image(container, launcher_image)
    return routed


def route_documents(
    spec: Json, platform: Sequence[Json], project: str | None = None, launcher_image: str | None = None
) -> tuple[Json, tuple[Json, ...]]:
    """Return a compiled pipeline with its GPU steps routed as by `route_pipeline`, and the documents after it.

    The volumes of routed steps are moved from the documents to the steps' arguments: only workers mount them.
    """
    routed = route_pipeline(spec, project, launcher_image, platform=platform)
    documents = copy.deepcopy(list(platform))
    for document in documents:
        for label, config in executor_configs([document]).items():
            container = routed.get("deploymentSpec", {}).get("executors", {}).get(label, {}).get("container", {})
            if is_routed(container.get("command")) and has_worker_volumes(routed, label, config):
                pod_volumes.move_to_workers(container, config, pod_volumes.tasks_of(routed, label))
    return routed, tuple(documents)


def has_worker_volumes(spec: Json, label: str, config: Json) -> bool:
    """Return whether the executor has volumes that its workers mount instead of its launcher.

    A component that lists in `task_config_passthroughs` where its settings go gets its volumes from KFP as an input.
    """
    components = spec.get("components", {}).values()
    listed = any(each.get("taskConfigPassthroughs") for each in components if each.get("executorLabel") == label)
    return not listed and any(config.get(field) for field in pod_volumes.MOVED)


def _route_container(step: str, container: Json, project: str | None, launcher_image: str | None) -> None:
    accelerator = _accelerator(step, container)
    if is_routed(container.get("command")):
        _check_agreement(step, container, accelerator)
        container.get("resources", {}).pop("accelerator", None)
    elif accelerator is None or str(accelerator["count"]) == "0":
        return
    else:
        _wrap(step, container, str(accelerator["count"]))
        del container["resources"]["accelerator"]
    check_environment(step, container["env"])
    _add_types(step, container, accelerator)
    pod_resources.move_to_workers(container, on_backend=bool(launcher_image))
    if project and all(entry["name"] != PROJECT for entry in container["env"]):
        container["env"].append({"name": PROJECT, "value": project})


def _swap_image(container: Json, launcher_image: str | None) -> None:
    """Replace the image by the launcher's. The step's image becomes an argument, so it stays in KFP's cache key."""
    arguments = container["args"]
    given = (str(argument) for argument in arguments[: arguments.index("--")])
    own = next((text.removeprefix(IMAGE_ARGUMENT) for text in given if text.startswith(IMAGE_ARGUMENT)), "")
    if launcher_image and not own:
        arguments.insert(0, f"{IMAGE_ARGUMENT}{container['image']}")
    container["image"] = launcher_image or container["image"]


def _wrap(step: str, container: Json, count: str) -> None:
    check_command(step, container.get("command"))
    argv = [*container["command"], *container.get("args", [])]
    constant = not count.startswith("{{")
    options = checked(step, {"gpus": _number(step, count)}) if constant else StepOptions()
    container["command"] = list(COMMAND)
    container["args"] = launcher_arguments(argv, gpus="" if constant else count)
    added = [{"name": name, "value": value} for name, value in to_environment(options).items()]
    container["env"] = [*container.get("env", []), *added]


def _add_types(step: str, container: Json, accelerator: Json | None) -> None:
    """Add the types of GPUs that the task accepts by its accelerator, unless the decorator names them."""
    types = accelerator["types"] if accelerator else ""
    given = next((entry["value"] for entry in container["env"] if entry["name"] == _GPU_TYPE), "")
    if types and given and types != given:
        raise DefinitionError(
            f"step {step!r}: the decorator sets gpu_type={given!r}, the task set_accelerator_type({types!r}); set it "
            "once"
        )
    if types and not given:
        checked(step, {"gpu_type": types})
        container["env"].append({"name": _GPU_TYPE, "value": types})


def _accelerator(step: str, container: Json) -> Json | None:
    """Return {"types", "count"} of a step that requests GPUs; None for one that requests none, or a TPU.

    `types` are those of a type that is no resource's name: values of the node label with the product, by commas.
    """
    requested = container.get("resources", {}).get("accelerator")
    if not requested:
        return None
    kind = str(requested.get("resourceType") or requested.get("type") or "")
    if _OUTSIDE_THE_QUOTA in kind.lower():
        return None
    named = not kind.lower().endswith(GPU_RESOURCE_SUFFIX)
    if named and not _PRODUCTS.fullmatch(kind):
        raise DefinitionError(
            f"step {step!r} asks for the accelerator {kind!r}, but the quota counts GPUs of any type: "
            f"write set_accelerator_type('nvidia.com/gpu'), or values of the node label {GPU_PRODUCT}, the best first: "
            "'NVIDIA-H100-80GB-HBM3,NVIDIA-A100-SXM4-80GB'"
        )
    return {"types": kind if named else "", "count": requested.get("resourceCount") or requested.get("count") or "1"}


def _check_agreement(step: str, container: Json, accelerator: Json | None) -> None:
    if accelerator is None:
        return
    decorated = next(e["value"] for e in container["env"] if e["name"] == PREFIX + "GPUS")
    if str(accelerator["count"]) != decorated:
        raise DefinitionError(
            f"step {step!r}: the decorator sets gpus={decorated}, the task set_accelerator_limit"
            f"({accelerator['count']}); set it once, or use gpuquota.set_gpus(task, {accelerator['count']})"
        )


def check_environment(step: str, environment: Sequence[Json]) -> None:
    """Raise DefinitionError for a variable that the author sets and that would not reach the workers."""
    for name in (entry["name"] for entry in environment):
        if name in WORKER_VARIABLES or name in POD_VARIABLES:
            raise DefinitionError(
                f"step {step!r} sets the environment variable {name}, which is set for each worker or for the step's "
                "pod by the cluster; rename it"
            )
        if name.startswith(PREFIX) and name not in LAUNCHER_VARIABLES:
            raise DefinitionError(
                f"step {step!r} sets the environment variable {name}, but names that begin with {PREFIX} are reserved "
                "for the launcher, which does not use this one; rename it"
            )


def _number(step: str, count: str) -> int:
    try:
        return int(count)
    except ValueError:
        raise DefinitionError(f"step {step!r}: the accelerator limit is {count!r}, which is not a number") from None


def _check_project(project: str | None) -> None:
    if project is None:
        return
    try:
        check_name("project", project)
    except InvalidFieldError as error:
        raise DefinitionError(error.message) from None
