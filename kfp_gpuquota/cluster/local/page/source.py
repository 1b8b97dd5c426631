"""The embedded cluster as the web page reads it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api.history import Report
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.wire import SubmitJob
from kfp_gpuquota.cluster.local.environment import forwarded_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kfp_gpuquota.api import Job, JobSpec, Project
    from kfp_gpuquota.api.history import HeldHours, Usage, UsePoint
    from kfp_gpuquota.api.wire import (
        Event,
        JobUpdate,
        LogChunk,
        NodeView,
        Outlook,
        ProjectView,
        StopAction,
        Supposition,
    )
    from kfp_gpuquota.cluster.local.cluster import LocalCluster
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.cluster.local.storage.store import Store
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
    from kfp_gpuquota.web.source import Notice, RunStep

CACHED_EVENTS: Final = 64


class LocalPages:
    """`web.source.Source` over the cluster's state in memory."""

    def __init__(
        self,
        store: Store,
        state: ClusterState,
        cluster: LocalCluster,
        problem: Callable[[], str] = str,
    ) -> None:
        self._store, self._state, self._cluster = store, state, cluster
        self._problem = problem
        self._views: dict[str, tuple[JobRecord, list[WorkerRecord], Job]] = {}
        self._listed: tuple[int, tuple[Job, ...]] = (-1, ())
        self._events: dict[str, tuple[int, tuple[Event, ...]]] = {}
        self._projects: tuple[int, tuple[ProjectView, ...]] = (-1, ())
        self._nodes: tuple[object, tuple[NodeView, ...]] = (None, ())

    def revision(self) -> int:
        """Return the state's revision."""
        return self._state.revision

    def now(self) -> float:
        """Return the state's time."""
        return self._state.clock()

    def problem(self) -> str:
        """Return why Ray cannot be used at present; "" where the cluster is not on Ray."""
        return self._problem()

    async def changed(self, after: int, timeout_s: float) -> None:
        """Wait for a change."""
        await self._state.wait_for_change(after, timeout_s)

    def projects(self) -> tuple[ProjectView, ...]:
        """Return all projects."""
        revision = self._state.revision
        if self._projects[0] != revision:
            self._projects = (revision, self._state.list_projects())
        return self._projects[1]

    def jobs(self) -> tuple[Job, ...]:
        """Return all jobs; the view of one whose records did not change is the same object as before."""
        revision = self._state.revision
        if self._listed[0] != revision:
            jobs = tuple(self._view(job) for job in self._state.jobs.values())
            if len(self._views) > len(jobs):
                self._views = {uid: view for uid, view in self._views.items() if uid in self._state.jobs}
            self._listed = (revision, jobs)
        return self._listed[1]

    def job(self, project: str, name: str) -> Job:
        """Return one job. Raises NotFoundError."""
        return self._view(self._state.job_named(project, name))

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes; the same tuple as before if neither they nor their workers have changed.

        The memory of devices that several share changes without a change of the state.
        """
        state = self._state
        workers = tuple(state.workers.values())
        seen = (state.nodes, state.taken, workers)
        if self._nodes[0] != seen or any(record.worker.share < 1 for record in workers):
            self._nodes = (seen, self._cluster.list_nodes())
        return self._nodes[1]

    def memory_of(self, worker: str, device: int) -> tuple[tuple[float, int], ...]:
        """Return what a worker used of a device."""
        return self._cluster.memory.of(worker, device)

    def gpu_use(self, node: str, device: int) -> tuple[UsePoint, ...]:
        """Return the use of a device of this machine."""
        return self._cluster.meter.of(node, device)

    def idle_since(self) -> dict[tuple[str, int], float]:
        """Return when the last worker of a job that is still listed left each device."""
        found: dict[tuple[str, int], float] = {}
        for record in self._state.workers.values():
            worker = record.worker
            if worker.finished_at is not None:
                for device in worker.devices:
                    place = (worker.node, device)
                    found[place] = max(found.get(place, 0.0), worker.finished_at)
        return found

    def events_of(self, uid: str) -> tuple[Event, ...]:
        """Return a job's history, from the state file where something was added since it was last read."""
        newest = self._store.revision()
        if self._events.get(uid, (-1, ()))[0] != newest:
            if len(self._events) >= CACHED_EVENTS:
                self._events.clear()
            self._events[uid] = (newest, tuple(self._store.load_job_events(uid)))
        return self._events[uid][1]

    def run_steps(self) -> tuple[RunStep, ...]:
        """Return nothing: steps without GPUs run outside of the cluster."""
        return ()

    async def look_up_runs(self) -> None:
        """Do nothing."""

    def notices_of(self, uid: str) -> tuple[Notice, ...]:
        """Return nothing: all that happens to a job here is in its history."""
        del uid
        return ()

    async def look_up(self, project: str, name: str) -> None:
        """Do nothing: all is in memory, or in the state file."""

    def sizes_of(self, job: Job) -> list[tuple[float, float]]:
        """Return what the job held after each moment at which workers started or exited."""
        held, found = 0.0, []
        for at, together in itertools.groupby(sorted(self._changes(job.uid)), key=lambda change: change[0]):
            held = max(0.0, held + sum(gpus for _, gpus in together))
            found.append((at, as_number(held)))
        return found

    def _changes(self, uid: str) -> Iterator[tuple[float, float]]:
        """Yield (time, change of the GPUs that the job holds) for each of its workers, in no order."""
        for record in self._state.workers_of(uid):
            worker = record.worker
            yield worker.started_at, worker.gpus
            if not record.alive:
                yield worker.finished_at or worker.started_at, -worker.gpus

    def reports_of(self, uid: str) -> tuple[Report, ...]:
        """Return a training's reports, the last one included."""
        job, stored = self._state.jobs.get(uid), self._state.reports.of(uid)
        progress = job.status.progress if job is not None else None
        if progress is None or (stored and stored[-1].at >= progress.at):
            return tuple(stored)
        last = Report(
            progress.at,
            progress.step,
            progress.metrics,
            progress.throughput,
            progress.workers,
            not_finite=progress.not_finite,
            noise_scale=progress.noise_scale,
        )
        return (*stored, last)

    def usage(self, width_s: int, since: float) -> Sequence[Usage]:
        """Return the projects' usage."""
        return self._store.load_usage(width_s, since)

    def held_hours(self, since_s: float) -> Sequence[HeldHours]:
        """Return the GPU-hours of each user and type of GPU."""
        return self._cluster.held_hours(since_s)

    async def what_if(self, supposed: Supposition) -> Outlook:
        """Return what would happen. Raises NotFoundError for a project that does not exist."""
        for spec in supposed.submit:
            self._state.project(spec.project)
        return self._cluster.what_if(supposed)

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a piece of a log. Raises NotFoundError."""
        return await self._cluster.read_log(project, name, worker, offset, timeout_s)

    async def submit(self, spec: JobSpec, request_id: str, *, like: Job | None, image: str) -> Job:
        """Queue the job. A new one has the daemon's environment, as far as a command would forward it."""
        del image
        if like is None:
            directory = spec.working_directory or str(Path.home())
            spec = msgspec.structs.replace(spec, working_directory=directory, environment=forwarded_environment())
        return self._cluster.submit(SubmitJob(spec=spec, request_id=request_id))

    async def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop the jobs."""
        self._cluster.stop_jobs(project, names, action)

    async def resume(self, project: str, name: str) -> None:
        """Resume the job."""
        self._cluster.resume_job(project, name)

    async def update(self, project: str, name: str, changed: JobUpdate) -> None:
        """Change the job."""
        self._cluster.update_job(project, name, changed)

    async def fixed_quota(self, project: str) -> str:
        """Return "": the cluster's user may change all quotas."""
        del project
        return ""

    async def set_project(self, project: Project, if_match: str) -> None:
        """Change the project."""
        self._cluster.set_project(project, if_match=if_match)

    def _view(self, job: JobRecord) -> Job:
        workers = self._state.workers_of(job.uid)
        found = self._views.get(job.uid)
        expected = self._state.expected_start(job.uid)
        if (
            found is None
            or found[0] is not job
            or found[2].status.expected_start is not expected
            or not _same(found[1], workers)
        ):
            found = self._views[job.uid] = (job, workers, self._state.view(job.uid))
        return found[2]


def _same(before: Sequence[WorkerRecord], now: Sequence[WorkerRecord]) -> bool:
    return len(before) == len(now) and (not now or all(one is other for one, other in zip(before, now, strict=True)))
