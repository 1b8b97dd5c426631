"""Suspends the topmost owners of pods that a plan stops, instead of evicting the pods.

| what is found | what happens |
|---|---|
| other pods of the owner, or of one above, hold GPUs that the plan does not stop | the victims are evicted |
| the same, and the victims' own controller would fail by that (`survives`) | the topmost owner is suspended |
| an object cannot be read at present | it is read again, for ENDED_WITHIN_S from the decision on |
| the topmost owner has completed or failed | the victims are evicted |
| an owner above that is of no kind of kinds.py, or is Kueue's or another controller's | the victims are evicted |
| the owner is suspended already, also by its user | its controller ends the pods |
| else | it is suspended; a conflict, a change in the meantime: it is read again |
| the owner's controller has not ended the pods within ENDED_WITHIN_S | they are evicted |

The bound of a reclaim begins with the plan's decision in any case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, is_retryable
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import (
    Suspendable,
    kind_of,
    may_be_suspended,
    owner_key,
    suspension,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.suspension.kinds import Kind

ENDED_WITHIN_S: Final = 20.0
SUSPENDED_UNUSED: Final = "SuspendedUnused"  # a reason of events
MAX_OWNERS: Final = 4  # above a pod: TrainJob, JobSet, Job, and one more
MAX_CONFLICTS: Final = 5
RETRY_S: Final = 1.0
_LOOK_UP_S: Final = 2.0

log = logging.getLogger(__name__)


class Eviction(Protocol):
    """Evicts a pod; the decision was made at `requested_at`, in seconds since 1970."""

    def __call__(self, pod: PodView, why: str, /, *, bounded: bool, requested_at: float) -> None:
        """Evict the pod, if it has not ended."""


class NotSuspended(Protocol):
    """Is called with why an owner is not suspended; `in_use`: others of its pods hold GPUs that are not unused yet."""

    def __call__(self, why: str, /, *, in_use: bool = False) -> None:
        """Process that it is not suspended."""


@dataclass(slots=True)
class _Stop:
    """The pods of one owner that a plan stops. `seen` are the uids of the owners that were read.

    With `not_suspended` no plan stops them: their owner stays suspended until a user resumes it, and nobody is evicted.
    Then pods of which `unused` has the uids do not keep it from being suspended.
    """

    pods: dict[str, PodView]
    reason: str
    bounded: bool
    at: float
    not_suspended: NotSuspended | None = None
    unused: frozenset[str] = frozenset()
    partial: bool = False  # their owner has other pods that hold GPUs
    fails: bool = False  # it would fail by the evictions
    index_failures: int | None = None  # of the first pod
    seen: list[str] = field(default_factory=list)
    conflicts: int = 0


class Suspending:
    """Suspensions in progress. `holding()` are the pods that hold GPUs and are not asked to leave.

    `asked()` are those that are asked to leave and were not deleted yet, `leave(uid)` adds one, since its owner is
    suspended. `count(pods)` counts the pods whose owner was suspended.
    """

    def __init__(
        self,
        writer: Writer,
        events: Recorder,
        holding: Callable[[], Iterable[PodView]],
        asked: Callable[[], Iterable[PodView]],
        leave: Callable[[str], None],
        evict: Eviction,
        count: Callable[[int], None],
    ) -> None:
        self._writer, self._events, self._holding, self._asked = writer, events, holding, asked
        self._leave, self._evict_pod, self._count = leave, evict, count
        self._stops: dict[tuple[str, str], _Stop] = {}  # of the present plan, by namespace and owner
        self._object = msgspec.json.Decoder(Suspendable)

    def stop(self, pod: PodView, reason: str, *, bounded: bool) -> bool:
        """Suspend the pod's owner when the plan is carried out; return False if it is of no such kind."""
        if not may_be_suspended(pod.controller_kind):
            return False
        if not self._stops:
            asyncio.get_running_loop().call_soon(self._suspend_all)
        stop = self._stops.setdefault(owner_key(pod), _Stop({}, reason, bounded, time.time()))
        stop.pods[pod.uid] = pod
        stop.bounded |= bounded
        return True

    def suspend_for_good(
        self, pods: Sequence[PodView], reason: str, not_suspended: NotSuspended, unused: frozenset[str]
    ) -> None:
        """Suspend the owner of these pods until a user resumes it; call `not_suspended` with why it cannot be.

        `unused` are the uids of all pods that are to be suspended now: so an owner of several workloads is, if all are.
        """
        stop = _Stop(
            {pod.uid: pod for pod in pods},
            reason,
            bounded=False,
            at=time.time(),
            not_suspended=not_suspended,
            unused=unused,
        )
        self._read(stop, None, join(pods_path(pods[0].namespace), pods[0].name), pods[0].namespace)

    def _suspend_all(self) -> None:
        stops, self._stops = self._stops, {}
        kept = {owner_key(pod) for pod in self._holding()}
        for key, stop in stops.items():
            pod = next(iter(stop.pods.values()))
            stop.partial = key in kept
            self._read(stop, None, join(pods_path(pod.namespace), pod.name), pod.namespace)

    def _read(self, stop: _Stop, kind: Kind | None, path: str, namespace: str) -> None:
        write = Write(
            verb="GET", path=path, about=namespace, lane=Lane.LOOK_UP, level=logging.DEBUG, limit_s=_LOOK_UP_S
        )
        failed = partial(self._unread, stop, partial(self._read, stop, kind, path, namespace))
        self._writer.submit(write, partial(self._found, stop, kind), failed)

    def _unread(self, stop: _Stop, again: Callable[[], None], error: Exception) -> None:
        """Read again what a busy API server has not answered: an eviction could fail the owner."""
        if is_retryable(error) and stop.not_suspended is None and time.time() < stop.at + ENDED_WITHIN_S:
            asyncio.get_running_loop().call_later(RETRY_S, again)
        else:
            self._failed(stop, error)

    def _found(self, stop: _Stop, kind: Kind | None, answer: bytes) -> None:
        """Go on to the object's owner, or suspend the object if it has none. `kind` is None for the pod."""
        try:
            found = self._object.decode(answer)
        except msgspec.DecodeError as error:
            self._failed(stop, error)
            return
        if kind is not None and found.metadata.uid != stop.seen[-1]:
            self._evict(stop, "another object has the name of its owner")
            return
        if kind is None:
            stop.index_failures = found.index_failures if len(stop.pods) == 1 else None
        elif len(stop.seen) == 1 and stop.not_suspended is None:
            evictions = sum(pod.controller_uid == found.metadata.uid for pod in self._asked())
            stop.fails = not found.survives(kind, evictions, stop.index_failures)
            if stop.partial and not stop.fails:
                self._evict(stop)
                return
        owner = found.owner
        if owner is not None and len(stop.seen) < MAX_OWNERS and (above := kind_of(owner)) is not None:
            stop.seen.append(owner.uid)
            namespace = found.metadata.namespace
            self._read(stop, above, above.path_of(namespace, owner.name), namespace)
        elif kind is None or owner is not None or found.managed_elsewhere:
            self._evict(stop, "another controller manages its owner, or the owner is of a kind that is not suspended")
        else:
            self._suspend(stop, kind, found)

    def _suspend(self, stop: _Stop, kind: Kind, found: Suspendable) -> None:
        if found.suspended:
            self._watch(stop)
            return
        if found.has_finished:
            self._evict(stop, "it has finished")
            return
        others = [pod for pod in self._others(stop) if kind.owns(found.metadata, pod)]
        if others and not stop.fails:
            self._evict(stop, f"its {kind.kind} has other pods whose GPUs are in use", in_use=True)
            return
        write = suspension(kind, found, stop.reason, resumes=stop.not_suspended is None)
        self._writer.submit(
            write, partial(self._suspended, stop, kind, found), partial(self._refused, stop, kind, found)
        )

    def _others(self, stop: _Stop) -> Iterable[PodView]:
        """Yield the pods that hold GPUs, except those that are stopped."""
        return (pod for pod in self._holding() if pod.uid not in stop.pods and pod.uid not in stop.unused)

    def _suspended(self, stop: _Stop, kind: Kind, found: Suspendable, _answer: bytes) -> None:
        meta = found.metadata
        subject = Subject(kind.kind, meta.name, meta.namespace, meta.uid, kind.api_version)
        if stop.not_suspended is not None:
            self._events.record(subject, SUSPENDED_UNUSED, f"{stop.reason}; it is suspended until a user resumes it")
            return
        others = [pod for pod in self._others(stop) if kind.owns(found.metadata, pod)]
        for pod in others:  # the next plan counts with their GPUs
            stop.pods[pod.uid] = pod
            self._leave(pod.uid)
        self._count(len(stop.pods))
        whole = "; all its pods are stopped, since it would fail by the loss of some" if others else ""
        self._events.record(subject, "Suspended", f"{stop.reason}; its new pods wait for their turn{whole}")
        self._watch(stop)

    def _refused(self, stop: _Stop, kind: Kind, found: Suspendable, error: Exception) -> None:
        stop.conflicts += 1
        if isinstance(error, ApiError) and error.status == 409 and stop.conflicts < MAX_CONFLICTS:
            meta = found.metadata
            self._read(stop, kind, kind.path_of(meta.namespace, meta.name), meta.namespace)
        else:
            self._failed(stop, error)

    def _failed(self, stop: _Stop, error: Exception) -> None:
        log.warning("the owner of pods cannot be suspended: %s", error)
        if stop.not_suspended is None:
            self._evict(stop)  # else it is requested again

    def _watch(self, stop: _Stop) -> None:
        """Evict the pods that the owner's controller does not end in time."""
        if stop.not_suspended is None:
            asyncio.get_running_loop().call_later(ENDED_WITHIN_S, self._evict, stop)

    def _evict(self, stop: _Stop, why: str = "", *, in_use: bool = False) -> None:
        """Evict the pods, as far as a plan stops them."""
        if stop.not_suspended is not None:
            stop.not_suspended(why, in_use=in_use)
            return
        for pod in stop.pods.values():
            self._evict_pod(pod, stop.reason, bounded=stop.bounded, requested_at=stop.at)
