"""Explains a pod of another controller in sentences: it has no status of this project, but annotations and events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.resources import WHOLE_GPU, weighed
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import NOWHERE
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import counted_view, pod_job
from kfp_gpuquota.cluster.kubernetes.objects import core_types, labels
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

COMPONENT = "gpuquota-controller"


def explained(calls: Calls, namespace: str, name: str) -> tuple[str, ...]:
    """Return what the pod holds or waits for, and why, in lines; () if there is no such pod."""
    try:
        pod = calls.read(join("/api/v1/namespaces", namespace, "pods", name), core_types.Pod)
    except NotFoundError:
        return ()
    view = counted_view(pod)
    reason = (pod.metadata.annotations or {}).get(labels.REASON, "")
    first = f"pod {name} {_state(view)}" + (f": {reason}" if reason and view.holds else "")
    event = _last_event(calls, namespace, view.uid)
    return (first, *([event] if event else []))


def _state(view: PodView) -> str:
    claims = bool(view.device_claims) and not view.counted
    gpus = "the devices that it claims" if claims else show_gpus(_gpus(view))
    match view.stage:
        case Stage.WAITING:
            return f"waits for {gpus}"
        case Stage.ASSIGNED:
            where = "on no node yet" if view.node == NOWHERE else f"on node {view.node}"
            return f"holds {gpus} {where}"
        case Stage.TERMINATING:
            return f"is being deleted, and holds {gpus} until it has exited"
        case Stage.ENDED:
            return "has ended"
    return "is not under the quota: it requests no GPUs that count, or its namespace is not managed"


def _gpus(view: PodView) -> float:
    if view.gpu_weights:
        return weighed(dict(view.needs.others), view.gpu_weights) / WHOLE_GPU
    return view.gpus * pod_job(view).share_of(0) if view.share and "gpu_fraction" in dict(view.share) else view.gpus


def _last_event(calls: Calls, namespace: str, uid: str) -> str:
    """Return the controller's newest event on the pod as text."""
    path = join("/api/v1/namespaces", namespace, "events")
    listed = calls.get(path, fieldSelector=f"involvedObject.uid={uid}").get("items") or []
    ours = [one for one in listed if (one.get("source") or {}).get("component") == COMPONENT]
    last = max(ours, key=lambda one: str(one.get("lastTimestamp") or ""), default=None)
    return "" if last is None else f"{last['reason']}: {last['message']}"
