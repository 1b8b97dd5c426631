"""The scheduler's state, indexed for planning. Only events change it."""

from __future__ import annotations

from bisect import bisect_left, insort
from contextlib import contextmanager
from functools import singledispatchmethod
from typing import TYPE_CHECKING

from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.history import Holder
from kfp_gpuquota.api.quantity import MIB
from kfp_gpuquota.api.resources import CountedNode
from kfp_gpuquota.errors import AlreadyExistsError, NotFoundError
from kfp_gpuquota.scheduler.state import events, progress, usage
from kfp_gpuquota.scheduler.state.groups import below, held_back, next_tasks
from kfp_gpuquota.scheduler.state.intake import bar, constrain, new_job, update
from kfp_gpuquota.scheduler.state.ledger import RESERVE_AFTER_S, Ledger
from kfp_gpuquota.scheduler.state.model import (
    GPU,
    MILLI,
    NOTHING,
    UNLIMITED,
    Amount,
    Host,
    Job,
    OrderKey,
    Queue,
    Shape,
    Status,
    Task,
    User,
)
from kfp_gpuquota.scheduler.state.order import job_key, shape_of
from kfp_gpuquota.scheduler.state.tree import graft, remove_quota, set_quota, subtree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.api.defragmentation import Defragmentation
    from kfp_gpuquota.api.placement import Placement


class State:
    """An indexed snapshot of the cluster.

    `apply` raises `NotFoundError` for an event of an unknown job or worker, `AlreadyExistsError` for a job submitted
    twice, and `InvalidFieldError` for departments that contain each other; the state is then unchanged.

    With `usage_half_life_s` the past over-quota usage of a queue, decayed with this half-life, reduces its part of the
    surplus. Without `moves` no job is moved to make room for another one. After `reserve_after_s` what a waiting job
    needs that fits into its queue's guarantee is kept for it. With `defragmentation` jobs are moved in a window to
    gather free GPUs.
    """

    def __init__(
        self,
        *,
        usage_half_life_s: float | None = None,
        moves: bool = True,
        reserve_after_s: float = RESERVE_AFTER_S,
        defragmentation: Defragmentation | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.ledger.defragmentation = defragmentation
        self.ledger.moves = moves
        self.ledger.half_life_s = usage_half_life_s
        self.ledger.reserve_after_s = reserve_after_s
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Task] = {}
        self.growable: dict[str, Job] = {}
        self.measurements = 0
        self.below: dict[str, Job] = {}
        self.sheltered: dict[str, Job] = {}
        self.suspended: dict[str, Job] = {}
        self.emptying: dict[str, Job] = {}
        self.deferred: dict[str, Job] = {}
        self.halted: dict[str, Job] = {}
        self.promised: dict[str, Job] = {}
        self.projects: dict[str, Project] = {}
        self.last_at = 0.0

    def apply(self, event: events.Event) -> None:
        """Apply the event to the state."""
        _handler_of(type(event))(self, event)

    @singledispatchmethod
    def _apply(self, event: events.Event) -> None:
        raise TypeError(f"not an event: {event!r}")

    @_apply.register
    def _(self, event: events.NodeChanged) -> None:
        node = event.node
        self.ledger.put_host(
            Host(
                name=node.name,
                devices=tuple(sorted(d.index for d in node.devices)),
                gpu_memory_mib=node.gpu_memory_mib,
                ready=node.ready,
                cpu=UNLIMITED if node.cpu is None else round(node.cpu * MILLI),
                memory=UNLIMITED if node.memory_mib is None else node.memory_mib * MIB,
                max_tasks=UNLIMITED if node.max_workers is None else node.max_workers,
                max_sharers=node.max_sharers,
                labels=node.labels,
                taints=node.taints,
                pool=node.pool,
                resources=dict(node.resources) if isinstance(node, CountedNode) else None,
                gpu_weights=node.gpu_weights if isinstance(node, CountedNode) else (),
            )
        )

    @_apply.register
    def _(self, event: events.NodeRemoved) -> None:
        host = self.ledger.hosts.get(event.name)
        if host is None:
            return
        self.ledger.put_host(Host(name=host.name, devices=(), ready=False))
        self._forget_empty(event.name)

    @_apply.register
    def _(self, event: events.QuotaChanged) -> None:
        project = self.projects[event.project.name] = event.project
        self._note_all_usage()
        pools = (queue.pool for queue in self.ledger.queues.values() if queue.name == project.name)
        with self._orders_followed(project.name), self._halts_followed(project.name):
            for pool in sorted({"", *project.pools, *pools}):
                self._configure(project, pool)

    @_apply.register
    def _(self, event: events.QuotaRemoved) -> None:
        self.projects.pop(event.name, None)
        self._note_all_usage()
        with self._orders_followed(event.name), self._halts_followed(event.name):
            for key, queue in list(self.ledger.queues.items()):
                if queue.name == event.name:
                    self._remove_quota(key, queue)

    def _remove_quota(self, key: str, queue: Queue) -> None:
        remove_quota(queue)
        if not queue.children and not any(job.queue is queue for job in self.jobs.values()):
            del self.ledger.queues[key]

    @_apply.register
    def _(self, event: events.LimitEnforced) -> None:
        for queue in self.queues_of(event.project):
            queue.enforced = event.enforced

    @_apply.register
    def _(self, event: events.JobSubmitted) -> None:
        if event.uid in self.jobs:
            raise AlreadyExistsError(f"job {event.uid!r} was submitted already")
        spec = event.spec
        job = new_job(event.uid, spec, self._configured(spec.project, spec.node_pool), event.at, event.parts)
        job.movable, job.overlapping, job.replaces = event.movable, event.overlapping, event.replaces
        job.together = event.together
        job.user = User(event.user)
        self.add_job(job)

    @_apply.register
    def _(self, event: events.JobUpdated) -> None:
        job = self._job(event.uid)
        self.ledger.settle()
        update(job, event.spec, self.ledger, resized=event.at is not None)
        job.below_since = job.below_since if event.at is None else event.at
        self._changed(job)

    @_apply.register
    def _(self, event: events.UserChanged) -> None:
        job = self._job(event.uid)
        before, after = job.user, self.user(job.queue, event.user)
        if before is after:
            return
        for user in (before, after):
            self._note_use_of(user)
        has = [self.ledger.amount(task).gpu for task in job.tasks.values()]
        holds = [self.ledger.amount(task).gpu for task in job.tasks.values() if task.status is Status.HELD]
        for user, sign in ((before, -1), (after, 1)):
            user.occupied += sign * sum(has)
            user.held += sign * sum(holds[: job.wanted])
            user.jobs += sign
        job.user = after
        self._forget_user(job.queue, before)
        self._changed(job)

    @_apply.register
    def _(self, event: events.RunTimeExpected) -> None:
        job = self._job(event.uid)
        job.expected_s = UNLIMITED if event.seconds is None else event.seconds
        self._changed(job)

    @_apply.register
    def _(self, event: events.JobRemoved) -> None:
        job = self._job(event.uid)
        job.removed = True
        for task in list(job.tasks.values()):
            if task.status is not Status.LEAVING:
                self.ledger.set(task, Status.LEAVING, task.node, task.devices)
        self._changed(job)

    @_apply.register
    def _(self, event: events.JobCompleting) -> None:
        job = self._job(event.uid)
        job.completing = event.completing
        self._changed(job)

    @_apply.register
    def _(self, event: events.JobSuspended) -> None:
        job = self._job(event.uid)
        job.suspended, job.suspended_for = True, event.reason
        self._changed(job)

    @_apply.register
    def _(self, event: events.JobResumed) -> None:
        job = self._job(event.uid)
        job.suspended, job.suspended_for = False, None
        job.submitted_at = job.submitted_at if event.at is None else event.at
        self._changed(job)

    @_apply.register
    def _(self, event: events.JobDeferred) -> None:
        job = self._job(event.uid)
        job.deferred_until, job.deferred_for = event.until, event.reason
        self._changed(job)

    @_apply.register
    def _(self, event: events.PlacementsPromised) -> None:
        job = self._job(event.job)
        job.promised_at = job.promised_at if job.promised else event.at
        job.promised, job.victims = event.placements, event.victims
        self._changed(job)

    @_apply.register
    def _(self, event: events.NodesBarred) -> None:
        job = self._job(event.uid)
        bar(job, frozenset(event.nodes))
        self._changed(job)

    @_apply.register
    def _(self, event: events.ConstraintsChanged) -> None:
        job = self._job(event.uid)
        constrain(job, event.spec, self._worker(event.worker) if event.worker else None)
        self._changed(job)

    @_apply.register
    def _(self, event: events.WorkerStarted) -> None:
        job = self._job(event.job)
        host = self._host(event.node)
        self._note_usage(job, event.at)
        task = _take_pending(job, event.part) or Task(job=job, request=job.request, index=0, group=event.part)
        progress.note_started(job, event.at)
        task.id, task.started_at, task.index = event.worker, event.at, job.next_index
        job.next_index += 1
        job.tasks[event.worker] = self.workers[event.worker] = task
        status = Status.LEAVING if job.removed else Status.HELD
        self.ledger.set(task, status, host, event.devices)
        self._changed(job)

    @_apply.register
    def _(self, event: events.WorkerMoved) -> None:
        task = self._worker(event.worker)
        before = task.node
        self.ledger.set(task, task.status, self._host(event.node), event.devices)
        self._changed(task.job)
        if before is not None:
            self._forget_empty(before.name)

    @_apply.register
    def _(self, event: events.WorkerLeaving) -> None:
        task = self._worker(event.worker)
        self._note_usage(task.job, event.at)
        self.ledger.set(task, Status.LEAVING, task.node, task.devices)
        progress.note_shrunk(task.job, event.at)
        task.job.exceeds = task.job.exceeds and task.job.active > 0
        self._changed(task.job)

    @_apply.register
    def _(self, event: events.WorkerGone) -> None:
        task = self._worker(event.worker)
        job, host = task.job, task.node
        if task.status is Status.LEAVING:  # a crash is not a shrink: a lost worker may be replaced at once
            progress.note_shrunk(job, event.at)
        self._note_usage(job, event.at)
        self.ledger.set(task, Status.PENDING, None)
        del job.tasks[event.worker], self.workers[event.worker]
        if not job.removed and len(job.tasks) + len(job.pending) < job.wanted:
            again = Task(job=job, request=task.request, index=0, priority=task.priority, group=task.group)
            job.pending.append(again)
        job.below_since = event.at if job.below_since is None else job.below_since
        job.exceeds = job.exceeds and job.active > 0
        self._changed(job)
        if host is not None:
            self._forget_empty(host.name)

    @_apply.register
    def _(self, event: events.ProgressReported) -> None:
        self.measurements += progress.note_progress(self._job(event.job), event)

    def held_by(self) -> dict[Holder, float]:
        """Return the GPUs that each user's workers hold, also those that leave, by the type in their host's labels."""
        held: dict[Holder, float] = {}
        for host in self.ledger.hosts.values():
            gpu_type = host.labels.get(GPU_PRODUCT, "")
            for task in host.tasks:
                if gpus := task.request.amount(host.gpu_memory_mib)[0] / GPU:
                    holder = Holder(task.job.queue.name, task.job.user.name, gpu_type)
                    held[holder] = held.get(holder, 0.0) + gpus
        return held

    @property
    def promises(self) -> dict[str, tuple[Placement, ...]]:
        """The promised placements, by uid of the job."""
        return {uid: job.promised for uid, job in self.promised.items()}

    def queues_of(self, project: str) -> list[Queue]:
        """Return the project's queues: one for nodes without a pool, and one for each pool that it has used."""
        keys = (_key(project, pool) for pool in dict.fromkeys(("", *self.ledger.totals, *self._pools_of(project))))
        return [self.ledger.queues[key] for key in keys if key in self.ledger.queues]

    def _pools_of(self, project: str) -> Iterable[str]:
        return self.projects[project].pools if project in self.projects else ()

    def add_job(self, job: Job) -> None:
        """Add a job record that no `JobSpec` can describe; its queue must be in the ledger."""
        self.jobs[job.uid] = job
        job.user = self.user(job.queue, job.user.name)
        job.user.jobs += 1
        self._changed(job)

    def add_queue(self, queue: Queue, parent: Queue | None = None) -> None:
        """Add a queue record below `parent`."""
        self.ledger.queues[_key(queue.name, queue.pool)] = queue
        self.ledger.totals.setdefault(queue.pool, [0.0] * 3)  # `queues_of` finds it before the pool's first node
        graft(queue, parent)

    @_apply.register
    def _(self, event: events.UsageRecalled) -> None:
        queue = self._configured(event.project, event.pool)
        queue.used, queue.used_until = event.gpu_seconds, event.at
        queue.recalled = {key: (used, event.at) for key, used in event.users.items()}
        for user in queue.users.values():
            _recall(queue, user, event.at)
        if self.ledger.half_life_s is not None:
            usage.keep_most(queue, self.ledger.half_life_s)

    @_apply.register
    def _(self, event: events.Defragmented) -> None:
        self.ledger.defragmented = (event.at, event.lost_gpu_s)

    @_apply.register
    def _(self, event: events.TimePassed) -> None:
        self.last_at = max(self.last_at, event.at)

    def _note_usage(self, job: Job, at: float | None) -> None:
        """Update the usage of the job's queues before a change at that time; None: at the last reported time."""
        self.last_at = max(self.last_at, at or 0.0)
        if self.ledger.half_life_s is not None:
            usage.note(job.queue.path, self.last_at, self.ledger.half_life_s)
        self._note_use_of(job.user)

    def _note_use_of(self, user: User) -> None:
        if self.ledger.half_life_s is not None:
            usage.note_user(user, self.last_at, self.ledger.half_life_s)

    def _forget_user(self, queue: Queue, user: User) -> None:
        """Forget a user without jobs: a project may have another one for each job."""
        if not user.jobs:
            usage.forget(queue, user, self.ledger.half_life_s)

    def user(self, queue: Queue, name: str) -> User:
        """Return the queue's record of a user."""
        if name not in queue.users:
            queue.users[name] = User(name, used_until=self.last_at)
            _recall(queue, queue.users[name], self.last_at)
        return queue.users[name]

    def _note_all_usage(self) -> None:
        """Update the usage of all queues before a change of guarantees, or of the tree: it is of what comes after."""
        if self.ledger.half_life_s is not None:
            usage.note(self.ledger.queues.values(), self.last_at, self.ledger.half_life_s)

    def _job(self, uid: str) -> Job:
        if uid not in self.jobs:
            raise NotFoundError(f"the scheduler has no job {uid!r}")
        return self.jobs[uid]

    def _worker(self, worker: str) -> Task:
        if worker not in self.workers:
            raise NotFoundError(f"the scheduler has no worker {worker!r}")
        return self.workers[worker]

    def _configure(self, project: Project, pool: str) -> None:
        """Set the parent and the quota of the project's queue in the node pool."""
        queue = self._queue(project.name, pool)
        parent = None if project.parent is None else self._parent(project.parent, pool)
        if parent is not queue.parent:
            graft(queue, parent)
        set_quota(queue, project)

    @contextmanager
    def _halts_followed(self, project: str) -> Iterator[None]:
        """Update the jobs of a project, and of those below it, for which another stop policy applies afterwards."""
        before = {queue: queue.halt for top in self.queues_of(project) for queue in subtree(top)}
        yield
        changed = {queue for queue, halt in before.items() if queue.halt is not halt}
        for job in list(self.jobs.values()) if changed else ():
            if job.queue in changed:
                self._changed(job)

    @contextmanager
    def _orders_followed(self, project: str) -> Iterator[None]:
        """Update the jobs of a project that has another order, or minimum run time, afterwards."""
        before = {queue: (queue.order, queue.min_run_time_s) for queue in self.queues_of(project)}
        yield
        changed = {queue for queue, rules in before.items() if (queue.order, queue.min_run_time_s) != rules}
        for job in list(self.jobs.values()) if changed else ():
            if job.queue in changed:
                self._changed(job)

    def _configured(self, name: str, pool: str) -> Queue:
        """Return the project's queue in the node pool, which it may use there for the first time."""
        if name in self.projects and _key(name, pool) not in self.ledger.queues:
            self._configure(self.projects[name], pool)
        return self._queue(name, pool)

    def _queue(self, name: str, pool: str) -> Queue:
        key = _key(name, pool)
        if key not in self.ledger.queues:
            self.add_queue(Queue(name=name, pool=pool, limit=NOTHING, exists=False, used_until=self.last_at))
        return self.ledger.queues[key]

    def _parent(self, name: str, pool: str) -> Queue:
        """Return the queue of a department; one that does not exist yet has no limits."""
        key = _key(name, pool)
        if key not in self.ledger.queues:
            self.add_queue(Queue(name=name, pool=pool, exists=False, used_until=self.last_at))
            if name in self.projects:
                self._configure(self.projects[name], pool)
        return self.ledger.queues[key]

    def _host(self, name: str) -> Host:
        """Return the node; one that was not reported has no devices to give."""
        if name not in self.ledger.hosts:
            self.ledger.put_host(Host(name=name, devices=(), ready=False))
        return self.ledger.hosts[name]

    def _forget_empty(self, name: str) -> None:
        host = self.ledger.hosts[name]
        if not host.devices and not host.ready and not host.tasks:
            self.ledger.drop_host(host)

    def _changed(self, job: Job) -> None:
        """Update every index that contains the job."""
        self.ledger.settle()
        _unfile(job)
        if job.removed and not job.tasks:
            del self.jobs[job.uid]
            job.user.jobs -= 1
            self._forget_user(job.queue, job.user)
        runnable = not job.removed and not job.suspended and not job.completing
        considered = runnable and not held_back(job)
        tasks = next_tasks(job) if considered and not job.stopped else []
        if tasks:
            _file(job, tasks)
        _request(job, self.ledger, considered=considered)
        self._note(self.growable, job, considered and job.wanted <= job.active and job.wanted < job.most)
        short = considered and job.active > 0 and below(job)
        self._note(self.below, job, short)
        if not short:
            job.below_since = None
        self._note(self.sheltered, job, job.least_s > 0 and job.active > 0)
        self._note(self.suspended, job, job.suspended and not job.removed)
        self._note(self.emptying, job, considered and not tasks and below(job))
        self._note(self.deferred, job, considered and job.deferred_for is not None)
        self._note(self.halted, job, runnable and job.halted)
        self._note(self.promised, job, considered and bool(job.promised))

    @staticmethod
    def _note(index: dict[str, Job], job: Job, belongs: bool) -> None:  # noqa: FBT001 - a predicate's value
        if belongs:
            index[job.uid] = job
        else:
            index.pop(job.uid, None)


# A singledispatchmethod makes a new function at each access (Python 3.11), which costs as much as many events do.
_handler_of = State.__dict__["_apply"].dispatcher.dispatch


def _recall(queue: Queue, user: User, at: float) -> None:
    """Give a user the past use that was stored; one of which nothing was stored has none."""
    user.used, user.used_until = queue.recalled.pop(usage.key_of(queue.name, user.name), (0.0, at))


def _take_pending(job: Job, part: str) -> Task | None:
    """Remove and return the first pending task of the part, or None."""
    index = next((i for i, task in enumerate(job.pending) if task.group == part), None)
    return None if index is None else job.pending.pop(index)


def _key(name: str, pool: str) -> str:
    """Return the key of a queue in the ledger; names contain no '@'."""
    return f"{name}@{pool}" if pool else name


def _file(job: Job, tasks: list[Task]) -> None:
    job.filed = (shape_of(job, tasks), job_key(job))
    insort(_shelf(job.queue, job.filed[0]).setdefault(job.filed[0], []), (job.filed[1], job), key=lambda e: e[0])


def _unfile(job: Job) -> None:
    if job.filed is None:
        return
    shape, key = job.filed
    shelf = _shelf(job.queue, shape)
    entries = shelf[shape]
    del entries[bisect_left(entries, key, key=lambda e: e[0])]
    if not entries:
        del shelf[shape]
    job.filed = None


def _shelf(queue: Queue, shape: Shape) -> dict[Shape, list[tuple[OrderKey, Job]]]:
    return queue.shelved if shape in queue.shelved else queue.waiting


def _request(job: Job, ledger: Ledger, *, considered: bool) -> None:
    """Add the job's holdings and demand to its queue's request, without lent workers."""
    held = [t for t in job.tasks.values() if t.status is Status.HELD]
    wants = (held + job.pending if considered else held)[: job.wanted]
    gpu = cpu = memory = 0.0
    for task in wants:
        amount = ledger.amount(task)
        gpu, cpu, memory = gpu + amount.gpu, cpu + amount.cpu, memory + amount.memory
    before, job.requested = job.requested, Amount(gpu, cpu, memory)
    for queue in job.queue.path:
        for r in range(3):
            queue.requested[r] += job.requested[r] - before[r]
