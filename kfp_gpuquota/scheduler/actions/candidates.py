"""Which hosts can be kept for a waiting job: those on which it fits once their preemptible workers have ended.

Invariant: what is found depends on the host, the workers on it, the request and the time alone, so it is the same for
all jobs that are alike until the host changes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api.resources import capacity_of
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Host, Status, Task

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Request

_ENOUGH: Final = 16
"""Hosts that are compared for one reservation, those with most idle devices: to compare all takes long at 5,000."""
_ALL: Final = 64
"""Of so many hosts all are compared."""
_NEAR_S: Final = 86_400.0
"""An enforced end that is further away says less about when a host is free than what is idle there now."""
_MANY: Final = 1 << 20
"""Workers on one host, where nothing limits them."""


class Candidate(NamedTuple):
    """A host that has room for `workers` of the job once its preemptible workers have ended; the best one sorts first.

    `idle`: how many of the devices for them are idle now; `latest`: when the last of those that must end was started;
    `free_at`: when enough of them have ended at the latest, `inf` where that is unknown or far away.
    """

    idle: int
    latest: float
    host: Host
    workers: int
    free_at: float

    @property
    def key(self) -> tuple[int, float, str]:
        """Its order among others where no end is known."""
        return (-self.idle, self.latest, self.host.name)


_PLANNED: Final = (Status.BOUND, Status.NOMINATED)
"""Tasks that this plan has started or promised."""

Known = dict[tuple[object, ...], dict[Host, tuple[int, "Candidate | None"]]]
"""What hosts are for jobs of one kind, as found for earlier jobs of the same cycle, with the versions of the hosts."""


def candidates_for(
    ledger: Ledger, tasks: Sequence[Task], now: float, known: dict[Host, tuple[int, Candidate | None]]
) -> list[Candidate]:
    """Return enough hosts for all tasks, and some more to choose from; hosts that have not changed are `known`."""
    found: dict[Host, Candidate] = {}
    workers, enough = 0, _ENOUGH if len(ledger.hosts) > _ALL else _ALL
    for host in _in_order(ledger, shared=not tasks[0].request.whole):
        if host in found:
            continue
        version, candidate = known.get(host, (-1, None))
        if version != host.version:
            candidate = _candidate(ledger, host, tasks[0], len(tasks), now)
            known[host] = host.version, candidate
        if candidate is not None:
            found[host] = candidate
            workers += candidate.workers
            if len(found) >= enough and workers >= len(tasks):
                break
    return list(found.values())


def _in_order(ledger: Ledger, *, shared: bool) -> Iterator[Host]:
    """Yield hosts with lent devices, which come back within a step, then those with most idle devices."""
    if ledger.lent_tasks:
        lending = (queue for queue in ledger.queues.values() if queue.lent[0])
        hosts = {host for queue in lending for job in queue.running if job.lent for host in job.hosts}
        yield from sorted(hosts, key=lambda host: (-host.idle_whole, host.name))[:_ENOUGH]
    if shared:
        yield from sorted(ledger.shared_hosts, key=lambda host: host.name)
    for count in sorted(ledger.by_idle, reverse=True):
        for name in ledger.by_idle[count]:
            yield ledger.hosts[name]


def _candidate(ledger: Ledger, host: Host, task: Task, most: int, now: float) -> Candidate | None:
    """Return the host with what the job could have there, or None.

    All leave it some day but the tasks of a core, and what is held for a job that waits. What is started or promised in
    this plan does, too: else nothing could be kept for the next job behind it. The placeholders of a reservation are of
    a job without any pending task.
    """
    if not host.ready or not placement.may_use(host, task):
        return None
    request = task.request
    ending = [
        other
        for other in host.tasks
        if other.status is Status.LEAVING
        or (not other.job.core and (other.status is not Status.NOMINATED or other.job.pending))
    ]
    if not ending and request.whole and host.idle_whole < request.devices:
        return None
    staying = [other for other in host.tasks if other not in ending] if ending else list(host.tasks)
    workers = _room(host, request, staying)
    if workers < 1:
        return None
    lent = lent_on(ledger, host)
    on_loan = {device for other in lent for device in other.devices}
    share = min(request.share_of(host.gpu_memory_mib), GPU)
    if share == GPU and not on_loan and not host.shared:
        idle = host.idle_whole
    else:
        idle = sum(host.idle(device) >= share or device in on_loan for device in host.devices)
    latest = max((now if other.status in _PLANNED else other.started_at for other in ending), default=0.0)
    free_at = free_at_of(host, request, min(workers, most), now, lent)
    return Candidate(min(idle, workers * request.devices), latest, host, workers, free_at)


def _ends_by(task: Task, now: float) -> float:
    """Return when the task ends at the latest, `inf` if nothing ends it or its start is not known."""
    if task.status not in _PLANNED:
        return task.job.ends_by(now)
    if task.status is Status.NOMINATED:
        return UNLIMITED
    runs = any(other.status is Status.HELD for other in task.job.tasks.values())
    return (task.job.started_at if runs else now) + task.job.most_s


def lent_on(ledger: Ledger, host: Host) -> set[Task]:
    """Return the lent workers on the host. Of a job on several hosts none: it is open where it would lose them."""
    lent: set[Task] = set()
    for job in {task.job for task in host.tasks} if ledger.lent_tasks else ():
        if job.lent and len(job.hosts) == 1:
            held = [task for task in job.tasks.values() if task.status is Status.HELD]
            lent.update(sorted(held, key=lambda task: -task.index)[: job.lent])
    return lent


def free_at_of(host: Host, request: Request, workers: int, now: float, lent: Collection[Task]) -> float:
    """Return when so many workers fit at the latest, by the ends that are enforced; `inf` if unknown or far away."""
    staying = [other for other in host.tasks if other.status is not Status.LEAVING and other not in lent]
    timed = [other for other in staying if other.job.most_s < UNLIMITED]
    free_at = now
    for other in sorted(timed, key=partial(_ends_by, now=now)):
        if _room(host, request, staying) >= workers:
            return free_at
        free_at = max(now, _ends_by(other, now))
        if free_at > now + _NEAR_S:
            return UNLIMITED
        staying.remove(other)
    return free_at if _room(host, request, staying) >= workers else UNLIMITED


def _room(host: Host, request: Request, staying: Sequence[Task]) -> int:
    """Return how many such workers fit on the host beside those that stay."""
    most: list[float] = [host.max_tasks - len(staying)]
    if request.devices:
        most.append(_parts_left(host, request, staying) // request.devices)
    if request.cpu:
        most.append((host.cpu - sum(task.request.cpu for task in staying)) // request.cpu)
    if request.memory:
        most.append((host.memory - sum(task.request.memory for task in staying)) // request.memory)
    for resource, need in request.resources:
        taken = sum(amount for task in staying for name, amount in task.request.resources if name == resource)
        most.append((capacity_of(host.resources, resource) - taken) // need)
    room = min(most)
    return _MANY if room == UNLIMITED else int(room)


def _parts_left(host: Host, request: Request, staying: Sequence[Task]) -> int:
    """Return how many devices, or parts of them, the request could have beside those that stay."""
    if request.whole:
        used = {device for task in staying for device in task.devices}
        return len(host.devices) - len(used.intersection(host.devices))
    held = dict.fromkeys(host.devices, 0)
    for task in staying:
        for device in set(task.devices) & held.keys():
            held[device] += task.request.share_of(host.gpu_memory_mib)
    share = request.share_of(host.gpu_memory_mib)
    return sum((GPU - taken) // share for taken in held.values())
