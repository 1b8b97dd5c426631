"""The cluster's state in memory: a copy of what SQLite holds, with the scheduler's indexed view beside it.

A `Change` gathers what one decision alters. `commit` writes all of it in one transaction, which ends only when the
scheduler has accepted the change: so a full disk, a kill at any moment, or a change that the scheduler refuses leave
file and memory as they were, and nothing is stored that could not be loaded again. Processes are started and signalled
after the commit, from what was committed: a daemon that died in between finds it there and does it then.

What cannot be loaded all the same is set aside (`Store.quarantine`), and the rest is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.lending import with_lent
from kfp_gpuquota.api.project import check_parents
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.wire import JobList, NodeView, ProjectView
from kfp_gpuquota.cluster.local.storage.history import ReportHistory
from kfp_gpuquota.cluster.local.storage.recalled_usage import changes_of, recalled
from kfp_gpuquota.cluster.local.storage.store import KEPT_EVENTS
from kfp_gpuquota.cluster.steady_clock import SteadyClock
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.protocols import Store as JobStore
from kfp_gpuquota.engine.records import JobRecord, view, with_status
from kfp_gpuquota.engine.start_conditions import settle
from kfp_gpuquota.engine.time_accounting import account, account_all
from kfp_gpuquota.errors import ConflictError, InvalidFieldError, NotFoundError, StateFileError, UsageError
from kfp_gpuquota.gc_pause import collector_paused
from kfp_gpuquota.scheduler.state import usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Job, Node, Project, Reason, Worker
    from kfp_gpuquota.api.node import SharingRules
    from kfp_gpuquota.cluster.local.storage.store import Store
    from kfp_gpuquota.engine.records import WorkerRecord

log = logging.getLogger(__name__)


class ClusterState(JobStore):
    """Projects, nodes, jobs and workers, each by its key, and the scheduler's state.

    `make_room()` frees some of a full disk, and returns whether it could: for changes that end something.
    `rules` are further arguments of the scheduler's state; `sharing` is how devices are shared, else as nodes have it.
    `clock(at_least)` returns the clock of all records, which begins no earlier than `at_least`. `replan()` is called
    after each commit that a plan may follow.
    """

    replan: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        store: Store,
        nodes: Iterable[Node],
        usage_half_life_s: float | None = None,
        make_room: Callable[[], bool] = lambda: False,
        clock: Callable[[float], Callable[[], float]] = SteadyClock,
        *,
        sharing: SharingRules | None = None,
        rules: Mapping[str, Any] | None = None,
    ) -> None:
        self._sharing = sharing
        self._new_scheduler = partial(scheduler.State, usage_half_life_s=usage_half_life_s, **(rules or {}))
        super().__init__({node.name: self._ruled(node) for node in nodes})
        self._store, self._make_room = store, make_room
        self.reports = ReportHistory(store)
        self._taken: dict[str, tuple[int, ...]] = {}
        self.projects: dict[str, Project] = {}
        self._usage_half_life_s = usage_half_life_s
        self.scheduler = self._new_scheduler()
        self._by_request: dict[str, str] = {}
        self._revision = time.time_ns() // 1_000_000  # differs from every earlier daemon's
        self._waiters: set[asyncio.Future[None]] = set()
        self.clock = clock(0.0)
        with collector_paused():
            self._load()
            gc.freeze()  # what was loaded stays: later passes need not look at it
        self.clock = clock(self._newest_record())
        self._recall()

    # Reading

    @property
    def revision(self) -> int:
        """Changes with every change."""
        return self._revision

    def job_named(self, project: str, name: str) -> JobRecord:
        """One job. Raises NotFoundError."""
        uid = self.uid_of(project, name)
        if uid is None:
            raise NotFoundError(
                f"project {project!r} has no job {name!r}; see what it has with: gpuquota list -p {project}"
            )
        return self.jobs[uid]

    def job_of_request(self, request_id: str) -> JobRecord | None:
        """The job that this request has made already."""
        uid = self._by_request.get(request_id)
        return self.jobs.get(uid) if uid else None

    def has_name(self, project: str, name: str) -> bool:
        """Return whether the project has a job of this name."""
        return self.uid_of(project, name) is not None

    def project(self, name: str) -> Project:
        """One project. Raises NotFoundError."""
        if name not in self.projects:
            raise NotFoundError(
                f"project {name!r} does not exist; create it with: gpuquota project create {name} --guaranteed N"
            )
        return self.projects[name]

    def view(self, uid: str) -> Job:
        """The job as clients see it."""
        return view(self.jobs[uid], self.workers_of(uid), self.expected_start(uid))

    def list_jobs(self, project: str = "", limit: int | None = None, page: str = "") -> JobList:
        """All jobs, or a project's, oldest first; with `limit` a page, which begins behind the job that `page` names.

        A page is named by the submission time and uid of its predecessor's last job, so that the other pages stay what
        they are while jobs are deleted.
        """
        chosen = [job for job in self.jobs.values() if project in ("", job.spec.project)]
        if page:
            chosen = _behind(chosen, *_place_of(page))
        if limit is None or limit >= len(chosen):
            return JobList(revision=self._revision, jobs=tuple(self.view(job.uid) for job in chosen))
        chosen = chosen[:limit]
        last = f"{chosen[-1].status.submitted_at!r}/{chosen[-1].uid}"
        return JobList(revision=self._revision, jobs=tuple(self.view(job.uid) for job in chosen), next_page=last)

    def list_projects(self) -> tuple[ProjectView, ...]:
        """All projects with what they hold, by name."""
        held = {name: defaultdict[str, float](float) for name in self.projects}  # by node pool
        wanted = dict.fromkeys(self.projects, 0.0)
        surplus = dict.fromkeys(self.projects, 0.0)
        device_memory_mib = None
        for uid, job in self.jobs.items():
            spec = job.spec
            if spec.project not in held or job.status.phase.final:
                continue
            gpus = sum(w.worker.gpus for w in self.alive_of(uid)) if self._workers_of.get(uid) else 0
            held[spec.project][spec.node_pool] += gpus
            if spec.shared:
                device_memory_mib = self._device_memory_mib() if device_memory_mib is None else device_memory_mib
                wanted[spec.project] += spec.gpus * min(1.0, spec.share_of(device_memory_mib))
            else:
                wanted[spec.project] += spec.gpus
                surplus[spec.project] += max(0.0, gpus - spec.gpus)
        views = (
            ProjectView(
                project=project,
                allocated=as_number(sum(held[name].values())),
                over_quota=as_number(project.borrowed(held[name])),
                requested=as_number(wanted[name]),
                surplus=as_number(surplus[name]),
            )
            for name, project in sorted(self.projects.items())
        )
        return with_lent(views, sum(len(node.devices) for node in self.nodes.values()))

    @property
    def taken(self) -> Mapping[str, tuple[int, ...]]:
        """Return the devices of each node that are used by others."""
        return self._taken

    def list_nodes(self) -> tuple[NodeView, ...]:
        """All nodes, with the workers that hold their devices; a device that is taken is used and held by none."""
        held: dict[str, dict[int, list[Worker]]] = {name: {} for name in self.nodes}
        for record in self.workers.values():
            for device in record.worker.devices if record.alive else ():
                held[record.worker.node].setdefault(device, []).append(record.worker)
        return tuple(
            NodeView(
                node=node,
                held={device: tuple(w.id for w in workers) for device, workers in held[name].items()},
                used={
                    **{device: as_number(sum(w.share for w in workers)) for device, workers in held[name].items()},
                    **dict.fromkeys(self._taken.get(name, ()), 1),
                },
            )
            for name, node in self.nodes.items()
        )

    def _device_memory_mib(self) -> int:
        """The smallest device's: what memory that is asked for counts as before it has a place."""
        return min((node.usable_mib(device) for node in self.nodes.values() for device in node.devices), default=0)

    async def wait_for_change(self, after: int | None, timeout_s: float) -> None:
        """Return once the revision is not `after` any more, or `timeout_s` is over."""
        if after != self._revision or timeout_s <= 0:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)

    def exceeds_guarantee(self, uid: str) -> bool:
        """Return whether the job has lost its core, by a minimum that was raised beyond the guarantee while it ran."""
        job = self.scheduler.jobs.get(uid)
        return job is not None and job.exceeds

    # Changing

    @contextlib.contextmanager
    def change(self, *, durable: bool = True) -> Iterator[Change]:
        """Gather a change; it is committed when the block ends without an error."""
        gathered = Change()
        yield gathered
        self.commit(gathered, durable=durable)

    def commit(self, change: Change, *, durable: bool = True) -> None:
        """Write it, and remember it. Raises StateFileError or ConflictError, and nothing has changed then."""
        now = self.clock()
        settle(self, change, now)
        account_all(self, change, now)
        try:
            self._commit(change, durable=durable)
        except StateFileError:
            if not (_ends_something(change) and self._make_room()):
                raise
            self._commit(change, durable=durable)

    def _commit(self, change: Change, *, durable: bool) -> None:
        applied, measured = False, self.scheduler.measurements
        try:
            with self._store.transaction(durable=durable):
                self._write(change)
                applied = True
                events = list(self.scheduler_events(change))
                for event in events:
                    self.scheduler.apply(event)
                if change.projects or not all(isinstance(event, scheduler.ProgressReported) for event in events):
                    self._write_past_use(change)
        except BaseException as error:
            if applied:
                self._rebuild_scheduler()
                self._recall()
            if not isinstance(error, Exception) or isinstance(error, StateFileError):
                raise
            log.exception("a change was refused, and is not stored")
            raise ConflictError(f"the cluster cannot take this change ({error}); nothing was changed") from error
        self.apply_change(change)
        self.wake()
        reported = all(isinstance(event, scheduler.ProgressReported) for event in events)
        if not reported or self.scheduler.measurements != measured:
            self.replan()

    def reserve_generation(self, uid: str, generation: int) -> None:
        """Store the number; where it cannot be written, the job's next commit writes it."""
        job = msgspec.structs.replace(self.jobs[uid], generation_high=generation)
        with self.noting(uid, durable=True) as recorder:
            recorder.record(job)
        self.jobs[uid] = job

    def note_waiting(self, uid: str, reason: Reason | None) -> None:
        """Keep why a job waits in memory: nothing is written."""
        job = self.jobs[uid]
        if job.status.reason is not reason and job.status.reason != reason:
            self.jobs[uid] = account(job, with_status(job, reason=reason), self.clock())
            self.wake()

    def wake(self) -> None:
        """Wake up the requests that wait for a change."""
        self._revision += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def set_nodes(self, nodes: Iterable[Node], taken: Mapping[str, tuple[int, ...]]) -> bool:
        """The cluster's nodes are these from now on; one that still has workers stays, and gets no more of them.

        Devices that are `taken` are used by others, and not planned with. Returns whether any of this is a change.
        """
        given = {node.name: self._ruled(node) for node in nodes}
        for record in self.workers.values():
            name = record.worker.node
            if record.alive and name not in given:
                given[name] = msgspec.structs.replace(self.nodes[name], ready=False)
        changed = [name for name in given if given[name] != self.nodes.get(name)]
        removed = [name for name in self.nodes if name not in given]
        retaken = [name for name in given if taken.get(name) != self._taken.get(name)]
        if not changed and not removed and not retaken:
            return False
        if changed or removed:
            with self._store.transaction():
                self._store.save_nodes(given.values())
        self.nodes, self._taken = given, dict(taken)
        for name in dict.fromkeys([*changed, *retaken]):
            self.scheduler.apply(scheduler.NodeChanged(self._usable(given[name])))
        for name in removed:
            self.scheduler.apply(scheduler.NodeRemoved(name))
        self.wake()
        return True

    # Inside

    def scheduler_events(self, change: Change) -> Iterator[scheduler.Event]:
        """Return the scheduler's events for a change, those of projects first: past borrowing is of what they were."""
        if self._usage_half_life_s is not None and not change.projects.keys().isdisjoint(self.projects):
            yield scheduler.TimePassed(self.clock())
        for name, project in change.projects.items():
            yield scheduler.QuotaRemoved(name) if project is None else scheduler.QuotaChanged(project)
        yield from super().scheduler_events(change)

    def _write(self, change: Change) -> None:
        for name, project in change.projects.items():
            if project is None:
                self._store.delete_project(name)
            else:
                self._store.save_project(project)
        for uid, job in change.jobs.items():
            if job is None:
                self._store.delete_job(uid)
            else:
                self._store.save_job(job)
        for worker in change.workers.values():
            if change.jobs.get(worker.worker.job_uid, worker) is not None:
                self._store.save_worker(worker)
        for event in change.events:
            self._store.append_event(event)
        if change.defragmented is not None:
            self._store.save_defragmented(change.defragmented)
        self.reports.write(change, self.jobs)

    def apply_change(self, change: Change) -> None:
        """Apply the change to the state."""
        for name, project in change.projects.items():
            if project is None:
                del self.projects[name]
            else:
                self.projects[name] = project
        super().apply_change(change)

    def put_job(self, job: JobRecord) -> None:
        """The job as given from now on, also by the request that made it."""
        super().put_job(job)
        self._by_request[job.request_id] = job.uid

    def remove_job(self, uid: str) -> list[str]:
        """Delete the job and its workers."""
        self._by_request.pop(self.jobs[uid].request_id, None)
        return super().remove_job(uid)

    def _load(self) -> None:
        """Everything that is stored and can be used, as if it happened just now."""
        projects = self._usable_projects()
        workers: dict[str, list[WorkerRecord]] = {}
        for record in self._store.load_workers():
            workers.setdefault(record.worker.job_uid, []).append(record)
        self._apply_nodes()
        self._take(Change(projects={project.name: project for project in projects}))
        for job in self._store.load_jobs():
            self._load_job(job, workers.pop(job.uid, []))
        for record in [record for left in workers.values() for record in left]:
            self._store.quarantine("workers", record.worker.id, f"there is no job {record.worker.job_uid}")

    def _load_job(self, job: JobRecord, workers: list[WorkerRecord]) -> None:
        try:
            self._take(Change(jobs={job.uid: job}, workers={record.worker.id: record for record in workers}))
        except Exception as error:
            log.exception("job %s cannot be used", job.uid)
            self._store.quarantine("jobs", job.uid, f"the scheduler refuses it: {error}")
            for record in workers:
                self._store.quarantine("workers", record.worker.id, f"there is no job {job.uid}")
            self._rebuild_scheduler()

    def _usable_projects(self) -> list[Project]:
        """Return all projects; one with impossible parents is used without a parent."""
        projects = {project.name: project for project in self._store.load_projects()}
        for name, project in list(projects.items()):
            try:
                check_parents(projects, project)
            except UsageError as error:
                self._store.quarantine("projects", name, error.message, keep=True)
                projects[name] = msgspec.structs.replace(project, parent=None)
                with self._store.transaction():
                    self._store.save_project(projects[name])
        return list(projects.values())

    def _take(self, change: Change) -> None:
        for event in list(self.scheduler_events(change)):
            self.scheduler.apply(event)
        self.apply_change(change)

    def _apply_nodes(self) -> None:
        for node in self.nodes.values():
            self.scheduler.apply(scheduler.NodeChanged(self._usable(node)))

    def _ruled(self, node: Node) -> Node:
        """The node with the cluster's rules of sharing."""
        return node if self._sharing is None else self._sharing.on(node)

    def _usable(self, node: Node) -> Node:
        """The node without the devices that others use."""
        taken = self._taken.get(node.name, ())
        return msgspec.structs.replace(node, devices=tuple(d for d in node.devices if d.index not in taken))

    def _rebuild_scheduler(self) -> None:
        """Make the scheduler's state again from what is remembered: it has taken half of something."""
        remembered = Change(projects=dict(self.projects), jobs=dict(self.jobs), workers=dict(self.workers))
        self.scheduler = self._new_scheduler()
        self._apply_nodes()
        before, self.jobs, self.workers = (self.jobs, self.workers), {}, {}
        try:
            for event in list(self.scheduler_events(remembered)):
                self.scheduler.apply(event)
        finally:
            self.jobs, self.workers = before

    def _newest_record(self) -> float:
        """When the newest thing that is remembered happened, in seconds since the epoch."""
        statuses = (job.status for job in self.jobs.values())
        return max((at for s in statuses for at in (s.submitted_at, s.started_at, s.finished_at) if at), default=0.0)

    def _write_past_use(self, change: Change) -> None:
        """Store what the projects that the change concerns have used, if it counts. What they hold has just changed."""
        half_life_s = self._usage_half_life_s
        if half_life_s is None:
            return
        uids = {*change.jobs, *(record.worker.job_uid for record in change.workers.values())}
        jobs = [*map(self.jobs.get, uids), *change.jobs.values()]
        concerned = {job.spec.project for job in jobs if job is not None}
        now, queues = self.clock(), list(self.scheduler.ledger.queues.values())
        if not change.projects:  # else departments and guarantees may be others
            queues = list({above: None for queue in queues if queue.name in concerned for above in queue.path})
        for name in [name for name, project in change.projects.items() if project is None]:
            self._store.forget_past_use(name)
        for queue in queues:
            if queue.exists:
                self._store.save_past_use(usage.noted(queue, now, half_life_s))

    def _recall(self) -> None:
        """Pass what is stored besides projects and jobs to the scheduler: past use, and what moves have cost."""
        self._recall_usage()
        if (done := self._store.load_defragmented()) is not None:
            self.scheduler.apply(done)

    def _recall_usage(self) -> None:
        """Pass what projects have used before this daemon's start to the scheduler, if it counts.

        Of a project of which nothing is stored since it changed last, because it did not count or an earlier version
        ran, it is computed from the history.
        """
        half_life_s = self._usage_half_life_s
        stored = self._store.load_past_use()
        if half_life_s is None:
            if stored:  # what is held meanwhile is not counted
                with self._store.transaction():
                    self._store.forget_past_use()
            return
        now, history = self.clock(), self._store.load_events(0, KEPT_EVENTS)
        changed_at = changes_of(history, self.projects)
        stored = [event for event in stored if event.at >= changed_at.get(event.project, 0.0)]
        found = {event.project for event in stored}
        computed = recalled(history, self.projects, now, half_life_s) if self.projects.keys() - found else ()
        for event in (*stored, *(event for event in computed if event.project not in found)):
            if event.project in self.projects:
                self.scheduler.apply(msgspec.structs.replace(event, at=min(event.at, now)))


def _behind(jobs: list[JobRecord], at: float, uid: str) -> list[JobRecord]:
    """The jobs behind the one with that uid; where it was deleted meanwhile, those that were submitted after it."""
    for i, job in enumerate(jobs):
        if job.uid == uid:
            return jobs[i + 1 :]
    return [job for job in jobs if job.status.submitted_at > at]


def _place_of(page: str) -> tuple[float, str]:
    """The submission time and the uid that name a page. Raises InvalidFieldError."""
    at, _, uid = page.partition("/")
    try:
        return float(at), uid
    except ValueError:
        raise InvalidFieldError("page", page, "it must be the next_page of a list") from None


def _ends_something(change: Change) -> bool:
    """Return whether the change only stops, ends or deletes, and therefore frees disk space."""
    jobs = all(job is None or job.ending or job.status.phase.final for job in change.jobs.values())
    return jobs and all(project is None for project in change.projects.values())
