"""Selects the host and the devices of a task: the fullest host on which it fits, close to its job's other workers."""

from __future__ import annotations

from collections import Counter
from heapq import merge
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.resources import capacity_of
from kfp_gpuquota.scheduler.state.model import GPU, Host, Request, Status, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger


_BUSY: Final = 0.25
"""The part of a node pool's devices that must be in use before placement considers fragmentation."""

_NOTHING_FREED: Final[Mapping[str, int]] = MappingProxyType({})


def place_all(ledger: Ledger, tasks: Sequence[Task], *, future: bool) -> bool:
    """Bind (or, with `future`, nominate) every task, or change nothing."""
    if tasks[0].job.groups is not None:
        from kfp_gpuquota.scheduler.placement import domains  # noqa: PLC0415

        return domains.place(ledger, tasks, future=future)
    mark, done = ledger.mark(), 0
    apart = ledger.one_by_one or tasks[0].job.spread
    while done < len(tasks):
        host = choose_host(ledger, tasks[done], len(tasks) - done, future=future)
        if host is None:
            ledger.rollback(mark)
            return False
        done += _fill(ledger, host, tasks[: done + 1] if apart else tasks, done, future=future)
    return True


def _fill(ledger: Ledger, host: Host, tasks: Sequence[Task], done: int, *, future: bool) -> int:
    """Place the tasks from `done` on the host while they are equal and fit, at least one; return how many."""
    first, placed = tasks[done], 0
    for task in tasks[done:]:
        if placed and (task.request is not first.request or not fits(host, task, future=future)):
            break
        put(ledger, task, host, future=future)
        placed += 1
    return placed


def put(ledger: Ledger, task: Task, host: Host, *, future: bool) -> None:
    """Assign devices of the host, on which the task must fit, to the task."""
    devices = pick_devices(host, task, future=future)
    if devices is None:
        raise AssertionError(f"{host.name} has no capacity for a task of {task.job.name}")
    ledger.set(task, Status.NOMINATED if future else Status.BOUND, host, devices)


def choose_host(ledger: Ledger, task: Task, more: int, *, future: bool) -> Host | None:
    """Return the best host for the task, where `more` tasks like it (itself included) remain to be placed, or None."""
    more = 1 if ledger.one_by_one else more
    for host in _preferred(ledger, task, more, future=future):
        if fits(host, task, future=future):
            return host
    return None


def fits(host: Host, task: Task, *, future: bool) -> bool:
    """Return whether the task fits on the host now, or with `future` after leaving workers have exited."""
    return (
        host.ready
        and may_use(host, task)
        and _other_fits(host, task, future=future)
        and _resources_fit(host, task, future=future)
        and (pick_devices(host, task, future=future) is not None)
    )


def fits_at(host: Host, task: Task, devices: Sequence[int]) -> bool:
    """Return whether the task fits on these devices of the host after leaving workers have exited."""
    share = task.request.share_of(host.gpu_memory_mib)
    return (
        host.ready
        and may_use(host, task, anywhere=True)  # the domain was chosen when it was promised
        and len(devices) == task.request.devices
        and all(device in host.devices and host.future(device) >= share for device in devices)
        and _other_fits(host, task, future=True)
        and _resources_fit(host, task, future=True)
    )


def is_idle(task: Task) -> bool:
    """Return whether a nominated task could start now: no leaving worker holds what it is nominated for."""
    host = task.node
    if host is None:
        return False
    if any(sum(host.taken[device]) > GPU for device in task.devices):
        return False
    if any(sum(host.sharers.get(device, ())) > host.max_sharers for device in task.devices):
        return False
    request = task.request
    if any(sum(host.counted[name]) > capacity_of(host.resources, name) for name, _ in request.resources):
        return False
    needs = ((request.cpu, host.cpu), (request.memory, host.memory), (1, host.max_tasks))
    return all(not need or sum(column[i] for column in host.other) <= total for i, (need, total) in enumerate(needs))


def fits_without(host: Host, task: Task, others: Iterable[Task]) -> bool:
    """Return whether the task would fit on the host after leaving workers and `others` have exited."""
    freed: dict[int, int] = {}
    fewer: Counter[int] = Counter()
    other = [0.0, 0.0, 0.0]
    resources: dict[str, int] = {}
    for victim in others:
        if victim.node is host:
            for resource, amount in victim.request.resources:
                resources[resource] = resources.get(resource, 0) + amount
            share = victim.request.share_of(host.gpu_memory_mib)
            for device in victim.devices:
                freed[device] = freed.get(device, 0) + share
                fewer[device] += not victim.request.whole
            other = [other[0] + victim.request.cpu, other[1] + victim.request.memory, other[2] + 1]
    request = task.request
    if request.devices:
        share = request.share_of(host.gpu_memory_mib)
        left = (host.future(d, fewer[d]) + freed.get(d, 0) for d in host.devices)
        if sum(free >= share for free in left) < request.devices:
            return False
    if not _resources_fit(host, task, future=True, freed=resources):
        return False
    return _other_fits(host, task, future=True, freed=other)


def could_hold(host: Host, task: Task) -> bool:
    """Return False if the task does not fit on the host whatever runs there (a fast check)."""
    request = task.request
    return request.devices <= len(host.devices) and request.cpu <= host.cpu and request.memory <= host.memory


class Capacity:
    """Checks whether a task fits on a host without some other tasks; in the common case by counting devices.

    `countable`: `short` devices more of the host decide it.
    """

    def __init__(self, host: Host, task: Task) -> None:
        request = task.request
        self._host, self._task = host, task
        # A device that the node does not have any more, or that is withheld, is no capacity for others when it is free.
        known = len(host.taken) <= len(host.devices)
        self.countable = request.whole and host.countable and not request.counted and known
        self.short = request.devices - host.future_whole

    def suffices(self, others: Iterable[Task]) -> bool:
        """Return whether the task fits after these tasks have exited."""
        if not self.countable:
            return fits_without(self._host, self._task, others)
        host = self._host
        return sum(len(task.devices) for task in others if task.node is host) >= self.short


def room_elsewhere(ledger: Ledger, task: Task) -> bool:
    """Return False where the node pool has too little capacity, however other tasks are moved (a fast check)."""
    pool = task.job.queue.pool
    held = ledger.held_gpus.get(pool, 0.0)
    return held + ledger.amount(task).gpu <= ledger.capacity(pool)[0]


def may_use(host: Host, task: Task, *, anywhere: bool = False) -> bool:
    """Return whether the host is in the task's node pool, and its affinity, tolerations and domain admit the host.

    With `anywhere` the domain to which the task is limited at present is ignored.
    """
    request = task.request
    if task.within is not None and not anywhere and host not in task.within:
        return False
    if host.pool != task.job.queue.pool or (request.nodes is not None and host.name not in request.nodes):
        return False
    return host.admits(request.rules)


def usable(ledger: Ledger, task: Task) -> list[Host]:
    """Return the hosts that are ready and that the task may use, full ones included."""
    return [host for host in ledger.hosts.values() if host.ready and may_use(host, task, anywhere=True)]


def workers_on_empty(host: Host, request: Request) -> float:
    """Return how many such tasks fit on an empty host."""
    share = request.share_of(host.gpu_memory_mib)
    most = [host.max_tasks]
    if request.devices:
        # Fractions of a device for tasks with several devices may interleave; a lower bound is enough to refuse.
        each = min(GPU // share, host.max_sharers) if share <= GPU else 0
        most.append(len(host.devices) * each // request.devices if each else 0)
    most += [total // need for need, total in ((request.cpu, host.cpu), (request.memory, host.memory)) if need]
    if host.resources is not None:
        most += [capacity_of(host.resources, name) // need for name, need in request.resources]
    return min(most)


def pick_devices(host: Host, task: Task, *, future: bool) -> tuple[int, ...] | None:
    """Return devices of the host for the task: the fullest on which its share fits, idle before leaving ones."""
    count = task.request.devices
    if not count:
        return ()
    if task.request.whole and (host.future_whole if future else host.idle_whole) < count:
        return None
    if task.request.whole:
        return _whole_devices(host, count, future=future)
    share = task.request.share_of(host.gpu_memory_mib)
    free = host.future if future else host.idle
    fitting = [d for d in host.devices if free(d) >= share]
    if len(fitting) < count:
        return None
    fitting.sort(key=lambda d: (host.idle(d) < share, free(d), d))
    return tuple(sorted(fitting[:count]))


def _whole_devices(host: Host, count: int, *, future: bool) -> tuple[int, ...]:
    """Return the first whole devices that are free, idle before leaving ones."""
    idle: list[int] = []
    coming: list[int] = []
    for device in host.devices:
        used, leaving, nominated = host.taken[device]
        if not used and not nominated:
            (coming if leaving else idle).append(device)
    if not future or len(idle) >= count:
        return tuple(idle[:count])
    return tuple(sorted(idle + coming[: count - len(idle)]))


def _preferred(ledger: Ledger, task: Task, more: int, *, future: bool) -> Iterable[Host]:
    """Yield hosts in the order of preference: with workers of the job, where all of the job fits, then the others."""
    devices = task.request.devices
    if task.job.spread:
        yield from _spread(ledger, task, future=future)
        return
    if not future and not ledger.one_by_one and _mixes(ledger, task, more):
        yield from _gentle(ledger, task)
        return
    if not task.request.whole:
        yield from _packed(ledger, task, future=future)
        return
    if task.job.hosts and more <= 1:
        yield from _near(task, future=future)
    if more > 1:
        yield from ledger.hosts_with(devices * more, future=future)
    yield from ledger.hosts_with(devices, future=future) if more <= 1 else _roomiest(ledger, devices, future=future)


def _near(task: Task, *, future: bool) -> Iterable[Host]:
    """Return the hosts where the job already has workers, the fullest first."""
    return sorted(task.job.hosts, key=lambda h: (h.future_whole if future else h.idle_whole, h.name))


def _spread(ledger: Ledger, task: Task, *, future: bool) -> Iterable[Host]:
    """Return the hosts with the fewest workers of the job first, among them the emptiest."""
    taken = task.job.hosts
    count = task.request.devices if task.request.whole else 0
    hosts = list(ledger.hosts_with(count, future=future))
    return sorted(hosts, key=lambda h: (taken.get(h, 0), -(h.future_whole if future else h.idle_whole), h.name))


def _roomiest(ledger: Ledger, devices: int, *, future: bool) -> Iterable[Host]:
    """Yield hosts, the emptiest first: a gang too large for any one host is spread over as few as possible."""
    index = ledger.by_future if future else ledger.by_idle
    for count in sorted(index, reverse=True):
        if count >= devices:
            for name in index[count]:
                yield ledger.hosts[name]


def _mixes(ledger: Ledger, task: Task, more: int) -> bool:
    """Return whether placement should consider fragmentation: for a share, or a single worker on nodes with shares.

    It does not while most of the node pool is idle: ranking takes time for every host, and enough capacity is left.
    """
    if task.request.whole and (more > 1 or not ledger.shared_hosts or task.job.hosts or not task.request.devices):
        return False
    pool = task.job.queue.pool
    held = ledger.held_gpus.get(pool, 0.0) + ledger.leaving_gpus.get(pool, 0.0)
    return held > _BUSY * ledger.capacity(pool)[0]


def _gentle(ledger: Ledger, task: Task) -> Iterable[Host]:
    """Return the hosts in ascending order of fragmentation; devices are then the fullest that fit."""
    if ledger.packing is None:
        hosts = ledger.hosts_with(task.request.devices if task.request.whole else 0, future=False)
        if not any(fits(host, task, future=False) for host in hosts):
            return ()  # the mix of all jobs takes longer to count than this
        from kfp_gpuquota.scheduler.placement.packing import Packing  # noqa: PLC0415 (numpy, which most plans do not need)

        ledger.packing = Packing(ledger)
    return ledger.packing.ranked(task.request, task.job.queue.pool)


def _packed(ledger: Ledger, task: Task, *, future: bool) -> Iterable[Host]:
    """Return hosts for a share: by the fullest device on which it fits, then the fullest host.

    Only hosts with shared devices are evaluated one by one: on the others a device is either idle or in use.
    """
    index = ledger.by_future if future else ledger.by_idle
    partly = sorted(key for key in (_packing_key(host, task, future=future) for host in ledger.shared_hosts) if key[0])
    wholly = ((GPU, n * GPU, name) for n in sorted(index) if n for name in index[n] if not ledger.hosts[name].shared)
    return (ledger.hosts[name] for _, _, name in merge(partly, wholly))


def _packing_key(host: Host, task: Task, *, future: bool) -> tuple[int, int, str]:
    """Return the idle share of the fullest device that fits (0: none), that of the whole host, and the host's name."""
    free = host.future if future else host.idle
    left = [free(d) for d in host.devices]
    share = task.request.share_of(host.gpu_memory_mib)
    return (min((n for n in left if n >= share), default=0), sum(left), host.name)


def _other_fits(host: Host, task: Task, *, future: bool, freed: Sequence[float] = (0, 0, 0)) -> bool:
    request = task.request
    used, leaving, nominated = host.other
    for i, (need, total) in enumerate(((request.cpu, host.cpu), (request.memory, host.memory), (1, host.max_tasks))):
        coming = nominated[i] if future else max(leaving[i], nominated[i])
        if need and used[i] + coming - freed[i] + need > total:
            return False
    return True


def _resources_fit(host: Host, task: Task, *, future: bool, freed: Mapping[str, int] = _NOTHING_FREED) -> bool:
    """Return whether the host has enough of each other resource, with what is `freed`."""
    return all(
        need <= host.left_of(resource, future=future) + freed.get(resource, 0)
        for resource, need in task.request.resources
    )
