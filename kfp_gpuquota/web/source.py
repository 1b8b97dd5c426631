"""What the pages read of a cluster, and what they ask of it. Each kind of cluster implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.api import Job, JobSpec, Project
    from kfp_gpuquota.api.history import HeldHours, Report, Usage, UsePoint
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


@dataclass(frozen=True)
class Notice:
    """What another program than the scheduler has reported about a job: on Kubernetes an Event.

    `at` is the last time (seconds since the epoch) of `count`; `about` is a worker, "" for the job itself.
    """

    at: float
    about: str
    reason: str
    message: str
    warning: bool = False
    count: int = 1


@dataclass(frozen=True)
class RunStep:
    """A step of a pipeline's run as its own pod shows it, also one that uses no GPU.

    `task` is its path in the run, `attempt` which one of its pods it is; the times are in seconds since the epoch.
    """

    run: str
    project: str
    pipeline: str
    task: str
    attempt: str
    phase: str
    submitted_at: float
    gpus: float = 0
    started_at: float | None = None
    finished_at: float | None = None


class Source(Protocol):
    """Reads are answered from memory; actions raise errors of `kfp_gpuquota.errors`."""

    def revision(self) -> int:
        """Return a number that grows with every change, also over restarts of the server."""

    def now(self) -> float:
        """Return the time in seconds since the epoch, as the cluster measures it."""

    def problem(self) -> str:
        """Return what the cluster cannot do at present, and why, as `Health.problem`; "" if it can do everything."""

    async def changed(self, after: int, timeout_s: float) -> None:
        """Return once the revision is not `after` any more, or the time is over."""

    def projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, by name."""

    def jobs(self) -> tuple[Job, ...]:
        """Return all jobs, oldest first; a job that did not change is the same object as before."""

    def job(self, project: str, name: str) -> Job:
        """Return one job. Raises NotFoundError."""

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes, and which workers hold their devices.

        On Kubernetes, where a worker's name is unique in its project only, each holder is "project/worker"; those of
        pods that belong to no job are among them. A device in use without a holder is used by others.
        """

    def memory_of(self, worker: str, device: int) -> Sequence[tuple[float, int]]:
        """Return (time, MiB) of what a worker used of a device that it shares, oldest first."""

    def gpu_use(self, node: str, device: int) -> Sequence[UsePoint]:
        """Return the use of a device over the last hours, oldest first; () of one that is not measured."""

    def idle_since(self) -> Mapping[tuple[str, int], float]:
        """Return when the last worker left each idle device, by (node, index); only where that is recorded."""

    def events_of(self, uid: str) -> tuple[Event, ...]:
        """Return the history of a job, oldest first."""

    def run_steps(self) -> Sequence[RunStep]:
        """Return the steps of runs as their pods show them, as of the last `look_up_runs`; () where there are none."""

    async def look_up_runs(self) -> None:
        """Read which steps' pods the user may see."""

    def notices_of(self, uid: str) -> tuple[Notice, ...]:
        """Return what other programs reported about a job and its workers, in no order; as of the last `look_up`."""

    async def look_up(self, project: str, name: str) -> None:
        """Read what the page of a job shows and the memory does not hold; does nothing for a job that is not there."""

    def sizes_of(self, job: Job) -> Sequence[tuple[float, float]]:
        """Return (time, GPUs that the job held from then on), oldest first."""

    def reports_of(self, uid: str) -> tuple[Report, ...]:
        """Return a training's reports, thinned out evenly, oldest first."""

    def usage(self, width_s: int, since: float) -> Sequence[Usage]:
        """Return each project's usage in intervals of `width_s` that begin after `since`, oldest first."""

    def held_hours(self, since_s: float) -> Sequence[HeldHours]:
        """Return the GPU-hours of each user and type of GPU in the last `since_s` seconds; () where nothing is kept."""

    async def what_if(self, supposed: Supposition) -> Outlook:
        """Return what would happen, without doing it."""

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a piece of a worker's log from byte `offset` on; a negative offset counts from its end."""

    async def submit(self, spec: JobSpec, request_id: str, *, like: Job | None, image: str) -> Job:
        """Queue a job, once per request id; what the form does not show is taken from the job `like`.

        `image` is for clusters that run jobs in images.
        """

    async def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs, as `ClusterApi.stop_jobs`."""

    async def resume(self, project: str, name: str) -> None:
        """Put a suspended job back into the queue."""

    async def update(self, project: str, name: str, changed: JobUpdate) -> None:
        """Change a job's size bounds or priority."""

    async def fixed_quota(self, project: str) -> str:
        """Return why the user cannot change a project's quota here, and what to change instead; "" for one who can."""

    async def set_project(self, project: Project, if_match: str) -> None:
        """Change a project if its version is still `if_match`. Raises ConflictError if it is not."""
