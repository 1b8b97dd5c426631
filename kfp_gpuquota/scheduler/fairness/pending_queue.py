"""The order in which one action visits the waiting jobs: queues by fairness, jobs of a queue by priority and age.

Invariant: jobs of one queue and shape can be placed together or not at all. After a failure the whole group is closed,
so a cycle costs the number of shapes and successes, each times the logarithm of the number of queues, and not the
number of waiting jobs. Rejected: sorting all jobs once per cycle. Each success changes the order of the queues, so the
order would be wrong after the first one.

In a project that is fair to its users (`Order.FAIR_USERS`) a shape has one group for each user; of the groups of one
priority and entitlement those of the user come first who uses least now; gangs that run below their minimum come before
them. So priorities and guarantees are obtained as without users, and the jobs of one user have the order that they have
alone. In the same way a project that puts short jobs first has a group for each expected run time. Rejected: the use
before the entitlement. A job beyond the guarantee could then hold up one within it; in strict order it does.

The groups of a queue are in a heap that is built again when the queue's holdings change: only these change the
entitlement of a group. A failure costs the logarithm of the number of groups. Rejected: a search through all groups
after each failure, which took a minute for one team's 4,000 shapes.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler.state.groups import next_tasks
from kfp_gpuquota.scheduler.state.order import (
    Entitlement,
    QueueKey,
    RankOf,
    among,
    entitlement,
    job_key,
    queue_key,
    shape_amount,
    shape_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Amount, Job, OrderKey, Queue, Shape

Entry = tuple["OrderKey", "Job"]
Head = tuple["Group", "Job"]
Entered = tuple["QueueKey", int, "Queue", Head]
GroupKey = tuple[int, Entitlement, bool, float, "OrderKey"]


class Group:
    """The waiting jobs of one queue and shape, without those `touched` by the cycle, plus those that are put back."""

    __slots__ = ("_at", "_back", "_filed", "_touched", "amount", "open", "queue", "shape")

    def __init__(
        self, queue: Queue, shape: Shape, amount: Amount, filed: list[Entry], touched: dict[Job, None]
    ) -> None:
        self.queue = queue
        self.shape = shape
        self.amount = amount
        self.open = True
        self._filed = filed
        self._at = 0
        self._back: list[Entry] = []
        self._touched = touched

    def put_back(self, job: Job) -> None:
        """Add a job that requests this shape next."""
        insort(self._back, (job_key(job), job), key=lambda e: e[0])

    def head(self) -> Entry | None:
        """Return the first job of the group with its key, or None."""
        filed, touched, at = self._filed, self._touched, self._at
        while at < len(filed) and filed[at][1] in touched:
            at += 1
        self._at = at
        if at >= len(filed):
            return self._back[0] if self._back else None
        if self._back and self._back[0][0] < filed[at][0]:
            return self._back[0]
        return filed[at]

    def take(self, job: Job) -> None:
        """Remove the job, which is the first one, from this action."""
        if self._back and self._back[0][1] is job:
            del self._back[0]
        else:
            self._at += 1


class QueueGroups:
    """The groups of one queue, and the first job of all of them."""

    def __init__(
        self,
        ledger: Ledger,
        queue: Queue,
        touched: dict[Job, None],
        *,
        in_order: bool,
        shapes: Collection[Shape] | None,
        rank_of: RankOf,
    ) -> None:
        self._rank_of = rank_of
        self._memory = ledger.gpu_memory_mib
        self._queue = queue
        self._in_order = in_order or queue.order is Order.STRICT
        self._touched = touched
        waiting = queue.waiting if shapes is None else {s: queue.waiting[s] for s in shapes if s in queue.waiting}
        self._groups = {shape: self._group(shape, filed) for shape, filed in waiting.items()}
        self._first: tuple[Group, Job] | None = None
        self._changed = True
        self._version = -1  # of the queue, for which the heap was built
        self._heap: list[tuple[GroupKey, int, Group]] = []

    def groups(self) -> list[Group]:
        """Return the groups that are still open."""
        return [group for group in self._groups.values() if group.open]

    def put_back(self, job: Job) -> None:
        """Add the job again with its next request, if it has one."""
        tasks = next_tasks(job)
        if not tasks:
            return
        shape = shape_of(job, tasks)
        if shape not in self._groups:
            self._groups[shape] = self._group(shape, [])
        self._groups[shape].put_back(job)
        self._version = -1
        self.changed()

    def changed(self) -> None:
        """Discard the cached first job."""
        self._changed = True

    def first(self) -> tuple[Group, Job] | None:
        """Return the first job of the queue with its group, or None."""
        if self._version != self._queue.version:
            self._build()
        if self._changed:
            self._changed = False
            self._first = self._find_first()
        return self._first

    def _build(self) -> None:
        """Build the heap for the queue's present holdings."""
        self._version, self._changed = self._queue.version, True
        entries: list[tuple[GroupKey, int, Group]] = []
        for number, group in enumerate(self._groups.values()):
            entry = group.head() if group.open else None
            if entry is not None:
                entries.append((self._key(group, self._entitled(group), entry), number, group))
        heapify(entries)
        self._heap = entries

    def _find_first(self) -> tuple[Group, Job] | None:
        """Return the first job of the open groups. An entry's job may have been taken since: its key only grows."""
        heap = self._heap
        while heap:
            key, number, group = heap[0]
            entry = group.head() if group.open else None
            if entry is None:
                heappop(heap)
            elif entry[0] == key[-1]:
                return group, entry[1]
            else:
                heapreplace(heap, (self._key(group, key[1], entry), number, group))
        return None

    def _key(self, group: Group, entitled: Entitlement, entry: Entry) -> GroupKey:
        return -group.shape.priority, entitled, *among(entry, self._rank_of)

    def _entitled(self, group: Group) -> Entitlement:
        """Return the class of the group's request: within one priority, requests within quota come first."""
        return Entitlement.WITHIN_GUARANTEE if self._in_order else entitlement(self._queue, group.amount)

    def _group(self, shape: Shape, filed: list[Entry]) -> Group:
        return Group(self._queue, shape, shape_amount(shape, self._memory), filed, self._touched)


class PendingQueue:
    """All waiting jobs, in the order in which one action visits them.

    Of a queue in `shapes` only the jobs of these shapes are visited: see rotation.py.

    A queue for which the action is not `useful` is omitted, and tested again when its holdings change. The children of
    each queue are in a heap by their keys. A key changes with the queue's holdings or first job: the queue and its
    ancestors are then inserted again, and older entries are dropped when they reach the top.
    """

    def __init__(
        self,
        ledger: Ledger,
        touched: dict[Job, None],
        *,
        in_order: bool = False,
        useful: Callable[[Queue], bool] = lambda _: True,
        shapes: Mapping[Queue, Collection[Shape]] | None = None,
        rank_of: RankOf = lambda _: 0.0,
    ) -> None:
        self._in_order, self._rank_of = in_order, rank_of
        self._shapes = shapes or {}
        self._ledger = ledger
        self._touched = touched
        self._useful = useful
        self._queues = {q: self._new_groups(q) for q in ledger.queues.values() if q.waiting and useful(q)}
        for job in touched:
            if job.placed < len(job.pending):
                self._groups_of(job.queue).put_back(job)
        self._heaps: dict[Queue | None, list[Entered]] = {}
        self._valid: dict[Queue, int] = {}
        self._entries = 0
        self._changed: dict[Queue, None] = dict.fromkeys(self._queues)
        self._seen = len(ledger.touched_queues)

    def next(self) -> Head | None:
        """Return the next job with its group, or None."""
        self._enter_changed()
        return self._first_below(None)

    def served(self, group: Group, job: Job) -> None:
        """Record that the job was served; it may request more."""
        self.skipped(group, job)
        self._touched[job] = None
        self._queues[job.queue].put_back(job)

    def skipped(self, group: Group, job: Job) -> None:
        """Exclude the job, but not its group, from this action."""
        group.take(job)
        self._note(job.queue)

    def failed(self, group: Group) -> None:
        """Close the group, since none of its jobs can be served."""
        group.open = False
        self._note(group.queue)

    def close_queue(self, queue: Queue) -> None:
        """Close all groups of the queue."""
        for group in self._queues[queue].groups():
            self.failed(group)

    def close_behind(self, job: Job) -> None:
        """Close the groups of the queue behind this job: all groups in strict order, else those of lower priority."""
        for group in self._queues[job.queue].groups():
            if self._in_order or group.shape.priority < job.priority:
                self.failed(group)

    def close_where(self, hopeless: Callable[[Job], bool]) -> None:
        """Close every group for whose first job `hopeless` returns True, but in strict order: the first one decides."""
        for groups in (each for queue, each in self._queues.items() if queue.order is not Order.STRICT):
            for group in groups.groups():
                entry = group.head()
                if entry is not None and hopeless(entry[1]):
                    self.failed(group)

    def _new_groups(self, queue: Queue) -> QueueGroups:
        shapes = self._shapes.get(queue)
        return QueueGroups(
            self._ledger, queue, self._touched, in_order=self._in_order, shapes=shapes, rank_of=self._rank_of
        )

    def _groups_of(self, queue: Queue) -> QueueGroups:
        if queue not in self._queues:
            self._queues[queue] = self._new_groups(queue)
        return self._queues[queue]

    def _note(self, queue: Queue) -> None:
        self._queues[queue].changed()
        self._changed[queue] = None

    def _enter_changed(self) -> None:
        """Insert every queue again that was served, or gained or lost tasks, since the last job."""
        log = self._ledger.touched_queues
        self._changed.update(dict.fromkeys(log[self._seen :]))
        self._seen = len(log)
        for queue in self._changed:
            if queue not in self._queues and queue.waiting and self._useful(queue):
                self._queues[queue] = self._new_groups(queue)
        for above in sorted({each for queue in self._changed for each in queue.path}, key=_depth, reverse=True):
            if above.children or above in self._queues:
                self._enter(above)
        self._changed.clear()

    def _enter(self, queue: Queue) -> None:
        self._entries += 1
        self._valid[queue] = self._entries
        head = self._first_of(queue)
        if head is not None:
            entry = (queue_key(queue, head[0].amount), self._entries, queue, head)
            heappush(self._heaps.setdefault(queue.parent, []), entry)

    def _first_of(self, queue: Queue) -> Head | None:
        below = self._first_below(queue) if queue.children else None
        if below is not None:
            return below
        groups = self._queues.get(queue)
        return None if groups is None else groups.first()

    def _first_below(self, parent: Queue | None) -> Head | None:
        """Return the first job of the first child that has one."""
        heap = self._heaps.get(parent, [])
        while heap and self._valid[heap[0][2]] != heap[0][1]:
            heappop(heap)
        return heap[0][3] if heap else None


def _depth(queue: Queue) -> tuple[int, str, str]:
    return len(queue.path), queue.name, queue.pool
