"""What users ask for, as the scheduler's records."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from kfp_gpuquota.api.quantity import MIB
from kfp_gpuquota.scheduler.state.model import (
    GPU,
    MILLI,
    NO_RULES,
    Group,
    Job,
    Queue,
    Request,
    Rules,
    Status,
    Task,
    Topology,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.scheduler.state.ledger import Ledger


def new_job(uid: str, spec: JobSpec, queue: Queue, at: float, parts: Mapping[str, JobSpec] | None = None) -> Job:
    """The scheduler's record of a job as its user asks for it; see `JobSubmitted` for `parts`."""
    size = spec.worker_gpus
    job = Job(
        uid=uid,
        name=spec.name,
        queue=queue,
        gang=spec.smallest // size,
        wanted=spec.gpus // size,
        most=spec.largest // size,
        request=request_of(spec),
        groups=_topology_of(spec),
        spread=spec.spread,
        priority=spec.effective_priority,
        preemptible=spec.may_be_preempted,
        submitted_at=at,
        cool_down_s=spec.cool_down_s,
        min_run_time_s=spec.min_run_time_s,
    )
    if parts:
        _make_of(job, parts)
    else:
        job.pending = [Task(job=job, request=job.request, index=i) for i in range(job.wanted)]
    return job


def update(job: Job, spec: JobSpec, ledger: Ledger) -> None:
    """Give the job the size bounds and the priority of `spec`.

    What it holds is taken off the ledger meanwhile: which of it is lent, and at which priority, is counted anew.
    """
    places = [(task, task.status, task.node, task.devices) for task in job.tasks.values()]
    for task, _, _, _ in places:
        ledger.set(task, Status.PENDING, None)
    size = spec.worker_gpus
    job.gang, job.wanted, job.most = spec.smallest // size, spec.gpus // size, spec.largest // size
    job.priority, job.groups = spec.effective_priority, _topology_of(spec)
    if not job.tasks:
        job.request = request_of(spec)
    for task, status, node, devices in places:
        ledger.set(task, status, node, devices)
    ledger.settle()
    job.pending = [Task(job=job, request=job.request, index=i) for i in range(max(0, job.wanted - job.active))]


def _make_of(job: Job, parts: Mapping[str, JobSpec]) -> None:
    """Give the job all workers of all parts as its gang."""
    counts = {name: spec.gpus // spec.worker_gpus for name, spec in parts.items()}
    requests = [(name, request_of(spec)) for name, spec in parts.items() for _ in range(counts[name])]
    job.pending = [Task(job=job, request=r, index=i, group=name) for i, (name, r) in enumerate(requests)]
    job.gang = job.wanted = job.most = len(job.pending)
    job.groups = Group("", children=tuple(Group(name, gang=count) for name, count in counts.items()))


def request_of(spec: JobSpec) -> Request:
    """What each worker of the job needs. Limits of shares are no part of it: they are never placed."""
    rules = Rules(tuple(sorted(spec.node_selector.items())), spec.node_affinity, spec.tolerations)
    return Request(
        devices=spec.worker_gpus,
        share=GPU if spec.gpu_fraction is None else round(spec.share_of(0) * GPU),
        memory_mib=spec.gpu_memory_mib or 0,
        # 1.1 * 1000 is a little more than 1100: what floating point adds must not count as a thousandth more.
        cpu=0 if spec.cpu is None else ceil(round(spec.cpu * MILLI, 3)),
        memory=(spec.memory_mib or 0) * MIB,
        nodes=None if spec.node is None else frozenset({spec.node}),
        rules=NO_RULES if rules == NO_RULES else rules,
    )


def bar(job: Job, nodes: frozenset[str]) -> None:
    """Place none of its tasks on these nodes from now on."""
    after: dict[Request, Request] = {}  # tasks that ask for the same go on sharing one request
    asking: tuple[Job | Task, ...] = (job, *job.tasks.values(), *job.pending)
    for one in asking:
        request = one.request
        if request not in after:
            rules = replace(request.rules, barred=nodes)
            after[request] = replace(request, rules=NO_RULES if rules == NO_RULES else rules)
        one.request = after[request]


def _topology_of(spec: JobSpec) -> Group | None:
    """One set of workers within a topology, where the job asks for one."""
    levels = tuple(key for key in (spec.required_topology, spec.preferred_topology) if key is not None)
    if not levels:
        return None
    required = None if spec.required_topology is None else 0
    preferred = None if spec.preferred_topology is None else len(levels) - 1
    return Group("", gang=spec.smallest // spec.worker_gpus, topology=Topology(levels, required, preferred))
