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
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.pods.device_claims import DeviceClaims

GRACE_S: Final = 30.0  # Kubernetes' default
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0

log = logging.getLogger(__name__)


class Attempts:
    """Which pods a request is under way for, and the growing pause after each one that has failed."""

    def __init__(self) -> None:
        self._sent: set[str] = set()  # also those whose next attempt waits
        self._pauses: dict[str, Backoff] = {}

    def begin(self, uid: str) -> bool:
        """Return whether no request is under way or waits; one is now."""
        begins = uid not in self._sent
        self._sent.add(uid)
        return begins

    def ended(self, uid: str) -> None:
        """Record a success."""
        self._sent.discard(uid)
        self._pauses.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Begin with the shortest pause again: the pod needs no request now."""
        self._pauses.pop(uid, None)

    def failed(self, uid: str, again: Callable[[str], None], error: Exception) -> None:
        """Call `again(uid)` after the pause."""
        pause_s = self._pauses.setdefault(uid, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)).next_s()
        log.warning("pod %s could not be released or deleted; that is tried again in %g s: %s", uid, pause_s, error)
        asyncio.get_running_loop().call_later(pause_s, self._repeat, uid, again)

    def _repeat(self, uid: str, again: Callable[[str], None]) -> None:
        self._sent.discard(uid)
        again(uid)


class UncountedPods:
    """Removes the gate of pods that count nothing."""

    def __init__(self, claims: DeviceClaims, writer: Writer, written_pods: WrittenPods) -> None:
        self._claims, self._writer, self._written_pods = claims, writer, written_pods
        self._attempts = Attempts()
        self._pod = msgspec.json.Decoder(Pod)

    def let_through(self, uid: str) -> None:
        """Remove the pod's gate if it counts nothing; once at a time, and again after a failure."""
        pod = self._claims.uncounted(uid)
        if pod is None:
            self._attempts.forget(uid)
        elif self._attempts.begin(uid):
            failed = partial(self._attempts.failed, uid, self.let_through)
            self._writer.submit(requests.gate_removal(pod), partial(self._answered, uid), failed)

    def _answered(self, uid: str, answer: bytes) -> None:
        self._attempts.ended(uid)
        self._written_pods.note(self._pod.decode(answer))


class ExchangedClaims:
    """Deletes released pods that now claim devices that are not counted."""

    def __init__(self, claims: DeviceClaims, writer: Writer, recorder: Recorder) -> None:
        self._claims, self._writer, self._recorder = claims, writer, recorder
        self._attempts = Attempts()

    def stop(self, uid: str) -> None:
        """Delete the pod if it has exchanged a claim; once, and again after a failure."""
        found = self._claims.exchanged(uid)
        if found is None:
            self._attempts.forget(uid)
        elif self._attempts.begin(uid):
            pod, why = found
            self._recorder.record(pod.subject, "ClaimsExchanged", why, warning=True)
            deletion = requests.deletion(pod.namespace, pod.name, pod.uid, GRACE_S)
            failed = partial(self._attempts.failed, uid, self.stop)
            self._writer.submit(deletion, lambda _: self._attempts.ended(uid), failed)
