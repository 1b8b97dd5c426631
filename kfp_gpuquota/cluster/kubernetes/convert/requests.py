"""Converts decisions to requests to the API server. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import JSON_PATCH, MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import GateShape
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
_AFFINITY: Final = "/spec/affinity"
_TERMS: Final = f"{_AFFINITY}/nodeAffinity/{REQUIRED}/nodeSelectorTerms"


def admission(pod: PodView, node: str, devices: tuple[int, ...], reason: str, *, pinned: bool = True) -> Write:
    """Return the patch that admits a gated pod to `node`: it removes the gate, pins the node and annotates the devices.

    If not `pinned`, the pod only prefers the node, and kube-scheduler may bind it to another one, of the same pool.
    """
    assert pod.gate is not None, "only a gated pod is admitted"
    notes = {labels.DEVICES: ",".join(map(str, devices)), labels.REASON: reason, **_claims_noted(pod)}
    pool = pool_of(node)
    if pool:
        notes[labels.OPENED] = node
    elif not pinned:
        notes[labels.RESERVED_ON] = node
    placed = [] if pool else _pinned(pod.gate, node) if pinned else _preferred(pod.gate, node)
    selected = pool or ("" if pinned else pod.pool)
    operations = [
        *placed,
        *(_selecting(pod.gate, selected) if selected else () if pinned else _outside_pools(pod.gate)),
        *_annotated(pod.gate, notes),
    ]
    return _release(pod, operations)


def gate_removal(pod: PodView) -> Write:
    """Return the patch that removes the gate of a pod that counts nothing, and notes what it claims."""
    assert pod.gate is not None, "only a gated pod is let through"
    return _release(pod, _annotated(pod.gate, notes) if (notes := _claims_noted(pod)) else ())


def _claims_noted(pod: PodView) -> dict[str, str]:
    return {labels.CLAIMED: ",".join(pod.claimed)} if pod.claimed else {}


def _release(pod: PodView, more: Iterable[dict[str, Any]]) -> Write:
    """Return the patch that removes the gate, with these operations.

    It tests the uid and the gate first: the second of two such patches fails and changes nothing, and so does a patch
    that arrives when another pod has the name.
    """
    assert pod.gate is not None, "only a gated pod is released"
    gate = f"/spec/schedulingGates/{pod.gate.index}"
    operations = [
        _operation("test", "/metadata/uid", pod.uid),
        _operation("test", f"{gate}/name", labels.QUOTA_GATE),
        _operation("remove", gate),
    ]
    return Write(
        verb="PATCH",
        path=join(pods_path(pod.namespace), pod.name),
        about=f"{pod.namespace}/{pod.name}",
        lane=Lane.ADMIT,
        body=[*operations, *more],
        content_type=JSON_PATCH,
    )


def with_annotations(admission: Write, notes: dict[str, str]) -> Write:
    """Return the admission with more annotations; the field exists when these operations are applied."""
    more = [
        _operation("add", f"/metadata/annotations/{escape_json_pointer(name)}", text) for name, text in notes.items()
    ]
    return msgspec.structs.replace(admission, body=[*admission.body, *more])


def eviction(pod: PodView, grace_s: float | None = None) -> Write:
    """Return the pod's eviction, which respects disruption budgets; `grace_s` None: with the pod's own grace period."""
    options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
    if grace_s is not None:
        options["gracePeriodSeconds"] = max(1, int(grace_s))
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": options,
    }
    path = join(pods_path(pod.namespace), pod.name, "eviction")
    return Write(verb="POST", path=path, about=f"{pod.namespace}/{pod.name}", lane=Lane.RELEASE, body=body)


def reservation_note(pod: PodView, node: str, devices: tuple[int, ...]) -> Write:
    """Return the patch that annotates where a pod that is not pinned holds devices; "" for no node."""
    notes = {labels.RESERVED_ON: node, labels.DEVICES: ",".join(map(str, devices))}
    body = {"metadata": {"uid": pod.uid, "annotations": notes}}
    path = join(pods_path(pod.namespace), pod.name)
    return Write(verb="PATCH", path=path, about=f"{pod.namespace}/{pod.name}", body=body, content_type=MERGE_PATCH)


def reclaim_note(pod: PodView, at: float) -> Write:
    """Return the patch that annotates when the reclaim began (seconds since 1970), for a restarted controller."""
    body = {"metadata": {"uid": pod.uid, "annotations": {labels.RECLAIMED_AT: f"{at:.0f}"}}}
    path = join(pods_path(pod.namespace), pod.name)
    return Write(verb="PATCH", path=path, about=f"{pod.namespace}/{pod.name}", body=body, content_type=MERGE_PATCH)


def deletion(namespace: str, name: str, uid: str = "", grace_s: float | None = None) -> Write:
    """Return the deletion of a pod; with `uid` only of the pod with that uid."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
    if uid:
        body["preconditions"] = {"uid": uid}
    if grace_s is not None:
        body["gracePeriodSeconds"] = max(1, int(grace_s))  # 0 would remove the object while the process still runs
    path = join(pods_path(namespace), name)
    return Write(verb="DELETE", path=path, about=f"{namespace}/{name}", lane=Lane.RELEASE, body=body)


def node_term(node: str) -> dict[str, Any]:
    """Return a requirement that only this node satisfies; kube-scheduler then considers no other node."""
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def outside_pools() -> dict[str, Any]:
    """Return the requirement of a node that is in no pool."""
    return {"key": labels.POOL, "operator": "DoesNotExist"}


def preference(node: str) -> dict[str, Any]:
    """Return a preference of this node, with the greatest weight."""
    return {"weight": 100, "preference": {"matchFields": [node_term(node)]}}


def _pinned(gate: GateShape, node: str) -> list[dict[str, Any]]:
    """Return operations that add the node to every required term: they are alternatives, and only extensible."""
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


def _preferred(gate: GateShape, node: str) -> list[dict[str, Any]]:
    """Return the operation that adds the node to the preferred ones."""
    term = preference(node)
    if gate.prefers:
        return [_operation("add", f"{_AFFINITY}/nodeAffinity/{PREFERRED}/-", term)]
    if gate.affinity == 2:
        return [_operation("add", f"{_AFFINITY}/nodeAffinity/{PREFERRED}", [term])]
    if gate.affinity == 1:
        return [_operation("add", f"{_AFFINITY}/nodeAffinity", {PREFERRED: [term]})]
    return [_operation("add", _AFFINITY, {"nodeAffinity": {PREFERRED: [term]}})]


def _outside_pools(gate: GateShape) -> list[dict[str, Any]]:
    """Return operations after those of `_preferred` that exclude the nodes of pools in every required term."""
    if gate.terms is None:
        required = {"nodeSelectorTerms": [{"matchExpressions": [outside_pools()]}]}
        return [_operation("add", f"{_AFFINITY}/nodeAffinity/{REQUIRED}", required)]
    return [
        _operation(
            "add",
            f"{_TERMS}/{i}/matchExpressions" + ("/-" if has else ""),
            outside_pools() if has else [outside_pools()],
        )
        for i, has in enumerate(gate.expressions)
    ]


def _selecting(gate: GateShape, pool: str) -> list[dict[str, Any]]:
    """Return the operation that selects the nodes of the pool, of which kube-scheduler chooses one."""
    if gate.selects:
        return [_operation("add", f"/spec/nodeSelector/{escape_json_pointer(labels.POOL)}", pool)]
    return [_operation("add", "/spec/nodeSelector", {labels.POOL: pool})]


def _annotated(gate: GateShape, notes: dict[str, str]) -> list[dict[str, Any]]:
    if gate.annotated:
        return [
            _operation("add", f"/metadata/annotations/{escape_json_pointer(name)}", text)
            for name, text in notes.items()
        ]
    # The pod may have been annotated since it was read: the test prevents overwriting that.
    return [_operation("test", "/metadata/annotations", None), _operation("add", "/metadata/annotations", notes)]


def _operation(operation: str, path: str, *value: Any) -> dict[str, Any]:
    return {"op": operation, "path": path, **({"value": value[0]} if value else {})}


def escape_json_pointer(part: str) -> str:
    """Return the text escaped as a part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")
