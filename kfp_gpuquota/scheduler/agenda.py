"""Which job is looked at next: through the tree of queues by fairness, within a queue by priority and age.

Jobs of one queue and shape fit or fail together, so a failure closes its shape for all of them. That makes a cycle cost
the number of shapes and of successes, and not the number of jobs that wait.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler import quota
from kfp_gpuquota.scheduler.order import (
    Entitlement,
    QueueKey,
    entitlement,
    job_key,
    next_tasks,
    queue_key,
    shape_amount,
    shape_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.scheduler.ledger import Ledger
    from kfp_gpuquota.scheduler.model import Job, OrderKey, Queue, Shape

Entry = tuple["OrderKey", "Job"]


class Line:
    """The jobs of one queue that wait, less those that this cycle has `touched`, plus what is put back."""

    def __init__(self, ledger: Ledger, queue: Queue, touched: dict[Job, None], *, in_order: bool) -> None:
        self._ledger = ledger
        self._queue = queue
        self._in_order = in_order
        self._touched = touched
        self._filed: dict[Shape, list[Entry]] = dict(queue.waiting)
        self._at = dict.fromkeys(self._filed, 0)
        self._back: dict[Shape, list[Entry]] = {}

    def put_back(self, job: Job) -> None:
        """The job asks for more."""
        tasks = next_tasks(job)
        if tasks:
            insort(self._back.setdefault(shape_of(job, tasks), []), (job_key(job), job), key=lambda e: e[0])

    def first(self) -> tuple[Shape, Job] | None:
        """The job to look at next."""
        best: tuple[tuple[int, Entitlement, OrderKey], Shape, Job] | None = None
        for shape in self.shapes():
            entry = self.head(shape)
            if entry is None:
                continue
            key = (-shape.priority, self._entitled(shape), entry[0])
            if best is None or key < best[0]:
                best = (key, shape, entry[1])
        return None if best is None else best[1:]

    def _entitled(self, shape: Shape) -> Entitlement:
        """Among jobs of one priority, what stays within quota goes before what does not."""
        if self._in_order:
            return Entitlement.WITHIN_GUARANTEE
        return entitlement(self._queue, shape_amount(shape, self._ledger.gpu_memory_mib))

    def close(self, shape: Shape) -> None:
        """No job of this shape is looked at any more."""
        self._filed.pop(shape, None)
        self._back.pop(shape, None)

    def take(self, shape: Shape, job: Job) -> None:
        """The job is first of its shape, and dealt with."""
        back = self._back.get(shape)
        if back and back[0][1] is job:
            del back[0]
        else:
            self._at[shape] += 1

    def shapes(self) -> list[Shape]:
        """The shapes that are still open."""
        return [*self._filed, *(s for s in self._back if s not in self._filed)]

    def head(self, shape: Shape) -> Entry | None:
        """The first job of a shape."""
        heads = self._back.get(shape, [])[:1]
        jobs = self._filed.get(shape)
        if jobs:
            at = self._at[shape]
            while at < len(jobs) and jobs[at][1] in self._touched:
                at += 1
            self._at[shape] = at
            heads += jobs[at : at + 1]
        return min(heads, key=lambda e: e[0], default=None)


class Agenda:
    """All jobs that wait, in the order in which one action looks at them."""

    def __init__(self, ledger: Ledger, touched: dict[Job, None], *, in_order: bool = False) -> None:
        self._in_order = in_order
        self._ledger = ledger
        self._touched = touched
        self._lines = {q: self._new_line(q) for q in ledger.queues.values() if q.waiting}
        for job in touched:
            self._line(job.queue).put_back(job)
        self._roots = [q for q in ledger.queues.values() if q.parent is None]
        self._keys: dict[Queue, tuple[int, Job, QueueKey]] = {}

    def next(self) -> tuple[Shape, Job] | None:
        """The first job of the first queue."""
        heads: dict[Queue, tuple[Shape, Job]] = {}
        for queue, line in self._lines.items():
            head = line.first()
            if head is not None:
                heads[queue] = head
        return self._best(self._roots, heads)

    def served(self, shape: Shape, job: Job) -> None:
        """The job got what it asked for; it may ask for more."""
        self._lines[job.queue].take(shape, job)
        self._touched[job] = None
        self._lines[job.queue].put_back(job)

    def skipped(self, shape: Shape, job: Job) -> None:
        """The job is out of this cycle; others of its shape are not."""
        self._lines[job.queue].take(shape, job)

    def failed(self, shape: Shape, job: Job) -> None:
        """Neither this job nor any other of its shape can be served."""
        self._lines[job.queue].close(shape)

    def close_behind(self, job: Job) -> None:
        """No job of the queue that comes after this one is looked at any more: in order all, else lower priorities."""
        line = self._lines[job.queue]
        for shape in line.shapes():
            if self._in_order or shape.priority < job.priority:
                line.close(shape)

    def close_where(self, hopeless: Callable[[Job], bool]) -> None:
        """Close every shape whose first job is hopeless."""
        for line in self._lines.values():
            for shape in line.shapes():
                entry = line.head(shape)
                if entry is not None and hopeless(entry[1]):
                    line.close(shape)

    def _new_line(self, queue: Queue) -> Line:
        return Line(self._ledger, queue, self._touched, in_order=self._in_order)

    def _line(self, queue: Queue) -> Line:
        if queue not in self._lines:
            self._lines[queue] = self._new_line(queue)
        return self._lines[queue]

    def _best(self, queues: Iterable[Queue], heads: dict[Queue, tuple[Shape, Job]]) -> tuple[Shape, Job] | None:
        best: tuple[QueueKey, tuple[Shape, Job]] | None = None
        for queue in queues:
            head = self._best(queue.children.values(), heads) or heads.get(queue)
            if head is None:
                continue
            key = self._key(queue, head[1])
            if best is None or key < best[0]:
                best = (key, head)
        return None if best is None else best[1]

    def _key(self, queue: Queue, job: Job) -> QueueKey:
        known = self._keys.get(queue)
        if known is not None and known[0] == queue.version and known[1] is job:
            return known[2]
        key = queue_key(queue, quota.total(self._ledger, next_tasks(job)))
        self._keys[queue] = (queue.version, job, key)
        return key
