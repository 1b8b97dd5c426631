"""Carries out plans on pods of other controllers: admits them by a patch, and stops them.

Pods are stopped by their owner's suspension (`suspension`), or evicted by the eviction API.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import is_retryable
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing.gpu_config import config_map, is_name
from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Sharer
from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import note_of
from kfp_gpuquota.cluster.kubernetes.suspension.suspending import Suspending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.kuberay.reconciler import RayUnits
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods
    from kfp_gpuquota.cluster.kubernetes.pods.eviction import Evictions
    from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.sharing.reservations import DeviceAssignment, Reservations
    from kfp_gpuquota.cluster.kubernetes.suspension.suspending import NotSuspended

REFUSED_PAUSE_S: Final = 1.0
REST_TIMEOUT_S: Final = 900.0  # more than a pod needs to become ready, also with a large image

_RECLAIMS: Final = frozenset({ReasonCode.RECLAIMED, ReasonCode.LENT_GPUS_RETURNED})

log = logging.getLogger(__name__)


class PodActions:
    """Admissions and evictions."""

    def __init__(
        self,
        pods: PlainPods,
        writer: Writer,
        reservations: Reservations,
        rules: CurrentRules,
        evictions: Evictions,
        recorder: Recorder,
        written_pods: WrittenPods,
        ray: RayUnits,
        unpinned: UnpinnedPods,
    ) -> None:
        self._pods, self._writer, self._recorder, self._written_pods = pods, writer, recorder, written_pods
        self._reservations, self._rules = reservations, rules
        self._evictions, self._ray, self._unpinned = evictions, ray, unpinned
        self._suspending = Suspending(
            writer,
            recorder,
            pods.holding,
            pods.asked_to_leave,
            pods.assume_leaving,
            self._evict,
            evictions.note_suspended,
        )
        self._pod = msgspec.json.Decoder(Pod)
        self._watched: set[str] = set()  # jobs with quota reserved for pods that do not exist yet

    def start(self, job: str, placements: Iterable[scheduler.Placement], reason: Reason) -> None:
        """Admit a waiting pod of the job for each placement."""
        assigned = self._pods.assign(job, placements)
        self.watch_rest(job)
        for pod, placement in assigned:
            self._pods.assume_sent(pod.uid, placement.node, placement.devices)
            pinned = self._unpinned.is_pinned(pod, placement.node)
            admission = requests.admission(pod, placement.node, placement.devices, reason.message, pinned=pinned)
            if gang := self._pods.gang_of(pod.uid).text:
                admission = requests.with_annotations(admission, {labels.GANG: gang})
            if pod.share:
                self._prepare(pod, admission)
            else:
                self._admit(pod, admission)

    def watch_rest(self, job: str, before: int = 0) -> None:
        """Give up the quota reserved for pods that do not exist yet when none of them has been created for a while."""
        left = self._pods.rest_of(job)
        if left and left == before:
            self._pods.give_up_rest(job)
        elif left and (before or job not in self._watched):
            self._watched.add(job)
            self._later(REST_TIMEOUT_S, lambda: self.watch_rest(job, left))
        else:
            self._watched.discard(job)

    def stop(self, workers: Iterable[str], reason: Reason) -> None:
        """Suspend the owners of these pods of one job, or evict the pods; people are notified of the first one."""
        notified = False
        for uid in workers:
            if self._reservations.gives_up(uid):
                self._pods.take_back(uid)  # it has not started: it waits for another placement
            elif member := self._pods.members.get(uid):
                self._pods.assume_leaving(uid)
                bounded = reason.code in _RECLAIMS
                if not self._suspending.stop(member.view, reason.message, bounded=bounded):
                    self._evict(member.view, reason.message, bounded=bounded, copy=notified)
                    notified = True

    def suspend_owner(
        self, pods: Sequence[PodView], reason: str, not_suspended: NotSuspended, unused: frozenset[str]
    ) -> None:
        """Suspend the owner of these pods until a user resumes it: see Suspending."""
        self._suspending.suspend_for_good(pods, reason, not_suspended, unused)

    def _evict(
        self, pod: PodView, why: str, *, bounded: bool, requested_at: float | None = None, copy: bool = False
    ) -> None:
        """Evict a pod; one of a suspended owner, unless it has ended, and without an event if it is ending."""
        if member := self._pods.members.get(pod.uid):
            if member.view.stage is not Stage.TERMINATING:
                self._recorder.record(pod.subject, "Evicted", self._explained(pod, why), copy=copy)
            self._evictions.evict(pod, bounded=bounded, requested_at=requested_at)

    def _explained(self, pod: PodView, why: str) -> str:
        """Return the reason, and the consequence if the pod's owner does not recreate it."""
        rules = self._rules.rules
        return why if rules.recreates(pod) else f"{why}; {rules.consequence(pod)}"

    def remake(self, pod: PodView, reason: str, why: str) -> None:
        """Stop a pod that cannot stay on its node, so that its owner recreates it: see Suspending."""
        if pod.uid in self._pods.members:
            self._pods.assume_leaving(pod.uid)
        elif not self._ray.pods.leave(pod.uid):
            return
        self._recorder.record(pod.subject, reason, why)
        if not self._suspending.stop(pod, why, bounded=False):
            self._evictions.evict(pod, bounded=False)

    def _prepare(self, pod: PodView, admission: Write) -> None:
        """Reserve shared GPUs, wait until the pod's part is free, write its GPU configuration, then admit it."""
        name = f"{pod.namespace}/{pod.name}"
        sharer = Sharer(
            note_of(pod_job(pod), pod.uid, name, time.time()),
            ready=partial(self._configure, pod, admission),
            failed=partial(self._admission_failed, pod),
            report=partial(self._recorder.record, pod.subject),
        )
        self._reservations.prepare(sharer)

    def _configure(self, pod: PodView, admission: Write, assignment: DeviceAssignment) -> None:
        admission = requests.with_annotations(admission, {labels.GPUS: ",".join(assignment.note.gpus)})
        name = self._reservations.config_of(pod.uid)
        if not is_name(name):  # another controller has gated it, so it refers to no GPU configuration
            self._admit(pod, admission)
            return
        filled = config_map(pod, name, assignment)
        failed = partial(self._admission_failed, pod)
        self._writer.submit(filled, lambda _: self._admit(pod, admission), failed)

    def _admit(self, pod: PodView, admission: Write) -> None:
        self._writer.submit(admission, self._answered, partial(self._admission_failed, pod))

    def _answered(self, answer: bytes) -> None:
        self._written_pods.note(self._pod.decode(answer))

    def _admission_failed(self, pod: PodView, error: Exception) -> None:
        """Look at the pod after a pause: the answer to an attempt before this one may have been lost."""
        log.warning("%s/%s could not be admitted: %s", pod.namespace, pod.name, error)
        self._unpinned.release_failed(pod.uid)
        self._later(REFUSED_PAUSE_S, partial(self._look_at, pod))

    def _look_at(self, pod: PodView) -> None:
        """Undo the assumptions about a pod that is not admitted; its GPUs are not given to others before that is known.

        The watch may report it much later, and a pod that has no controller stays on a node that is full.
        """
        name = f"{pod.namespace}/{pod.name}"
        path = join(pods_path(pod.namespace), pod.name)
        look = Write(verb="GET", path=path, about=name, lane=Lane.LOOK_UP, level=logging.DEBUG)
        self._writer.submit(look, partial(self._found, pod), partial(self._not_found, pod))

    def _found(self, pod: PodView, answer: bytes) -> None:
        self._answered(answer)
        self._pods.take_back(pod.uid)

    def _not_found(self, pod: PodView, error: Exception) -> None:
        if is_retryable(error):
            self._later(REFUSED_PAUSE_S, partial(self._look_at, pod))
        else:
            self._pods.take_back(pod.uid)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, action)
