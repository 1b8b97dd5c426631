"""Decisions as requests to the API server: pure. `Write.about` names the object for logs, events and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.async_client import JSON_PATCH, MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pods import GateShape, PodView

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_AFFINITY: Final = "/spec/affinity"
_TERMS: Final = f"{_AFFINITY}/nodeAffinity/{REQUIRED}/nodeSelectorTerms"


def admission(pod: PodView, node: str, devices: tuple[int, ...], reason: str) -> Write:
    """One patch that lets a gated pod go to `node`: gate off, node on, devices noted.

    It tests the uid and the gate first: of two such patches the second one fails and changes nothing, and so does one
    that comes when another pod has the name.
    """
    assert pod.gate is not None, "only a gated pod is admitted"
    gate = f"/spec/schedulingGates/{pod.gate.index}"
    notes = {labels.DEVICES: ",".join(map(str, devices)), labels.REASON: reason}
    pool = pool_of(node)
    if pool:
        notes[labels.OPENED] = node
    operations = [
        _operation("test", "/metadata/uid", pod.uid),
        _operation("test", f"{gate}/name", labels.QUOTA_GATE),
        _operation("remove", gate),
        *(_selecting(pod.gate, pool) if pool else _pinned(pod.gate, node)),
        *_annotated(pod.gate, notes),
    ]
    return Write(
        verb="PATCH",
        path=f"{pods_path(pod.namespace)}/{pod.name}",
        about=f"{pod.namespace}/{pod.name}",
        lane=Lane.ADMIT,
        body=operations,
        content_type=JSON_PATCH,
    )


def noting(admission: Write, notes: dict[str, str]) -> Write:
    """The admission, with more annotations: they exist by the time these operations are carried out."""
    more = [_operation("add", f"/metadata/annotations/{escaped(name)}", text) for name, text in notes.items()]
    return msgspec.structs.replace(admission, body=[*admission.body, *more])


def eviction(pod: PodView, grace_s: float | None = None) -> Write:
    """Ask for the pod's end by the eviction API, which honours disruption budgets. None: with its own grace period."""
    options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
    if grace_s is not None:
        options["gracePeriodSeconds"] = max(1, int(grace_s))
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": options,
    }
    path = f"{pods_path(pod.namespace)}/{pod.name}/eviction"
    return Write(verb="POST", path=path, about=f"{pod.namespace}/{pod.name}", lane=Lane.RELEASE, body=body)


def reclaim_note(pod: PodView, at: float) -> Write:
    """Note on the pod since when its borrowed GPUs are reclaimed (seconds since 1970), for the next controller."""
    body = {"metadata": {"uid": pod.uid, "annotations": {labels.RECLAIMED_AT: f"{at:.0f}"}}}
    path = f"{pods_path(pod.namespace)}/{pod.name}"
    return Write(verb="PATCH", path=path, about=f"{pod.namespace}/{pod.name}", body=body, content_type=MERGE_PATCH)


def deletion(namespace: str, name: str, uid: str = "", grace_s: float | None = None) -> Write:
    """End a pod that is our own; with `uid` only the one that is meant."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
    if uid:
        body["preconditions"] = {"uid": uid}
    if grace_s is not None:
        body["gracePeriodSeconds"] = max(1, int(grace_s))  # 0 would take the object away while the process still runs
    path = f"{pods_path(namespace)}/{name}"
    return Write(verb="DELETE", path=path, about=f"{namespace}/{name}", lane=Lane.RELEASE, body=body)


def node_term(node: str) -> dict[str, Any]:
    """A requirement that only one node fulfils; kube-scheduler looks at no other one then."""
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def _pinned(gate: GateShape, node: str) -> list[dict[str, Any]]:
    """The node in every required term: terms are alternatives. Of existing terms only appending is allowed."""
    if gate.terms is None:
        required: dict[str, Any] = {"nodeSelectorTerms": [{"matchFields": [node_term(node)]}]}
        if gate.affinity == 2:
            return [_operation("add", f"{_AFFINITY}/nodeAffinity/{REQUIRED}", required)]
        if gate.affinity == 1:
            return [_operation("add", f"{_AFFINITY}/nodeAffinity", {REQUIRED: required})]
        return [_operation("add", _AFFINITY, {"nodeAffinity": {REQUIRED: required}})]
    return [
        _operation(
            "add", f"{_TERMS}/{i}/matchFields" + ("/-" if has else ""), node_term(node) if has else [node_term(node)]
        )
        for i, has in enumerate(gate.terms)
    ]


def _selecting(gate: GateShape, pool: str) -> list[dict[str, Any]]:
    """Any node of an autoscaled pool: which one, and whether there is one yet, is kube-scheduler's to find out."""
    if gate.selects:
        return [_operation("add", f"/spec/nodeSelector/{escaped(labels.POOL)}", pool)]
    return [_operation("add", "/spec/nodeSelector", {labels.POOL: pool})]


def _annotated(gate: GateShape, notes: dict[str, str]) -> list[dict[str, Any]]:
    if gate.annotated:
        return [_operation("add", f"/metadata/annotations/{escaped(name)}", text) for name, text in notes.items()]
    # Somebody may have annotated it since: the test keeps that from being overwritten.
    return [_operation("test", "/metadata/annotations", None), _operation("add", "/metadata/annotations", notes)]


def _operation(operation: str, path: str, *value: Any) -> dict[str, Any]:
    return {"op": operation, "path": path, **({"value": value[0]} if value else {})}


def escaped(part: str) -> str:
    """As a part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")
