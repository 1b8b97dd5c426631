"""Writes a state's records as those of a dump. The state is not changed."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kfp_gpuquota.scheduler.dump.records import (
    STATE_INDEXES,
    AmountRecord,
    JobRecord,
    NodeRecord,
    Orders,
    PendingRecord,
    QueueRecord,
    RequestRecord,
    WorkerRecord,
)
from kfp_gpuquota.scheduler.state.model import Status

if TYPE_CHECKING:
    from kfp_gpuquota.scheduler.state.model import Amount, Host, Job, Queue, Request, Task
    from kfp_gpuquota.scheduler.state.state import State

R = TypeVar("R", bound=msgspec.Struct)


def node_records(state: State) -> tuple[NodeRecord, ...]:
    """Return the nodes in the ledger's order."""
    return tuple(_node(host) for host in state.ledger.hosts.values())


def queue_records(state: State) -> tuple[QueueRecord, ...]:
    """Return the queues in the ledger's order."""
    keys = {queue: key for key, queue in state.ledger.queues.items()}
    return tuple(_queue(queue, keys) for queue in keys)


def job_records(state: State) -> tuple[JobRecord, ...]:
    """Return all jobs."""
    keys = {queue: key for key, queue in state.ledger.queues.items()}
    requests: dict[Request, RequestRecord] = {}  # most workers share the request of their job, and many jobs one
    return tuple(_job(job, keys[job.queue], requests) for job in state.jobs.values())


def orders(state: State) -> Orders:
    """Return the orders of the state's indexes."""
    leaving = tuple(task.id for task in state.ledger.leaving)
    return Orders(leaving=leaving, **{name: tuple(getattr(state, name)) for name in STATE_INDEXES})


def _node(host: Host) -> NodeRecord:
    return _record(host, NodeRecord, workers=tuple(task.id for task in host.tasks))


def _queue(queue: Queue, keys: dict[Queue, str]) -> QueueRecord:
    return _record(
        queue,
        QueueRecord,
        key=keys[queue],
        deserved=_amount(queue.deserved),
        limit=_amount(queue.limit),
        children=tuple(keys[child] for child in queue.children.values()),
        running=tuple(job.uid for job in queue.running),
        waiting=tuple(entries[0][1].uid for entries in queue.waiting.values()),
        users={user.name: (user.used, user.used_until) for user in queue.users.values()},
    )


def _amount(amount: Amount) -> AmountRecord:
    return _record(amount, AmountRecord)


def _job(job: Job, queue: str, requests: dict[Request, RequestRecord]) -> JobRecord:
    own = _request(job.request, requests)

    def different(task: Task) -> RequestRecord | None:
        return None if task.request == job.request else _request(task.request, requests)

    return _record(
        job,
        JobRecord,
        queue=queue,
        user=job.user.name,
        request=own,
        workers=tuple(_worker(task, different(task)) for task in job.tasks.values()),
        pending=tuple(_record(task, PendingRecord, request=different(task)) for task in job.pending),
        hosts=tuple(host.name for host in job.hosts),
    )


def _worker(task: Task, request: RequestRecord | None) -> WorkerRecord:
    if task.node is None:
        raise AssertionError(f"worker {task.id} of {task.job.name} has no node")
    return _record(task, WorkerRecord, node=task.node.name, leaving=task.status is Status.LEAVING, request=request)


def _request(request: Request, made: dict[Request, RequestRecord]) -> RequestRecord:
    found = made.get(request)
    if found is None:
        nodes = None if request.nodes is None else tuple(sorted(request.nodes))
        rules = request.rules
        named = {"labels": rules.labels, "terms": rules.terms, "tolerations": rules.tolerations}
        barred = tuple(sorted(rules.barred))
        found = made[request] = _record(request, RequestRecord, nodes=nodes, barred=barred, **named)
    return found


def _record(source: object, kind: type[R], **others: object) -> R:
    """Return a struct with `others` and, for its other fields, the attributes of `source` of the same names.

    A value equal to the field's default is left to the default, so that the encoder omits it: JSON has no infinity.
    """
    values = dict(others)
    for name, default in _fields(kind):
        value = others[name] if name in others else getattr(source, name)
        if value == default:
            values.pop(name, None)
        elif isinstance(value, float) and math.isinf(value):
            raise AssertionError(f"{kind.__name__}.{name} is {value}, which JSON cannot express")
        else:
            values[name] = value
    return msgspec.convert(values, kind)


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Return the names of the fields and their defaults."""
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))
