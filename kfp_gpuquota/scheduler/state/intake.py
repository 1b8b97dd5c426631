"""Creates the scheduler's records from users' job specs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.quantity import MIB
from kfp_gpuquota.api.resources import CountedJobSpec
from kfp_gpuquota.scheduler.state.model import (
    GPU,
    MILLI,
    NO_RULES,
    UNLIMITED,
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
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Amount


def new_job(uid: str, spec: JobSpec, queue: Queue, at: float, parts: Mapping[str, JobSpec] | None = None) -> Job:
    """Return the scheduler's record of a job spec; `parts` as in `JobSubmitted`."""
    job = Job(
        uid=uid,
        name=spec.name,
        queue=queue,
        gang=spec.workers_of(spec.smallest),
        wanted=spec.workers_of(spec.gpus),
        most=spec.workers_of(spec.largest),
        request=request_of(spec),
        groups=_topology_of(spec),
        spread=spec.spread,
        priority=spec.effective_priority,
        preemptible=spec.may_be_preempted,
        submitted_at=at,
        cool_down_s=spec.cool_down_s,
        min_run_time_s=spec.min_run_time_s,
        most_s=UNLIMITED if spec.max_runtime_s is None else spec.max_runtime_s + spec.grace_period_s,
    )
    if parts:
        _make_of(job, parts)
    else:
        job.pending = [Task(job=job, request=job.request, index=i) for i in range(job.wanted)]
    return job


def update(job: Job, spec: JobSpec, ledger: Ledger, *, resized: bool) -> None:
    """Give the job the size bounds and the priority of `spec`. `resized`: sizes differ, perhaps from an earlier run's.

    Its holdings are removed from the ledger meanwhile: the lent part, the core and the priority are counted again.
    Borrowed workers do not become a core by a larger minimum: a job that runs with one beyond the guarantee has none.
    """
    places = [(task, task.status, task.node, task.devices) for task in job.tasks.values()]
    core = [ledger.amount(task) for task, status, _, _ in places if status is not Status.LEAVING]
    for task, _, _, _ in places:
        ledger.set(task, Status.PENDING, None)
    resized |= spec.workers_of(spec.smallest) > job.gang
    job.gang, job.wanted, job.most = map(spec.workers_of, (spec.smallest, spec.gpus, spec.largest))
    job.priority, job.groups = spec.effective_priority, _topology_of(spec)
    if not job.tasks:
        job.request = request_of(spec)
    if resized:
        job.exceeds = not job.preemptible and _exceeds(job.queue, core[: job.gang])
    for task, status, node, devices in places:
        ledger.set(task, status, node, devices)
    ledger.settle()
    job.pending = [Task(job=job, request=job.request, index=i) for i in range(job.wanted - len(job.tasks))]


def _exceeds(queue: Queue, core: Sequence[Amount]) -> bool:
    """Return whether such a core is more than what other cores leave of the guaranteed quota at any level."""
    total = [sum(column) for column in zip(*core, strict=True)]
    return any(
        value and above.fixed[r] + value > above.deserved[r] for above in queue.path for r, value in enumerate(total)
    )


def _make_of(job: Job, parts: Mapping[str, JobSpec]) -> None:
    """Set all workers of all parts as the job's gang."""
    counts = {name: spec.workers_of(spec.gpus) for name, spec in parts.items()}
    requests = [(name, request_of(spec)) for name, spec in parts.items() for _ in range(counts[name])]
    job.pending = [Task(job=job, request=r, index=i, group=name) for i, (name, r) in enumerate(requests)]
    job.gang = job.wanted = job.most = len(job.pending)
    job.groups = Group("", children=tuple(Group(name, gang=count) for name, count in counts.items()))


def request_of(spec: JobSpec) -> Request:
    """Return the request of each worker of the job, without limits of shares, which do not affect placement."""
    rules = Rules(tuple(sorted(spec.node_selector.items())), spec.node_terms, spec.tolerations)
    weights = spec.gpu_weights if isinstance(spec, CountedJobSpec) else ()
    return Request(
        devices=0 if weights else spec.worker_gpus,
        share=GPU if spec.gpu_fraction is None else round(spec.share_of(0) * GPU),
        memory_mib=spec.gpu_memory_mib or 0,
        compute=round((spec.gpu_compute or 0.0) * GPU),
        # 1.1 * 1000 is slightly more than 1100 in floating point, which must not round up to the next thousandth.
        cpu=0 if spec.cpu is None else ceil(round(spec.cpu * MILLI, 3)),
        memory=(spec.memory_mib or 0) * MIB,
        nodes=None if spec.node is None else frozenset({spec.node}),
        rules=NO_RULES if rules == NO_RULES else rules,
        resources=spec.resources if isinstance(spec, CountedJobSpec) else (),
        gpu_weights=weights,
    )


def bar(job: Job, nodes: frozenset[str]) -> None:
    """Exclude these nodes for all tasks of the job."""
    _change_rules(_all_of(job), lambda rules: replace(rules, barred=nodes))


def constrain(job: Job, spec: JobSpec, only: Task | None = None) -> None:
    """Give all tasks of the job, or one of them, the constraints of `spec`; barred nodes stay barred."""
    given = request_of(spec).rules
    _change_rules(_all_of(job) if only is None else [only], lambda rules: replace(given, barred=rules.barred))


def _all_of(job: Job) -> list[Job | Task]:
    return [job, *job.tasks.values(), *job.pending]


def _change_rules(asking: Iterable[Job | Task], changed: Callable[[Rules], Rules]) -> None:
    after: dict[Request, Request] = {}  # equal tasks keep sharing one request object
    for one in asking:
        request = one.request
        if request not in after:
            rules = changed(request.rules)
            after[request] = replace(request, rules=NO_RULES if rules == NO_RULES else rules)
        one.request = after[request]


def _topology_of(spec: JobSpec) -> Group | None:
    """Return one set of workers with the job's topology, or None where it requests none.

    Several types of GPUs are domains, too: the widest ones.
    """
    order = spec.gpu_types if len(spec.gpu_types) > 1 else ()
    product = GPU_PRODUCT if order else None
    levels = tuple(key for key in (product, spec.required_topology, spec.preferred_topology) if key is not None)
    preferred = None if spec.preferred_topology is None else len(levels) - 1
    if spec.segment_topology is not None:
        levels += (spec.segment_topology,)
    if not levels:
        return None
    needed = sum(key is not None for key in (product, spec.required_topology))
    required = needed - 1 if needed else None
    topology = Topology(levels, required, preferred, order, spec.segment or 0)
    return Group("", gang=spec.workers_of(spec.smallest), topology=topology)
