"""Applies each event of an elastic job to the job's state, and decides nothing.

A restarted coordinator restores from the workers that reconnect which generation is in force, and which switches were
agreed on before the restart: the workers may have switched after its last write.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Final

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership import events as e
from kfp_gpuquota.membership.job_state import JobState
from kfp_gpuquota.membership.limits import kills_due
from kfp_gpuquota.membership.policy import participants
from kfp_gpuquota.membership.roster import Generation, Member
from kfp_gpuquota.membership.tables import GenerationState, WorkerState, WorkerTrigger

_OPEN: Final = {GenerationState.PROPOSED, GenerationState.RECOVERING, GenerationState.WITHDRAWN}


def record(job: JobState, event: e.Event) -> None:
    """Apply the event to the job's state."""
    if not isinstance(event, e.TargetChanged | e.Ticked | e.WorkerGone | e.WorkerDisconnected):
        member = job.members.get(event.worker)
        if member and member.alive:
            member.record(job.now, job.limits.gap_s)
    _on(event, job)


@singledispatch
def _on(event: object, _job: JobState) -> None:
    raise TypeError(f"{event!r} is not an event")


@_on.register
def _on_target(event: e.TargetChanged, job: JobState) -> None:
    job.target, job.targeted = event.workers, frozenset(event.workers)
    for worker in event.workers:
        member = job.members.setdefault(worker, Member(worker))
        member.wanted_at = job.now if member.wanted_at is None else member.wanted_at
    _mark_leaving(job)


@_on.register
def _on_leave_requested(event: e.LeaveRequested, job: JobState) -> None:
    job.leave_requested.add(event.worker)
    _mark_leaving(job)


@_on.register
def _on_tick(_event: e.Ticked, job: JobState) -> None:
    _mark_leaving(job)
    together = [
        job.members[w] for w in participants(job.generations.values())
    ]  # also of withdrawn ones: perhaps agreed on
    for worker, why in kills_due(job.members.values(), together, job.limits, job.now, job.finished_at):
        job.kill(worker, why)
    for member in [member for member in job.members.values() if _is_stale(job, member)]:
        job.kill(member.id, f"it trains in generation {member.stale_generation}, which is not in force")


@_on.register
def _on_exited(event: e.WorkerGone, job: JobState) -> None:
    member = job.members.setdefault(event.worker, Member(event.worker))
    member.disconnect(job.now)
    if event.finished and not member.killed and member.state is not WorkerState.LEFT:
        job.finish(member)
    member.move(WorkerTrigger.GONE)


@_on.register
def _on_disconnected(event: e.WorkerDisconnected, job: JobState) -> None:
    if member := job.members.get(event.worker):
        member.disconnect(job.now)


@_on.register
def _on_joined(event: e.WorkerJoined, job: JobState) -> None:
    member = job.members.setdefault(event.worker, Member(event.worker))
    member.connect(job.now)
    member.record(job.now, job.limits.gap_s)
    member.move(WorkerTrigger.JOINED)


@_on.register
def _on_ready(event: e.WorkerReady, job: JobState) -> None:
    if (member := job.members.get(event.worker)) and member.move(WorkerTrigger.READY):
        member.ready_at = job.now


@_on.register
def _on_worker_heard(_event: e.WorkerHeard, _job: JobState) -> None:
    """Do nothing: `record` has updated the time of the last message."""


@_on.register
def _on_reconnected(event: e.WorkerReconnected, job: JobState) -> None:
    """Restore the generation in force after a restart of the coordinator: the highest one that a worker adopted."""
    member = job.members.setdefault(event.worker, Member(event.worker))
    member.connect(job.now)
    member.stale_generation = 0
    reported = job.generations.get(event.generation)
    if reported is None and event.generation > job.generation:
        _restore_generation(job, event.generation, event.members, event.step).adopted[event.worker] = (0.0, 0)
    elif reported is not None:
        generation = _note_adoption(job, event.worker, event.generation, event.step)
        if generation:
            generation.adopted.setdefault(event.worker, (0.0, 0))
    else:
        member.stale_generation = event.generation


@_on.register
def _on_prepared(event: e.GenerationPrepared, job: JobState) -> None:
    if generation := job.generations.get(event.generation):
        generation.prepared.add(event.worker)


@_on.register
def _on_preparation_failed(event: e.PreparationFailed, job: JobState) -> None:
    if generation := job.generations.get(event.generation):
        generation.refused.add(event.worker)
    elif event.generation < job.first:
        job.earlier_refusals[event.worker] = event.generation
    if job.pending is None or job.pending.number != event.generation:
        return
    if job.pending.base:
        job.pending.failed_at = job.now  # the members keep training; it is proposed again after failure_s
    elif job.failed_at is None:
        job.failed_at = job.now


@_on.register
def _on_adopted(event: e.GenerationAdopted, job: JobState) -> None:
    _restore_switch(job, event)
    generation = _note_adoption(job, event.worker, event.generation, event.step)
    if generation is None:
        _kill_stale(job, event.worker, event.generation)
        return
    generation.adopted[event.worker] = (event.pause_ms, event.lost_steps)
    if event.worker not in generation.members:
        job.release(event.worker, WorkerTrigger.RELEASED, event.step)


@_on.register
def _on_failed(event: e.CollectiveFailed, job: JobState) -> None:
    _restore_switch(job, event)
    generation = _note_adoption(job, event.worker, event.generation, event.step)
    in_base = job.base is not None and event.worker in job.base.members
    behind = generation is None and in_base and job.base and event.worker not in job.base.adopted
    recovering = job.pending and job.pending.base == 0 and job.pending.number != event.generation
    if (generation or behind) and not recovering and job.failed_at is None:
        job.failed_at = job.now
    if in_base and job.base and event.generation == job.base.number:
        job.base.failed.add(event.worker)
    elif job.base and event.worker in job.base.leavers:
        job.release_after_failure(event.worker, job.base)


@_on.register
def _on_finished(event: e.TrainingFinished, job: JobState) -> None:
    member = job.members.get(event.worker)
    if member and member.move(WorkerTrigger.FINISHED):
        job.finish(member)
        job.out.append(c.AnnounceFinish(event.worker, event.step))


def _restore_generation(job: JobState, number: int, members: tuple[str, ...], step: int) -> Generation:
    generation = Generation(number, members, 0, GenerationState.RECOVERING)
    generation.refused = {worker for worker in members if job.earlier_refusals.get(worker) == number}
    job.generations[number] = generation
    job.highest = max(job.highest, number)
    for worker in members:
        member = job.members.setdefault(worker, Member(worker))
        if member.last_message_at is None:
            member.trained_before = member.returning = True
        member.last_message_at = job.now  # its silence counts from now on
    job.commit(generation, step)
    return generation


def _restore_switch(job: JobState, event: e.GenerationAdopted | e.CollectiveFailed) -> None:
    """Restore a switch that was agreed on before the coordinator's restart and made after the workers had reconnected.

    All members of the generation in force had agreed on it, so that no other generation can follow. The first report
    may come from a worker that leaves with it, and after an agreed eviction it has no members.
    """
    before = job.generation < event.generation < job.first and event.generation not in job.generations
    if before and event.members is not None and event.worker in job.members:
        job.withdraw()
        _restore_generation(job, event.generation, event.members, event.step)


def _note_adoption(job: JobState, worker: str, number: int, step: int) -> Generation | None:
    """Commit generation `number` if it is open, and return it; None where it is not in force."""
    generation = job.generations.get(number)
    if generation is None or worker not in job.members:
        return None
    if generation.state in _OPEN and number > job.generation:
        job.commit(generation, step)
    return generation if generation is job.base else None


def _kill_stale(job: JobState, worker: str, number: int) -> None:
    """Kill a worker that switched to a generation that is not in force: its state is outdated, so it cannot rejoin.

    Late messages of the members of the generation in force, and of workers that leave with it, are ignored.
    """
    member = job.members.get(worker)
    base = job.base
    if member is None or (base and number <= base.number and worker in {*base.members, *base.leavers}):
        return
    if number > job.generation:
        job.kill(worker, f"it switched to generation {number}, which was given up")
    elif member.alive:
        job.kill(worker, f"it switched to generation {number}, which generation {job.generation} has replaced")


def _is_stale(job: JobState, member: Member) -> bool:
    """Return whether the worker reconnected with an outdated generation and has not reported leaving by agreement."""
    if not member.stale_generation or member.connected_at is None or job.base is None or job.recovering:
        return False
    concerned_now = member.id in {*job.base.members, *job.base.leavers}
    had_time = job.now - member.connected_at >= job.limits.failure_s
    return had_time and not concerned_now and job.stays(member)


def _mark_leaving(job: JobState) -> None:
    for member in job.members.values():
        released = member.state is WorkerState.LEFT  # permanently: its id is never in the target again
        if not released and member.id in job.targeted and member.id not in job.leave_requested:
            member.leaving_since = None
        elif member.leaving_since is None:
            member.leaving_since = job.now
