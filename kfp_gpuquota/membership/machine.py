"""The membership machine of one elastic job: `apply(event, now)` returns commands.

Each event first changes the job's state (`event_handlers`). Then the generation in force is compared with the target
and the workers' states, and the next one may be proposed (`decisions`). Then the orders that follow from the new state
are compared with those last sent, and the changed ones are sent. So a decision depends only on the state.
Handlers that decide themselves would depend on the order in which events arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership import commands as c
from kfp_gpuquota.membership.decisions import decide
from kfp_gpuquota.membership.event_handlers import record
from kfp_gpuquota.membership.events import WorkerDisconnected, WorkerHeard, WorkerReconnected
from kfp_gpuquota.membership.job_state import JobState
from kfp_gpuquota.membership.policy import participants
from kfp_gpuquota.membership.roster import Generation, Limits, Member
from kfp_gpuquota.membership.tables import WorkerState, WorkerTrigger

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kfp_gpuquota.membership.commands import Command, Order
    from kfp_gpuquota.membership.events import Event


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


class Membership:
    """The membership of one elastic job: the generation in force and the next one.

    `first_generation` is the first unused number: 1 for a new job, one more than the highest reserved number after a
    restart of the coordinator. With more than 1 the machine first waits `limits.silence_s` for workers that already
    train to reconnect. `trained` are the workers of the generation that was in force before the restart: until one of
    them reconnects, none is killed and no first generation is opened, because the coordinator may be disconnected from
    them.
    """

    def __init__(
        self,
        *,
        min_workers: int = 1,
        first_generation: int = 1,
        limits: Limits | None = None,
        now: float = 0.0,
        trained: Collection[str] = (),
    ) -> None:
        self._job = JobState(min_workers, first_generation, limits or Limits(), now)
        self._trained = frozenset(trained)
        for worker in trained:
            self._job.members[worker] = Member(worker, trained_before=True, returning=True)

    def apply(self, event: Event, now: float) -> list[Command]:
        """Apply one event at `now` (seconds of a monotonic clock), and return the commands to execute, in order."""
        job = self._job
        job.out, job.now = [], now
        record(job, event)
        if _is_routine(job, event):
            return job.out
        decide(job)
        send_changed_orders(job)
        return job.out

    def order_for(self, worker: str) -> Order:
        """Return the current order for `worker`, which is sent whenever it connects."""
        return order_for(self._job, worker)

    # For reading only.

    @property
    def generation(self) -> int:
        """The number of the generation in force; 0 before the first."""
        return self._job.generation

    @property
    def highest(self) -> int:
        """The highest generation number used so far."""
        return self._job.highest

    @property
    def base(self) -> Generation | None:
        """The generation in force."""
        return self._job.base

    @property
    def pending(self) -> Generation | None:
        """The next generation, proposed or being built."""
        return self._job.pending

    @property
    def members(self) -> Mapping[str, Member]:
        """All workers of the job, past and present, by id."""
        return self._job.members

    @property
    def unnamed(self) -> int:
        """The number of workers that have connected, or were named by others, and that the cluster has not named."""
        return sum(one.wanted_at is None and one.id not in self._trained for one in self._job.members.values())

    @property
    def finished(self) -> bool:
        """Whether a worker has applied the last step."""
        return self._job.finished


def _is_routine(job: JobState, event: Event) -> bool:
    """Return whether no decision and no order can follow from the event.

    Heartbeats arrive once a second from each worker; silence is checked at each tick. While all members train together
    and no generation is pending, a lost or restored connection changes nothing either: all connections of a job may
    break at once, and checking every member for each of them would take quadratic time.
    """
    if isinstance(event, WorkerHeard):
        return True
    base = job.base
    if base is None or not base.complete or job.pending is not None or job.failed_at is not None:
        return False
    if isinstance(event, WorkerReconnected):
        return event.generation == base.number and event.worker in base.adopted
    return isinstance(event, WorkerDisconnected) and event.worker in base.member_set
