"""Removes the gate of pods whose claims request nothing that counts: kube-scheduler alone places them.

Deletes released pods that have exchanged a claim for devices that are not counted. Rejected: to evict them. Their owner
could keep the devices by a disruption budget, or by a long grace period.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.pods.device_claims import DeviceClaims

GRACE_S: Final = 30.0  # Kubernetes' default
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0

log = logging.getLogger(__name__)


class UncountedPods:
    """Pods that count nothing."""

    def __init__(self, claims: DeviceClaims, writer: Writer, written_pods: WrittenPods, recorder: Recorder) -> None:
        self._claims, self._writer, self._written_pods, self._recorder = claims, writer, written_pods, recorder
        self._sent: set[str] = set()  # also those whose next attempt waits
        self._pauses: dict[str, Backoff] = {}
        self._pod = msgspec.json.Decoder(Pod)

    def let_through(self, uid: str) -> None:
        """Remove the pod's gate if it counts nothing; once at a time, and again after a failure."""
        pod = self._claims.uncounted(uid)
        if pod is None:
            self._pauses.pop(uid, None)
        if pod is not None and uid not in self._sent:
            self._sent.add(uid)
            self._writer.submit(requests.gate_removal(pod), partial(self._answered, uid), partial(self._failed, uid))

    def stop_exchanged(self, uid: str) -> None:
        """Delete a released pod that now claims devices that are not counted; once, and again after a failure."""
        found = self._claims.exchanged(uid)
        if found is not None and uid not in self._sent:
            pod, why = found
            self._sent.add(uid)
            self._recorder.record(pod.subject, "ClaimsExchanged", why, warning=True)
            deletion = requests.deletion(pod.namespace, pod.name, pod.uid, GRACE_S)
            self._writer.submit(deletion, lambda _: self._sent.discard(uid), partial(self._failed, uid))

    def _answered(self, uid: str, answer: bytes) -> None:
        self._sent.discard(uid)
        self._pauses.pop(uid, None)
        self._written_pods.note(self._pod.decode(answer))

    def _failed(self, uid: str, error: Exception) -> None:
        pause_s = self._pauses.setdefault(uid, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)).next_s()
        log.warning("pod %s could not be released or deleted; that is tried again in %g s: %s", uid, pause_s, error)
        asyncio.get_running_loop().call_later(pause_s, self._again, uid)

    def _again(self, uid: str) -> None:
        self._sent.discard(uid)
        self.let_through(uid)
        self.stop_exchanged(uid)
