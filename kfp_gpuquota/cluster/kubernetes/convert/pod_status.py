"""Reads from a pod's status how it ended, and why it does not start. Pure."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.control_characters import last_line
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.engine.records import KILLED_ABOVE

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod, Terminated

KILLED: Final = KILLED_ABOVE + signal.SIGKILL


_TROUBLE: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)


def exit_code_of(pod: Pod) -> int | None:
    """Return the first terminated container's exit code; KILLED if the pod was ended by a disruption."""
    if pod.status.phase not in {"Succeeded", "Failed"}:
        return None
    if lost_with(pod):
        return KILLED
    ended = _terminated(pod)
    if ended is None:
        return 0 if pod.status.phase == "Succeeded" else KILLED
    return ended.exit_code


def ended_at(pod: Pod) -> float | None:
    """Return when the first terminated container of a pod that is over has ended, by its kubelet's clock, if known."""
    ended = _terminated(pod) if pod.status.phase in {"Succeeded", "Failed"} else None
    return ended.finished_at.timestamp() if ended is not None and ended.finished_at is not None else None


def _terminated(pod: Pod) -> Terminated | None:
    return next((s.state.terminated for s in pod.status.container_statuses if s.state.terminated), None)


def last_error(pod: Pod) -> str:
    """Return the last line of a failed container's termination message; "" without one.

    The message is the end of the log if the script wrote none. A signal's cause is not in the log, but may be reported,
    in one line.
    """
    ended = _terminated(pod) if pod.status.phase == "Failed" else None
    if ended is None or not ended.exit_code or (ended.exit_code > KILLED_ABOVE and "\n" in ended.message.strip()):
        return ""
    return last_line(ended.message)


def lost_with(pod: Pod) -> str:
    """Return why a pod was ended that did not end by itself: a drain, an eviction, the end or refusal of its node.

    A container that exceeds its own limit of memory or storage sets no DisruptionTarget.
    """
    if rejected := rejected_with(pod):
        return rejected
    found = (c for c in pod.status.conditions if c.type == "DisruptionTarget" and c.status == "True")
    return next((f"{c.reason or c.type}: {c.message}".removesuffix(": ")[:300] for c in found), "")


def rejected_with(pod: Pod) -> str:
    """Return why its kubelet did not take a pod that was bound to its node; "" if it did.

    kube-scheduler and kubelet disagree on what kube-scheduler does not see: a device that has just failed, a static
    pod that came first, GPUs that are not on one NUMA node. Such a pod has failed with a reason, and no container has
    a status.
    """
    status = pod.status
    if status.phase != "Failed" or not status.reason or status.container_statuses or status.init_container_statuses:
        return ""
    if status.reason == "DeadlineExceeded":
        return ""  # its own limit, which passed before its containers were created
    return f"{status.reason}: {status.message}".removesuffix(": ")[:300]


def trouble_of(pod: Pod) -> str:
    """Return why the pod does not start, as reported by kube-scheduler or the kubelet; "" without a failure."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = status.state.waiting
        if waiting is not None and waiting.reason in _TROUBLE:
            return f"{waiting.reason}: {waiting.message}"[:300]
    if pod.status.phase != "Pending" or pod.spec.node_name:
        return ""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return f"Unschedulable: {condition.message}"[:300]
    return ""


def unhealthy_gpu(pod: Pod) -> str:
    """Return a GPU of the pod that its kubelet reports as unhealthy; "" if none."""
    statuses = (*pod.status.container_statuses, *pod.status.init_container_statuses)
    gpus = (one for s in statuses for one in s.allocated_resources_status if one.name == labels.GPU_RESOURCE)
    return next((device.resource_id for one in gpus for device in one.resources if device.health == "Unhealthy"), "")
