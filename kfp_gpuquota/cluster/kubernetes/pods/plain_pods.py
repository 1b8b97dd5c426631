"""Tracks pods of other controllers as the scheduler's jobs: each pod alone, or a group that starts together.

Pods of a group start together; group_stages.py has the stages of a group. Pods that join an admitted group, because
their owner recreated them or has more of them, are jobs of their own: they need not wait for each other.

A controller may create pods one after another, each after the previous one runs. Then the pods that it can have created
start, together with placeholders for the others (`rest`): these hold no devices, and count against the quota until the
pod is created that takes its placeholder's part of the job, or until a pod of the job has ended.

| stage before | stage now   | scheduler events                                                |
|--------------|-------------|-----------------------------------------------------------------|
| -            | waiting     | JobSubmitted; for a group when it is complete                   |
| -            | assigned    | JobSubmitted, WorkerStarted                                     |
| waiting      | assigned    | WorkerStarted                                                   |
| assigned     | waiting     | WorkerGone: the write that admitted it has failed               |
| waiting      | ended       | JobRemoved; the rest of a gang gathers again                    |
| assigned     | assigned    | ConstraintsChanged, if a volume that it mounts was bound        |
| assigned     | terminating | WorkerLeaving; its job is closed                                |
| assigned     | ended       | WorkerGone; its job is closed, or removed with its last pod     |

A closed job gets no replacement pods: their owner's new pods are new jobs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.convert.gang_notes import NO_GANG, GangNote
from kfp_gpuquota.cluster.kubernetes.convert.owners import Rest
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import NOWHERE
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job
from kfp_gpuquota.cluster.kubernetes.pods.group_stages import Group, GroupKey, GroupStage
from kfp_gpuquota.cluster.kubernetes.pods.pod_jobs import (
    REST,
    REST_PART,
    Member,
    PodJob,
    by_age,
    gpus_of_part,
    group_key,
    nodes_of,
    request_of,
    rest_part,
    split_into_parts,
    takes,
)
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import together_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator


class PlainPods:
    """All pods of other controllers. `emit` receives the scheduler's events, none before `settle`.

    By the `rules` in effect a pod's owner recreates a deleted pod, or does not.
    """

    def __init__(
        self,
        emit: Callable[[scheduler.Event], None],
        allocator: DeviceAllocator,
        rules: CurrentRules | None = None,
    ) -> None:
        self._emit, self._allocator, self._rules = emit, allocator, rules or CurrentRules()
        self.members: dict[str, Member] = {}
        self.jobs: dict[str, PodJob] = {}
        self.groups: dict[GroupKey, Group] = {}
        self._settled = False
        self._numbers = itertools.count(1)

    def settle(self) -> None:
        """Form the groups after all existing pods were put; groups from before a restart are restored."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """Settle pod by pod; the caller may yield to other tasks in between."""
        self._settled = True
        groups: dict[GroupKey, list[Member]] = {}
        for member in self.members.values():
            if (key := group_key(member.view)) is not None:
                groups.setdefault(key, []).append(member)
        for key, members in groups.items():
            if any(member.stage is Stage.ASSIGNED for member in members):
                self._restore(key, members)
        # Pods that hold GPUs come first: whether the others of their group wait for each other depends on them.
        for member in sorted(self.members.values(), key=lambda member: member.stage is Stage.WAITING):
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
        changed = view.stage is Stage.WAITING and request_of(member.view) != request_of(view)
        moved = nodes_of(member.view) != nodes_of(view)
        user_of = self._rules.rules.user_of
        passed_on = user_of(member.view.labels) != user_of(view.labels)
        member.view = view
        if not self._settled:
            return
        if changed and member.reported is Stage.WAITING:
            self._leave_queue(member)  # its labels have changed: it is submitted again
        self._advance(member)
        if moved and member.reported >= Stage.ASSIGNED and member.job is not None:
            self._emit(scheduler.ConstraintsChanged(member.job.uid, pod_job(view), view.uid))
        if passed_on and member.job is not None:
            self.users_changed([member.job])

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

    def holding(self) -> Iterator[PodView]:
        """Yield the pods that hold devices and are not asked to leave."""
        return (member.view for member in self.members.values() if member.stage is Stage.ASSIGNED)

    def asked_to_leave(self) -> Iterator[PodView]:
        """Yield the pods that are asked to leave, and were not deleted yet."""
        members = self.members.values()
        return (one.view for one in members if one.evicted and one.view.stage is Stage.ASSIGNED)

    def running(self) -> Iterator[PodView] | None:
        """Return the pods that hold devices and were not deleted, even if asked to leave; None before `settle`."""
        if not self._settled:
            return None
        return (member.view for member in self.members.values() if member.view.stage is Stage.ASSIGNED)

    def take_back(self, uid: str) -> None:
        """Undo the assumptions about a pod after a write has failed."""
        if member := self.members.get(uid):
            member.sent_to, member.evicted = None, False
            self._advance(member)

    def waiting_of(self, job: str) -> list[PodView]:
        """Return the waiting pods of a job, oldest first."""
        return [member.view for member in self._queued(job)]

    def assign(self, job: str, placements: Iterable[scheduler.Placement]) -> list[tuple[PodView, scheduler.Placement]]:
        """Return a waiting pod for each placement, the oldest first; in a gang with parts, one of the same part.

        For a placement whose pod does not exist yet a placeholder is started.
        """
        found = self.jobs.get(job)
        waiting: dict[str, list[PodView]] = {}
        for member in reversed(self._queued(job)):
            waiting.setdefault(member.part, []).append(member.view)
        assigned = []
        for placement in placements:
            if waiting.get(placement.part):
                assigned.append((waiting[placement.part].pop(), placement))
            elif found is not None and not found.closed and placement.part.startswith(REST_PART):
                self._reserve(found, placement.part)
        return assigned

    def gang_of(self, uid: str) -> GangNote:
        """Return what an admission of the pod annotates about its gang."""
        member = self.members[uid]
        if (key := group_key(member.view)) is None:
            return NO_GANG
        group = self.groups.get(key)
        counts = Counter(group.gang.rest.values() if group is not None and group.gang is not None else ())
        rest = tuple(Rest(count, gpus_of_part(part)) for part, count in sorted(counts.items()))
        return GangNote(max(1, member.view.group_size), rest)

    def rest_of(self, job: str) -> int:
        """Return for how many pods of the job that do not exist yet quota is reserved."""
        return len(self.jobs[job].rest) if job in self.jobs else 0

    def give_up_rest(self, job: str) -> None:
        """Release the quota of pods that were not created."""
        if (found := self.jobs.get(job)) is not None and found.rest:
            self._close_job(found)

    def incomplete(self) -> Iterator[list[PodView]]:
        """Return the waiting pods of each group that is not complete, oldest first."""
        for group in self.groups.values():
            if group.stage is GroupStage.GATHERING and group.waiting:
                yield [member.view for member in sorted(group.waiting.values(), key=by_age)]

    def _queued(self, job: str) -> list[Member]:
        members = self.jobs[job].members.values() if job in self.jobs else ()
        queued = (member for member in members if member.stage is Stage.WAITING)
        return sorted(queued, key=by_age)

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
            if member.key != group_key(member.view):  # its owner was read only now
                self._account(member, stage)
            return
        self._change(member, was, stage)
        self._account(member, stage)

    def _change(self, member: Member, was: Stage, stage: Stage) -> None:
        match stage:
            case Stage.WAITING if was >= Stage.ASSIGNED:
                self._wait_again(member)
            case Stage.WAITING:
                self._queue(member)
            case Stage.ASSIGNED:
                self._hold(member, was)
            case Stage.TERMINATING:
                self._hold(member, was)
                self._relocate(member)
                self._emit(scheduler.WorkerLeaving(member.view.uid))
                self._close(member)
            case Stage.ENDED | Stage.OUTSIDE if was is Stage.WAITING:
                self._leave_queue(member)
            case Stage.ENDED | Stage.OUTSIDE if was >= Stage.ASSIGNED:
                self._end(member)

    def _queue(self, member: Member) -> None:
        """Submit a waiting pod without a group; a group decides when its pods are submitted."""
        if member.job is None and group_key(member.view) is None:
            self._form(None, [member])

    # Groups

    def _account(self, member: Member, stage: Stage) -> None:
        """Update the pod's group after it has changed its stage, and what the group's other pods wait for."""
        key = group_key(member.view)
        if member.key is not None and member.key != key:
            self._leave_group(member)
        member.key = key
        if key is None:
            return
        group = self.groups.setdefault(key, Group(key))
        uid = member.view.uid
        (group.holding.add if stage is Stage.ASSIGNED else group.holding.discard)(uid)
        if stage is Stage.WAITING and (member.job is None or member.job is not group.gang):
            group.waiting[uid] = member
        else:
            group.waiting.pop(uid, None)
        self._regroup(group)

    def _leave_group(self, member: Member) -> None:
        group = self.groups.get(member.key or ("", ""))
        if group is not None:
            group.holding.discard(member.view.uid)
            group.waiting.pop(member.view.uid, None)
            self._regroup(group)

    def _regroup(self, group: Group) -> None:
        """Submit the waiting pods of the group as its stage requires."""
        if group.advance() and group.stage is not GroupStage.ADMITTED:
            for member in group.waiting.values():  # no longer alone: they start with the others again
                self._withdraw(member)
        if group.stage is GroupStage.ADMITTED:
            for member in [member for member in group.waiting.values() if member.job is None]:
                self._join(group, member)
        elif group.stage is GroupStage.GATHERING and len(group.waiting) >= group.size:
            members = sorted(group.waiting.values(), key=by_age)
            gang = members[: group.size]
            group.gang = self._form(group.key, gang, gang[0].view.rest)
            for member in gang:
                del group.waiting[member.view.uid]
            group.advance()
        if not group.waiting and not group.holding and group.gang is None:
            del self.groups[group.key]

    def _join(self, group: Group, member: Member) -> None:
        """Submit a pod that waits in an admitted group: in place of an equal placeholder, else alone."""
        job = group.gang
        holder = None if job is None else next((h for h, part in job.rest.items() if takes(member, part)), None)
        if job is None or holder is None:
            self._form(None, [member], replaces=group.lacks_one)
            return
        member.job, member.part = job, job.rest.pop(holder)
        job.members[member.view.uid] = member
        del group.waiting[member.view.uid]
        self._release_holder(holder)

    def _withdraw(self, member: Member) -> None:
        """Remove the job of a pod that waited alone."""
        job, member.job = member.job, None
        if job is not None:
            self._remove(job)

    def _restore(self, key: GroupKey, members: list[Member]) -> None:
        """Form the gang of an admitted group again: the pods that hold GPUs, and those whose admission is missing."""
        holding = [member for member in members if member.stage is Stage.ASSIGNED]
        size = max(member.view.group_size for member in members)
        waiting = sorted((member for member in members if member.stage is Stage.WAITING), key=by_age)
        rest = max(holding, key=by_age).view.rest
        gang = self._form(key, [*holding, *waiting[: max(0, size - len(holding))]], rest)
        self.groups[key] = Group(key, gang=gang)
        for number, later in enumerate(rest):
            for _ in range(later.pods):
                self._reserve(gang, rest_part(number, later))

    def _reserve(self, job: PodJob, part: str) -> None:
        """Start a placeholder: it holds devices of no node, so it only counts against the quota."""
        holder = f"{job.uid}{REST}{next(self._numbers)}"
        job.rest[holder] = part
        devices = self._allocator.take(holder, NOWHERE, gpus_of_part(part), None)
        self._emit(scheduler.WorkerStarted(holder, job.uid, NOWHERE, devices, 0.0, part))

    def _leave_queue(self, member: Member) -> None:
        """Remove a pod from the queue. The waiting rest of its group is formed again; running pods continue."""
        uid, job = member.view.uid, member.job
        member.reported, member.job = Stage.OUTSIDE, None
        if job is not None:
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
            self._form(None, [member])
        assert member.job is not None
        node, wanted = member.sent_to or (view.node, view.devices)
        devices = self._allocator.take(view.uid, node, view.gpus, wanted, part=bool(view.share))
        self._emit(scheduler.WorkerStarted(view.uid, member.job.uid, node, devices, view.created, member.part))

    def _relocate(self, member: Member) -> None:
        """Hold devices of another node after kube-scheduler has chosen it, or the reservation has moved there.

        Also of a pod that is evicted: it may be bound before its deletion arrives, and runs there until it has ended.
        """
        view, held = member.view, self._allocator.held(member.view.uid)
        if member.sent_to is None and held and view.located not in {"", held[0]}:
            devices = self._allocator.move(view.uid, view.located, view.devices)
            self._emit(scheduler.WorkerMoved(view.uid, view.located, devices))

    def _release(self, member: Member) -> None:
        self._release_holder(member.view.uid)

    def _release_holder(self, holder: str) -> None:
        self._allocator.release(holder)
        self._emit(scheduler.WorkerGone(holder))

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

    def _form(
        self, key: GroupKey | None, members: list[Member], rest: tuple[Rest, ...] = (), *, replaces: bool = False
    ) -> PodJob:
        first = min(members, key=by_age)
        uid = first.view.uid if key is None else f"group/{first.view.uid}"
        while uid in self.jobs:  # an earlier group with the same first pod is closed, and some pods still hold devices
            uid += "/again"
        job = PodJob(uid=uid, key=key, members={m.view.uid: m for m in members}, replaces=replaces)
        self.jobs[job.uid] = job
        for member in members:
            member.job = job
        parts = split_into_parts(members, rest)
        movable = all(
            self._rules.rules.recreates(member.view) for member in members
        )  # without a new pod a move would lose the work
        spec = pod_job(first.view, 1 if parts else len(members))
        self._emit(
            scheduler.JobSubmitted(
                job.uid,
                spec,
                first.view.created,
                movable=movable,
                overlapping=True,
                together=together_name(first.view),
                replaces=replaces,
                parts=parts,
                user=self._rules.rules.user_of(first.view.labels),
            )
        )
        return job

    def users_changed(self, jobs: Iterable[PodJob] | None = None) -> None:
        """Count jobs, by default all of them, as those of the users that their first pods' labels name now."""
        for job in self.jobs.values() if jobs is None else jobs:
            if job.members:
                first = min(job.members.values(), key=by_age)
                self._emit(scheduler.UserChanged(job.uid, self._rules.rules.user_of(first.view.labels)))

    def _close(self, member: Member) -> None:
        assert member.job is not None
        self._close_job(member.job)

    def _close_job(self, job: PodJob) -> None:
        if job.closed:
            return
        self._shut(job)
        self._emit(scheduler.JobCompleting(job.uid))
        for member in [m for m in job.members.values() if m.reported is Stage.WAITING]:
            del job.members[member.view.uid]
            self._wait_outside(member)

    def _disband(self, job: PodJob) -> None:
        """Submit the rest of a gang again after it lost a waiting pod."""
        if job.started:
            self._close_job(job)
            return
        self._remove(job)
        for member in list(job.members.values()):
            self._wait_outside(member)

    def _wait_outside(self, member: Member) -> None:
        """Let a pod wait without the gang that it was part of; its group decides how."""
        member.job, member.part = None, ""
        self._queue(member)
        if (key := group_key(member.view)) is not None:
            group = self.groups.setdefault(key, Group(key))
            group.waiting[member.view.uid] = member
            self._regroup(group)

    def _remove(self, job: PodJob) -> None:
        self._shut(job)
        del self.jobs[job.uid]
        self._emit(scheduler.JobRemoved(job.uid))

    def _shut(self, job: PodJob) -> None:
        """Release the job's placeholders, and let its group form another gang."""
        job.closed = True
        group = self.groups.get(job.key) if job.key is not None else None
        if group is not None and group.gang is job:
            group.gang = None
        for holder in job.rest:
            self._release_holder(holder)
        job.rest.clear()
