"""The membership machine of one elastic job: `apply(event, now)` returns commands.

Each event first changes what is known (`hearing`); then the generation in force is compared with what is wanted and
possible, and the next one may be proposed (`deciding`); then the orders that follow from the new state are compared
with those last sent, and what differs is sent (`orders`). So a decision never depends on which event came when, only on
what is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.membership.deciding import decide
from kfp_gpuquota.membership.events import WorkerDisconnected, WorkerHeard, WorkerReconnected
from kfp_gpuquota.membership.hearing import hear
from kfp_gpuquota.membership.known import KnownJob
from kfp_gpuquota.membership.orders import order_for, send_changed_orders
from kfp_gpuquota.membership.roster import Generation, Limits, Member

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kfp_gpuquota.membership.commands import Command, Order
    from kfp_gpuquota.membership.events import Event


class Membership:
    """One elastic job: who trains together now, and who will next.

    `first_generation` is the first number that was never used: 1 for a new job, one more than the highest reserved
    after the coordinator restarted. With more than 1 the machine first gives workers that already train the time
    (`limits.silence_s`) to reconnect. `trained` are the workers of the generation that was in force then: while none of
    them is heard, none is killed and no first generation is opened beside theirs, since it is the coordinator that may
    be cut off from them.
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
        self._job = KnownJob(min_workers, first_generation, limits or Limits(), now)
        for worker in trained:
            self._job.members[worker] = Member(worker, trained_before=True, returning=True)

    def apply(self, event: Event, now: float) -> list[Command]:
        """Take one event in, at `now` (seconds, any origin, never falling); return what is to be done, in order."""
        job = self._job
        job.out, job.now = [], now
        hear(job, event)
        if _is_routine(job, event):
            return job.out
        decide(job)
        send_changed_orders(job)
        return job.out

    def order_for(self, worker: str) -> Order:
        """What stands for `worker` now: sent whenever it connects."""
        return order_for(self._job, worker)

    # To be read only

    @property
    def generation(self) -> int:
        """The number of the generation in force; 0 before the first."""
        return self._job.generation

    @property
    def highest(self) -> int:
        """The highest number that a generation of this job was ever given."""
        return self._job.highest

    @property
    def base(self) -> Generation | None:
        """The generation in force."""
        return self._job.base

    @property
    def pending(self) -> Generation | None:
        """The next one, proposed or being built."""
        return self._job.pending

    @property
    def members(self) -> Mapping[str, Member]:
        """All workers that were ever heard of, by id."""
        return self._job.members

    @property
    def finished(self) -> bool:
        """Whether somebody applied the last step."""
        return self._job.finished


def _is_routine(job: KnownJob, event: Event) -> bool:
    """Return whether no decision and no order can follow from the event, so that none needs to be looked for.

    Signs of life come once a second from each worker; what follows from silence is decided at each tick. While all
    members train together and nothing is pending, a connection that breaks or comes back changes nothing either: all of
    a job's may, at once, and looking at each member for each of them takes their number squared.
    """
    if isinstance(event, WorkerHeard):
        return True
    base = job.base
    if base is None or not base.complete or job.pending is not None or job.failed_at is not None:
        return False
    if isinstance(event, WorkerReconnected):
        return event.generation == base.number and event.worker in base.adopted
    return isinstance(event, WorkerDisconnected) and event.worker in base.member_set
