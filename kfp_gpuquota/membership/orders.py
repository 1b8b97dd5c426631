"""The current order for each worker, as a function of the job's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership.policy import participants
from kfp_gpuquota.membership.tables import WorkerState, WorkerTrigger

if TYPE_CHECKING:
    from kfp_gpuquota.membership.job_state import JobState


def send_changed_orders(job: JobState) -> None:
    """Release workers outside the target and all generations, and send each worker its order where it has changed."""
    in_use = participants([generation for generation in (job.base, job.pending) if generation])
    named = {worker for worker, member in job.members.items() if member.wanted_at is not None}
    for worker in named - set(job.wanted()) - in_use - job.possibly_training():
        job.release(worker, WorkerTrigger.RELEASED, job.base.step if job.base else 0)
    for worker, member in job.members.items():
        order = order_for(job, worker)
        if member.state is not WorkerState.GONE and job.sent.get(worker) != order:
            job.sent[worker] = order
            job.out.append(c.SendOrder(worker, order))


def order_for(job: JobState, worker: str) -> c.Order:
    """Return the current order for `worker`, which is sent whenever it connects."""
    member = job.members.get(worker)
    if job.base and worker in job.base.leavers and worker in job.sent and not job.switch_is_over(job.base):
        return job.sent[worker]  # its connections stay open until all members have switched
    if member is None:
        return c.Stay(0)
    if not member.alive and member.state is not WorkerState.FINISHED:
        return c.Release("this job does not want the worker any more")
    in_base = job.base is not None and worker in job.base.member_set
    pending = job.pending
    if pending and pending.base == 0 and worker in pending.member_set:
        return c.Recover(pending.number, pending.members)
    if pending and pending.base and (in_base or worker in pending.member_set):
        return c.Propose(pending.number, pending.members, pending.base)
    if not in_base and job.finished and member.state is not WorkerState.FINISHED:
        return c.Release("the training has finished")
    if not in_base and not job.stays(member) and member.state is not WorkerState.FINISHED:
        return c.Release("this job does not want the worker any more")
    return c.Stay(job.generation if in_base else 0)
