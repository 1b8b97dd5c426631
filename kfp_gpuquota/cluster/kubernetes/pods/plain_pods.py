"""Pods that somebody else makes, as the scheduler's jobs: each one alone, or a group that starts together.

A group forms once as many of its pods wait as it says. Pods that come to a formed group later, because their owner made
them anew, are jobs of their own: they join siblings that run, so nothing is gained by making them wait for each other.

| pod was | is now  | the scheduler is told                                              |
|---------|---------|--------------------------------------------------------------------|
| -       | waiting | JobSubmitted; of a group once it is whole                          |
| -       | held    | JobSubmitted, WorkerStarted                                        |
| waiting | held    | WorkerStarted                                                      |
| held    | waiting | WorkerGone: the write that admitted it has failed                  |
| waiting | over    | JobRemoved; what is left of a group forms anew                     |
| held    | leaving | WorkerLeaving; its job is closed                                   |
| held    | over    | WorkerGone; its job is closed, or removed where it was the last    |

A closed job takes no replacements: its pods' owner makes new ones, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage, pod_job
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import DEFAULT_RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import Seats

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
        """Some of it holds devices."""
        return any(member.told >= Stage.HELD for member in self.members.values())


@dataclass(slots=True)
class Member:
    """One pod as last seen, and what the scheduler believes of it. `sent_to`: it is being admitted there.

    `part`: of a group whose pods differ, those that are like this one.
    """

    view: PodView
    told: Stage = Stage.OUTSIDE
    job: PodJob | None = None
    sent_to: tuple[str, tuple[int, ...]] | None = None
    asked_to_go: bool = False
    part: str = ""

    @property
    def stage(self) -> Stage:
        """Where it stands, decisions that are being carried out taken for done."""
        stage = self.view.stage
        if stage is Stage.WAITING and self.sent_to is not None:
            stage = Stage.HELD
        return Stage.LEAVING if stage is Stage.HELD and self.asked_to_go else stage


class PlainPods:
    """All such pods. `tell` gets the scheduler's events; none before `settle`.

    `recreated(pod)`: its owner creates another one in its place when it is gone.
    """

    def __init__(
        self,
        tell: Callable[[scheduler.Event], None],
        seats: Seats,
        recreated: Callable[[PodView], bool] = DEFAULT_RULES.recreates,
    ) -> None:
        self._tell, self._seats, self._recreated = tell, seats, recreated
        self.members: dict[str, Member] = {}
        self.jobs: dict[str, PodJob] = {}
        self.gathering: dict[GroupKey, dict[str, Member]] = {}
        self._open: dict[GroupKey, int] = {}
        self._settled = False

    def settle(self) -> None:
        """All that exists was put: what belonged together before a restart does so again."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """Settle pod by pod, for a caller that does other things in between."""
        self._settled = True
        groups: dict[GroupKey, list[Member]] = {}
        for member in self.members.values():
            if (key := _group_key(member.view)) is not None:
                groups.setdefault(key, []).append(member)
        for key, members in groups.items():
            if any(member.stage is Stage.HELD for member in members):
                self._form(key, members)
        for member in list(self.members.values()):
            if member.view.uid in self.members:  # it may have gone since
                self._advance(member)
            yield

    # What was seen

    def put(self, view: PodView) -> None:
        """A pod is as given."""
        member = self.members.get(view.uid)
        if member is None:
            if view.stage is Stage.OVER:
                return
            member = self.members[view.uid] = Member(view)
        if view.stage is not Stage.WAITING:
            member.sent_to = None  # the watch has seen what became of it
        changed = view.stage is Stage.WAITING and _wish(member.view) != _wish(view)
        member.view = view
        if not self._settled:
            return
        if changed and member.told is Stage.WAITING:
            self._leave_queue(member)  # its labels have changed: it asks anew
        self._advance(member)

    def drop(self, uid: str) -> None:
        """A pod is gone."""
        member = self.members.pop(uid, None)
        if member is not None:
            self._move(member, Stage.OVER)

    # What was decided

    def assume_sent(self, uid: str, node: str, devices: tuple[int, ...]) -> None:
        """It is being admitted there."""
        self.members[uid].sent_to = (node, devices)
        self._advance(self.members[uid])

    def assume_leaving(self, uid: str) -> None:
        """It is being told to go."""
        self.members[uid].asked_to_go = True
        self._advance(self.members[uid])

    def take_back(self, uid: str) -> None:
        """What was being done to it has failed: it stands where it was last seen."""
        if member := self.members.get(uid):
            member.sent_to, member.asked_to_go = None, False
            self._advance(member)

    def waiting_of(self, job: str) -> list[PodView]:
        """The pods of a job that wait for their turn, oldest first."""
        return [member.view for member in self._queued(job)]

    def paired(self, job: str, placements: Iterable[scheduler.Placement]) -> list[tuple[PodView, scheduler.Placement]]:
        """Which of the job's pods goes to each place, the oldest first; of a group of parts one of the place's part."""
        waiting: dict[str, list[PodView]] = {}
        for member in reversed(self._queued(job)):
            waiting.setdefault(member.part, []).append(member.view)
        return [(waiting[place.part].pop(), place) for place in placements if waiting.get(place.part)]

    def _queued(self, job: str) -> list[Member]:
        members = self.jobs[job].members.values() if job in self.jobs else ()
        queued = (member for member in members if member.stage is Stage.WAITING)
        return sorted(queued, key=lambda member: (member.view.created, member.view.uid))

    # The table

    def _advance(self, member: Member) -> None:
        stage = member.stage
        self._move(member, stage)
        if stage is Stage.OVER:
            self.members.pop(member.view.uid, None)

    def _move(self, member: Member, stage: Stage) -> None:
        was, member.told = member.told, stage
        if was is stage:
            return
        match stage:
            case Stage.WAITING if was >= Stage.HELD:
                self._wait_again(member)
            case Stage.WAITING:
                self._queue(member)
            case Stage.HELD:
                self._hold(member, was)
            case Stage.LEAVING:
                self._hold(member, was)
                self._tell(scheduler.WorkerLeaving(member.view.uid))
                self._close(member)
            case Stage.OVER | Stage.OUTSIDE if was is Stage.WAITING:
                self._leave_queue(member)
            case Stage.OVER | Stage.OUTSIDE if was >= Stage.HELD:
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
        """It waits no more. What was to start with it forms anew; what runs already goes on."""
        uid, job = member.view.uid, member.job
        member.told, member.job = Stage.OUTSIDE, None
        if job is None:
            if (key := _group_key(member.view)) is not None:
                self.gathering.get(key, {}).pop(uid, None)
            return
        del job.members[uid]
        self._disband(job)

    def _hold(self, member: Member, was: Stage) -> None:
        if was >= Stage.HELD:
            if was is Stage.LEAVING:  # an eviction that was refused: it holds what it held
                self._give_back(member)
            else:
                return
        view = member.view
        if member.job is None:
            self.gathering.get(_group_key(view) or ("", ""), {}).pop(view.uid, None)
            self._form(None, [member])
        assert member.job is not None
        node, wanted = member.sent_to or (view.node, view.devices)
        devices = self._seats.take(view.uid, node, view.gpus, wanted, part=bool(view.share))
        self._tell(scheduler.WorkerStarted(view.uid, member.job.uid, node, devices, view.created, member.part))

    def _give_back(self, member: Member) -> None:
        self._seats.release(member.view.uid)
        self._tell(scheduler.WorkerGone(member.view.uid))

    def _wait_again(self, member: Member) -> None:
        """Its admission failed. A job that was closed meanwhile takes it no more."""
        self._give_back(member)
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
            self._close_job(job)  # those of it that wait leave it
        if not job.members:
            self._remove(job)
        self._give_back(member)

    # Jobs

    def _form(self, key: GroupKey | None, members: list[Member]) -> None:
        first = min(members, key=lambda m: (m.view.created, m.view.uid))
        uid = first.view.uid if key is None else f"group/{first.view.uid}"
        while uid in self.jobs:  # an earlier group with the same first pod is closed, and some of it still hold devices
            uid += "/again"
        job = PodJob(uid=uid, key=key, members={m.view.uid: m for m in members})
        self.jobs[job.uid] = job
        if key is not None:
            self._open[key] = self._open.get(key, 0) + 1
        for member in members:
            member.job = job
        parts = _split(members)
        movable = all(
            self._recreated(member.view) for member in members
        )  # another pod is not created, and work is lost
        spec = pod_job(first.view, 1 if parts else len(members))
        self._tell(scheduler.JobSubmitted(job.uid, spec, first.view.created, movable=movable, parts=parts))

    def _close(self, member: Member) -> None:
        assert member.job is not None
        self._close_job(member.job)

    def _close_job(self, job: PodJob) -> None:
        if job.closed:
            return
        self._no_longer_open(job)
        self._tell(scheduler.JobCompleting(job.uid))
        for member in [m for m in job.members.values() if m.told is Stage.WAITING]:
            del job.members[member.view.uid]
            self._form(None, [member])

    def _disband(self, job: PodJob) -> None:
        """A group lost one that waited."""
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
        self._tell(scheduler.JobRemoved(job.uid))

    def _no_longer_open(self, job: PodJob) -> None:
        if not job.closed and job.key is not None:
            self._open[job.key] -= 1
            if not self._open[job.key]:
                del self._open[job.key]
        job.closed = True


def _group_key(view: PodView) -> GroupKey | None:
    if not view.group or view.share:  # a job that holds parts of GPUs has one worker
        return None
    return view.namespace, view.group


def _split(members: list[Member]) -> dict[str, JobSpec]:
    """What each part of the group asks for; no parts where all are alike."""
    alike: dict[tuple[object, ...], list[Member]] = {}
    for member in sorted(members, key=lambda m: (m.view.created, m.view.uid)):
        member.part = ""
        alike.setdefault((member.view.gpus, member.view.needs, member.view.place), []).append(member)
    if len(alike) == 1:
        return {}
    parts: dict[str, JobSpec] = {}
    for number, same in enumerate(alike.values()):
        parts[str(number)] = pod_job(same[0].view, len(same))
        for member in same:
            member.part = str(number)
    return parts


def _wish(view: PodView) -> tuple[object, ...]:
    """What it asks for."""
    quality = view.kind, view.priority, view.preemptible, view.pool, view.place, view.avoids
    return view.gpus, view.share, view.needs, *quality, view.group, view.group_size
