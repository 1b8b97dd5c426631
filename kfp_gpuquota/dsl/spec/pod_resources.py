"""CPU, memory and extended resources of a step: its workers request them, and its launcher requests almost nothing.

KFP sets the values of `set_cpu_limit` and `set_memory_limit` on the step's own pod, which runs the launcher. If that
pod kept them, each step would reserve them twice, and a step that needs more than half a node would wait for its own
launcher. So routing replaces them by the launcher's requests and passes them on to the workers: constants as an
environment variable, which KFP leaves out of its cache key as it leaves out resources; pipeline parameters as an
argument, because KFP fills parameters only into commands and arguments.
"""

from __future__ import annotations

import json
from typing import Any, Final

from kfp_gpuquota.errors import InvalidFieldError

Json = dict[str, Any]

VARIABLE: Final = "GPUQUOTA_POD_RESOURCES"
ARGUMENT: Final = "--pod-resources="

# The launcher waits, follows a log and relays files in chunks. Limits are set only where the step has limits: a
# namespace whose ResourceQuota counts limits rejects pods without them.
_OWN: Final = {"CpuRequest": ("50m", 0.05), "MemoryRequest": ("64Mi", 64 * 2**20 / 1e9)}
_OWN_LIMITS: Final = {"CpuLimit": ("1", 1.0), "MemoryLimit": ("512Mi", 512 * 2**20 / 1e9)}
_FIELDS: Final = {
    "CpuRequest": ("requests", "cpu"),
    "CpuLimit": ("limits", "cpu"),
    "MemoryRequest": ("requests", "memory"),
    "MemoryLimit": ("limits", "memory"),
}
_PLACEHOLDER: Final = "{{"


def move_to_workers(container: Json, *, on_backend: bool) -> None:
    """Move the resources of a routed container (PipelineSpec JSON) to its workers. Idempotent.

    A step without requests gets the launcher's requests only for a KFP backend: kfp.local warns about each request,
    which it ignores.
    """
    resources: Json = container.get("resources", {})
    if _is_moved(container):
        if on_backend and not resources:
            container["resources"] = _launchers({})
        return
    requested = _kubernetes_resources(resources)
    if requested or on_backend:
        container["resources"] = _launchers(resources)
    else:
        container.pop("resources", None)
    text = json.dumps(requested, sort_keys=True)
    if _PLACEHOLDER in text:
        container["args"].insert(0, ARGUMENT + text)
    else:
        container["env"].append({"name": VARIABLE, "value": text})


def parsed(text: str | None) -> Json | None:
    """Return container resources in Kubernetes' format; None where the step was compiled without routing.

    Raises InvalidFieldError.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(part, dict) for part in found.values()):
            return found
    except ValueError:
        pass
    raise InvalidFieldError(VARIABLE, text, "it must be JSON such as {'limits': {'memory': '8Gi'}}")


def with_extended(resources: Json, extended: dict[str, int]) -> Json:
    """Return the resources with `extended` added to the limits and to the requests, which must be equal."""
    amounts = {name: str(count) for name, count in extended.items()}
    parts = {part: {**resources.get(part, {}), **amounts} for part in ("limits", "requests")}
    return {**resources, **{part: found for part, found in parts.items() if found}}


def _is_moved(container: Json) -> bool:
    return any(entry["name"] == VARIABLE for entry in container.get("env", [])) or any(
        str(argument).startswith(ARGUMENT) for argument in container.get("args", [])
    )


def _kubernetes_resources(resources: Json) -> Json:
    """Return KFP's fields as {"limits": ..., "requests": ...}.

    KFP writes each amount as text (`resourceMemoryLimit`), and constants also as a number for older backends: CPUs, and
    memory in 10^9 bytes.
    """
    found: Json = {}
    for field, (part, name) in _FIELDS.items():
        amount = resources.get(f"resource{field}") or _number(name, resources.get(_camel(field)))
        if amount:
            found.setdefault(part, {})[name] = amount
    return found


def _number(name: str, amount: float | None) -> str:
    if not amount:
        return ""
    return f"{round(amount * 1000)}m" if name == "cpu" else str(round(amount * 1e9))


def _launchers(resources: Json) -> Json:
    own = dict(_OWN)
    own |= {f: amount for f, amount in _OWN_LIMITS.items() if resources.get(f"resource{f}") or resources.get(_camel(f))}
    texts = {f"resource{field}": text for field, (text, _) in own.items()}
    return texts | {_camel(field): number for field, (_, number) in own.items()}


def _camel(field: str) -> str:
    return field[0].lower() + field[1:]
