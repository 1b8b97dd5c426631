"""Whether the nodes could hold the tasks of a job if nothing else ran on them.

Plans (which job of a strict project blocks the others) and reasons (what no change of the load would help) ask this
one function. It runs the placement of plans itself, on copies of the nodes that are empty: a count of what fits would
be a second model of parts, domains, shares and pod limits. The copies follow the ledger's nodes, and the answer for
jobs that are alike is kept until a node changes. Whole devices of any node are counted, which is as exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.ledger import Ledger
from kfp_gpuquota.scheduler.state.model import Host, Job, Queue, Task

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_MOST: Final = 10_000
"""Answers that are kept."""


def fit_when_empty(ledger: Ledger, tasks: Sequence[Task]) -> bool:
    """Return whether a plan could start these tasks if nothing ran on the nodes.

    Where the job itself runs is not considered: for growth the answer may be yes where it is no.
    """
    job, request = tasks[0].job, tasks[0].request
    if request.plain and request.devices and not ledger.special and job.groups is None and not job.queue.pool:
        return sum(nodes * (size // request.devices) for size, nodes in ledger.by_size.items()) >= len(tasks)
    if not isinstance(ledger.empty_nodes, EmptyNodes):
        ledger.empty_nodes = EmptyNodes(ledger)
    return ledger.empty_nodes.hold(tasks)


class EmptyNodes:
    """Copies of the ledger's nodes without any task."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._empty = ledger, Ledger()
        self._answers: dict[Hashable, bool] = {}
        ledger.changed_hosts.update(dict.fromkeys(ledger.hosts))

    def hold(self, tasks: Sequence[Task]) -> bool:
        """Return whether all of these tasks of one job fit."""
        self._follow()
        job = tasks[0].job
        alike = tuple((task.request, task.group) for task in tasks), job.groups, job.spread, job.queue.pool
        if alike not in self._answers:
            if len(self._answers) >= _MOST:
                self._answers.clear()
            self._answers[alike] = placement.place_all(self._empty, _copies(tasks), future=False)
            self._empty.rollback(0)
            self._empty.settle()
        return self._answers[alike]

    def _follow(self) -> None:
        """Repeat the changes of the ledger's nodes."""
        if self._ledger.changed_hosts:
            self._answers.clear()
        self._empty.one_by_one = self._ledger.one_by_one
        for name in self._ledger.changed_hosts:
            if (host := self._ledger.hosts.get(name)) is not None:
                self._empty.put_host(_copy(host))
            elif name in self._empty.hosts:
                self._empty.drop_host(self._empty.hosts[name])
        self._ledger.changed_hosts.clear()


def _copies(tasks: Sequence[Task]) -> list[Task]:
    """Return tasks like these of a job that does not run, in a queue of their own."""
    job = tasks[0].job
    queue = Queue(name=job.queue.name, pool=job.queue.pool)
    queue.path = (queue,)
    alone = Job(
        uid=job.uid,
        name=job.name,
        queue=queue,
        gang=len(tasks),
        wanted=len(tasks),
        most=len(tasks),
        request=job.request,
        groups=job.groups,
        spread=job.spread,
    )
    return [Task(alone, task.request, task.index, group=task.group) for task in tasks]


def _copy(host: Host) -> Host:
    return Host(
        name=host.name,
        devices=host.devices,
        gpu_memory_mib=host.gpu_memory_mib,
        ready=host.ready,
        cpu=host.cpu,
        memory=host.memory,
        max_tasks=host.max_tasks,
        labels=host.labels,
        taints=host.taints,
        pool=host.pool,
        resources=host.resources,
        gpu_weights=host.gpu_weights,
        max_sharers=host.max_sharers,
    )
