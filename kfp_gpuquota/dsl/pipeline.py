"""`gpuquota.pipeline`, the decorator for a pipeline."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from google.protobuf import json_format  # type: ignore[import-untyped]
from kfp.dsl import base_component, structures
from kfp.pipeline_spec import pipeline_spec_pb2

from kfp_gpuquota.dsl.pipelines.route import LAUNCHER_IMAGE, route_documents, route_pipeline
from kfp_gpuquota.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]
Pipeline: TypeAlias = base_component.BaseComponent


def _pipeline_spec(self: Pipeline) -> pipeline_spec_pb2.PipelineSpec:
    """Return the edited pipeline spec; a pipeline loaded from YAML would return its original text."""
    return self.component_spec.implementation.graph


@overload
def pipeline(target: Pipeline) -> Pipeline: ...
@overload
def pipeline(
    target: None = None, *, project: str | None = None, launcher_image: str | None = None
) -> Callable[[Pipeline], Pipeline]: ...


def pipeline(
    target: Pipeline | None = None, *, project: str | None = None, launcher_image: str | None = None
) -> Pipeline | Callable[[Pipeline], Pipeline]:
    """Route every step of a pipeline that uses GPUs through the quota of `project`.

    Put it above `@dsl.pipeline`, or apply it to a pipeline loaded from YAML. Decorated steps, and steps that request
    GPUs with `set_accelerator_limit`, are routed, also in nested pipelines, conditions, loops and exit handlers.
    Without `project` a step uses $GPUQUOTA_PROJECT or the configured default where it runs (on Kubernetes its
    namespace). The given pipeline is not changed. Raises DefinitionError.

    `launcher_image` (default: $GPUQUOTA_LAUNCHER_IMAGE where the pipeline is defined) is for a KFP backend: the image
    with this package, in which the steps' pods wait for their workers. The workers run in the steps' own images, which
    need not contain this package. On one machine it has no effect.
    """

    def decorate(target: Pipeline) -> Pipeline:
        _check_kind(target)
        routed = copy.deepcopy(target)
        routed.__class__ = type(type(target).__name__, (type(target),), {"pipeline_spec": property(_pipeline_spec)})
        _route(routed.component_spec, project, launcher_image or os.environ.get(LAUNCHER_IMAGE))
        return routed

    return decorate if target is None else decorate(target)


def _route(component: structures.ComponentSpec, project: str | None, launcher_image: str | None) -> None:
    """Route a pipeline's GPU steps. Without settings of kfp-kubernetes only its deployment spec is converted: KFP's
    conversion of a whole pipeline takes longer than all of routing.
    """
    graph = component.implementation.graph
    platform = json_format.MessageToDict(component.platform_spec)
    if platform:
        spec, (edited,) = route_documents(json_format.MessageToDict(graph), [platform], project, launcher_image)
        graph.CopyFrom(json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec()))
        component.platform_spec = json_format.ParseDict(edited, pipeline_spec_pb2.PlatformSpec())
        return
    spec = route_pipeline({"deploymentSpec": json_format.MessageToDict(graph.deployment_spec)}, project, launcher_image)
    graph.deployment_spec.CopyFrom(json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec()).deployment_spec)


def _check_kind(target: Any) -> None:
    if isinstance(target, base_component.BaseComponent) and target.component_spec.implementation.graph is not None:
        return
    name = getattr(target, "name", None) or getattr(target, "__name__", target)
    raise DefinitionError(
        f"{name!r} is not a pipeline yet: put @gpuquota.pipeline(...) above @dsl.pipeline, not below it; "
        "for a step use @gpuquota.component(...)"
    )
