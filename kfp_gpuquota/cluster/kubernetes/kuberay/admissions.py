"""Admits waiting pods of units to the nodes of their slots."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Unit
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods

RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class Admissions:
    """Writes the admissions of pods, and repeats those that fail."""

    def __init__(self, writer: Writer, written_pods: WrittenPods, unpinned: UnpinnedPods) -> None:
        self._writer, self._written_pods, self._unpinned = writer, written_pods, unpinned
        self._pod = msgspec.json.Decoder(Pod)

    def admit(self, unit: Unit) -> None:
        """Admit waiting pods to the nodes of slots without pods."""
        for pod in unit.waiting_in_order():
            slot = next(iter(unit.missing(pod.ray_group)), None)
            if slot is not None:
                unit.attach(slot, pod)
                pinned = self._unpinned.is_pinned(pod, slot.node)
                reason = "it is its Ray cluster's turn"
                write = requests.admission(pod, slot.node, slot.devices, reason, pinned=pinned)
                self._writer.submit(write, self._admitted, partial(self._not_admitted, unit, slot.id, pod.uid))

    def _admitted(self, answer: bytes) -> None:
        self._written_pods.note(self._pod.decode(answer))

    def _not_admitted(self, unit: Unit, slot_id: str, pod_uid: str, error: Exception) -> None:
        """Try again after a pause, in which the watch reports the pod's state."""
        log.warning("a pod of %s could not be admitted: %s", unit.uid, error)
        self._unpinned.release_failed(pod_uid)
        asyncio.get_running_loop().call_later(RETRY_S, self._retry_admission, unit, slot_id)

    def _retry_admission(self, unit: Unit, slot_id: str) -> None:
        slot = unit.slots.get(slot_id)
        if slot is not None and slot.pod is not None and slot.pod.stage is Stage.WAITING:
            pod = slot.pod
            unit.detach(slot)
            unit.waiting[pod.uid] = pod
            self.admit(unit)
