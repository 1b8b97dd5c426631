"""Decides which generation follows, from the job's state alone, never from the order in which events arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.policy import disconnected_members, first_members, next_members, still_fits, survivors

if TYPE_CHECKING:
    from kfp_gpuquota.membership.job_state import JobState
    from kfp_gpuquota.membership.roster import Generation


def decide(job: JobState) -> None:
    """Compare the generation in force with the target and the workers' states, and open the next one where needed."""
    _complete_switch(job)
    if job.base is not None and not job.base.members:
        if not (job.base.complete and job.wanted()):
            return
        job.forget_base()
    if job.base is None and job.finished:
        job.withdraw()  # a first generation would repeat the finished training
    elif job.base is None:
        _decide_first(job)
    elif _decide_recovery(job, job.base):
        return
    elif job.finished:
        job.withdraw()  # the members vote no more, and workers that wait to join are released
    else:
        _decide_resize(job, job.base)


def _complete_switch(job: JobState) -> None:
    if job.base and not job.base.complete and job.switch_is_over(job.base):
        job.base.complete = True
        job.announce(job.base)


def _decide_first(job: JobState) -> None:
    pending = job.pending
    if pending and set(pending.members) <= set(job.wanted()) and not _failure_is_due(job, pending):
        return
    wanted = [] if job.possibly_training() else [job.members[worker] for worker in job.wanted()]
    members = first_members(wanted, job.min_workers, job.limits.forming_s, job.now)
    job.withdraw()
    if members:
        job.open(members, base=0)


def _decide_recovery(job: JobState, base: Generation) -> bool:
    """Open or keep a recovery generation; return False where no member is lost and no collective has failed."""
    if job.recovering and job.pending and all(job.members[w].alive for w in job.pending.members):
        if not _failure_is_due(job, job.pending):
            return True
    elif not any(_is_missing(job, w, base) for w in base.members) and not _failure_is_due(job, base):
        return job.failed_at is not None
    members = survivors([job.members[w] for w in base.members], job.wanted())
    job.withdraw()
    if members:
        job.open(members, base=0)
    else:
        job.forget_base()
    return True


def _failure_is_due(job: JobState, generation: Generation) -> bool:
    """Return whether to recover now: at once where one lost connection explains the failure, else after `failure_s`."""
    if job.failed_at is None:
        return False
    alive = [member for w in generation.members if (member := job.members[w]).alive]
    lost = disconnected_members(alive, job.failed_at, job.limits.failure_s, job.now)
    for worker in lost or ():
        job.kill(worker, "its connections to the coordinator and to its peers broke")
    return lost is not None


def _decide_resize(job: JobState, base: Generation) -> None:
    members = next_members(base.members, job.wanted(), job.members)
    failed_at = job.pending.failed_at if job.pending else None
    stuck = failed_at is not None and job.now - failed_at >= job.limits.failure_s
    if job.pending and not stuck and still_fits(job.pending.members, base.members, members):
        return
    job.withdraw()
    if members != base.members:
        job.open(members, base=base.number)


def _is_missing(job: JobState, worker: str, base: Generation) -> bool:
    """Return whether the member is lost, or refused the generation just before the others agreed on it."""
    member = job.members[worker]
    lost = not member.alive and not member.finished
    return lost or (worker in base.refused and worker not in base.adopted)
