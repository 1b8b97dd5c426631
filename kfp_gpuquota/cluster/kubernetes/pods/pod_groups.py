"""Assigns waiting pods to their owner's group; the owner is read once, when its first pod arrives.

An owner that cannot be read (the conversion webhook of its kind fails, its API server does not answer) is unknown: its
pods wait with that reason, and it is read again after growing pauses. So do those of a PodGroup of Kubernetes' own that
does not exist yet: kube-scheduler waits for it, too, and they would hold GPUs for nothing. Nothing else
waits: a call may take LOOK_UP_S and is in a lane that namespaces share in turn, and the first plan waits no longer for
all of them together.

kube-scheduler 1.37 binds no pod of such a PodGroup while another one has a gate, whatever the group's policy is. So
there all its pods start together: as many as its Job has, or as exist if no Job made the group.

Owners are not watched: a cluster may have very many Jobs, and their gang size is needed only for some seconds, until
their pods have been created. So a response is cached for a short time, and read again for pods that arrive later, and
for groups that stay incomplete: a resumed Job creates fewer pods than it did at first, and a size may be changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, is_retryable
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.convert.owners import ALONE, NATIVE_VERSIONS, GangSize, gang_size, job_of_group
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner

CACHED_S: Final = 30.0
RETRY_S: Final = 5.0
LONGEST_PAUSE_S: Final = 60.0
LOOK_UP_S: Final = 2.0

log = logging.getLogger(__name__)


class Gangs:
    """Gang sizes by owner. `pods` are all tracked pods by uid.

    `put` receives pods after their owner was read; `unread` is called when an owner could not be. `counted(namespace)`
    has the names of the resources, and of the claim templates, that count as GPUs there.
    """

    def __init__(
        self,
        pods: Mapping[str, PodView],
        put: Callable[[PodView], None],
        unread: Callable[[], None],
        writer: Writer,
        counted: Callable[[str], Container[str]],
    ) -> None:
        self._pods, self._put, self._unread, self._writer, self._counted = pods, put, unread, writer, counted
        self._sizes: dict[Owner, tuple[GangSize, float]] = {}
        self._waiting: dict[Owner, dict[str, PodView]] = {}
        self._joined: dict[Owner, set[str]] = {}  # uids of pods whose group depends on the owner
        self._again: dict[Owner, tuple[float, float]] = {}  # when an incomplete group is read again, and the pause
        self._failures: dict[Owner, tuple[str, Backoff]] = {}  # why an owner is unknown, and the pauses
        self._native_versions: tuple[str, ...] = NATIVE_VERSIONS  # of native PodGroups, the one that is served first
        self._all_read = asyncio.Event()
        self._all_read.set()

    def join(self, pod: PodView) -> PodView | None:
        """Return the pod with its group; None if its owner has to be read first, after which the pod is put."""
        owner, before = pod.owner, self._pods.get(pod.uid)
        waits = pod.stage is Stage.WAITING
        if not waits:
            self.drop(pod.uid)
        if owner is None or pod.group_size:
            return pod
        if pod.stage is not Stage.ENDED:
            self._joined.setdefault(owner, set()).add(pod.uid)
        if before is not None and (before.group_size or (waits and before.stage is Stage.WAITING)):
            return _grouped(pod, GangSize(before.group_size, before.group_size, before.rest))
        if not waits and owner not in self._sizes:
            return pod
        size = self._cached_size(owner)
        if size is not None:
            return _grouped(pod, size)
        requested = owner in self._waiting
        self._waiting.setdefault(owner, {})[pod.uid] = pod
        if not requested:
            self._read(owner)
        return None

    def drop(self, uid: str) -> None:
        """Remove a deleted pod, perhaps before its owner was read."""
        for pods in self._waiting.values():
            pods.pop(uid, None)
        if (pod := self._pods.get(uid)) is not None and pod.owner is not None:
            joined = self._joined.get(pod.owner, set())
            joined.discard(uid)
            if not joined:
                self._joined.pop(pod.owner, None)
                self._again.pop(pod.owner, None)

    def forget_sizes(self) -> None:
        """Read all owners again when a pod of theirs arrives: other resources count as GPUs now."""
        self._sizes.clear()

    def refresh(self, owner: Owner) -> None:
        """Read the owner of an incomplete group again, if its pause is over; the pauses grow."""
        now = asyncio.get_running_loop().time()
        at, pause_s = self._again.setdefault(owner, (now + RETRY_S, RETRY_S))
        if now < at or owner in self._waiting:
            return
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        self._again[owner] = now + pause_s, pause_s
        self._waiting[owner] = {}
        self._read(owner)

    async def settled(self) -> None:
        """Wait until no owner is being read, at most LOOK_UP_S: only pods of an unknown owner wait longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_UP_S):
                await self._all_read.wait()

    def unknown(self) -> Iterator[tuple[PodView, str]]:
        """Yield the first waiting pod of each owner that could not be read, and why it waits."""
        for owner, (why, _) in self._failures.items():
            if pods := self._waiting.get(owner):
                first = min(pods.values(), key=lambda pod: (pod.created, pod.uid))
                yield (
                    first,
                    f"how many pods start with it is unknown: its {owner.kind} {owner.name} cannot be read: {why}",
                )

    def _cached_size(self, owner: Owner) -> GangSize | None:
        found = self._sizes.get(owner)
        if found is None:
            return None
        if asyncio.get_running_loop().time() - found[1] < CACHED_S:
            return found[0]
        del self._sizes[owner]
        return None

    def _read(self, owner: Owner) -> None:
        self._all_read.clear()
        versions = self._native_versions if owner.is_native else (owner.api_version,)
        self._read_version(owner, versions)

    def _read_version(self, owner: Owner, versions: tuple[str, ...]) -> None:
        """Read the owner in the first of the versions of its API; if it is not there, in the next."""
        path = owner._replace(api_version=versions[0]).path
        self._get(path, owner, partial(self._answered, owner, versions[0]), partial(self._failed, owner, versions[1:]))

    def _get(
        self, path: str, owner: Owner, answered: Callable[[bytes], None], failed: Callable[[Exception], None]
    ) -> None:
        about, lane = f"{owner.namespace}/{owner.group}", Lane.LOOK_UP
        write = Write(verb="GET", path=path, about=about, lane=lane, level=logging.DEBUG, limit_s=LOOK_UP_S)
        self._writer.submit(write, answered, failed)

    def _answered(self, owner: Owner, version: str, answer: bytes) -> None:
        size = gang_size(owner, answer, self._counted(owner.namespace))
        if owner.is_native:
            self._native_versions = (version, *(one for one in NATIVE_VERSIONS if one != version))
        if owner.is_native and version == NATIVE_VERSIONS[0]:
            if (job := job_of_group(owner, answer)) is not None:
                self._get(job.path, owner, partial(self._job_answered, owner, job), partial(self._failed, owner, ()))
                return
            size = _at_least(size, self._gated(owner))
        self._settle(owner, size)

    def _job_answered(self, owner: Owner, job: Owner, answer: bytes) -> None:
        """Let all pods of the Job of a PodGroup start together."""
        size = gang_size(job, answer, self._counted(owner.namespace))
        self._settle(owner, _at_least(size, size.labelled))

    def _gated(self, owner: Owner) -> int:
        """Return how many pods of the owner wait, of those that exist."""
        known = (self._pods.get(uid) for uid in self._joined.get(owner, ()))
        return sum(pod is None or pod.stage is Stage.WAITING for pod in known)

    def _failed(self, owner: Owner, other_versions: tuple[str, ...], error: Exception) -> None:
        """Plan the pods one by one if the API server refuses to show the owner; retry if it was unavailable."""
        absent = isinstance(error, ApiError) and error.not_found
        if absent and other_versions:
            self._read_version(owner, other_versions)
            return
        why = str(error)
        if absent and owner.is_native:
            why = "it does not exist yet; its pods start when it has been created"
        elif isinstance(error, ApiError) and not is_retryable(error):
            log.warning("pods of %s/%s are planned one by one: %s", owner.namespace, owner.group, error)
            self._settle(owner, ALONE)
            return
        _, backoff = self._failures.get(owner, ("", Backoff(RETRY_S, LONGEST_PAUSE_S)))
        self._failures[owner] = why[:300], backoff
        self._unread()
        asyncio.get_running_loop().call_later(backoff.next_s(), self._read_if_needed, owner)

    def _read_if_needed(self, owner: Owner) -> None:
        if self._waiting.get(owner):
            self._read(owner)
        else:  # its pods were deleted meanwhile
            self._waiting.pop(owner, None)
            self._failures.pop(owner, None)
            self._note_all_read()

    def _settle(self, owner: Owner, answer: GangSize) -> None:
        now = asyncio.get_running_loop().time()
        self._sizes = {one: found for one, found in self._sizes.items() if now - found[1] < CACHED_S}
        self._sizes[owner] = answer, now
        known = (self._pods.get(uid) for uid in self._joined.get(owner, ()))
        changed = [pod for pod in known if pod is not None and _differs(pod, answer)]
        self._failures.pop(owner, None)
        for pod in (*changed, *self._waiting.pop(owner, {}).values()):
            self._put(_grouped(pod, answer))
        self._note_all_read()

    def _note_all_read(self) -> None:
        if not self._waiting:
            self._all_read.set()


def _at_least(size: GangSize, pods: int) -> GangSize:
    return size._replace(pods=max(size.pods, pods), labelled=max(size.labelled, pods))


def _differs(pod: PodView, answer: GangSize) -> bool:
    """Return whether the owner's answer gives a known pod another group, also one that was admitted without one."""
    after = _grouped(pod, answer)
    return (pod.group, pod.group_size, pod.rest) != (after.group, after.group_size, after.rest)


def _grouped(pod: PodView, answer: GangSize) -> PodView:
    """Return the pod in its labelled group, else in its owner's group, with the owner's gang size."""
    given = "" if pod.owner is not None and pod.group == pod.owner.group else pod.group
    size = answer.labelled if given else answer.pods
    if pod.owner is None or (size <= 1 and not answer.rest):
        return msgspec.structs.replace(pod, group=given, group_size=0, rest=())
    group = given or pod.owner.group
    return msgspec.structs.replace(pod, group=group, group_size=max(1, size), rest=answer.rest)
