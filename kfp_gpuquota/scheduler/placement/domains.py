"""Placement within topology domains: hosts that have the same labels, such as a rack or a zone.

A job (or a part of it) may *require* that its tasks share a domain of some level, and *prefer* that they share a
narrower one. Domains are tried from the preferred level up to the required one, at each level the one with the least
free capacity first in which all fit, so that large domains stay free. Types of GPUs are domains with an order of
preference (`Topology.order`), which comes before the capacity. Where no domain of the preferred level can hold
all, as few of them as possible are used, those with the most free capacity first.

Tasks in segments (`state/groups.py`) are placed one segment after the other, each in one domain of the last level: in
the fullest that holds all the rest, else in the roomiest. Domains share no host, so a segment that fits in one of them
takes nothing from another one, and in no other order do more segments fit.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state import groups
from kfp_gpuquota.scheduler.state.model import GPU, Group, Host, Job, Task, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger

Domain = list[Host]
_EVERYWHERE = -1


def place(ledger: Ledger, tasks: Sequence[Task], *, future: bool) -> bool:
    """Bind (or, with `future`, nominate) every task within its domain, or change nothing."""
    job = tasks[0].job
    hosts = [host for host in ledger.hosts.values() if host.ready]
    group = job.groups or Group("", gang=job.gang)
    return _place(ledger, group, list(tasks), hosts, future=future)


def within_required(ledger: Ledger, job: Job, tasks: Sequence[Task], attempt: Callable[[Domain], bool]) -> bool:
    """Run `attempt` in one domain of the job's required level after the other until one succeeds; return whether.

    Used for reclaim, where what fits cannot be computed beforehand. The domain with the most free capacity is first.
    Only the requirement of the whole job is considered, not those of its parts.
    """
    topology = None if job.groups is None else job.groups.topology
    for task in tasks:
        task.within = None
    if topology is None or (topology.required is None and job.segments is None):
        return attempt([])
    hosts = [host for host in ledger.hosts.values() if host.ready]
    if topology.required is None:
        return attempt(hosts)
    held = groups.active_tasks(job)
    for domain in _domains(hosts, topology, topology.required, tasks[0], future=True, roomiest=True):
        if not _holds(domain, held):
            continue
        for task in tasks:
            task.within = frozenset(domain)
        if attempt(domain):
            return True
    return False


def by_segment(ledger: Ledger, tasks: Sequence[Task], hosts: Domain, attempt: Callable[[Sequence[Task]], bool]) -> bool:
    """Run `attempt` for the tasks of one segment after the other, each in one domain among the hosts; else for all.

    Return whether all succeeded. For reclaim: the domain with the most free capacity is first.
    """
    if tasks[0].job.segments is None:
        return attempt(tasks)
    return _each_segment(ledger, tasks, [hosts], attempt, future=True, reclaims=True)


class Required(NamedTuple):
    """The level that all tasks of a job must share: its label, and the domains of ready nodes, of which one has to hold
    them. `types`: the accepted types of GPUs, if the label is the type.
    """

    label: str
    types: tuple[str, ...]
    areas: list[Domain]

    @property
    def text(self) -> str:
        """The level as messages name it."""
        return f"GPU type of {', '.join(self.types)}" if self.types else self.label


def required(ledger: Ledger, task: Task) -> Required | None:
    """Return the level that all tasks of the task's job must share; None without one."""
    topology = None if task.job.groups is None else task.job.groups.topology
    if topology is None or topology.required is None:
        return None
    hosts = [host for host in ledger.hosts.values() if host.ready]
    types = topology.order if topology.required == 0 else ()
    areas = _domains(hosts, topology, topology.required, task, future=False)
    return Required(topology.levels[topology.required], types, areas)


def most_room(ledger: Ledger, tasks: Sequence[Task]) -> tuple[str, float] | None:
    """Return (level, the most tasks that fit in one required domain now); None without a required level."""
    found = required(ledger, tasks[0])
    if found is None:
        return None
    room = (sum(_capacity(host, tasks[0], future=False) for host in area) for area in found.areas)
    return found.text, max(room, default=0)


def bound_to_domain(job: Job) -> bool:
    """Return whether the job's workers must share a domain, so that they cannot be moved one by one."""
    return job.groups is not None and any(
        g.topology is not None and (g.topology.required is not None or g.topology.segment) for g in _all(job.groups)
    )


def _all(group: Group) -> Iterator[Group]:
    yield group
    for child in group.children:
        yield from _all(child)


def _place(ledger: Ledger, group: Group, tasks: list[Task], hosts: Domain, *, future: bool) -> bool:
    """Place all of the group's tasks in one of its domains among the hosts, or change nothing."""
    mine = {leaf.name for leaf in groups.leaves(group)}
    chosen = [task for task in tasks if task.group in mine]
    if not chosen:
        return True
    mark = ledger.mark()
    for areas in _areas(group, chosen, hosts, future=future):
        inside = [host for area in areas for host in area]
        if group.children:
            placed = all(_place(ledger, child, chosen, inside, future=future) for child in group.children)
        else:
            placed = _fill(ledger, chosen, areas, future=future)
        if placed:
            return True
        ledger.rollback(mark)
    return False


def _fill(ledger: Ledger, tasks: Sequence[Task], areas: Sequence[Domain], *, future: bool) -> bool:
    """Place each task in the first of the areas where it fits; return False where one fits in none."""
    if tasks[0].job.segments is not None:
        return _each_segment(ledger, tasks, areas, partial(_fill_one, ledger, future=future), future=future)
    sets = [frozenset(area) for area in areas]
    for done, task in enumerate(tasks):
        for area in sets:
            task.within = area
            host = placement.choose_host(ledger, task, len(tasks) - done if len(sets) == 1 else 1, future=future)
            if host is not None:
                placement.put(ledger, task, host, future=future)
                break
        else:
            return False
    return True


def _fill_one(ledger: Ledger, tasks: Sequence[Task], *, future: bool) -> bool:
    """Place the tasks within the hosts to which they are limited; return False where one does not fit."""
    for done, task in enumerate(tasks):
        host = placement.choose_host(ledger, task, len(tasks) - done, future=future)
        if host is None:
            return False
        placement.put(ledger, task, host, future=future)
    return True


def _each_segment(
    ledger: Ledger,
    tasks: Sequence[Task],
    areas: Sequence[Domain],
    attempt: Callable[[Sequence[Task]], bool],
    *,
    future: bool,
    reclaims: bool = False,
) -> bool:
    """Run `attempt` for what segments have lost, then for one segment after the other; return whether all succeeded."""
    job, rest = tasks[0].job, list(tasks)
    for domain, lost in groups.incomplete(job).items():
        part, rest = rest[:lost], rest[lost:]
        inside = [host for area in areas for host in area if _segment_domain(job, host) == domain]
        if part and not _tried(ledger, part, inside, attempt):
            return False
    for area in areas:
        domains = _segment_domains(area, tasks[0])
        room = {key: sum(_capacity(host, tasks[0], future=future) for host in part) for key, part in domains.items()}
        if not reclaims:
            room = {key: capacity for key, capacity in room.items() if capacity >= min(job.segment, len(rest))}
        while rest and room:
            enough = {key: capacity for key, capacity in room.items() if capacity >= len(rest) and not reclaims}
            key = min(enough or room, key=lambda key: (room[key] if enough else -room[key], key))
            if _tried(ledger, rest[: job.segment], domains[key], attempt):
                rest, room[key] = rest[job.segment :], room[key] - job.segment
            else:
                del room[key]
    return not rest


def _tried(ledger: Ledger, tasks: Sequence[Task], hosts: Domain, attempt: Callable[[Sequence[Task]], bool]) -> bool:
    """Run the attempt within these hosts; a failed one changes nothing."""
    mark = ledger.mark()
    for task in tasks:
        task.within = frozenset(hosts)
    if attempt(tasks):
        return True
    ledger.rollback(mark)
    return False


def _segment_domain(job: Job, host: Host) -> groups.SegmentDomain | None:
    assert job.segments is not None
    return groups.segment_domain(job.segments, host)


def _segment_domains(hosts: Domain, task: Task) -> dict[groups.SegmentDomain, Domain]:
    """Return the domains in which segments of the task's job may be."""
    found: dict[groups.SegmentDomain, Domain] = {}
    for host in hosts:
        if (domain := _segment_domain(task.job, host)) is not None:
            found.setdefault(domain, []).append(host)
    return found


def most_segments(ledger: Ledger, task: Task, room: Callable[[Host], float] | None = None) -> int:
    """Return the most segments of the task's job that fit in one required domain, with `room` for its tasks on a host.

    Without `room` those that fit now.
    """
    found = required(ledger, task)
    areas = [[host for host in ledger.hosts.values() if host.ready]] if found is None else found.areas
    room = room or (lambda host: _capacity(host, task, future=False))
    return max((_segments_in(area, task, room) for area in areas), default=0)


def _segments_in(area: Domain, task: Task, room: Callable[[Host], float]) -> int:
    usable = [host for host in area if placement.may_use(host, task, anywhere=True)]
    each = (sum(map(room, part)) for part in _segment_domains(usable, task).values())
    return sum(int(min(workers, 1 << 20)) // task.job.segment for workers in each)


def _areas(group: Group, tasks: Sequence[Task], hosts: Domain, *, future: bool) -> Iterable[list[Domain]]:
    """Yield the candidates for the group, best first: each is a list of domains to be filled one after the other."""
    topology = group.topology
    if topology is None:
        yield [hosts]
        return
    narrowest = topology.preferred if topology.preferred is not None else topology.required
    widest = _EVERYWHERE if topology.required is None else topology.required
    held = _held_by(group, tasks[0].job)
    levels = range(_EVERYWHERE if narrowest is None else narrowest, widest - 1, -1)
    # The first type of GPUs comes before a narrower domain of the next one.
    types = _domains(hosts, topology, 0, tasks[0], future=future) if topology.order else [hosts]
    for within, level in product(types, levels):
        for domain in _domains(within, topology, level, tasks[0], future=future):
            if (level >= 0 and not _holds(domain, held)) or not _may_hold(domain, tasks, future=future):
                continue
            if narrowest is not None and level < narrowest:
                parts = _domains(domain, topology, narrowest, tasks[0], future=future, roomiest=True)
                rest = [host for host in domain if not any(host in part for part in parts)]
                yield [*parts, rest]
            else:
                yield [domain]


def _held_by(group: Group, job: Job) -> list[Task]:
    mine = {leaf.name for leaf in groups.leaves(group)}
    return [task for task in groups.active_tasks(job) if task.group in mine]


def _holds(domain: Domain, held: Iterable[Task]) -> bool:
    return all(task.node in domain for task in held)


def _may_hold(domain: Domain, tasks: Sequence[Task], *, future: bool) -> bool:
    """Return False where equal tasks certainly do not all fit (a fast check by count)."""
    if any(task.request is not tasks[0].request and task.request != tasks[0].request for task in tasks):
        return True
    return sum(_capacity(host, tasks[0], future=future) for host in domain) >= len(tasks)


def _domains(
    hosts: Domain, topology: Topology, level: int, task: Task, *, future: bool, roomiest: bool = False
) -> list[Domain]:
    """Return the domains of a level, sorted at each wider level by free capacity, the least first (or the most).

    Those of a label with an order of preference are in that order.
    """
    found = [hosts]
    for number, key in enumerate(topology.levels[: level + 1]):
        listed = [_parts(domain, key, task, future=future) for domain in found]
        if number == 0 and topology.order:
            rank = {value: place for place, value in enumerate(topology.order)}
            chosen = [
                sorted((p for p in parts if p[0].labels[key] in rank), key=lambda p: rank[p[0].labels[key]])
                for parts in listed
            ]
        else:
            chosen = [parts[::-1] for parts in listed] if roomiest else listed
        found = [part for parts in chosen for part in parts]
    return found


def _parts(domain: Domain, key: str, task: Task, *, future: bool) -> list[Domain]:
    by_value: dict[str, Domain] = {}
    for host in domain:
        value = host.labels.get(key)
        if value is not None:
            by_value.setdefault(value, []).append(host)
    capacity = {value: sum(_capacity(host, task, future=future) for host in part) for value, part in by_value.items()}
    return [by_value[value] for value in sorted(by_value, key=lambda value: (capacity[value], value))]


def _capacity(host: Host, task: Task, *, future: bool) -> float:
    """Return an upper bound of how many tasks like this one fit on the host."""
    request = task.request
    if not placement.may_use(host, task, anywhere=True):
        return 0
    if request.whole and request.devices:
        workers: float = (host.future_whole if future else host.idle_whole) // request.devices
    elif request.devices:
        share, free = request.share_of(host.gpu_memory_mib), host.future if future else host.idle
        most = host.max_sharers
        workers = sum(min(most, free(d) // share) for d in host.devices) // request.devices if share <= GPU else 0
    else:
        workers = host.max_tasks
    return workers
