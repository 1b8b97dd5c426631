"""One scheduling cycle: idle GPUs first, then GPUs of other jobs, then lending of the rest.

    allocate      bind on idle GPUs, or nominate on those that become idle, reclaiming lent workers
    consolidate   move preemptible jobs together if that frees capacity for a job
    reclaim       reclaim from queues above their share
    preempt       reclaim from lower priorities of the same queue
    evict_stale   stop gangs that have been below their minimum for too long, what exceeds an enforced limit, and
                  what is drained
    lend          give remaining idle GPUs to elastic jobs above their request, where they pay (growth.py)
    defragment    in a plan that starts and stops nothing, gather free GPUs, in the administrator's window
                  (defragmentation.py)

Before the first of them come entitled jobs that have waited too long, and what is kept for them (reservations.py).

Every action visits the waiting jobs in the same fair order and decides on the real ledger. The caller reads the changes
from the ledger and rolls them back. Rejected: a copy of the ledger per action, which would cost the size of the
cluster for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order, StopPolicy
from kfp_gpuquota.scheduler.actions.consolidation import BORROWERS_COST_S, MoveCache, consolidate
from kfp_gpuquota.scheduler.actions.defragmentation import defragment
from kfp_gpuquota.scheduler.actions.enforcement import enforce
from kfp_gpuquota.scheduler.actions.growth import Growth
from kfp_gpuquota.scheduler.actions.promises import keep
from kfp_gpuquota.scheduler.actions.reservations import (
    MOST,
    Overdue,
    Reservation,
    overtaking,
    reserve,
    reserve_after,
)
from kfp_gpuquota.scheduler.actions.victims import make_room
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.fairness.fairshare import assign_shares
from kfp_gpuquota.scheduler.fairness.pending_queue import PendingQueue
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.placement.empty_nodes import fit_when_empty
from kfp_gpuquota.scheduler.placement.finder import Finders
from kfp_gpuquota.scheduler.placement.units import Attempt, Mode
from kfp_gpuquota.scheduler.state import usage
from kfp_gpuquota.scheduler.state.events import Defragmented
from kfp_gpuquota.scheduler.state.groups import below, held_back, next_tasks
from kfp_gpuquota.scheduler.state.model import NEVER, UNLIMITED, Amount, Job, Status, Task
from kfp_gpuquota.scheduler.state.order import job_key, rank_by_length, shape_amount, shape_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kfp_gpuquota.api.defragmentation import Defragmentation
    from kfp_gpuquota.scheduler.actions.candidates import Known
    from kfp_gpuquota.scheduler.fairness import pending_queue
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Group, Queue, Request, Shape, User

Try = Callable[[Job, list[Task], Amount], bool]
"""Serves a job's next request and returns True, or changes nothing and returns False."""

Alike = tuple[tuple["Request", ...], "Group | None", bool, str, str]
"""What determines whether tasks can be placed: requests, the parts of the gang, spreading, the node pool, and the job
that runs within a topology."""

ACTIONS: Final = ("allocate", "consolidate", "reclaim", "preempt", "evict_stale", "lend", "defragment")


class Cycle:
    """The working state of one plan. `cause[job]` is the job for which a victim was taken, and how.

    Of a queue in `shapes` only waiting jobs of these shapes are considered.
    """

    def __init__(
        self,
        ledger: Ledger,
        growable: Iterable[Job] = (),
        *,
        below: Iterable[Job] = (),
        emptying: Iterable[Job] = (),
        sheltered: Iterable[Job] = (),
        promised: Iterable[Job] = (),
        workers: Mapping[str, Task] | None = None,
        now: float = 0.0,
        in_order: bool = False,
        strict: bool = False,
        shapes: Mapping[Queue, Collection[Shape]] | None = None,
        most_reserved: int = MOST,
    ) -> None:
        self.ledger = ledger
        self._most_reserved = most_reserved
        self.shapes = shapes or {}
        self.workers = workers or {}
        self.below = below
        self.in_order = in_order
        self.strict = strict
        self.now = now
        self._mark = ledger.mark()
        self.growable = growable
        self.touched: dict[Job, None] = {}
        self.victims: dict[Job, None] = {}
        self.pledged: dict[Job, None] = {}
        self.causes: dict[Task, tuple[Job, str]] = {}
        self.placeable: dict[Alike, tuple[int, bool]] = {}
        self.finders = Finders(ledger)
        self.moves = MoveCache(now)
        self.sheltered = _sheltered(sheltered, now)
        self.sheltered_from_reclaim = _sheltered(self.sheltered, now, ledger.reclaim_shelter_s)
        self.held_off: dict[tuple[Queue, Shape], float] = {}
        self.unsheltered = Finders(ledger)
        self.again_at: float | None = None
        self.defragmented: Defragmented | None = None
        self.reserved: dict[Job, Reservation] = {}
        self.tried: set[Job] = set()  # in vain, before the first action
        self.unreservable: set[tuple[Group | None, Request, int]] = set()  # no nodes can be kept for such jobs
        self.known: Known = {}
        self.lacking: dict[Queue, Reservation] = {}
        self.overdue: dict[Queue, Overdue] = {}
        self.blocking: dict[Queue, Job] = {}  # the first job of a strict queue, which waits, and so do the others
        self._impossible: dict[tuple[Queue, Shape], bool] = {}
        self.absent: dict[Queue, list[Job]] = {}  # stopped jobs of strict queues, which come before younger ones
        for job in emptying:
            if not self._is_deferred(job):
                self._note_absent(job)
        for pool in ledger.pools:
            assign_shares(ledger.roots(pool), ledger.capacity(pool), self._used())
        self._keep(promised)

    def _keep(self, promised: Iterable[Job]) -> None:
        """Begin with what earlier plans promised; a promise that was not carried out yet can be reclaimed.

        A job of which all promises are held by placeholders requests nothing more: its workers are still exiting.
        """
        self.kept: dict[Task, None] = {}
        self.promised = list(promised)
        due = [job for job in self.promised if not self._is_deferred(job)]
        kept, asked = keep(self.ledger, due, self.workers)
        for task, job in asked.items():  # a process ended before it had asked all of them
            self.causes[task] = (job, _why_again(task.job, job))
            self.victims[task.job] = None
            self._note_absent(task.job)
        for job, tasks in kept.items():
            own = [task for task in tasks if task.moved is None]
            if own:
                self.touched[job] = None
            waiting = [task for task in own if task.status is Status.NOMINATED]
            if waiting:
                self.pledged[job] = None
            self.kept.update(dict.fromkeys(waiting))

    def _used(self) -> Callable[[Queue], float] | None:
        """Return the recent over-quota use per queue, or None if it does not count. Shares then change with time."""
        half_life_s = self.ledger.half_life_s
        if half_life_s is None:
            return None
        if self.ledger.has_waiting:
            self._too_early(self.now + half_life_s / usage.LOOKS_PER_HALF_LIFE)
        return lambda queue: usage.used_by(queue, self.now, half_life_s)

    def use_of(self, user: User) -> float:
        """Return the GPUs that count as the user's, in the order of its queue's jobs and what is lent to them."""
        return usage.use_of(user, self.now, self.ledger.half_life_s)

    def rank(self, job: Job) -> float:
        """Return what comes before the age of the job among those of its queue, priority and entitlement."""
        queue = job.queue
        if queue.order is Order.FAIR_USERS:
            return self.use_of(job.user)
        if queue.order is Order.SHORTEST:
            return rank_by_length(job, self.now, reserve_after(self.ledger, queue))
        return 0.0

    def run(self, actions: Sequence[str] = ACTIONS) -> None:
        """Carry out the actions in order, on the ledger."""
        tries: dict[str, Try] = {
            "allocate": self._allocate,
            "consolidate": self._consolidate,
            "reclaim": self._reclaim,
            "preempt": self._preempt,
        }
        wanted = {action: tries[action] for action in actions if action in tries and self._has(action)}
        if not self.strict and not self.in_order:
            self._reserve(wanted)
        for action, attempt in wanted.items():
            self._each(action, attempt)
        self._open_reserved()
        if "evict_stale" in actions:
            self._evict_stale()
        if "lend" in actions:
            self._lend()
        if "defragment" in actions and self.ledger.defragmentation is not None and self.ledger.moves:
            self._defragment(self.ledger.defragmentation)

    def _has(self, action: str) -> bool:
        return self.ledger.moves or action != "consolidate"

    def _reserve(self, tries: Mapping[str, Try]) -> None:
        """Serve the jobs that have waited too long; for the first of each queue that cannot start hold what is idle.

        Of the first jobs of all queues the oldest is next, after the priority of the queues.
        """
        self.overdue = {queue: Overdue(queue, self) for queue in self.ledger.queues.values() if queue.waiting}
        soonest = [line.soonest for line in self.overdue.values() if line.soonest is not None]
        if soonest:
            self._too_early(min(soonest))
        heads = [_head(job, line) for line in self.overdue.values() if (job := line.first()) is not None]
        heapify(heads)
        while heads and len(self.reserved) < self._most_reserved:
            *_, first, line = heappop(heads)
            if self._reserve_for(first, line, tries) and (job := line.first()) is not None:
                heappush(heads, _head(job, line))

    def _reserve_for(self, job: Job, line: Overdue, tries: Mapping[str, Try]) -> bool:
        """Serve the first job of a queue, or hold what it needs; return whether the next one may take some, too."""
        tasks = next_tasks(job)
        amount = quota.total(self.ledger, tasks)
        if tries and quota.within_guarantee(job.queue, amount):
            if self._serve(job, tasks, amount, tries):
                return True
            self.tried.add(job)
        if self._hold(job, tasks, amount):
            return False
        line.leave_out()
        return True

    def _reserve_next(self, queue: Queue) -> None:
        """Hold what the next job of the queue needs after the one before it has started beyond the guarantee."""
        line = self.overdue[queue]
        while (job := line.first()) is not None and self._reserve_for(job, line, {}):
            pass

    def is_served(self, job: Job) -> bool:
        """Return whether the job has what it requests next in this plan, or requests nothing now."""
        return job in self.touched or job in self.victims or self._is_deferred(job)

    def is_behind(self, job: Job) -> bool:
        """Return whether the job of a strict queue waits for an earlier one, which has to be started again."""
        return self._before(job) is not None

    def _before(self, job: Job) -> Job | None:
        """Return the first job before this one that was stopped, in a strict queue, or None."""
        first = (one for one in self.absent.get(job.queue, ()) if not one.active and job_key(one) < job_key(job))
        return min(first, key=job_key, default=None)

    def _serve(self, job: Job, tasks: list[Task], amount: Amount, tries: Mapping[str, Try]) -> bool:
        mark = self.ledger.mark()
        for action, attempt in tries.items():
            if attempt(job, tasks, amount):
                self._note(action, job, mark)
                self.touched[job] = None
                return True
        return False

    def _hold(self, job: Job, tasks: list[Task], amount: Amount) -> bool:
        if quota.barred_by_guarantee(job, amount):
            return False
        alike = job.groups, job.request, len(tasks)
        if alike in self.unreservable:
            return False
        found = reserve(self.ledger, job, tasks, self.now, self.known)
        if found is None:
            self.unreservable.add(alike)
            return False
        self.reserved[job] = self.lacking[job.queue] = found
        return True

    def would_overtake(self, job: Job, amount: Amount) -> Job | None:
        """Return the job that is going to need the part of their queue's guarantee that this one would use, or None."""
        reserved = self.lacking.get(job.queue)
        if reserved is None or job is reserved.job or job.priority > reserved.job.priority:
            return None
        together = Amount(*map(sum, zip(amount, reserved.lacks, strict=True)))
        return None if quota.within_guarantee(job.queue, together) else reserved.job

    def _open_reserved(self) -> None:
        """Leave what is reserved to sessions of a higher priority, and to jobs that can be reclaimed from."""
        held = any(reservation.held for reservation in self.reserved.values())
        for reservation in self.reserved.values():
            reservation.drop(self.ledger)
        if held:
            self._each("allocate", self._allocate_reserved, look_ahead=False)
        self._backfill(self.lacking if held else [queue for queue in self.lacking if queue.order is Order.STRICT])

    def _backfill(self, queues: Iterable[Queue]) -> None:
        """Start on reserved devices jobs of these queues that have ended when these are needed, the oldest first.

        In strict order on others as well.
        """
        timed = {queue: one for queue in queues if (one := self.lacking[queue]).starts_by < UNLIMITED}
        for queue, reserved in timed.items():
            failed: set[Shape] = set()
            shapes = self.shapes.get(queue, queue.waiting)
            for job in overtaking(queue, shapes, reserved.starts_by - self.now, self.rank):
                assert job.filed is not None
                served = job in self.touched or job in self.victims or job is reserved.job
                if not served and job.filed[0] not in failed and not self._must_not_grow(job) and not self._fill(job):
                    failed.add(job.filed[0])

    def _fill(self, job: Job) -> bool:
        """Start the job on idle devices, if quotas allow and it has ended when others need these."""
        tasks, mark = next_tasks(job), self.ledger.mark()
        amount = quota.total(self.ledger, tasks)
        if quota.barred_by_guarantee(job, amount) or quota.barred_by_limit(job, amount, future=False):
            return False
        if not tasks or not placement.place_all(self.ledger, tasks, future=False):
            return False
        if not all(one.is_over(job, tasks, self.now) for one in self.reserved.values()):
            self.ledger.rollback(mark)
            return False
        self._note("allocate", job, mark)
        self.touched[job] = None
        return True

    def hold_reserved(self) -> None:
        """Hold again what is reserved and still idle. For reasons of waiting jobs."""
        for reservation in self.reserved.values():
            reservation.hold(self.ledger)

    def _allocate_reserved(self, job: Job, tasks: list[Task], amount: Amount) -> bool:
        if job.active >= job.core and quota.within_guarantee(job.queue, amount):
            return False
        mark = self.ledger.mark()
        if not self._allocate(job, tasks, amount):
            return False
        if all(reservation.comes_back(self.ledger, job, tasks) for reservation in self.reserved.values()):
            return True
        self.ledger.rollback(mark)
        return False

    def _attempt(self, attempt: Try, job: Job, amount: Amount) -> bool:
        """Try to serve the job. What is reserved for it is not in its own way."""
        reserved = self.reserved.get(job)
        if reserved is None:
            return attempt(job, next_tasks(job), amount)
        held = reserved.held
        reserved.drop(self.ledger)
        if attempt(job, next_tasks(job), amount):
            del self.reserved[job], self.lacking[job.queue]
            return True
        if held:
            reserved.hold(self.ledger)
        return False

    def changed(self) -> list[Task]:
        """Return the tasks that this cycle placed, moved or stopped, in the order of their first change."""
        return list(dict.fromkeys(change[0] for change in self.ledger.since(self._mark)))

    def _each(self, action: str, attempt: Try, *, look_ahead: bool = True) -> None:
        useful = self._useful(action)
        pending = PendingQueue(
            self.ledger, self.touched, in_order=self.in_order, useful=useful, shapes=self.shapes, rank_of=self.rank
        )
        if action == "allocate" and look_ahead and not self.strict:
            kept = self.victims.keys() | self.reserved.keys()  # these are skipped, or have their own part reserved
            pending.close_where(lambda job: job not in kept and not self._can_be_placed(job))
        while (head := pending.next()) is not None:
            group, job = head
            if self._has_to_wait(pending, group, job):
                continue
            mark, reserved = self.ledger.mark(), job in self.reserved
            if self._attempt(attempt, job, group.amount):
                self._note(action, job, mark)
                pending.served(group, job)
                self.blocking.pop(job.queue, None)
                if reserved:
                    self._reserve_next(job.queue)
            elif self.strict:
                return
            else:
                pending.failed(group)
                self._block(pending, group, job)
                if action == "reclaim" and quota.barred_by_share(job, group.amount):
                    pending.close_behind(job)

    def _has_to_wait(self, pending: PendingQueue, group: pending_queue.Group, job: Job) -> bool:
        """Return whether the job is not tried: it may not start or grow now, or would pass one that comes before it."""
        if self.absent and (first := self._before(job)) is not None:
            self.blocking[job.queue] = first
            pending.close_queue(job.queue)
        elif job in self.victims or job in self.tried or self._must_not_grow(job):
            pending.skipped(group, job)
            if job in self.tried:
                self._block(pending, group, job)
        elif self.would_overtake(job, group.amount) is not None:
            pending.failed(group)
        else:
            return False
        return True

    def _block(self, pending: PendingQueue, group: pending_queue.Group, job: Job) -> None:
        """Let no job of a strict queue pass this one, which does not start now, unless it never can."""
        if job.queue.order is Order.STRICT and group.shape.starts and not self.can_never_start(job):
            self.blocking[job.queue] = job
            pending.close_queue(job.queue)

    def blocked_by(self, job: Job) -> Job | None:
        """Return the first job of a strict queue, which this one does not pass, or None."""
        first = self.blocking.get(job.queue)
        return first if first is not job else None

    def can_never_start(self, job: Job) -> bool:
        """Return whether only other nodes or another quota would let the job start, or its deferral has to end."""
        tasks = next_tasks(job)
        if not tasks or self._is_deferred(job) or not job.queue.exists:
            return True
        alike = job.queue, shape_of(job, tasks)
        if alike not in self._impossible:
            forbidden = quota.barred_by_size(job, quota.total(self.ledger, tasks)) is not None
            self._impossible[alike] = forbidden or not fit_when_empty(self.ledger, tasks)
        return self._impossible[alike]

    def _useful(self, action: str) -> Callable[[Queue], bool]:
        """Return a fast test of whether the action may serve a job of a queue; the action makes all other tests."""
        if action == "reclaim":
            return lambda queue: any(queue.claim(r) < queue.share[r] for r in range(3))
        if action == "preempt":
            return lambda queue: any(queue.priorities.values())
        if action == "consolidate":
            return self._may_fit_elsewhere
        return lambda _: True

    def _may_fit_elsewhere(self, queue: Queue) -> bool:
        """Return whether the queue's node pool has enough idle GPUs for one of its jobs."""
        idle = self.ledger.capacity(queue.pool)[0] - self.ledger.held_gpus.get(queue.pool, 0.0)
        memory = self.ledger.gpu_memory_mib
        return any(shape_amount(shape, memory).gpu <= idle for shape in queue.waiting)

    def _note(self, action: str, job: Job, mark: int) -> None:
        for task, before, _, _ in self.ledger.since(mark):
            if task.status is Status.NOMINATED:
                self.pledged[job] = None
            if before is Status.HELD and task.status is not Status.HELD:
                self.causes[task] = (job, action)
                self.victims[task.job] = None
            if task.job is not job and task.job.queue.order is Order.STRICT:
                self._note_absent(task.job)  # it has lost its devices to the job

    def _note_absent(self, job: Job) -> None:
        if job.queue.order is Order.STRICT and not job.active and job not in self.absent.get(job.queue, ()):
            self.absent.setdefault(job.queue, []).append(job)

    def _allocate(self, job: Job, tasks: list[Task], amount: Amount) -> bool:
        if quota.barred_by_guarantee(job, amount):
            return False
        # A task that joins a nominated gang is nominated too: it must not start alone.
        if (
            job not in self.pledged
            and not quota.barred_by_limit(job, amount, future=False)
            and placement.place_all(self.ledger, tasks, future=False)
        ):
            return True
        if not quota.barred_by_limit(job, amount, future=True) and placement.place_all(self.ledger, tasks, future=True):
            return True
        return self._any_lent() and self._make_room(job, tasks, amount, Mode.LENT)

    def _can_be_placed(self, job: Job) -> bool:
        """Return whether the job can be placed at all; other jobs must not influence the order of the queues."""
        if self._any_lent():
            return True
        tasks = next_tasks(job)
        runs = job.uid if job.groups is not None and job.active else ""  # where it can grow depends on where it runs
        alike = (tuple(task.request for task in tasks), job.groups, job.spread, job.queue.pool, runs)
        if self.placeable.get(alike, (-1, False))[0] != self.ledger.state:
            mark = self.ledger.mark()
            found = placement.place_all(self.ledger, tasks, future=True)
            self.ledger.rollback(mark)
            self.placeable[alike] = (self.ledger.state, found)
        return self.placeable[alike][1]

    def _must_wait_to_reclaim(self, job: Job) -> bool:
        """Return whether the job has waited less than its delay before reclaiming."""
        return self._too_early(job.waiting_since + job.preemption_delay_s)

    def _must_not_grow(self, job: Job) -> bool:
        """Return whether the job was deferred, is held, or shrunk soon after it had grown. A gang is completed at once.

        Rejected: counting from the shrinking. A job that releases a GPU once, for a moment, should receive it again
        when it is idle; only repeated growth in vain is to be avoided.
        """
        if self._is_deferred(job) or held_back(job):
            return True
        flaps = job.shrunk_at >= job.grown_at > NEVER and job.active > 0 and not below(job)
        return flaps and self._too_early(job.grown_at + job.cool_down_s)

    def _is_deferred(self, job: Job) -> bool:
        """Return whether the job may not start or grow for a while."""
        return not (job.active and below(job)) and self._too_early(job.deferred_until)

    def _too_early(self, until: float) -> bool:
        """Return whether `until` is in the future, and request a plan at that time."""
        if self.now >= until:
            return False
        self.again_at = until if self.again_at is None else min(self.again_at, until)
        return True

    def _any_lent(self) -> bool:
        return self.ledger.lent_tasks > 0

    def _consolidate(self, job: Job, tasks: list[Task], amount: Amount) -> bool:
        if quota.barred_by_guarantee(job, amount) or quota.barred_by_limit(job, amount, future=True):
            return False
        entitled = quota.within_guarantee(job.queue, amount)
        self.moves.most_lost_s = UNLIMITED if entitled else BORROWERS_COST_S
        return consolidate(self.ledger, tasks, self.moves, self.sheltered)

    def _reclaim(self, job: Job, tasks: list[Task], amount: Amount) -> bool:
        if (
            self._must_wait_to_reclaim(job)
            or quota.barred_by_guarantee(job, amount)
            or quota.barred_by_share(job, amount)
        ):
            return False
        return self._make_room(job, tasks, amount, Mode.RECLAIM)

    def _preempt(self, job: Job, tasks: list[Task], amount: Amount) -> bool:
        if self._must_wait_to_reclaim(job) or quota.barred_by_guarantee(job, amount):
            return False
        if not any(n and priority < job.priority for priority, n in job.queue.priorities.items()):
            return False
        return self._make_room(job, tasks, amount, Mode.PREEMPT)

    def _make_room(self, job: Job, tasks: list[Task], amount: Amount, mode: Mode) -> bool:
        if not job.queue.exists:
            return False
        sheltered = self.sheltered_from_reclaim if mode is Mode.RECLAIM else self.sheltered
        attempt = Attempt(self.ledger, job, tasks, mode, amount, sheltered=sheltered, kept=self.kept, now=self.now)
        if make_room(attempt, self.finders):
            return True
        if sheltered and mode is not Mode.LENT:
            self._note_held_off(
                job,
                Attempt(self.ledger, job, tasks, mode, amount, kept=self.kept, now=self.now),
                min(sheltered.values()),
            )
        return False

    def _note_held_off(self, job: Job, attempt: Attempt, until: float) -> None:
        """If only minimum run times prevent the job's start, request a plan when the first of them ends."""
        mark = self.ledger.mark()
        if make_room(attempt, self.unsheltered):
            self.ledger.rollback(mark)
            self._too_early(until)
            if job.filed is not None:
                self.held_off[job.queue, job.filed[0]] = until

    def _evict_stale(self) -> None:
        for task in enforce(self.ledger):
            drained = task.job.queue.halt is StopPolicy.HOLD_AND_DRAIN
            self.causes[task] = (task.job, "drain" if drained else "limit")
            self.victims[task.job] = None
        for job in sorted(self.below, key=lambda j: j.uid):
            if job.active and below(job) and self._stale(job):
                for task in [t for t in job.tasks.values() if t.status is Status.HELD]:
                    self.ledger.set(task, Status.LEAVING, task.node, task.devices)
                    self.causes[task] = (job, "evict_stale")
                self.victims[job] = None

    def _stale(self, job: Job) -> bool:
        """Return whether the gang was below its minimum for too long. Without a start time only the limit 0 applies."""
        if job.below_since is None:
            return job.stale_after_s == 0
        return job.stale_after_s >= 0 and not self._too_early(job.below_since + job.stale_after_s)

    def _lend(self) -> None:
        """Lend idle GPUs, and what is lent already to the jobs that achieve most with it."""
        if self.ledger.any_idle or self.ledger.lent_tasks:
            # A job that starts in this plan starts at its lent size: growing right afterwards would cost a switch.
            Growth(self).run(dict.fromkeys([*self.growable, *self.touched]))

    def _defragment(self, rule: Defragmentation) -> None:
        """Gather free GPUs if a round is due, and this plan changes nothing that runs: the next one is soon then."""
        window = rule.open_at(self.now)
        if window is None:
            self._too_early(rule.opens_after(self.now))
            return
        last_at, spent = self.ledger.defragmented
        if last_at < window.start:
            spent = 0.0
        elif self._too_early(last_at + rule.round_s):
            return
        if any(task.status in (Status.BOUND, Status.LEAVING) for task in self.changed()):
            return
        self.hold_reserved()
        moved, lost_gpu_s = defragment(self.ledger, rule, self.now, spent, self.sheltered)
        for reservation in self.reserved.values():
            reservation.drop(self.ledger)
        for task in moved:
            self.causes[task] = (task.job, "defragment")
            self.victims[task.job] = None
        self.defragmented = Defragmented(self.now, spent + lost_gpu_s)
        if any(self.ledger.held_gpus.values()):
            self._too_early(self.now + rule.round_s)

    def is_settled(self, job: Job) -> bool:
        """Return whether the job's cool-down and deferral are over. All growth within one plan is one change."""
        return not self._too_early(max(job.grown_at + job.cool_down_s, job.deferred_until))

    def review_at(self, at: float) -> None:
        """Request a plan at that time."""
        self._too_early(at)


def _head(job: Job, line: Overdue) -> tuple[int, float, str, Job, Overdue]:
    return -job.queue.priority, job.submitted_at, job.uid, job, line


def _why_again(victim: Job, job: Job) -> str:
    """Return the action by which the victim's worker was chosen, as far as the jobs alone show it."""
    if victim.active >= victim.wanted and victim.lent:
        return "allocate"
    if victim.queue is not job.queue:
        return "reclaim"
    return "preempt" if victim.priority < job.priority else "consolidate"


def _sheltered(jobs: Iterable[Job], now: float, most_s: float = UNLIMITED) -> dict[Job, float]:
    """Return the end of each job's minimum run time, for those that are still in it."""
    until = {job: job.started_at + min(job.least_s, most_s) for job in jobs}
    return {job: end for job, end in until.items() if now < end}
