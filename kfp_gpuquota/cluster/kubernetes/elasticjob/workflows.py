"""Determines from a run's Argo Workflow whether the run still waits for one of its steps. Pure.

A step's pod may not exist while the step continues: Argo creates the next attempt after its requeue time (10 s by
default) and its backoff, and the image may have to be pulled. No fixed time bounds that, but the Workflow does: the run
waits for the step while the step's node, or that of its executor, has not ended. With the retryStrategy that KFP ships
for Argo (templateDefaults) these are Retry nodes, which stay Running between two attempts.

Rejected: waiting while the Workflow runs. A step that has failed permanently may be one of many, and its job would hold
GPUs until the others end.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from datetime import datetime  # noqa: TC003 (msgspec reads the annotations)
from typing import Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import is_object_name, join
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, OwnerReference, Struct

KIND: Final = "Workflow"
GROUP: Final = "argoproj.io"
EXECUTOR: Final = ".executor"
"""Suffix of an executor node's name: every task of a pipeline is a template with one task of this name."""
# Every level of a node's name may carry an attempt: run(0).root(0).train(0).executor(0). An iteration has two numbers:
# iteration-iterations(0:0)(0).
_ATTEMPTS: Final = re.compile(r"\(\d+\)(?=\.|$)")
_GENERATED: Final = re.compile(r"-[a-z0-9]{5}$")
_FINAL: Final = frozenset({"Succeeded", "Failed", "Error", "Skipped", "Omitted"})


class _Spec(Struct, frozen=True):
    active_deadline_seconds: int | None = None
    shutdown: str = ""


class _Node(Struct, frozen=True):
    name: str = ""
    phase: str = ""


class _Status(Struct, frozen=True):
    phase: str = ""
    finished_at: datetime | None = None
    nodes: dict[str, _Node] | None = None
    compressed_nodes: str = ""


class Workflow(Struct, frozen=True):
    """The fields of an Argo Workflow that are read."""

    metadata: Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


def path(namespace: str, *name: str) -> str:
    """Return the path of the Workflow `name`, or of all Workflows of the namespace. Raises InvalidFieldError."""
    return join("/apis/argoproj.io/v1alpha1/namespaces", namespace, "workflows", *name)


def pipeline_of(workflow: str) -> str:
    """Return the name of the pipeline of a Workflow: KFP adds a hyphen and five characters."""
    return _GENERATED.sub("", workflow)


def without_attempts(node: str) -> str:
    """Return the node's name without attempt numbers, so that all attempts have the same name."""
    return _ATTEMPTS.sub("", node)


def place_of(node: str) -> str:
    """Return the path of a step in its run from the name of its executor's node: "run-x7.root.train"."""
    return without_attempts(node).removesuffix(EXECUTOR)


def owner_of(references: tuple[OwnerReference, ...]) -> OwnerReference | None:
    """Return the reference to the Workflow that owns an object; one whose name no object can have is none."""
    owners = (one for one in references if one.kind == KIND and one.api_version.startswith(f"{GROUP}/"))
    return next((one for one in owners if is_object_name(one.name)), None)


def read(found: dict[str, Any]) -> Workflow:
    """Return the Workflow of an API object."""
    return msgspec.convert(found, Workflow, strict=False)


def is_over(workflow: Workflow) -> bool:
    """Return whether the run makes no further attempt at any step.

    KFP terminates a run by `activeDeadlineSeconds: 0`, Argo's own client by `shutdown`.
    """
    spec, status = workflow.spec, workflow.status
    terminated = spec.active_deadline_seconds == 0 or bool(spec.shutdown)
    ended = status.finished_at is not None or status.phase in _FINAL
    return terminated or ended or workflow.metadata.deletion_timestamp is not None


def awaits(workflow: Workflow, uid: str, place: str) -> bool:
    """Return whether the run `uid` waits for the step at path `place`; "" is any step.

    Nodes that cannot be decoded (Argo may store those of very large runs in a database) count as waiting.
    """
    if workflow.metadata.uid != uid or is_over(workflow):
        return False
    nodes = nodes_of(workflow)
    if not place or not nodes:
        return True
    mine = {place, place + EXECUTOR}
    return any(node.phase not in _FINAL for node in nodes if without_attempts(node.name) in mine)


def nodes_of(workflow: Workflow) -> list[_Node]:
    """Return the run's nodes; [] if they cannot be decoded."""
    if workflow.status.nodes:
        return list(workflow.status.nodes.values())
    try:
        packed = base64.b64decode(workflow.status.compressed_nodes)
        text = zlib.decompress(packed, wbits=zlib.MAX_WBITS | 16)
        return list(msgspec.json.decode(text, type=dict[str, _Node]).values())
    except (binascii.Error, zlib.error, msgspec.DecodeError):
        return []
