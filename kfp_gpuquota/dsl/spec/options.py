"""The options of a decorated step, and their encoding for the step's launcher.

They are environment variables of the step's container, not arguments: KFP's backend leaves variables out of its cache
key, so that a step with other GPUs still finds its cached result.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.durations import seconds
from kfp_gpuquota.api.quantity import parse_mib
from kfp_gpuquota.api.validation import MAX_RUNTIME_S, check_count, check_name, check_range
from kfp_gpuquota.errors import DefinitionError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "GPUQUOTA_"
PROJECT: Final = "GPUQUOTA_PROJECT"
# Fields of a share, which JobSpec has with the prefix "gpu_". A name that begins with another one comes first.
_SHARE: Final = ("fraction_limit", "fraction", "memory_limit_mib", "memory_mib", "compute", "devices")
_SAME: Final = ("gpus", "min_gpus", "max_gpus", "gpus_per_worker", "preemptible", "priority", "max_runtime_s")
_GIVEN: Final = ("max_restarts", "restart_window_s")  # JobSpec has a default for them
_EXTENDED: Final = "extended_resources"
MAX_EXTENDED: Final = 4096


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of a step's job that do not depend on the run."""

    gpus: int = 1  # this and the next two are of the whole job
    min_gpus: int | None = None
    max_gpus: int | None = None
    gpus_per_worker: int | None = None
    fraction: float | None = None  # this or `memory_mib`: a share of each of `devices` GPUs of one node
    fraction_limit: float | None = None  # up to which the share may use idle capacity
    memory_mib: int | None = None
    memory_limit_mib: int | None = None
    compute: float | None = None  # the part of each GPU's computing power
    devices: int | None = None
    gpu_type: str = ""  # the GPU products in the nodes' labels that it accepts, in order: "A100,H100"
    interactive: bool = False
    preemptible: bool | None = None
    priority: int | None = None
    max_runtime_s: float | None = None  # of all starts, without the time in the queue
    max_restarts: int | None = None  # ends of its own workers, without `restart_window_s` between two of them
    restart_window_s: float | None = None
    checkpoint: str = ""  # a PersistentVolumeClaim; the embedded cluster needs none
    resource_claim_template: str = ""  # of which each worker gets a claim; the embedded cluster has none
    extended_resources: dict[str, int] = {}  # that each worker's pod requests in addition, as {"rdma/hca": 1}
    name: str = ""  # the prefix of the job's name; "": the step's name

    def __post_init__(self) -> None:
        _check_extended(self.extended_resources)
        check_count("gpus", self.gpus, 1)
        if self.name:
            check_name("name", self.name)
        if self.max_runtime_s is not None:
            check_range("max_runtime", self.max_runtime_s, 1, MAX_RUNTIME_S, "s")
        if self.checkpoint:
            check_name("checkpoint", self.checkpoint)
        for field in ("interactive", "preemptible"):
            if not isinstance(getattr(self, field), bool | None):
                raise InvalidFieldError(field, getattr(self, field), "it must be True or False")
        self.job_spec(
            name="step",
            project="project",
            command=("true",),
            resource_claim_template=self.resource_claim_template,
        )

    def job_spec(self, *, name: str, project: str, command: tuple[str, ...], **more: Any) -> JobSpec:
        """Return the JobSpec that a run submits; `more` are other fields of JobSpec. Raises InvalidFieldError."""
        kind = Kind.BUILD if self.interactive else Kind.TRAIN
        return JobSpec(
            name=name,
            project=project,
            command=command,
            kind=kind,
            gpu_types=tuple(self.gpu_type.split(",")) if self.gpu_type else (),
            **{f"gpu_{field}": getattr(self, field) for field in _SHARE},
            **{field: getattr(self, field) for field in _SAME},
            **{field: value for field in _GIVEN if (value := getattr(self, field)) is not None},
            **more,
        )


ARGUMENTS: Final = {re.sub("_(s|mib)$", "", field): field for field in StepOptions.__struct_fields__}
"""The options by the decorator's arguments, which have no units in their names: '2h', '4Gi'."""


def checked(component: str, given: Mapping[str, object]) -> StepOptions:
    """Return the options from the decorator's arguments. Raises DefinitionError with the component and the argument."""
    for argument, value in given.items():
        if _is_channel(value):
            raise DefinitionError(
                f"component {component!r}: {argument} is {_channel(value)}, which has no value before the pipeline "
                "runs, but a constant is needed here; for a number of GPUs set by a parameter use "
                "task.set_accelerator_type('nvidia.com/gpu').set_accelerator_limit(...)"
            )
    _check_whole(component, given.get("gpus"))
    try:
        fields = {
            ARGUMENTS.get(argument, argument): _in_units(component, argument, value)
            for argument, value in given.items()
            if value is not None
        }
        return StepOptions(**fields)  # type: ignore[arg-type]  # the structs check types themselves
    except InvalidFieldError as error:
        message = error.message
        for field in _SHARE:
            message = message.replace(f"gpu_{field}", field.removesuffix("_mib"))
        message = message.replace("gpu_types", "gpu_type")
        message = message.replace("kind is 'build'", "interactive is True")
        raise DefinitionError(f"component {component!r}: {message}") from None


def _check_whole(component: str, gpus: object) -> None:
    if isinstance(gpus, float) and 0 < gpus < 1:
        raise DefinitionError(
            f"component {component!r}: gpus is {gpus}, but it must be a whole number; for a part of a GPU write "
            f"fraction={gpus}"
        )


def to_environment(options: StepOptions) -> dict[str, str]:
    """Return the options as GPUQUOTA_* variables in a fixed order, without defaults except `gpus`."""
    given = msgspec.to_builtins(options)
    given = {"gpus": options.gpus, **given}
    return {PREFIX + name.upper(): _shown(value) for name, value in sorted(given.items())}


def from_environment(environment: Mapping[str, str]) -> StepOptions:
    """Return the options from GPUQUOTA_* variables, the inverse of `to_environment`. Raises InvalidFieldError."""
    found: dict[str, Any] = {
        field: environment[PREFIX + field.upper()]
        for field in StepOptions.__struct_fields__
        if environment.get(PREFIX + field.upper())
    }
    try:
        if _EXTENDED in found:
            found[_EXTENDED] = msgspec.json.decode(found[_EXTENDED])
        return msgspec.convert(found, StepOptions, strict=False)
    except msgspec.DecodeError as error:
        raise InvalidFieldError(
            "environment", found, f"the step's GPUQUOTA_* variables are invalid: {error}"
        ) from error


def _is_channel(value: object) -> bool:
    """Return whether it is a pipeline parameter or a task's output. By attributes: this module must not import kfp."""
    return hasattr(value, "pattern") and hasattr(value, "channel_type")


def _channel(value: Any) -> str:
    return f"output {value.name!r} of task {value.task_name!r}" if value.task_name else f"parameter {value.name!r}"


def _seconds(component: str, argument: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (found := seconds(value.strip())) is not None:
        return found
    raise DefinitionError(
        f"component {component!r}: {argument} is {value!r}, but it must be seconds or a time such as '90m', '2h', '1d'"
    )


def _in_units(component: str, argument: str, value: object) -> object:
    """Return an argument's value in the unit of the option, which is the end of its name."""
    if argument == "gpu_type":
        return _types(value)
    unit = ARGUMENTS.get(argument, argument).removeprefix(argument)
    if unit == "_s":
        return _seconds(component, argument, value)
    return _mebibytes(argument, value) if unit == "_mib" else value


def _types(value: object) -> str:
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list | tuple) or not all(isinstance(one, str) for one in types):
        raise InvalidFieldError("gpu_type", value, "it must be a type of GPUs, or a list of some, the best one first")
    return ",".join(types)


def _mebibytes(argument: str, value: object) -> int:
    if not isinstance(value, str):
        raise InvalidFieldError(argument, value, "it must be an amount with a unit", hint="for example '4Gi' or '4G'")
    return parse_mib(argument, value)


def _check_extended(resources: Mapping[str, object]) -> None:
    for name, count in resources.items():
        if "/" not in name or name.endswith("/gpu"):
            raise InvalidFieldError(
                _EXTENDED, name, "it must be an extended resource such as 'rdma/hca'; for GPUs write gpus=..."
            )
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_EXTENDED:
            why = f"the count must be a whole number from 1 to {MAX_EXTENDED}"
            raise InvalidFieldError(_EXTENDED, {name: count}, why)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return msgspec.json.encode(value, order="sorted").decode()
    return str(value).lower() if isinstance(value, bool) else str(value)
