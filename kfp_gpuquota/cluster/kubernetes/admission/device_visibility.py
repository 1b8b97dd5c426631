"""Hides GPUs from containers that request none, by NVIDIA_VISIBLE_DEVICES=void. Pure.

CUDA base images set the variable to `all` in the image, where admission cannot read it, and NVIDIA's container runtime
uses it: without this patch a container that requests no GPU has access to every GPU of its node. A container that sets
the variable itself keeps it (manifests/base/device-policies.yaml refuses values with devices); for one that requests
GPUs the device plugin sets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api.resources import Resources
    from kfp_gpuquota.cluster.kubernetes.admission.review_types import Container, PodSpec

VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICES: Final = {"name": VARIABLE, "value": "void"}


def hiding(spec: PodSpec, weights: Resources = (), *, shares: bool = False) -> Iterator[dict[str, Any]]:
    """Return the patch of a pod's containers that request no GPU.

    `weights` has other resources that count as GPUs. `shares`: the first container holds parts of GPUs.
    """
    names = (labels.GPU_RESOURCE, *(name for name, _ in weights if name.startswith(f"{labels.VENDOR}/")))
    for field, containers in (
        ("containers", spec.containers),
        ("initContainers", spec.init_containers),
        ("ephemeralContainers", spec.ephemeral_containers),
    ):
        first = 1 if shares and field == "containers" else 0
        yield from _hidden(f"/spec/{field}", containers or (), first, names)


def _hidden(path: str, containers: Sequence[Container], first: int, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for index, container in enumerate(containers):
        if (
            index < first
            or _requests_gpus(container, names)
            or any(one.name == VARIABLE for one in container.env or ())
        ):
            continue
        if container.env:
            yield {"op": "add", "path": f"{path}/{index}/env/-", "value": NO_DEVICES}
        else:
            yield {"op": "add", "path": f"{path}/{index}/env", "value": [NO_DEVICES]}


def _requests_gpus(container: Container, names: tuple[str, ...]) -> bool:
    resources = container.resources
    given = (resources.limits, resources.requests) if resources is not None else ()
    return any(amounts is not None and amounts.get(name, "0") != "0" for amounts in given for name in names)


def hidden_in_template(container: dict[str, Any]) -> dict[str, Any]:
    """Return a container of an ElasticJob's template that requests no GPUs, with its GPUs hidden."""
    env = container.get("env") or []
    if any(one.get("name") == VARIABLE for one in env):
        return container
    return {**container, "env": [*env, NO_DEVICES]}
