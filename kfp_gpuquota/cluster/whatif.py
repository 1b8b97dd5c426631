"""Answers what-if questions about jobs, quotas and nodes with names and sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.wire import Effect, OtherTeams, Outlook
from kfp_gpuquota.cluster.plan_pacing import LONGEST_FORECAST_S, within
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.scheduler.forecast import RunTime
from kfp_gpuquota.scheduler.state.copying import copied
from kfp_gpuquota.scheduler.state.model import GPU

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kfp_gpuquota.api.wire import JobName, Supposition
    from kfp_gpuquota.scheduler.state.model import Job

_PREFIX = "what-if-"
OTHERS = "other teams' jobs"


RunTimes = Callable[[str], RunTime]
"""What is known of a job's run time, by its uid."""


def outlook(state: scheduler.State, supposed: Supposition, now: float, run_time: RunTimes | None = None) -> Outlook:
    """Return the effect of the supposition on the next plan; `state` is not changed.

    With `run_time` also when jobs that would wait are expected to start. Jobs that would lose workers are listed at
    once, although they would hold the GPUs until the workers have exited. Raises NotFoundError for a job or node that
    does not exist.
    """
    if supposed.growing:
        return Outlook(keeps=tuple(_not_growing(state, supposed.growing, now)))
    return _outlook(state, _answer(state, supposed, now, run_time), supposed)


def _not_growing(state: scheduler.State, names: Iterable[JobName], now: float) -> Iterator[Effect]:
    """Yield why jobs do not grow, for those that could be larger."""
    for one in names:
        job = _job_named(state, one)
        if (reason := scheduler.why_not_larger(state, job.uid, now)) is not None:
            yield Effect(project=one.project, job=one.name, reason=reason)


def outlook_for_user(
    state: scheduler.State,
    supposed: Supposition,
    now: float,
    visible: Collection[str] | None,
    run_time: RunTimes | None = None,
) -> Outlook:
    """Return what `outlook` does for a user who may see the jobs of the `visible` projects only, None: of all.

    Effects on other jobs are summed up in `others`, and no reason names such a job. Raises what `outlook` raises.
    """
    if visible is None:
        return outlook(state, supposed, now, run_time)
    own = copied(state)
    hidden = {uid for uid, job in own.jobs.items() if job.queue.name not in visible}
    for uid in hidden:
        own.jobs[uid].name = OTHERS  # sentences name jobs, and the plan does not depend on names
    answer = _answer(own, supposed, now, run_time)
    found = _outlook(own, answer, supposed)
    effects = {name: _shown(getattr(found, name), visible, hidden) for name in Outlook.__struct_fields__[:-1]}
    return Outlook(**effects, others=_other_teams(own, answer, hidden))


def _answer(state: scheduler.State, supposed: Supposition, now: float, run_time: RunTimes | None) -> scheduler.WhatIf:
    events = list(_events(state, supposed, now))
    return scheduler.what_if(state, events, now, run_time, in_time=within(LONGEST_FORECAST_S))


def _outlook(state: scheduler.State, answer: scheduler.WhatIf, supposed: Supposition) -> Outlook:
    names = {uid: (job.queue.name, job.name) for uid, job in state.jobs.items()}
    names |= {f"{_PREFIX}{i}": (spec.project, spec.name) for i, spec in enumerate(supposed.submit)}
    waits = [uid for uid in names if uid.startswith(_PREFIX) and uid not in answer.starts]
    expected = {uid: answer.expected.get(uid) for uid in waits}

    def effects(uids: Iterable[str]) -> tuple[Effect, ...]:
        return tuple(
            Effect(
                project=names[uid][0],
                job=names[uid][1],
                reason=answer.why(uid),
                expected_start=expected.get(uid),
            )
            for uid in uids
            if uid in names
        )

    return Outlook(
        starts=effects(answer.starts),
        waits=effects(waits),
        no_longer_starts=effects(answer.no_longer_starts),
        grows=effects(answer.grows),
        shrinks=effects(answer.shrinks),
        stops=effects(answer.stops),
    )


def _shown(effects: Iterable[Effect], visible: Collection[str], hidden: Collection[str]) -> tuple[Effect, ...]:
    """Return the effects on visible jobs, with reasons that are reduced to their sentences."""
    return tuple(
        msgspec.structs.replace(effect, reason=_sentence(effect.reason, hidden))
        for effect in effects
        if effect.project in visible
    )


def _sentence(reason: Reason | None, hidden: Collection[str]) -> Reason | None:
    """Return the reason without its details; None where it is that another team's job needs the GPUs."""
    if reason is None or reason.beneficiary in hidden:
        return None
    return Reason(code=reason.code, message=reason.message)


def _other_teams(state: scheduler.State, answer: scheduler.WhatIf, hidden: set[str]) -> OtherTeams:
    shrinks, stops = set(answer.shrinks).intersection(hidden), set(answer.stops).intersection(hidden)
    released = [worker for resize in answer.after.resize if resize.job in shrinks for worker in resize.remove]
    released += [worker for evict in answer.after.evict if evict.job in stops for worker in evict.workers]
    requests = [state.workers[worker].request for worker in released]
    return OtherTeams(
        starts=len(hidden.intersection(answer.starts)),
        no_longer_starts=len(hidden.intersection(answer.no_longer_starts)),
        grows=len(hidden.intersection(answer.grows)),
        shrinks=len(shrinks),
        stops=len(stops),
        released_gpus=as_number(sum(request.devices * request.share for request in requests) / GPU),
    )


def _events(state: scheduler.State, supposed: Supposition, now: float) -> Iterator[scheduler.Event]:
    for project in supposed.projects:
        yield scheduler.QuotaChanged(project)
    for name in supposed.without_nodes:
        yield from _without_node(state, name)
    for i, new in enumerate(supposed.with_nodes):
        pool = (host.labels for host in state.ledger.hosts.values() if host.pool == new.pool)
        yield scheduler.NodeChanged(new.node(f"{_PREFIX}{i}", pool, state.ledger.gpu_memory_mib))
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


def _job_named(state: scheduler.State, wanted: JobName) -> Job:
    """Return the job. Raises NotFoundError."""
    found = (job for job in state.jobs.values() if (job.queue.name, job.name) == (wanted.project, wanted.name))
    job = next(found, None)
    if job is None:
        raise NotFoundError(f"project {wanted.project!r} has no job {wanted.name!r} that runs or waits")
    return job


def _without_job(state: scheduler.State, wanted: JobName) -> Iterator[scheduler.Event]:
    job = _job_named(state, wanted)
    yield scheduler.JobRemoved(job.uid)
    yield from (scheduler.WorkerGone(worker) for worker in list(job.tasks))
