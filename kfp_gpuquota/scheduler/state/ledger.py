"""The ledger: the only module that counts the devices of tasks and the amounts of queues, with undo.

A plan is computed on the real ledger and rolled back, so that the cost of a cycle grows with its changes, not with the
size of the cluster. Rejected: copying the cluster for each attempt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.scheduler.state.model import UNLIMITED, Amount, Host, Job, Queue, Request, Status, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api.defragmentation import Defragmentation

Change = tuple[Task, Status, Host | None, tuple[int, ...]]

RESERVE_AFTER_S: Final = 1800.0
_USED, _LEAVING, _NOMINATED = 0, 1, 2
_COLUMN = {Status.HELD: _USED, Status.BOUND: _USED, Status.NOMINATED: _NOMINATED, Status.LEAVING: _LEAVING}


class Packing(Protocol):
    """Ranks hosts by fragmentation; implemented by `placement.packing`."""

    def ranked(self, request: Request, pool: str) -> Iterator[Host]:
        """Return hosts with enough devices, CPU and memory for the request, the best first."""


class Ledger:
    """Hosts, queues and the tasks on them. `by_idle[n]` and `by_future[n]` are names of hosts with n free whole GPUs.

    `half_life_s`: the half-life of over-quota usage in fair shares; None: usage does not count. `reclaim_shelter_s`:
    the longest time for which a minimum run time protects over-quota workers from reclaim. `reserve_after_s`: how long
    an entitled job waits until what it needs is kept for it. Without `moves` no job is moved to make room. In the
    window of `defragmentation` jobs are moved to gather free GPUs; `defragmented` is when a plan last looked for such
    moves, and the GPU-seconds of work that those of that window have cost. `held_gpus` and `leaving_gpus` are
    micro-GPUs by node pool, `lent_tasks` counts tasks above what their job requests.
    `touched_queues` lists the queues whose tasks changed since the ledger was settled. `state` identifies what is held:
    after a rollback it is what it was. `epoch` counts changes of hosts by which a task that no host can hold may become
    one that fits; `changed_hosts` are the names of hosts whose copies in `empty_nodes` (placement/empty_nodes.py) are
    older. `packing`: the ranking for shares, during a plan. `one_by_one`: each task of a gang is packed by itself, and
    shares onto the fullest device, as KAI-Scheduler does, instead of close to the others and with the least
    fragmentation.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.queues: dict[str, Queue] = {}
        self.by_idle: dict[int, list[str]] = {}
        self.by_future: dict[int, list[str]] = {}
        self.totals: dict[str, list[float]] = {}
        self.boundless: dict[str, list[int]] = {}
        self.special = 0
        self.one_by_one = False
        self.half_life_s: float | None = None
        self.reclaim_shelter_s = UNLIMITED
        self.reserve_after_s = RESERVE_AFTER_S
        self.moves = True
        self.defragmentation: Defragmentation | None = None
        self.defragmented = (0.0, 0.0)
        self.packing: Packing | None = None
        self.empty_nodes: object | None = None
        self.changed_hosts: dict[str, None] = {}
        self.gpu_memory_mib = 0
        self.by_size: dict[int, int] = {}
        self.leaving: dict[Task, None] = {}
        self.shared_hosts: dict[Host, None] = {}
        self.touched_hosts: list[Host] = []
        self.touched_queues: list[Queue] = []
        self.held_gpus: dict[str, float] = {}
        self.leaving_gpus: dict[str, float] = {}
        self.lent_tasks = 0
        self.epoch = 0
        self.state = 0
        self._last_state = 0
        self._journal: list[Change] = []
        self._states: list[int] = []

    def put_host(self, host: Host) -> None:
        """Add or replace a host; the tasks on a replaced host keep their devices."""
        old = self.hosts.get(host.name)
        held: list[tuple[Task, Status, tuple[int, ...]]] = []
        if old is not None:
            if old.gpu_memory_mib != host.gpu_memory_mib:  # what requests for memory count as changes with it
                held = [(task, task.status, task.devices) for task in old.tasks]
                for task, _, _ in held:
                    self._change(task, Status.PENDING, None, ())
            self._unindex(old)
            self._count_capacity(old, -1)
            host.taken, host.other, host.tasks = old.taken, old.other, old.tasks
            host.counted, host.sharers = old.counted, old.sharers
            host.shared = old.shared
            self.shared_hosts.pop(old, None)
            self._note_shared(host)
            for task in host.tasks:
                task.node = host
                task.job.hosts[host] = task.job.hosts.pop(old, 0) or task.job.hosts[host]
        self.epoch += old is None or _offers_more(host, old)
        self._note_changed(host)
        self.hosts[host.name] = host
        self._count_capacity(host, 1)
        self._recount(host)
        self._index(host)
        self._note_memory(host, old)
        for task, status, devices in held:
            self._change(task, status, host, devices)

    def _note_changed(self, host: Host) -> None:
        if self.empty_nodes is not None:
            self.changed_hosts[host.name] = None

    def _note_memory(self, host: Host, old: Host | None) -> None:
        """Update the memory of the smallest device; all hosts are searched only when a host that had it changes."""
        sizes: Iterable[int] = (self.gpu_memory_mib, host.gpu_memory_mib)
        if old is not None and old.gpu_memory_mib == self.gpu_memory_mib:
            sizes = (other.gpu_memory_mib for other in self.hosts.values())
        self.gpu_memory_mib = min((size for size in sizes if size), default=0)

    def drop_host(self, host: Host) -> None:
        """Remove a host without tasks."""
        self._note_changed(host)
        self._unindex(host)
        self._count_capacity(host, -1)
        del self.hosts[host.name]

    def capacity(self, pool: str = "") -> Amount:
        """Return the sum of the ready hosts of a node pool; unlimited where a host does not report the resource."""
        totals, boundless = self.totals.get(pool, [0.0] * 3), self.boundless.get(pool, [0] * 3)
        return Amount(*(UNLIMITED if n else total for n, total in zip(boundless, totals, strict=True)))

    def roots(self, pool: str) -> list[Queue]:
        """Return the queues of a node pool that have no parent."""
        return [queue for queue in self.queues.values() if queue.parent is None and queue.pool == pool]

    @property
    def has_waiting(self) -> bool:
        """Return whether a job waits in any queue."""
        return any(queue.waiting for queue in self.queues.values())

    @property
    def pools(self) -> list[str]:
        """The node pools that have queues."""
        return sorted({queue.pool for queue in self.queues.values()})

    @property
    def any_idle(self) -> bool:
        """Whether a ready host has an idle whole GPU."""
        return any(names for count, names in self.by_idle.items() if count)

    def idle_gpus(self) -> dict[str, int]:
        """Return the number of idle whole GPUs of ready hosts by node pool."""
        found: dict[str, int] = {}
        for count, names in self.by_idle.items():
            for name in names if count else ():
                pool = self.hosts[name].pool
                found[pool] = found.get(pool, 0) + count
        return found

    def hosts_with(self, devices: int, *, future: bool) -> Iterable[Host]:
        """Yield ready hosts with at least that many free whole GPUs, the fullest first, then by name."""
        index = self.by_future if future else self.by_idle
        for count in sorted(index):
            if count >= devices:
                for name in index[count]:
                    yield self.hosts[name]

    def set(self, task: Task, status: Status, host: Host | None, devices: tuple[int, ...] = ()) -> None:
        """Change the status and the devices of the task; `rollback` to an earlier mark undoes it."""
        self._journal.append((task, task.status, task.node, task.devices))
        self._states.append(self.state)
        self._change(task, status, host, devices)
        self._last_state += 1
        self.state = self._last_state

    def mark(self) -> int:
        """Return a point to roll back to."""
        return len(self._journal)

    def rollback(self, mark: int) -> None:
        """Undo every change since the mark."""
        while len(self._journal) > mark:
            self._change(*self._journal.pop())
            self.state = self._states.pop()

    def since(self, mark: int) -> list[Change]:
        """Return the changes since the mark, oldest first, each with the values before it."""
        return self._journal[mark:]

    def settle(self) -> None:
        """Make all changes so far permanent."""
        self._journal.clear()
        self._states.clear()
        self.touched_hosts.clear()
        self.touched_queues.clear()
        self.packing = None

    def amount(self, task: Task) -> Amount:
        """Return what the task counts against quotas, by the memory of its device, or of the smallest if not placed."""
        memory = task.node.gpu_memory_mib if task.node is not None else self.gpu_memory_mib
        return task.request.amount(memory)

    def _change(self, task: Task, status: Status, host: Host | None, devices: tuple[int, ...]) -> None:
        before, old = task.node, _COLUMN.get(task.status)
        stays = before is host and task.devices == devices
        if before is not None and not stays:
            self._count_host(task, before, old, None)
            del before.tasks[task]
        if old is not None:
            self._count_job(task, before, old, -1)
        new = _COLUMN.get(status)
        if old == _LEAVING:
            del self.leaving[task]
        if new == _LEAVING:
            self.leaving[task] = None
        task.status, task.node, task.devices = status, host, devices
        if host is not None:
            if not stays:
                host.tasks[task] = None
            self._count_host(task, host, old if stays else None, new)
        if new is not None:
            self._count_job(task, host, new, 1)

    def _count_job(self, task: Task, host: Host | None, column: int, sign: int) -> None:
        job, lent, fixed = task.job, False, False
        leaving = column == _LEAVING
        if not leaving:
            number = job.active + (sign > 0)
            lent, fixed = number > job.wanted, number <= job.core
            job.active += sign
            if job.active == (sign > 0):
                _note_running(job, sign)
            if task.status is not Status.HELD and task.moved is None:
                job.placed += sign
        amount = task.request.amount(0 if host is None else host.gpu_memory_mib)
        job.user.occupied += sign * amount.gpu
        if not leaving and not lent:
            job.user.held += sign * amount.gpu
        in_pool, pool = (self.leaving_gpus if leaving else self.held_gpus), job.queue.pool
        in_pool[pool] = in_pool.get(pool, 0.0) + sign * amount.gpu
        self.lent_tasks += sign * lent
        self.touched_queues.append(job.queue)
        count_queues(job, amount, sign, leaving=leaving, lent=lent, fixed=fixed)

    def _count_host(self, task: Task, host: Host, old: int | None, new: int | None) -> None:
        """Count the task in column `new` instead of `old`; None: not on the host."""
        host.version += 1
        self.touched_hosts.append(host)
        request = task.request
        if old is not None:
            _count_other(host, old, request, -1)
        if new is not None:
            _count_other(host, new, request, 1)
        if (old is None) != (new is None):
            _note_present(task, host, 1 if old is None else -1)
            if not request.whole:
                self._note_shared(host)
        if task.devices:
            _count_devices(host, task.devices, request.share_of(host.gpu_memory_mib), old, new)
            if not request.whole:
                _count_sharers(host, task.devices, old, new)
            self._reindex(host)

    def _note_shared(self, host: Host) -> None:
        if host.shared:
            self.shared_hosts[host] = None
        else:
            self.shared_hosts.pop(host, None)

    def _reindex(self, host: Host) -> None:
        if not host.ready:
            return
        idle, future = host.filed
        if host.idle_whole != idle:
            _shift(self.by_idle, host.name, idle, host.idle_whole)
        if host.future_whole != future:
            _shift(self.by_future, host.name, future, host.future_whole)
        host.filed = (host.idle_whole, host.future_whole)

    def _recount(self, host: Host) -> None:
        future = idle = 0
        for device in host.devices:
            used, leaving, nominated = host.taken.setdefault(device, [0, 0, 0])
            if not used and not nominated:
                future += 1
                idle += not leaving
        host.idle_whole, host.future_whole = idle, future

    def _index(self, host: Host) -> None:
        if host.ready:
            host.filed = (host.idle_whole, host.future_whole)
            insort(self.by_idle.setdefault(host.idle_whole, []), host.name)
            insort(self.by_future.setdefault(host.future_whole, []), host.name)

    def _unindex(self, host: Host) -> None:
        if host.ready:
            _discard(self.by_idle[host.idle_whole], host.name)
            _discard(self.by_future[host.future_whole], host.name)

    def _count_capacity(self, host: Host, sign: int) -> None:
        if host.ready:
            size = len(host.devices)
            self.by_size[size] = self.by_size.get(size, 0) + sign
            self.special += sign * host.special
            totals = self.totals.setdefault(host.pool, [0.0] * 3)
            boundless = self.boundless.setdefault(host.pool, [0] * 3)
            for r, value in enumerate((host.gpus, host.cpu, host.memory)):
                if value < UNLIMITED:
                    totals[r] += sign * value
                else:
                    boundless[r] += sign


def _count_other(host: Host, at: int, request: Request, sign: int) -> None:
    column = host.other[at]
    for resource, amount in request.resources:
        host.counted.setdefault(resource, [0, 0, 0])[at] += sign * amount
    if request.cpu or request.memory:
        column[0] += sign * request.cpu
        column[1] += sign * request.memory
    column[2] += sign


def _note_present(task: Task, host: Host, sign: int) -> None:
    """Update the host's count of tasks on shared devices, and the job's count of tasks by host."""
    if task.devices and not task.request.whole:
        host.shared += sign
    hosts = task.job.hosts
    hosts[host] = hosts.get(host, 0) + sign
    if not hosts[host]:
        del hosts[host]


def _count_devices(host: Host, devices: tuple[int, ...], share: int, old: int | None, new: int | None) -> None:
    """Change the columns of the devices, and the host's counts of idle and future whole devices."""
    taken, present = host.taken, host.devices
    futures = idles = 0
    for d in devices:
        cell = taken.get(d) or taken.setdefault(d, [0, 0, 0])
        used, leaving, nominated = cell
        was = not (used or nominated)
        was_idle = was and not leaving
        if old is not None:
            cell[old] -= share
        if new is not None:
            cell[new] += share
        if d in present:
            used, leaving, nominated = cell
            now = not (used or nominated)
            futures += now - was
            idles += (now and not leaving) - was_idle
    host.future_whole += futures
    host.idle_whole += idles


def _count_sharers(host: Host, devices: tuple[int, ...], old: int | None, new: int | None) -> None:
    for device in devices:
        cell = host.sharers.setdefault(device, [0, 0, 0])
        if old is not None:
            cell[old] -= 1
        if new is not None:
            cell[new] += 1


def _note_running(job: Job, sign: int) -> None:
    """Add a job to its queue's running ones, or remove it, and from the count by priority of those that may lose
    workers.
    """
    queue = job.queue
    if sign > 0:
        queue.running[job] = None
    else:
        queue.running.pop(job, None)
    if not job.core or job.most > job.gang:
        queue.priorities[job.priority] = queue.priorities.get(job.priority, 0) + sign


def count_queues(job: Job, amount: Amount, sign: int, *, leaving: bool, lent: bool, fixed: bool) -> None:
    """Add one task's amount, times `sign`, to its queue and all ancestors."""
    gpu, cpu, memory = amount
    for queue in job.queue.path:
        queue.version += 1
        columns = [queue.leaving] if leaving else [queue.held]
        if lent:
            columns.append(queue.lent)
        if fixed:
            columns.append(queue.fixed)
        for column in columns:
            column[0] += sign * gpu
            if cpu:
                column[1] += sign * cpu
            if memory:
                column[2] += sign * memory


def _shift(index: dict[int, list[str]], name: str, old: int, new: int) -> None:
    _discard(index[old], name)
    insort(index.setdefault(new, []), name)


def _discard(names: list[str], name: str) -> None:
    del names[bisect_left(names, name)]


def _offers_more(host: Host, old: Host) -> bool:
    """Return whether a task that could not use the host before may be able to."""
    kind = host.labels, host.taints, host.pool, host.devices, host.gpu_memory_mib
    if kind != (old.labels, old.taints, old.pool, old.devices, old.gpu_memory_mib):
        return True
    more = host.cpu > old.cpu or host.memory > old.memory or host.max_tasks > old.max_tasks
    more = more or host.max_sharers > old.max_sharers or (host.ready and not old.ready)
    return more or (host.resources != old.resources and _has_more(host.resources, old.resources))


def _has_more(resources: dict[str, int] | None, old: dict[str, int] | None) -> bool:
    if resources is None or old is None:
        return resources is None
    return any(amount > old.get(name, 0) for name, amount in resources.items())
