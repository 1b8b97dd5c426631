"""plan(state, now): runs one cycle on the state's ledger, reads the decisions from its journal, and rolls it back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order
from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.gc_pause import collector_paused
from kfp_gpuquota.scheduler.actions.consolidation import lost_work_s
from kfp_gpuquota.scheduler.actions.cycle import ACTIONS, Cycle
from kfp_gpuquota.scheduler.actions.decisions import Bind, Evict, Move, Nominate, Plan, Resize
from kfp_gpuquota.scheduler.actions.growth import gains, worth
from kfp_gpuquota.scheduler.explain import sentences
from kfp_gpuquota.scheduler.explain.waiting import Promised, of_several, waits
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.groups import held_back, next_tasks
from kfp_gpuquota.scheduler.state.model import GPU, Job, Status, Task

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.scheduler.actions.reservations import Reservation
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Amount, OrderKey, Queue, Shape
    from kfp_gpuquota.scheduler.state.state import State


@dataclass(slots=True)
class Outcome:
    """The changes of one cycle to one job. `hold`: placeholders that hold what was promised to leaving workers."""

    start: list[Task] = field(default_factory=list)
    nominate: list[Task] = field(default_factory=list)
    hold: list[Task] = field(default_factory=list)
    stop: list[Task] = field(default_factory=list)
    move: list[Task] = field(default_factory=list)


_DECIDE_SIZES: Final = tuple(action for action in ACTIONS if action != "defragment")
"""The actions that decide about sizes of jobs."""

Shapes = Mapping["Queue", Collection["Shape"]]
"""The shapes of waiting jobs that a plan considers, for queues with more than one plan can; others have all."""


def plan(
    state: State, now: float, actions: Sequence[str] = ACTIONS, *, strict: bool = False, shapes: Shapes | None = None
) -> Plan:
    """Return the plan for this state at `now` (seconds since the epoch). Pure: the same history gives the same plan.

    With `strict` no job overtakes another: the first job in the order that cannot be served ends the action. Waiting
    jobs of other shapes than `shapes` keep waiting, and `Plan.waiting` has no reason for them.
    """
    ledger = state.ledger
    ledger.settle()
    mark = ledger.mark()
    with collector_paused():  # over a large state a pass takes a fifth of the time and frees nothing
        try:
            return _read(state, _decide(state, now, actions, strict=strict, shapes=shapes), mark)
        finally:
            ledger.rollback(mark)


def _decide(state: State, now: float, actions: Sequence[str], *, strict: bool, shapes: Shapes | None) -> Cycle:
    cycle = Cycle(
        state.ledger,
        state.growable.values(),
        below=state.below.values(),
        emptying=state.emptying.values(),
        sheltered=state.sheltered.values(),
        promised=state.promised.values(),
        workers=state.workers,
        now=now,
        in_order=strict,
        strict=strict,
        shapes=shapes,
    )
    cycle.run(actions)
    return cycle


def why_not_larger(state: State, uid: str, now: float) -> Reason | None:
    """Return why an elastic job that runs gets no further worker now; None for another one, or if its size changes."""
    job, ledger = state.jobs.get(uid), state.ledger
    if job is None or not job.active or job.active >= job.most or job.removed or job.completing:
        return None
    ledger.settle()
    mark, size = ledger.mark(), job.active
    with collector_paused():
        try:
            cycle = _decide(state, now, _DECIDE_SIZES, strict=False, shapes=None)
            return None if job.active != size or job in cycle.victims else _why_not_larger(cycle, job)
        finally:
            ledger.rollback(mark)


def _why_not_larger(cycle: Cycle, job: Job) -> Reason:
    if job.deferred_for is not None and job.deferred_until > cycle.now:
        return job.deferred_for
    if job.halted:
        return sentences.halted(job)
    if cycle.now < (until := job.grown_at + job.cool_down_s):
        return sentences.cooling_down(job, until - cycle.now)
    ledger = cycle.ledger
    each = max(1, job.request.amount(ledger.gpu_memory_mib).gpu) / GPU
    tasks = next_tasks(job) or [Task(job, job.request, job.next_index + i) for i in range(job.segment)]
    idle = not quota.barred_by_limit(job, quota.total(ledger, tasks), future=False) and _fits_now(ledger, tasks)
    cycle.hold_reserved()
    if idle and not _fits_now(ledger, tasks):
        keeps = [one.job.name for one in cycle.reserved.values() if one.held]
        return sentences.kept_for_others(job, sorted(keeps))
    if idle and job.active >= job.wanted and not gains(job, worth(job, cycle.now, each, changes=False)):
        return sentences.trains_no_faster(job)
    reason = waits(ledger, job, tasks, _promised(cycle, ()))
    if job.active >= job.wanted:  # what is lent is kept for no other job of the queue
        return reason
    return _behind(cycle, job, quota.total(ledger, tasks), reason)


def _behind(cycle: Cycle, job: Job, amount: Amount, reason: Reason) -> Reason:
    """Return the reason with the job of its queue that this one may not pass, if there is one."""
    if (first := cycle.blocked_by(job)) is not None:
        return sentences.behind_first(reason, job, first)
    before = cycle.would_overtake(job, amount)
    return reason if before is None else sentences.behind(reason, before)


def _fits_now(ledger: Ledger, tasks: Sequence[Task]) -> bool:
    mark = ledger.mark()
    found = placement.place_all(ledger, tasks, future=False)
    ledger.rollback(mark)
    return found


def _read(state: State, cycle: Cycle, mark: int) -> Plan:
    outcomes = _outcomes(cycle.ledger, mark)
    bind: list[Bind] = []
    resize: list[Resize] = []
    evict: list[Evict] = []
    move: list[Move] = []
    nominate: list[Nominate] = []
    idle: set[str] = set()
    promises: dict[str, tuple[Placement, ...]] = {}
    victims = _victims(cycle)
    for job, outcome in sorted(outcomes.items(), key=lambda item: item[0].uid):
        before = job.active + len(outcome.stop) - len(outcome.start) - len(outcome.nominate) - len(outcome.hold)
        if outcome.stop and len(outcome.stop) == before:
            evict.append(_evict(job, outcome, cycle))
        elif outcome.start and not before:
            bind.append(Bind(job.uid, _placements(outcome.start), sentences.started(job, len(outcome.start))))
        elif outcome.start or outcome.stop:
            resize.extend(_resizes(job, outcome, before, cycle))
        move.extend(_move(task, cycle) for task in outcome.move)
        if promised := [*outcome.nominate, *outcome.hold, *outcome.move]:
            promises[job.uid] = tuple(sorted(_placements(promised), key=lambda p: (p.node, p.devices, p.part)))
        if outcome.nominate:
            nominate.append(_nominate(job, outcome.nominate))
        if not before and not outcome.start:
            idle.add(job.uid)
    cycle.hold_reserved()
    promised_now = [task for outcome in outcomes.values() for task in (*outcome.nominate, *outcome.hold)]
    waiting = _waiting(state, cycle, outcomes, promised_now)
    waiting.update((n.job, n.reason) for n in nominate if n.job in idle)
    return Plan(
        bind=tuple(bind),
        resize=tuple(resize),
        evict=tuple(evict),
        move=tuple(move),
        nominate=tuple(nominate),
        waiting=waiting,
        promises=promises,
        victims={uid: victims[uid] for uid in promises if uid in victims},
        again_at=cycle.again_at,
        defragmented=cycle.defragmented,
    )


def _victims(cycle: Cycle) -> dict[str, tuple[str, ...]]:
    """Return the workers that leave for each job, those that were asked earlier and have not exited included."""
    found: dict[str, list[str]] = {}
    for task, (job, _) in cycle.causes.items():
        if task.status is Status.LEAVING and task.job is not job:
            found.setdefault(job.uid, []).append(task.id)
    for job in cycle.promised:
        earlier = set(job.victims)
        found.setdefault(job.uid, []).extend(task.id for task in cycle.ledger.leaving if task.id in earlier)
    return {uid: tuple(sorted(set(ids))) for uid, ids in found.items() if ids}


def _outcomes(ledger: Ledger, mark: int) -> dict[Job, Outcome]:
    outcomes: dict[Job, Outcome] = {}
    copies = set()
    first: dict[Task, Status] = {}
    for task, before, _, _ in ledger.since(mark):
        first.setdefault(task, before)
        if task.moved is not None and task.status is Status.BOUND:
            copies.add(task.moved)
    for task, before in first.items():
        if task.status is before:
            continue
        outcome = outcomes.setdefault(task.job, Outcome())
        if task.moved is not None:
            (outcome.move if task.status is Status.BOUND else outcome.hold).append(task)
        elif task.status is Status.BOUND:
            outcome.start.append(task)
        elif task.status is Status.NOMINATED:
            outcome.nominate.append(task)
        elif task not in copies:
            outcome.stop.append(task)
    return outcomes


def _placements(tasks: Iterable[Task]) -> tuple[Placement, ...]:
    return tuple(_placement(task) for task in tasks)


def _placement(task: Task) -> Placement:
    if task.node is None:
        raise AssertionError(f"a task of {task.job.name} was planned without a node")
    return Placement(task.node.name, task.devices, task.group)


def _evict(job: Job, outcome: Outcome, cycle: Cycle) -> Evict:
    workers = tuple(sorted(t.id for t in outcome.stop))
    return Evict(job.uid, workers, sentences.stopped(job, cycle.causes[outcome.stop[0]]))


def _resizes(job: Job, outcome: Outcome, before: int, cycle: Cycle) -> Iterator[Resize]:
    """Yield the loss of workers, then the growth: each has its own cause, also where a worker is replaced."""
    left = before - len(outcome.stop)
    if outcome.stop:
        remove = tuple(sorted(t.id for t in outcome.stop))
        reason = sentences.shrunk(job, before, left, cycle.causes[outcome.stop[0]])
        yield Resize(job.uid, (), remove, before, left, reason)
    if outcome.start:
        after = left + len(outcome.start)
        yield Resize(job.uid, _placements(outcome.start), (), left, after, sentences.expanded(job, left, after))


def _move(copy: Task, cycle: Cycle) -> Move:
    old = copy.moved
    if old is None:
        raise AssertionError("a move has an origin")
    to, lost_s = _placement(copy), lost_work_s(copy.job, cycle.now)
    window = "" if cycle.ledger.defragmentation is None else cycle.ledger.defragmentation.window
    return Move(copy.job.uid, old.id, to, sentences.moved(old, to.node, cycle.causes[old], lost_s, window))


def _nominate(job: Job, tasks: Sequence[Task]) -> Nominate:
    leaving = [
        other
        for task, devices in [(task, set(task.devices)) for task in tasks]
        if task.node is not None
        for other in task.node.tasks
        if other.status is Status.LEAVING and not devices.isdisjoint(other.devices)
    ]
    if not leaving:  # devices are idle, but CPU, memory or the pod limit may be used up
        needs_more = [t.node for t in tasks if t.node is not None and (t.request.counted or t.node.special)]
        leaving = [other for node in needs_more for other in node.tasks if other.status is Status.LEAVING]
    if not leaving:
        # Nothing on its nodes leaves: the project's own leaving workers still count against its limit.
        leaving = [t for j in _jobs_of(tasks) for t in j.tasks.values() if t.status is Status.LEAVING]
    unique = sorted(set(leaving), key=lambda t: t.id)
    return Nominate(job.uid, _placements(tasks), tuple(t.id for t in unique), sentences.nominated(job, unique))


def _jobs_of(tasks: Sequence[Task]) -> set[Job]:
    queue = tasks[0].job.queue
    return {t.job for t in tasks} | set(queue.running)


def _promised(cycle: Cycle, tasks: Iterable[Task]) -> Promised:
    """Return what is promised to jobs by `tasks`, or reserved, and not held by them yet."""
    ledger = cycle.ledger
    tasks = [*tasks, *(task for reservation in cycle.reserved.values() for task in reservation.held)]
    amounts: dict[Queue, list[float]] = {}
    idle: set[tuple[str, int]] = set()
    for task in tasks:
        for queue in task.job.queue.path:
            found = amounts.setdefault(queue, [0.0, 0.0, 0.0])
            amounts[queue] = [a + b for a, b in zip(found, ledger.amount(task), strict=True)]
        if (host := task.node) is not None:
            idle.update((host.name, device) for device in task.devices if not any(host.taken[device][:2]))
    return Promised(amounts, Counter(node for node, _ in idle))


def _waiting(state: State, cycle: Cycle, placed: Container[Job], tasks: Sequence[Task]) -> dict[str, Reason]:
    promised = _promised(cycle, tasks)
    alike: dict[tuple[str, str], dict[str, tuple[Reason, list[str]]]] = {}  # also by user, whose use is a detail
    firsts: dict[Queue, dict[int, Job]] = {}
    reasons: dict[str, Reason] = {}
    for jobs, held_off in _of_one_shape(cycle, placed):
        delay = None if held_off is None else held_off - cycle.now
        if (reservation := cycle.reserved.get(jobs[0])) is not None and reservation.nodes:
            first = jobs.pop(0)
            reasons[first.uid] = _reserved(cycle, reservation, tasks)
            if not jobs:
                continue
        following = next_tasks(jobs[0])
        reason = waits(cycle.ledger, jobs[0], following, promised, delay)
        reason = _behind(cycle, jobs[0], quota.total(cycle.ledger, following), reason)
        user, queue = "", jobs[0].queue
        if queue.order in _RANKED:
            if queue not in firsts:
                firsts[queue] = _first_ranked(cycle, queue, placed)
            user, reason = jobs[0].user.name, _ranked(cycle, jobs[0], reason, firsts[queue].get(jobs[0].priority))
        found = alike.setdefault((reason.project, reason.message), {}).setdefault(user, (reason, []))
        found[1].extend(job.uid for job in jobs)
    for by_user in alike.values():
        number = sum(len(uids) for _, uids in by_user.values())
        for reason, uids in by_user.values():
            reasons.update(dict.fromkeys(uids, of_several(reason, number)))
    reasons.update((uid, sentences.suspended(job)) for uid, job in state.suspended.items() if not job.active)
    emptying = ((uid, job) for uid, job in state.emptying.items() if not job.active and job not in cycle.victims)
    reasons.update((uid, sentences.emptying(job)) for uid, job in emptying)
    reasons.update(_deferred(state, cycle.now))
    halted = ((uid, job) for uid, job in state.halted.items() if not job.active and job not in cycle.victims)
    reasons.update((uid, sentences.halted(job)) for uid, job in halted if held_back(job))
    return reasons


_RANKED: Final = (Order.FAIR_USERS, Order.SHORTEST)
"""The orders in which something comes before age."""


def _ranked(cycle: Cycle, job: Job, reason: Reason, first: Job | None) -> Reason:
    """Return the reason with what comes before the job's age, and with the job of the project that is first by that.

    `first` is the first waiting job of the priority (`_first_ranked`); None: age alone decides between them.
    """
    if first is None:
        return reason
    rank = cycle.rank(job)
    before = None if cycle.rank(first) >= rank else first
    if job.queue.order is Order.FAIR_USERS:
        return sentences.among_users(reason, job, rank, before)
    return reason if before is None else sentences.longer(reason, job, before)


def _alike(job: Job) -> str | float:
    """Return what the waiting jobs have in common between which age alone decides."""
    return job.user.name if job.queue.order is Order.FAIR_USERS else job.length_s


def _first_ranked(cycle: Cycle, queue: Queue, placed: Container[Job]) -> dict[int, Job]:
    """Return the waiting job that comes first before age, of each priority with several users or expected run times."""
    found: dict[int, tuple[float, OrderKey, Job]] = {}
    several: set[int] = set()
    for shape, entries in queue.waiting.items():
        left = (each for each in entries if each[1] not in placed and each[1] not in cycle.victims)
        if shape.starts and (entry := next(left, None)) is not None:
            one = (cycle.rank(entry[1]), *entry)
            before = found.setdefault(shape.priority, one)
            if _alike(before[2]) != _alike(entry[1]):
                several.add(shape.priority)
            found[shape.priority] = min(before, one)
    return {priority: found[priority][2] for priority in several}


def _reserved(cycle: Cycle, reservation: Reservation, tasks: Iterable[Task]) -> Reason:
    """Return why a job waits for which idle devices are kept: they are not promised to others."""
    reservation.drop(cycle.ledger)
    reason = waits(cycle.ledger, reservation.job, next_tasks(reservation.job), _promised(cycle, tasks))
    reservation.hold(cycle.ledger)
    return sentences.reserved(reason, reservation.nodes, reservation.starts_by)


def _of_one_shape(cycle: Cycle, placed: Container[Job]) -> Iterator[tuple[list[Job], float | None]]:
    """Yield the waiting jobs of each shape, which have one reason, and until when minimum run times hold them off."""
    for queue in cycle.ledger.queues.values():
        for shape in cycle.shapes.get(queue, queue.waiting):
            entries = queue.waiting.get(shape, ()) if shape.starts else ()
            jobs = [job for _, job in entries if not job.active and job not in placed and job not in cycle.victims]
            if jobs:
                yield jobs, cycle.held_off.get((queue, shape))


def _deferred(state: State, now: float) -> Iterator[tuple[str, Reason]]:
    for uid, job in state.deferred.items():
        if job.deferred_for is not None and job.deferred_until > now and not job.active:
            yield uid, job.deferred_for
