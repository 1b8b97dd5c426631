"""What one elastic job's events say: each changes what is known of the job, and nothing is decided here.

A restarted coordinator knows nothing but the highest number; it learns from the workers that come back which generation
is in force, and which switches were agreed on before it.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Final

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership import events as e
from kfp_gpuquota.membership.known import KnownJob
from kfp_gpuquota.membership.limits import kills_due
from kfp_gpuquota.membership.policy import concerned
from kfp_gpuquota.membership.roster import Generation, Member
from kfp_gpuquota.membership.tables import GenerationState, WorkerState, WorkerTrigger

_OPEN: Final = {GenerationState.PROPOSED, GenerationState.RECOVERING, GenerationState.WITHDRAWN}


def hear(job: KnownJob, event: e.Event) -> None:
    """Change what is known."""
    if not isinstance(event, e.TargetChanged | e.Ticked | e.WorkerGone | e.WorkerDisconnected):
        member = job.members.get(event.worker)
        if member and member.alive:
            member.hear(job.now, job.limits.gap_s)
    _on(event, job)


@singledispatch
def _on(event: object, _job: KnownJob) -> None:
    raise TypeError(f"{event!r} is not an event")


@_on.register
def _on_target(event: e.TargetChanged, job: KnownJob) -> None:
    job.target, job.targeted = event.workers, frozenset(event.workers)
    for worker in event.workers:
        member = job.members.setdefault(worker, Member(worker))
        member.wanted_at = job.now if member.wanted_at is None else member.wanted_at
    _mark_leaving(job)


@_on.register
def _on_leave_requested(event: e.LeaveRequested, job: KnownJob) -> None:
    job.asked_to_leave.add(event.worker)
    _mark_leaving(job)


@_on.register
def _on_tick(_event: e.Ticked, job: KnownJob) -> None:
    _mark_leaving(job)
    together = [job.members[w] for w in concerned(job.generations.values())]  # also one withdrawn, yet agreed on
    for worker, why in kills_due(job.members.values(), together, job.limits, job.now, job.finished_at):
        job.kill(worker, why)
    for member in [member for member in job.members.values() if _is_stray(job, member)]:
        job.kill(member.id, f"it trains in generation {member.stray_in}, which is not in force")


@_on.register
def _on_gone(event: e.WorkerGone, job: KnownJob) -> None:
    member = job.members.setdefault(event.worker, Member(event.worker))
    member.disconnect(job.now)
    if event.finished and not member.killed and member.state is not WorkerState.LEFT:
        job.finish(member)
    member.move(WorkerTrigger.GONE)


@_on.register
def _on_disconnected(event: e.WorkerDisconnected, job: KnownJob) -> None:
    if member := job.members.get(event.worker):
        member.disconnect(job.now)


@_on.register
def _on_joined(event: e.WorkerJoined, job: KnownJob) -> None:
    member = job.members.setdefault(event.worker, Member(event.worker))
    member.connect(job.now)
    member.hear(job.now, job.limits.gap_s)
    member.move(WorkerTrigger.JOINED)


@_on.register
def _on_ready(event: e.WorkerReady, job: KnownJob) -> None:
    if (member := job.members.get(event.worker)) and member.move(WorkerTrigger.READY):
        member.ready_at = job.now


@_on.register
def _on_heard(_event: e.WorkerHeard, _job: KnownJob) -> None:
    """A sign of life and nothing else: `hear` has noted it."""


@_on.register
def _on_reconnected(event: e.WorkerReconnected, job: KnownJob) -> None:
    """A restarted coordinator learns from its workers which generation is in force: the highest one adopted."""
    member = job.members.setdefault(event.worker, Member(event.worker))
    member.connect(job.now)
    member.stray_in = 0
    known = job.generations.get(event.generation)
    if known is None and event.generation > job.generation:
        _relearn(job, event.generation, event.members, event.step).adopted[event.worker] = (0.0, 0)
    elif known is not None:
        generation = _note_adoption(job, event.worker, event.generation, event.step)
        if generation:
            generation.adopted.setdefault(event.worker, (0.0, 0))
    else:
        member.stray_in = event.generation


@_on.register
def _on_prepared(event: e.GenerationPrepared, job: KnownJob) -> None:
    if generation := job.generations.get(event.generation):
        generation.prepared.add(event.worker)


@_on.register
def _on_preparation_failed(event: e.PreparationFailed, job: KnownJob) -> None:
    if generation := job.generations.get(event.generation):
        generation.refused.add(event.worker)
    elif event.generation < job.first:
        job.refused_before[event.worker] = event.generation
    if job.pending is None or job.pending.number != event.generation:
        return
    if job.pending.base:
        job.pending.failed_at = job.now  # nobody waits for it; it is proposed anew after a while
    elif job.failed_at is None:
        job.failed_at = job.now


@_on.register
def _on_adopted(event: e.GenerationAdopted, job: KnownJob) -> None:
    _learn_switch(job, event)
    generation = _note_adoption(job, event.worker, event.generation, event.step)
    if generation is None:
        _end_stray(job, event.worker, event.generation)
        return
    generation.adopted[event.worker] = (event.pause_ms, event.lost_steps)
    if event.worker not in generation.members:
        job.release(event.worker, WorkerTrigger.RELEASED, event.step)


@_on.register
def _on_failed(event: e.CollectiveFailed, job: KnownJob) -> None:
    _learn_switch(job, event)
    generation = _note_adoption(job, event.worker, event.generation, event.step)
    in_base = job.base is not None and event.worker in job.base.members
    behind = generation is None and in_base and job.base and event.worker not in job.base.adopted
    recovering = job.pending and job.pending.base == 0 and job.pending.number != event.generation
    if (generation or behind) and not recovering and job.failed_at is None:
        job.failed_at = job.now
    if in_base and job.base and event.generation == job.base.number:
        job.base.failed.add(event.worker)
    elif job.base and event.worker in job.base.leavers:
        job.let_go(event.worker, job.base)


@_on.register
def _on_finished(event: e.TrainingFinished, job: KnownJob) -> None:
    member = job.members.get(event.worker)
    if member and member.move(WorkerTrigger.FINISHED):
        job.finish(member)
        job.out.append(c.AnnounceFinish(event.worker, event.step))


def _relearn(job: KnownJob, number: int, members: tuple[str, ...], step: int) -> Generation:
    generation = Generation(number, members, 0, GenerationState.RECOVERING)
    generation.refused = {worker for worker in members if job.refused_before.get(worker) == number}
    job.generations[number] = generation
    job.highest = max(job.highest, number)
    for worker in members:
        member = job.members.setdefault(worker, Member(worker))
        if member.heard_at is None:
            member.trained_before = member.returning = True
        member.heard_at = job.now  # its silence is counted from here
    job.commit(generation, step)
    return generation


def _learn_switch(job: KnownJob, event: e.GenerationAdopted | e.CollectiveFailed) -> None:
    """A switch that was agreed on under the coordinator before this one, and made after they connected to this one.

    All members of the generation in force had agreed on it, so that it is the only one that can follow; one that
    leaves with it may be the first to say so, and nobody is in it where they agreed on an eviction.
    """
    before = job.generation < event.generation < job.first and event.generation not in job.generations
    if before and event.members is not None and event.worker in job.members:
        job.withdraw()
        _relearn(job, event.generation, event.members, event.step)


def _note_adoption(job: KnownJob, worker: str, number: int, step: int) -> Generation | None:
    """The generation in force if `worker` is in `number`, which commits it; None where that is history."""
    generation = job.generations.get(number)
    if generation is None or worker not in job.members:
        return None
    if generation.state in _OPEN and number > job.generation:
        job.commit(generation, step)
    return generation if generation is job.base else None


def _end_stray(job: KnownJob, worker: str, number: int) -> None:
    """A worker in a generation that is not in force meets nobody there, and cannot be taken back: its state is old.

    Members of the one in force, and those who leave, may be heard late.
    """
    member = job.members.get(worker)
    base = job.base
    if member is None or (base and number <= base.number and worker in {*base.members, *base.leavers}):
        return
    if number > job.generation:
        job.kill(worker, f"it switched to generation {number}, which was given up")
    elif member.alive:
        job.kill(worker, f"it switched to generation {number}, which generation {job.generation} has replaced")


def _is_stray(job: KnownJob, member: Member) -> bool:
    """It came back with a generation that is history, and has not said since that it left by agreement."""
    if not member.stray_in or member.connected_at is None or job.base is None or job.recovering:
        return False
    concerned_now = member.id in {*job.base.members, *job.base.leavers}
    had_time = job.now - member.connected_at >= job.limits.failure_s
    return had_time and not concerned_now and job.stays(member)


def _mark_leaving(job: KnownJob) -> None:
    for member in job.members.values():
        released = member.state is WorkerState.LEFT  # for good: its id is not wanted again
        if not released and member.id in job.targeted and member.id not in job.asked_to_leave:
            member.leaving_since = None
        elif member.leaving_since is None:
            member.leaving_since = job.now
