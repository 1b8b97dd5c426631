"""Tracks pods of other controllers as the scheduler's jobs: each pod alone, or a group that starts together.

A group is formed when as many of its pods wait as its size. Pods that join a formed group later, because their owner
recreated them, are jobs of their own: their siblings run already, so they need not wait for each other.

| stage before | stage now   | scheduler events                                                |
|--------------|-------------|-----------------------------------------------------------------|
| -            | waiting     | JobSubmitted; for a group when it is complete                   |
| -            | assigned    | JobSubmitted, WorkerStarted                                     |
| waiting      | assigned    | WorkerStarted                                                   |
| assigned     | waiting     | WorkerGone: the write that admitted it has failed               |
| waiting      | ended       | JobRemoved; the rest of a group is formed again                 |
| assigned     | terminating | WorkerLeaving; its job is closed                                |
| assigned     | ended       | WorkerGone; its job is closed, or removed with its last pod     |

A closed job gets no replacement pods: their owner's new pods are new jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage, pod_job
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import RulesBook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator

GroupKey = tuple[str, str]


@dataclass(slots=True)
class PodJob:
    """A job of the scheduler: one pod, or a formed group."""

    uid: str
    key: GroupKey | None = None
    members: dict[str, Member] = field(default_factory=dict)
    closed: bool = False

    @property
    def started(self) -> bool:
        """Return whether any of its pods holds devices."""
        return any(member.reported >= Stage.ASSIGNED for member in self.members.values())


@dataclass(slots=True)
class Member:
    """A pod as last seen, and the stage last reported to the scheduler. `sent_to`: it is being admitted there.

    `part`: the part of its group with equal pods, if the group's pods differ.
    """

    view: PodView
    reported: Stage = Stage.OUTSIDE
    job: PodJob | None = None
    sent_to: tuple[str, tuple[int, ...]] | None = None
    evicted: bool = False
    part: str = ""

    @property
    def stage(self) -> Stage:
        """Return its stage, assuming that pending writes succeed."""
        stage = self.view.stage
        if stage is Stage.WAITING and self.sent_to is not None:
            stage = Stage.ASSIGNED
        return Stage.TERMINATING if stage is Stage.ASSIGNED and self.evicted else stage


class PlainPods:
    """All pods of other controllers. `emit` receives the scheduler's events, none before `settle`.

    By the `rules` in effect a pod's owner recreates a deleted pod, or does not.
    """

    def __init__(
        self,
        emit: Callable[[scheduler.Event], None],
        allocator: DeviceAllocator,
        rules: RulesBook | None = None,
    ) -> None:
        self._emit, self._allocator, self._rules = emit, allocator, rules or RulesBook()
        self.members: dict[str, Member] = {}
        self.jobs: dict[str, PodJob] = {}
        self.gathering: dict[GroupKey, dict[str, Member]] = {}
        self._open: dict[GroupKey, int] = {}
        self._settled = False

    def settle(self) -> None:
        """Form the groups after all existing pods were put; groups from before a restart are restored."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """Settle pod by pod; the caller may yield to other tasks in between."""
        self._settled = True
        groups: dict[GroupKey, list[Member]] = {}
        for member in self.members.values():
            if (key := _group_key(member.view)) is not None:
                groups.setdefault(key, []).append(member)
        for key, members in groups.items():
            if any(member.stage is Stage.ASSIGNED for member in members):
                self._form(key, members)
        for member in list(self.members.values()):
            if member.view.uid in self.members:  # it may have been deleted since
                self._advance(member)
            yield

    # Observed changes

    def put(self, view: PodView) -> None:
        """Add or update a pod."""
        member = self.members.get(view.uid)
        if member is None:
            if view.stage is Stage.ENDED:
                return
            member = self.members[view.uid] = Member(view)
        if view.stage is not Stage.WAITING:
            member.sent_to = None  # the watch has reported the result
        changed = view.stage is Stage.WAITING and _request(member.view) != _request(view)
        member.view = view
        if not self._settled:
            return
        if changed and member.reported is Stage.WAITING:
            self._leave_queue(member)  # its labels have changed: it is submitted again
        self._advance(member)

    def drop(self, uid: str) -> None:
        """Remove a deleted pod."""
        member = self.members.pop(uid, None)
        if member is not None:
            self._move(member, Stage.ENDED)

    # Decisions

    def assume_sent(self, uid: str, node: str, devices: tuple[int, ...]) -> None:
        """Assume that the pod's admission to the node succeeds."""
        self.members[uid].sent_to = (node, devices)
        self._advance(self.members[uid])

    def assume_leaving(self, uid: str) -> None:
        """Assume that the pod's eviction succeeds."""
        self.members[uid].evicted = True
        self._advance(self.members[uid])

    def take_back(self, uid: str) -> None:
        """Undo the assumptions about a pod after a write has failed."""
        if member := self.members.get(uid):
            member.sent_to, member.evicted = None, False
            self._advance(member)

    def waiting_of(self, job: str) -> list[PodView]:
        """Return the waiting pods of a job, oldest first."""
        return [member.view for member in self._queued(job)]

    def paired(self, job: str, placements: Iterable[scheduler.Placement]) -> list[tuple[PodView, scheduler.Placement]]:
        """Return a waiting pod for each placement, the oldest first; in a group with parts, one of the same part."""
        waiting: dict[str, list[PodView]] = {}
        for member in reversed(self._queued(job)):
            waiting.setdefault(member.part, []).append(member.view)
        return [(waiting[placement.part].pop(), placement) for placement in placements if waiting.get(placement.part)]

    def _queued(self, job: str) -> list[Member]:
        members = self.jobs[job].members.values() if job in self.jobs else ()
        queued = (member for member in members if member.stage is Stage.WAITING)
        return sorted(queued, key=lambda member: (member.view.created, member.view.uid))

    # The table

    def _advance(self, member: Member) -> None:
        stage = member.stage
        self._move(member, stage)
        if stage is Stage.ENDED:
            self.members.pop(member.view.uid, None)

    def _move(self, member: Member, stage: Stage) -> None:
        was, member.reported = member.reported, stage
        if was is stage:
            self._relocate(member)
            return
        match stage:
            case Stage.WAITING if was >= Stage.ASSIGNED:
                self._wait_again(member)
            case Stage.WAITING:
                self._queue(member)
            case Stage.ASSIGNED:
                self._hold(member, was)
            case Stage.TERMINATING:
                self._hold(member, was)
                self._emit(scheduler.WorkerLeaving(member.view.uid))
                self._close(member)
            case Stage.ENDED | Stage.OUTSIDE if was is Stage.WAITING:
                self._leave_queue(member)
            case Stage.ENDED | Stage.OUTSIDE if was >= Stage.ASSIGNED:
                self._end(member)

    def _queue(self, member: Member) -> None:
        if member.job is not None:
            return  # its group was formed with it
        key = _group_key(member.view)
        if key is None or self._open.get(key):
            self._form(None, [member])
            return
        gathered = self.gathering.setdefault(key, {})
        gathered[member.view.uid] = member
        if len(gathered) >= member.view.group_size:
            del self.gathering[key]
            self._form(key, list(gathered.values()))

    def _leave_queue(self, member: Member) -> None:
        """Remove a pod from the queue. The waiting rest of its group is formed again; running pods continue."""
        uid, job = member.view.uid, member.job
        member.reported, member.job = Stage.OUTSIDE, None
        if job is None:
            if (key := _group_key(member.view)) is not None:
                self.gathering.get(key, {}).pop(uid, None)
            return
        del job.members[uid]
        self._disband(job)

    def _hold(self, member: Member, was: Stage) -> None:
        if was >= Stage.ASSIGNED:
            if was is Stage.TERMINATING:  # the eviction was refused: it keeps its devices
                self._release(member)
            else:
                return
        view = member.view
        if member.job is None:
            self.gathering.get(_group_key(view) or ("", ""), {}).pop(view.uid, None)
            self._form(None, [member])
        assert member.job is not None
        node, wanted = member.sent_to or (view.node, view.devices)
        devices = self._allocator.take(view.uid, node, view.gpus, wanted, part=bool(view.share))
        self._emit(scheduler.WorkerStarted(view.uid, member.job.uid, node, devices, view.created, member.part))

    def _relocate(self, member: Member) -> None:
        """Hold devices of another node after kube-scheduler has chosen it, or the reservation has moved there."""
        held = self._allocator.held(member.view.uid)
        if member.reported is Stage.ASSIGNED and member.sent_to is None and held and held[0] != member.view.node:
            self._release(member)
            self._hold(member, Stage.WAITING)

    def _release(self, member: Member) -> None:
        self._allocator.release(member.view.uid)
        self._emit(scheduler.WorkerGone(member.view.uid))

    def _wait_again(self, member: Member) -> None:
        """Queue a pod again after its admission failed; if its job was closed in the meantime, as a new job."""
        self._release(member)
        job = member.job
        assert job is not None, "what holds devices belongs to a job"
        if job.closed:
            del job.members[member.view.uid]
            if not job.members:
                self._remove(job)
            member.job = None
            self._queue(member)

    def _end(self, member: Member) -> None:
        job = member.job
        assert job is not None, "what holds devices belongs to a job"
        del job.members[member.view.uid]
        if job.members:
            self._close_job(job)  # its waiting pods become jobs of their own
        if not job.members:
            self._remove(job)
        self._release(member)

    # Jobs

    def _form(self, key: GroupKey | None, members: list[Member]) -> None:
        first = min(members, key=lambda m: (m.view.created, m.view.uid))
        uid = first.view.uid if key is None else f"group/{first.view.uid}"
        while uid in self.jobs:  # an earlier group with the same first pod is closed, and some pods still hold devices
            uid += "/again"
        job = PodJob(uid=uid, key=key, members={m.view.uid: m for m in members})
        self.jobs[job.uid] = job
        if key is not None:
            self._open[key] = self._open.get(key, 0) + 1
        for member in members:
            member.job = job
        parts = _split(members)
        movable = all(
            self._rules.rules.recreates(member.view) for member in members
        )  # without a new pod a move would lose the work
        spec = pod_job(first.view, 1 if parts else len(members))
        self._emit(scheduler.JobSubmitted(job.uid, spec, first.view.created, movable=movable, parts=parts))

    def _close(self, member: Member) -> None:
        assert member.job is not None
        self._close_job(member.job)

    def _close_job(self, job: PodJob) -> None:
        if job.closed:
            return
        self._no_longer_open(job)
        self._emit(scheduler.JobCompleting(job.uid))
        for member in [m for m in job.members.values() if m.reported is Stage.WAITING]:
            del job.members[member.view.uid]
            self._form(None, [member])

    def _disband(self, job: PodJob) -> None:
        """Form the rest of a group again after it lost a waiting pod."""
        if job.started:
            self._close_job(job)
            return
        self._remove(job)
        for member in list(job.members.values()):
            member.job = None
            self._queue(member)

    def _remove(self, job: PodJob) -> None:
        self._no_longer_open(job)
        del self.jobs[job.uid]
        self._emit(scheduler.JobRemoved(job.uid))

    def _no_longer_open(self, job: PodJob) -> None:
        if not job.closed and job.key is not None:
            self._open[job.key] -= 1
            if not self._open[job.key]:
                del self._open[job.key]
        job.closed = True


def _group_key(view: PodView) -> GroupKey | None:
    if not view.group or view.share:  # a job with shared GPUs has one worker
        return None
    return view.namespace, view.group


def _split(members: list[Member]) -> dict[str, JobSpec]:
    """Return the job of each part of the group; {} if all pods are equal."""
    alike: dict[tuple[object, ...], list[Member]] = {}
    for member in sorted(members, key=lambda m: (m.view.created, m.view.uid)):
        member.part = ""
        alike.setdefault((member.view.gpus, member.view.needs, member.view.constraints), []).append(member)
    if len(alike) == 1:
        return {}
    parts: dict[str, JobSpec] = {}
    for number, same in enumerate(alike.values()):
        parts[str(number)] = pod_job(same[0].view, len(same))
        for member in same:
            member.part = str(number)
    return parts


def _request(view: PodView) -> tuple[object, ...]:
    """Return all fields of a waiting pod that determine its job."""
    quality = view.kind, view.priority, view.preemptible, view.pool, view.constraints, view.excluded_nodes
    return view.gpus, view.share, view.needs, *quality, view.group, view.group_size
