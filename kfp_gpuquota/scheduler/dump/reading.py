"""Makes a state of a dump's records.

Only names, amounts and orders are in a dump. Every count and index of the state follows from them, by the same code
that keeps them in a running cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from kfp_gpuquota.scheduler.dump.records import STATE_INDEXES, JobRecord, NodeRecord, QueueRecord, RequestRecord
from kfp_gpuquota.scheduler.state.model import (
    NO_RULES,
    Amount,
    Host,
    Job,
    Queue,
    Request,
    Rules,
    Status,
    Task,
    User,
)
from kfp_gpuquota.scheduler.state.state import State
from kfp_gpuquota.scheduler.state.tree import graft

if TYPE_CHECKING:
    from collections.abc import Iterable

    import msgspec

    from kfp_gpuquota.scheduler.dump.records import AmountRecord, PendingRecord, StateDump, WorkerRecord

K = TypeVar("K")
V = TypeVar("V")


def _same(record: type[msgspec.Struct], *others: str) -> tuple[str, ...]:
    """Return the fields that a record and the scheduler's own class share: all but `others`."""
    return tuple(name for name in record.__struct_fields__ if name not in others)


_JOB_FIELDS: Final = _same(
    JobRecord, "queue", "request", "workers", "pending", "hosts", "throughput", "batches", "user"
)
_QUEUE_FIELDS: Final = _same(QueueRecord, "key", "deserved", "limit", "children", "running", "waiting", "users")
_NODE_FIELDS: Final = _same(NodeRecord, "workers")
_REQUEST_FIELDS: Final = _same(RequestRecord, "nodes", "labels", "terms", "tolerations", "barred")


def read_state(dump: StateDump) -> State:
    """Return the state of the dump. Raises KeyError where a record names another one that the dump does not have."""
    half_life_s, reserve_after_s = dump.usage_half_life_s, dump.reserve_after_s
    state = State(usage_half_life_s=half_life_s, moves=dump.moves, reserve_after_s=reserve_after_s)
    state.ledger.defragmentation, state.ledger.defragmented = dump.defragmentation, dump.defragmented
    state.ledger.reclaim_shelter_s = dump.reclaim_shelter_s
    state.projects = {project.name: project for project in dump.projects}
    for node in dump.nodes:
        state.ledger.put_host(Host(**_taken(node, _NODE_FIELDS)))
    _read_queues(state, dump.queues)
    requests: dict[RequestRecord, Request] = {}  # equal workers share one request, as in the original
    for record in dump.jobs:
        _read_job(state, record, requests)
    state.ledger.settle()
    state.last_at = dump.last_at
    _restore_orders(state, dump)
    return state


def _taken(record: msgspec.Struct, fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in fields}


def _read_queues(state: State, records: Iterable[QueueRecord]) -> None:
    queues = state.ledger.queues
    for record in records:
        queue = queues[record.key] = Queue(
            deserved=_amount(record.deserved), limit=_amount(record.limit), **_taken(record, _QUEUE_FIELDS)
        )
        queue.users = {name: User(name, used=used, used_until=at) for name, (used, at) in record.users.items()}
        graft(queue, None)
    for record in records:
        for child in record.children:
            graft(queues[child], queues[record.key])


def _amount(record: AmountRecord) -> Amount:
    return Amount(record.gpu, record.cpu, record.memory)


def _read_job(state: State, record: JobRecord, requests: dict[RequestRecord, Request]) -> None:
    queue = state.ledger.queues[record.queue]
    job = Job(
        queue=queue,
        user=state.user(queue, record.user),
        request=_request(record.request, requests),
        throughput=dict(record.throughput),
        batches=dict(record.batches),
        **_taken(record, _JOB_FIELDS),
    )
    job.pending = [_pending(job, one, requests) for one in record.pending]
    for worker in record.workers:
        _read_worker(state, job, worker, requests)
    below_since = job.below_since
    state.add_job(job)
    job.below_since = below_since


def _pending(job: Job, record: PendingRecord, requests: dict[RequestRecord, Request]) -> Task:
    request = job.request if record.request is None else _request(record.request, requests)
    return Task(job=job, request=request, index=record.index, priority=record.priority, group=record.group)


def _read_worker(state: State, job: Job, record: WorkerRecord, requests: dict[RequestRecord, Request]) -> None:
    request = job.request if record.request is None else _request(record.request, requests)
    task = Task(
        job=job,
        request=request,
        index=record.index,
        id=record.id,
        priority=record.priority,
        started_at=record.started_at,
        group=record.group,
    )
    job.tasks[task.id] = state.workers[task.id] = task
    status = Status.LEAVING if record.leaving else Status.HELD
    state.ledger.set(task, status, state.ledger.hosts[record.node], record.devices)


def _request(record: RequestRecord, made: dict[RequestRecord, Request]) -> Request:
    found = made.get(record)
    if found is None:
        rules = Rules(record.labels, record.terms, record.tolerations, frozenset(record.barred))
        found = made[record] = Request(
            nodes=None if record.nodes is None else frozenset(record.nodes),
            rules=NO_RULES if rules == NO_RULES else rules,
            **_taken(record, _REQUEST_FIELDS),
        )
    return found


def _restore_orders(state: State, dump: StateDump) -> None:
    """Put every index of the state into the order that it had."""
    workers, hosts = state.workers, state.ledger.hosts
    for name in STATE_INDEXES:
        _sort(getattr(state, name), getattr(dump.orders, name))
    _sort(state.ledger.leaving, [workers[id_] for id_ in dump.orders.leaving])
    for node in dump.nodes:
        _sort(hosts[node.name].tasks, [workers[id_] for id_ in node.workers])
    for job in dump.jobs:
        if job.uid in state.jobs:
            _sort(state.jobs[job.uid].hosts, [hosts[name] for name in job.hosts])
    for record in dump.queues:
        queue = state.ledger.queues[record.key]
        _sort(queue.running, [state.jobs[uid] for uid in record.running])
        first = [state.jobs[uid].filed for uid in record.waiting]
        _sort(queue.waiting, [filed[0] for filed in first if filed is not None])


def _sort(index: dict[K, V], order: Iterable[K]) -> None:
    """Put the keys of the index into this order; keys that are not in it stay behind the others."""
    sorted_ = {key: index[key] for key in order if key in index}
    sorted_.update(index)
    index.clear()
    index.update(sorted_)
