"""Records events on pods, for users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder, Subject

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView


class PodEventRecorder:
    """Records events whose subjects are pods."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record(self, pod: PodView, reason: str, message: str) -> None:
        """Record an event on the pod."""
        self._recorder.record(Subject("Pod", pod.name, pod.namespace, pod.uid), reason, message)
