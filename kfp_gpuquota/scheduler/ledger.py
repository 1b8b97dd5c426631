"""Who holds what: the one place where a task's devices and its queues' amounts are counted, with undo.

A plan is tried out on the real ledger and rolled back, so that a cycle costs what it changes and not the size of the
cluster (rejected: copying the cluster for each attempt).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.model import GPU, Amount, Host, Job, Queue, Status, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

Change = tuple[Task, Status, Host | None, tuple[int, ...]]

_USED, _LEAVING, _NOMINATED = 0, 1, 2
_COLUMN = {Status.HELD: _USED, Status.BOUND: _USED, Status.NOMINATED: _NOMINATED, Status.LEAVING: _LEAVING}


class Ledger:
    """Hosts, queues and what tasks take of them. `by_idle[n]` and `by_future[n]`: names of hosts with n whole GPUs."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.queues: dict[str, Queue] = {}
        self.by_idle: dict[int, list[str]] = {}
        self.by_future: dict[int, list[str]] = {}
        self.capacity: list[float] = [0, 0, 0]
        self.gpu_memory_mib = 0
        self._journal: list[Change] = []

    def put_host(self, host: Host) -> None:
        """Add or replace a host; the tasks on a replaced one stay where they are."""
        old = self.hosts.get(host.name)
        if old is not None:
            self._unindex(old)
            self._count_capacity(old, -1)
            host.used, host.leaving, host.nominated = old.used, old.leaving, old.nominated
            host.other, host.tasks = old.other, old.tasks
            for task in host.tasks:
                task.node = host
        self.hosts[host.name] = host
        self._count_capacity(host, 1)
        self._recount(host)
        self._index(host)
        sizes = [h.gpu_memory_mib for h in self.hosts.values() if h.gpu_memory_mib]
        self.gpu_memory_mib = min(sizes, default=0)

    def drop_host(self, host: Host) -> None:
        """Forget a host that holds nothing."""
        self._unindex(host)
        self._count_capacity(host, -1)
        del self.hosts[host.name]

    def hosts_with(self, devices: int, *, future: bool) -> Iterable[Host]:
        """Ready hosts with at least that many whole GPUs free, the fullest first, then by name."""
        index = self.by_future if future else self.by_idle
        for count in sorted(index):
            if count >= devices:
                for name in index[count]:
                    yield self.hosts[name]

    def set(self, task: Task, status: Status, host: Host | None, devices: tuple[int, ...] = ()) -> None:
        """Change where the task stands; undone by `rollback` to a mark taken before."""
        self._journal.append((task, task.status, task.node, task.devices))
        self._change(task, status, host, devices)

    def mark(self) -> int:
        """A point to roll back to."""
        return len(self._journal)

    def rollback(self, mark: int) -> None:
        """Undo every change since the mark."""
        while len(self._journal) > mark:
            self._change(*self._journal.pop())

    def since(self, mark: int) -> list[Change]:
        """What was changed since the mark, oldest first, each with what it was before."""
        return self._journal[mark:]

    def settle(self) -> None:
        """What was changed so far is history now."""
        self._journal.clear()

    def amount(self, task: Task) -> Amount:
        """What the task counts against quotas: by its device's memory where it is placed, else by the smallest."""
        memory = task.node.gpu_memory_mib if task.node is not None else self.gpu_memory_mib
        return task.request.amount(memory)

    def _change(self, task: Task, status: Status, host: Host | None, devices: tuple[int, ...]) -> None:
        if task.node is not None:
            self._count(task, task.node, -1)
            del task.node.tasks[task]
        task.status, task.node, task.devices = status, host, devices
        if host is not None:
            host.tasks[task] = None
            self._count(task, host, 1)

    def _count(self, task: Task, host: Host, sign: int) -> None:
        column = _COLUMN[task.status]
        self._count_host(task, host, column, sign)
        leaving = column == _LEAVING
        amount = task.request.amount(host.gpu_memory_mib)
        job = task.job
        lent = False
        if not leaving:
            lent = max(job.active, job.active + sign) > job.wanted
            job.active += sign
            _note_running(job)
            if task.status is not Status.HELD and task.moved is None:
                job.placed += sign
        count_queues(job, amount, sign, leaving=leaving, lent=lent)

    def _count_host(self, task: Task, host: Host, column: int, sign: int) -> None:
        request = task.request
        if task.devices:
            taken = (host.used, host.leaving, host.nominated)[column]
            step = sign * request.share_of(host.gpu_memory_mib)
            for device in task.devices:
                taken[device] = taken.get(device, 0) + step
        other = host.other[column]
        other[0] += sign * request.cpu
        other[1] += sign * request.memory
        other[2] += sign
        if task.devices:
            self._reindex(host)

    def _reindex(self, host: Host) -> None:
        if not host.ready:
            return
        idle, future = host.idle_whole, host.future_whole
        self._recount(host)
        if host.idle_whole != idle:
            _shift(self.by_idle, host.name, idle, host.idle_whole)
        if host.future_whole != future:
            _shift(self.by_future, host.name, future, host.future_whole)

    def _recount(self, host: Host) -> None:
        used, leaving, nominated = host.used, host.leaving, host.nominated
        future = idle = 0
        for device in host.devices:
            if not used.get(device) and not nominated.get(device):
                future += 1
                if not leaving.get(device):
                    idle += 1
        host.idle_whole, host.future_whole = idle, future

    def _index(self, host: Host) -> None:
        if host.ready:
            insort(self.by_idle.setdefault(host.idle_whole, []), host.name)
            insort(self.by_future.setdefault(host.future_whole, []), host.name)

    def _unindex(self, host: Host) -> None:
        if host.ready:
            _discard(self.by_idle[host.idle_whole], host.name)
            _discard(self.by_future[host.future_whole], host.name)

    def _count_capacity(self, host: Host, sign: int) -> None:
        if host.ready:
            self.capacity[0] += sign * GPU * len(host.devices)
            self.capacity[1] += sign * host.cpu if host.cpu < float("inf") else 0
            self.capacity[2] += sign * host.memory if host.memory < float("inf") else 0


def _note_running(job: Job) -> None:
    if job.active:
        job.queue.running[job] = None
    else:
        job.queue.running.pop(job, None)


def count_queues(job: Job, amount: Amount, sign: int, *, leaving: bool, lent: bool) -> None:
    """Add one task's amount (or take it away) to what its queue and all ancestors hold."""
    for queue in job.queue.path:
        queue.version += 1
        for r, value in enumerate(amount):
            if not value:
                continue
            if leaving:
                queue.leaving[r] += sign * value
                continue
            queue.held[r] += sign * value
            if lent:
                queue.lent[r] += sign * value
            if not job.preemptible:
                queue.fixed[r] += sign * value


def _shift(index: dict[int, list[str]], name: str, old: int, new: int) -> None:
    _discard(index[old], name)
    insort(index.setdefault(new, []), name)


def _discard(names: list[str], name: str) -> None:
    del names[bisect_left(names, name)]
