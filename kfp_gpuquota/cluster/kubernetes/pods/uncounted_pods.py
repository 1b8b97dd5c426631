"""Removes the gate of pods whose claims request nothing that counts: kube-scheduler alone places them.

Evicts released pods that have exchanged a claim for devices that are not counted, again and again while a disruption
budget refuses it. Rejected: to delete them. The controller's account may delete only pods with GPUs of the quota.
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
        """Evict a released pod that now claims devices that are not counted; once, and again after a refusal."""
        found = self._claims.exchanged(uid)
        if found is not None and uid not in self._sent:
            pod, why = found
            self._sent.add(uid)
            self._recorder.record(pod.subject, "ClaimsExchanged", why, warning=True)
            self._writer.submit(requests.eviction(pod), lambda _: self._sent.discard(uid), partial(self._failed, uid))

    def _answered(self, uid: str, answer: bytes) -> None:
        self._sent.discard(uid)
        self._pauses.pop(uid, None)
        self._written_pods.note(self._pod.decode(answer))

    def _failed(self, uid: str, error: Exception) -> None:
        pause_s = self._pauses.setdefault(uid, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)).next_s()
        log.warning("pod %s could not be released or evicted; that is tried again in %g s: %s", uid, pause_s, error)
        asyncio.get_running_loop().call_later(pause_s, self._again, uid)

    def _again(self, uid: str) -> None:
        self._sent.discard(uid)
        self.let_through(uid)
        self.stop_exchanged(uid)
