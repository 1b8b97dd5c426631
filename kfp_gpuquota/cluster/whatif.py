"""Answers what-if questions about jobs, quotas and nodes with names and sentences. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.api.wire import Effect, Outlook
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api.wire import JobName, Supposition

_PREFIX = "what-if-"


def outlook(state: scheduler.State, supposed: Supposition, now: float) -> Outlook:
    """Return the effect of the supposition on the next plan; `state` is not changed.

    Jobs that would lose workers are listed at once, although they would hold the GPUs until the workers have exited.
    Raises NotFoundError for a job or node that does not exist.
    """
    answer = scheduler.what_if(state, list(_events(state, supposed, now)), now)
    names = {uid: (job.queue.name, job.name) for uid, job in state.jobs.items()}
    names |= {f"{_PREFIX}{i}": (spec.project, spec.name) for i, spec in enumerate(supposed.submit)}
    waits = [uid for uid in names if uid.startswith(_PREFIX) and uid not in answer.starts]

    def effects(uids: Iterable[str]) -> tuple[Effect, ...]:
        return tuple(
            Effect(project=names[uid][0], job=names[uid][1], reason=answer.why(uid)) for uid in uids if uid in names
        )

    return Outlook(
        starts=effects(answer.starts),
        waits=effects(waits),
        no_longer_starts=effects(answer.no_longer_starts),
        grows=effects(answer.grows),
        shrinks=effects(answer.shrinks),
        stops=effects(answer.stops),
    )


def _events(state: scheduler.State, supposed: Supposition, now: float) -> Iterator[scheduler.Event]:
    for project in supposed.projects:
        yield scheduler.QuotaChanged(project)
    for name in supposed.without_nodes:
        yield from _without_node(state, name)
    for job in supposed.delete:
        yield from _without_job(state, job)
    for i, spec in enumerate(supposed.submit):
        yield scheduler.JobSubmitted(f"{_PREFIX}{i}", spec, now)


def _without_node(state: scheduler.State, name: str) -> Iterator[scheduler.Event]:
    host = state.ledger.hosts.get(name)
    if host is None:
        raise NotFoundError(f"node {name!r} does not exist; see them with: gpuquota list nodes")
    yield from (scheduler.WorkerGone(task.id) for task in host.tasks)
    yield scheduler.NodeRemoved(name)


def _without_job(state: scheduler.State, wanted: JobName) -> Iterator[scheduler.Event]:
    found = (job for job in state.jobs.values() if (job.queue.name, job.name) == (wanted.project, wanted.name))
    job = next(found, None)
    if job is None:
        raise NotFoundError(f"project {wanted.project!r} has no job {wanted.name!r} that runs or waits")
    yield scheduler.JobRemoved(job.uid)
    yield from (scheduler.WorkerGone(worker) for worker in list(job.tasks))
