"""What must hold after each commit of the engine, and when nothing happens any more."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Order, Phase, ReasonCode, StopPolicy
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.history import Holder
from kfp_gpuquota.cluster.local.unused_jobs import INTERVAL_S
from kfp_gpuquota.engine.expected_starts import RunTimesOfWaiting
from kfp_gpuquota.engine.job_book import Change, JobBook
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.scheduler.actions import growth
from kfp_gpuquota.scheduler.state import usage
from kfp_gpuquota.web.views.teams import tree
from tests.simulation.cluster import INSTANT_S
from tests.simulation.conditions import Conditions, line_of, stop_policy_of
from tests.simulation.gathering import Gathering, is_gathered
from tests.simulation.histories import TYPES, row_of, type_of
from tests.simulation.records import wrongly_accounted
from tests.simulation.search import fits, free_devices, left_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kfp_gpuquota.api import Job, Project, Resize
    from kfp_gpuquota.api.wire import ProjectView
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
    from kfp_gpuquota.scheduler.state.model import Job as ScheduledJob
    from tests.simulation.cluster import SimulatedCluster

EPSILON = 1e-6
USE_EPSILON_S = 0.5
MOST_LOST_S = 60.0
IDLE = re.compile(r"; (\d+)(?: of type [\w ]+)? (?:is|are) idle(?: \((\d+) more (?:is|are) promised to other jobs\))?")
HOLDS = re.compile(
    r"project (\w+)(?: \(node pool (\w+)\))? holds ([\d.]+)(?: \(and [\d.]+ promised\))? of its [a-z ]+[\d.]+"
    r"(?: \(([\d.]+) more)?"
)
STARTS = re.compile(r"starts with (\d+) GPUs? of the (\d+) requested")
FIRST_OF = re.compile(r"so the first of (\d+) such jobs starts when")
ENDED = re.compile(r"worker \d+ has ended with exit code 0")
EXPANDED = re.compile(r"expanded from (\d+) to (\d+) GPUs: (\d+) GPUs? (?:is|are) idle")


def _concerns(job: JobRecord) -> tuple[object, ...]:
    """Return what decides whether the job needs the workers that it was promised."""
    phase = job.status.phase
    grows = job.growth_failed is None
    return id(job.spec), job.intent, job.completing, phase.final, phase is Phase.SUSPENDED, grows


def contradiction(resize: Resize) -> str:
    """Return what the reason of a change of size contradicts; "" if nothing."""
    before, after, message = resize.from_gpus, resize.to_gpus, resize.reason.message
    if (found := EXPANDED.match(message)) and (int(found[1]), int(found[2])) != (before, after):
        return f"has changed from {before} to {after} because: {message!r}"
    if after == before or not message:
        return f"has changed from {before} to {after} because: {message!r}"
    if after < before and "expanded" in message:
        return f"shrinks from {before} to {after} because: {message!r}"
    if after > before and ("shrunk" in message or "was lost" in message):
        return f"grows from {before} to {after} because: {message!r}"
    return ""


def gains(job: ScheduledJob, now: float) -> bool:
    """Return whether one more worker is requested, or lent to the job if it is idle."""
    return job.active < job.wanted or growth.gains(job, growth.worth(job, now, 1.0, changes=False))


def contradictions(job: JobRecord) -> Iterator[str]:
    """Yield what the job's changes of size contradict: a worker is lost once in a run of the job."""
    yield from filter(None, map(contradiction, job.status.resizes))
    ended = Counter(r.reason.message for r in job.status.resizes if ENDED.fullmatch(r.reason.message))
    for message, times in ended.items():
        if times > job.attempt:
            yield f"has lost a worker {times} times: {message}"


class ViolationError(AssertionError):
    """What does not hold, with the time."""


@dataclass
class Invariants:
    """Watches one cluster. What is known of jobs here outlives the engine's restarts."""

    cluster: SimulatedCluster
    restarted_for: dict[tuple[str, str, int, int], int] = field(default_factory=dict)
    revoked: Counter[str] = field(default_factory=Counter)
    changed_at: dict[str, float] = field(default_factory=dict)
    exceeded: set[str] = field(default_factory=set)  # jobs that have lost their core by an update
    violations: list[ViolationError] = field(default_factory=list)
    conditions: Conditions = field(default_factory=Conditions)
    announced: dict[str, float] = field(default_factory=dict)  # when a job whose GPUs are unused is suspended
    idle_suspensions: int = 0
    commits: int = 0
    holders_changed: bool = False  # by the change that is being applied
    committed_at: float = 0.0
    _checked: int = -1

    def __post_init__(self) -> None:
        self.gathering = Gathering(self.cluster.history.defragmentation)

    def watch(self) -> None:
        """Watch the engine that was just started."""
        self.cluster.state.observe = self.before
        self.cluster.state.settled = self.after

    def fail(self, what: str) -> None:
        """Keep the violation, and raise it: a handler in between does not hide it."""
        self.violations.append(ViolationError(f"at {self.cluster.loop.time():.2f} s: {what}"))
        raise self.violations[-1]

    # Before and after each commit

    def before(self, change: Change) -> None:
        """Compare a change with the records that it changes."""
        state = self.cluster.state
        self._check_conditions(self.conditions.observe(state.jobs, change, state.clock()))
        self.holders_changed = bool(change.projects or change.workers) or any(
            job is None or uid not in state.jobs or _concerns(state.jobs[uid]) != _concerns(job)
            for uid, job in change.jobs.items()
        )
        for uid, job in change.jobs.items():
            if job is not None and uid in state.jobs and _concerns(state.jobs[uid]) != _concerns(job):
                self.changed_at[uid] = self.cluster.loop.time()
        for uid, job in change.jobs.items():
            if job is not None and uid in state.jobs:
                self._check_promise(state.jobs[uid], job, change)
        for uid, job in change.jobs.items():
            if job is not None and uid in state.jobs:
                self._check_job(state.jobs[uid], job, change)
        for worker in change.workers.values():
            old = state.workers.get(worker.worker.id)
            if old is None:
                self._check_start(worker)
                self._check_held(worker, change)
            elif worker.released and not old.released:
                self._check_release(worker, change)

    def after(self) -> None:
        """Check the records as they are now."""
        self.commits += 1
        self.committed_at = self.cluster.loop.time()
        for job in self.cluster.state.jobs.values():
            if wrong := wrongly_accounted(job, self.cluster.state.clock()):
                self.fail(wrong)
        if self.holders_changed:
            alive = list(self.cluster.alive_workers())
            self._check_devices(alive)
            self._check_stops(alive)
            self._check_limits(alive)
            self._check_views()

    def _check_conditions(self, wrong: Iterable[str]) -> None:
        for what in wrong:
            self.fail(what)

    def _check_promise(self, old: JobRecord, new: JobRecord, change: Change) -> None:
        """A promise is carried out, or revoked: by a lost node, a change of the job, or another job in its place."""
        if new.completing and set(new.promised) - set(old.promised):
            self.fail(f"{new.spec.name} is promised workers while it completes: {new.promised}")
        lost = set(old.promised) - set(new.promised)
        started = [w.worker for w in change.workers.values() if w.worker.job_uid == new.uid]
        if not lost or any(worker.id not in self.cluster.state.workers for worker in started):
            return
        self.revoked[new.uid] += 1
        changed = self.changed_at.get(new.uid, -INSTANT_S) + INSTANT_S > self.cluster.loop.time()
        if changed or self.cluster.disturbed or new.intent is not Intent.RUN:
            return
        wanted = {(promise.node, device) for promise in lost for device in promise.devices}
        others = [j for uid, j in change.jobs.items() if j is not None and uid != new.uid]
        taken = {(p.node, device) for j in others for p in j.promised for device in p.devices}
        taken |= {(w.worker.node, d) for w in change.workers.values() for d in w.worker.devices}
        if not wanted & taken and not self._leaves_no_quota(new, len(lost), change):
            self.fail(f"the promise of {new.spec.name} is revoked without a cause: {old.promised}")

    def _leaves_no_quota(self, job: JobRecord, lost: int, change: Change) -> bool:
        """Return whether what others have and are promised leaves too little of a limit for so many workers more."""
        state, spec = self.cluster.state, job.spec
        jobs = {**state.jobs, **{uid: one for uid, one in change.jobs.items() if one is not None}}
        workers = [w for w in {**state.workers, **change.workers}.values() if w.alive and not w.released]
        found = [(jobs[w.worker.job_uid].spec, w.worker.gpus) for w in workers if w.worker.job_uid in jobs]
        found += [(one.spec, one.spec.worker_gpus * len(one.promised)) for one in jobs.values()]
        for above in self._line(spec.project):
            limit = above.quota_in(spec.node_pool).limit
            used = sum(
                gpus for each, gpus in found if each.node_pool == spec.node_pool and above in self._line(each.project)
            )
            if limit is not None and used + lost * spec.worker_gpus > limit + EPSILON:
                return True
        return False

    def _check_job(self, old: JobRecord, new: JobRecord, change: Change) -> None:
        if new.attempt > old.attempt:
            workers = [w for w in change.workers.values() if w.worker.job_uid == new.uid and w.attempt == new.attempt]
            if len(workers) * new.spec.worker_gpus < new.spec.smallest:
                self.fail(f"{new.spec.name} starts with {len(workers)} workers")
            self._check_start_reason(new, len(workers) * new.spec.worker_gpus)
        if is_gathered(old, new):
            self._check_gathering(old, change)
        elif new.status.moves > old.status.moves and new.status.last_move is not None:
            self._count_restart(new, new.status.last_move.reason.beneficiary)
            self._check_move(old, new.status.last_move.reason.beneficiary)
            self._check_core(new, new.status.last_move.reason.beneficiary)
        if new.status.evictions > old.status.evictions and new.status.last_eviction is not None:
            self._count_restart(new, new.status.last_eviction.reason.beneficiary)
            drained = new.status.last_eviction.reason.code is ReasonCode.PROJECT_DRAINED
            self._check_core(new, "" if drained else new.status.last_eviction.reason.beneficiary)
        if new.status.restarts > old.status.restarts:
            self._check_charge(new, change)
        self._check_unused(old, new)
        if len(new.status.resizes) > len(old.status.resizes):
            for wrong in contradictions(new):
                self.fail(f"{new.spec.name} {wrong}")

    def _check_unused(self, old: JobRecord, new: JobRecord) -> None:
        """A job is suspended for unused GPUs only if none was used for so long, and its owner was warned before."""
        reason, rule, now = new.status.reason, self.cluster.history.idle, self.cluster.loop.time()
        if reason is None or reason.code is not ReasonCode.GPUS_UNUSED:
            return
        clock = self.cluster.state.clock()
        announced = float(reason.details.get("suspended_at", 0.0))
        if announced and announced != self.announced.get(new.uid):
            if rule is not None and announced < clock + rule.suspend_after_s - rule.warn_after_s - EPSILON:
                self.fail(f"{new.spec.name} is warned, and its owner has too little time")
            self.announced[new.uid] = announced
        if rule is None or old.suspended or not new.suspended:
            return
        times = [now - part * INTERVAL_S for part in range(int(rule.suspend_after_s / INTERVAL_S) + 1)]
        if any(self.cluster.history.uses(new.spec.name, at) for at in times):
            self.fail(f"{new.spec.name} is suspended, and has used its GPUs")
        if clock < self.announced.get(new.uid, math.inf) - EPSILON:
            self.fail(f"{new.spec.name} is suspended, and its owner was not warned in time")
        if clock - (old.status.started_at or clock) < rule.suspend_after_s - EPSILON:
            self.fail(f"{new.spec.name} is suspended, and has not run for so long since it was resumed")
        self.idle_suspensions += 1

    def _check_core(self, stopped: JobRecord, beneficiary: str) -> None:
        """Neither another job nor a drain stops one that is not preemptible; it stops when it ran below its minimum."""
        if self._is_protected(stopped) and beneficiary != stopped.uid:
            self.fail(f"{stopped.spec.name} is not preemptible, and loses its core: {stopped.status.reason}")

    def _is_protected(self, job: JobRecord) -> bool:
        """Return whether the job has a core: not if its minimum was raised beyond the guarantee while it ran."""
        if self.cluster.state.exceeds_guarantee(job.uid):
            self.exceeded.add(job.uid)
        return not job.spec.may_be_preempted and job.uid not in self.exceeded

    def _check_start_reason(self, job: JobRecord, held: int) -> None:
        """A start states the size it has and the size it asks for."""
        message = job.status.reason.message if job.status.reason is not None else ""
        found = STARTS.match(message)
        if found is None:
            return
        if (int(found[1]), int(found[2])) != (held, job.spec.gpus):
            self.fail(f"{job.spec.name} starts with {held} of {job.spec.gpus}, but {message!r}")

    def _check_move(self, moved: JobRecord, beneficiary: str) -> None:
        """A job that loses work is not moved for one that would hold more than its project's guarantee.

        One that would be stopped otherwise is: the other has a higher priority in the same project.
        """
        state = self.cluster.state
        served, started = state.jobs.get(beneficiary), moved.status.started_at
        if served is None or started is None or moved.managed or state.clock() - started <= MOST_LOST_S:
            return
        project, own = state.projects[served.spec.project], moved.spec
        if own.project == project.name and own.effective_priority < served.spec.effective_priority:
            return
        kept = (record for record in self.cluster.alive_workers() if not record.released)
        held = self._held_by_pool(kept)[project.name, served.spec.node_pool]
        needs = served.spec.smallest * min(1.0, served.spec.share_of(0))
        if (
            not state.alive_of(beneficiary)
            and held + needs > project.quota_in(served.spec.node_pool).guaranteed + EPSILON
        ):
            self.fail(f"{moved.spec.name} loses its work for {served.spec.name}, which borrows")

    def _check_gathering(self, moved: JobRecord, change: Change) -> None:
        """A job moves to gather free GPUs in the window and its budget only, not twice in a row, and unprotected."""
        state = self.cluster.state
        self._check_conditions(self.gathering.observe(state, moved, change, state.clock()))
        if self._is_protected(moved):
            self.fail(f"{moved.spec.name} is not preemptible, and moves to gather GPUs")

    def _check_charge(self, job: JobRecord, change: Change) -> None:
        """Only an end that is the job's own counts as a restart."""
        ended = [w.worker.id for w in change.workers.values() if w.worker.job_uid == job.uid and not w.alive]
        if any(self.cluster.processes.all[worker].lost for worker in ended if worker in self.cluster.processes.all):
            self.fail(f"{job.spec.name} is charged for a lost node")

    def _count_restart(self, job: JobRecord, beneficiary: str) -> None:
        """A job is restarted at most once for the next workers of its beneficiary; all that stops at once is one."""
        served = self.cluster.state.jobs.get(beneficiary)
        reason = (job.uid, beneficiary, served.next_index if served else 0, self.revoked[beneficiary])
        run = self.restarted_for.setdefault(reason, job.attempt)
        if run != job.attempt:
            self.fail(f"{job.spec.name} is restarted for {beneficiary} in its runs {run} and {job.attempt}")

    def _check_start(self, record: WorkerRecord) -> None:
        """A run of a job begins when the processes of its last run have ended."""
        for process in self.cluster.processes.all.values():
            earlier = self.cluster.state.workers.get(process.worker.id)
            of_job = process.worker.job_uid == record.worker.job_uid
            if of_job and process.alive and earlier is not None and earlier.attempt < record.attempt:
                self.fail(f"{record.worker.id} starts while {process.worker.id} of the run before still runs")

    def _check_held(self, record: WorkerRecord, change: Change) -> None:
        """In a project with a stop policy only the gang of a job that runs is completed."""
        state = self.cluster.state
        job = state.jobs.get(record.worker.job_uid)
        if job is None or stop_policy_of(state.projects, job.spec.project) is StopPolicy.NONE:
            return
        workers = {w.worker.id: w for w in state.workers_of(job.uid)} | change.workers
        own = [w for w in workers.values() if w.worker.job_uid == job.uid and w.alive and not w.released]
        news = [w for w in own if w.worker.id not in state.workers]
        if len(news) == len(own) or sum(w.worker.gpus for w in own) > job.spec.smallest:
            self.fail(f"{job.spec.name} gets {record.worker.id}, and its project is held")

    def _check_release(self, record: WorkerRecord, change: Change) -> None:
        old = self.cluster.state.jobs[record.worker.job_uid]
        job = change.jobs.get(old.uid) or old
        ending = job.intent is not Intent.RUN or job.completing or job.uid in self.cluster.requested
        if ending or self._has_failed(job):
            return
        if not job.suspended:
            self._check_kept(record, old, job)
        if not self._is_protected(job):
            return
        workers = {w.worker.id: w for w in self.cluster.state.workers_of(job.uid)} | change.workers
        left = [w for w in workers.values() if w.worker.job_uid == job.uid and w.alive and not w.released]
        if sum(w.worker.gpus for w in left) < job.spec.protected_of(job.spec.gpus):
            self.fail(f"{job.spec.name} cannot be preempted and loses a worker of its core: {job.status.reason}")

    def _check_kept(self, record: WorkerRecord, old: JobRecord, new: JobRecord) -> None:
        """No worker leaves a node for another job while its own job keeps a promise there: it would grow again.

        But while workers of the job exit that have moved, their destinations are held.
        """
        kept = set(old.promised) & set(new.promised)
        moving = any(w.released for w in self.cluster.state.alive_of(old.uid))
        if not moving and any(promise.node == record.worker.node and not promise.part for promise in kept):
            self.fail(f"{new.spec.name} loses {record.worker.id}, and keeps {kept}: {new.status.reason}")

    def _has_failed(self, job: JobRecord) -> bool:
        return any(not w.alive and w.worker.exit_code for w in self.cluster.state.workers_of(job.uid))

    def _check_devices(self, alive: list[WorkerRecord]) -> None:
        history = self.cluster.history
        recorded = (record.worker for record in alive)
        really = (process.worker for process in self.cluster.processes.all.values() if process.code is None)
        for workers in (recorded, really):
            taken: dict[tuple[str, int], float] = {}
            for worker in workers:
                for device in worker.devices:
                    where = worker.node, device
                    taken[where] = share = taken.get(where, 0.0) + worker.share
                    if share > 1 + EPSILON:
                        self.fail(f"{share:g} of device {where} is held")
        for uid in {record.worker.job_uid for record in alive}:
            spec = self.cluster.state.jobs[uid].spec
            types = {type_of(record.worker.node) for record in alive if record.worker.job_uid == uid}
            if spec.gpu_types and (len(types) > 1 or not types <= {*spec.gpu_types}):
                self.fail(f"{spec.name} accepts {spec.gpu_types}, and has {types}")
            pools = {history.pool_of(record.worker.node) for record in alive if record.worker.job_uid == uid}
            if pools != {spec.node_pool}:
                self.fail(f"{spec.name} asks for node pool {spec.node_pool!r}, and is in {pools}")

    def _check_stops(self, alive: list[WorkerRecord]) -> None:
        """All workers of a job that stops have been asked to leave: those of a gang that lost one wait for it else."""
        for record in alive:
            job = self.cluster.state.jobs[record.worker.job_uid]
            if (job.intent is not Intent.RUN or job.suspended) and not record.released:
                self.fail(f"{job.spec.name} stops ({job.intent}), but {record.worker.id} was not asked to leave")

    def _check_limits(self, alive: list[WorkerRecord]) -> None:
        state = self.cluster.state
        held = self._held_by_pool(alive)
        for (name, pool), gpus in held.items():
            limit = state.projects[name].quota_in(pool).limit
            if limit is not None and gpus > limit + EPSILON:
                self.fail(f"project {name} holds {gpus:g} of at most {limit:g} in pool {pool!r}")
        for queue in state.scheduler.ledger.queues.values():
            if queue.fixed[0] > queue.deserved[0]:
                self.fail(f"cores of project {queue.name} hold {queue.fixed[0]} of {queue.deserved[0]} guaranteed")

    def _held_by_pool(self, alive: Iterable[WorkerRecord]) -> dict[tuple[str, str], float]:
        held = defaultdict[tuple[str, str], float](float)
        for record in alive:
            spec = self.cluster.state.jobs[record.worker.job_uid].spec
            for project in self._line(spec.project):
                held[project.name, spec.node_pool] += record.worker.gpus
        return held

    def _line(self, name: str) -> list[Project]:
        """Return the project and the departments that it belongs to."""
        return line_of(self.cluster.state.projects, name)

    def _check_views(self) -> None:
        """The sums that users see equal the records."""
        state = self.cluster.state
        jobs = [state.view(uid) for uid, job in state.jobs.items() if not job.status.phase.final or state.alive_of(uid)]
        teams = state.list_projects()
        nodes = sum(share for node in state.list_nodes() for share in node.used.values())
        projects = sum(view.allocated for view in teams)
        if abs(sum(job.status.gpus for job in jobs) - nodes) > EPSILON:
            self.fail(f"jobs hold {sum(job.status.gpus for job in jobs):g} GPUs, of nodes {nodes:g} are used")
        for job in jobs:
            if not job.spec.shared and job.status.gpus - job.status.leaving_gpus > job.spec.largest:
                self.fail(f"{job.spec.name} holds {job.status.gpus} of {job.spec.largest} GPUs: {job.status.workers}")
        self._check_teams(jobs, teams)
        self._check_holders()
        final = sum(job.status.gpus for job in jobs if job.status.phase.final)
        if abs(projects + final - nodes) > EPSILON:
            self.fail(f"projects hold {projects:g} GPUs, of nodes {nodes:g} are used")

    def _check_teams(self, jobs: list[Job], teams: Sequence[ProjectView]) -> None:
        """What the page says that a team waits for is what its jobs ask for and do not hold."""
        wanted: Counter[str] = Counter()
        for job in jobs:
            if not job.status.phase.final:
                asked = job.spec.gpus * min(1.0, job.spec.share_of(0))
                for project in self._line(job.spec.project):
                    wanted[project.name] += max(0.0, asked - job.status.gpus)  # type: ignore[assignment]
        for team in tree(teams):
            if abs(team.amounts.waiting - wanted[team.name]) > EPSILON:
                self.fail(f"team {team.name} waits for {wanted[team.name]:g} GPUs, the page says {team.amounts}")

    def _check_holders(self) -> None:
        """The GPUs of each user and type, which reports add up, are those of the workers' records."""
        state, held = self.cluster.state, defaultdict[Holder, float](float)
        for record in (each for uid in state.jobs for each in state.alive_of(uid)):
            job, node = state.jobs[record.worker.job_uid], state.nodes[record.worker.node]
            holder = Holder(job.spec.project, job.submitter, node.labels.get(GPU_PRODUCT, ""))
            held[holder] += record.worker.gpus
        found = state.scheduler.held_by()
        for holder in held.keys() | found.keys():
            if abs(held[holder] - found.get(holder, 0.0)) > EPSILON:
                self.fail(f"{holder} holds {held[holder]:g} GPUs, {found.get(holder, 0.0):g} are counted")

    # At some moments

    def check(self) -> None:
        """Check what needs a plan, if anything was committed since the last time."""
        if self.commits == self._checked:
            return
        self._checked = self.commits
        plan = self.check_restart()
        self.check_reasons(plan)
        self.check_segments(plan)

    def check_segments(self, plan: scheduler.Plan) -> None:
        """A plan leaves no part of a segment of a job whose segments are whole."""
        state = self.cluster.state
        started = [(one.job, one.placements) for one in plan.bind] + [(one.job, one.add) for one in plan.resize]
        started += [(one.job, one.placements) for one in plan.nominate]
        added = Counter((uid, row_of(place.node)) for uid, places in started for place in places)
        ends = {worker for one in plan.evict for worker in one.workers}
        ends |= {worker for one in plan.resize for worker in one.remove}
        for uid, job in state.jobs.items():
            if job.spec.segment is None:
                continue
            running = [w.worker for w in state.workers_of(uid) if w.alive and not w.released]
            before = Counter(row_of(worker.node) for worker in running)
            after = Counter(row_of(worker.node) for worker in running if worker.id not in ends)
            after.update({row: count for (other, row), count in added.items() if other == uid})
            if any(n % job.spec.segment for n in after.values()) > any(n % job.spec.segment for n in before.values()):
                self.fail(f"{job.spec.name} gets parts of segments: {after}, and had {before}")

    def check_restart(self) -> scheduler.Plan:
        """A restarted engine decides what this one decides; return that."""
        live, now = self.cluster.state, self.cluster.state.clock()
        history = self.cluster.history
        half_life_s = history.usage_half_life_s
        rules = {"reserve_after_s": history.reserve_after_s, "defragmentation": history.defragmentation}
        again = scheduler.State(usage_half_life_s=half_life_s, **rules)  # type: ignore[arg-type]
        for node in live.nodes.values():
            again.apply(scheduler.NodeChanged(node))
        for project in live.projects.values():
            again.apply(scheduler.QuotaChanged(project))
        change = Change(jobs=dict(live.jobs), workers=dict(live.workers))
        for event in (*JobBook(live.nodes).scheduler_events(change), *self.cluster.store.load_past_use()):
            again.apply(event)
        if (done := self.cluster.store.load_defragmented()) is not None:
            again.apply(done)
        for state in (live.scheduler, again):
            for expected in RunTimesOfWaiting(live).changes(state):
                state.apply(expected)
        if half_life_s is not None:
            self._check_past_use(live.scheduler, again, now, half_life_s)
        decided, afresh = scheduler.plan(live.scheduler, now), scheduler.plan(again, now)
        for kind in ("bind", "resize", "evict", "move", "nominate", "promises", "waiting"):
            if getattr(decided, kind) != getattr(afresh, kind):
                self.fail(f"{kind}: {getattr(decided, kind)}, and after a restart {getattr(afresh, kind)}")
        return decided

    def _check_past_use(self, live: scheduler.State, again: scheduler.State, now: float, half_life_s: float) -> None:
        """What teams and their users have used is the same for a restarted engine."""
        for name, queue in live.ledger.queues.items():
            found, afresh = ({"": usage.used_by(one, now, half_life_s)} for one in (queue, again.ledger.queues[name]))
            users = ((queue, found), (again.ledger.queues[name], afresh)) if queue.order is Order.FAIR_USERS else ()
            for one, uses in users:
                uses |= {user: usage.used_by_user(record, now, half_life_s) for user, record in one.users.items()}
            for user in found.keys() | afresh.keys():
                if abs(found.get(user, 0.0) - afresh.get(user, 0.0)) > USE_EPSILON_S:
                    self.fail(f"{name} has used {found} GPU seconds, and after a restart {afresh}")

    def check_reasons(self, plan: scheduler.Plan) -> None:
        """The figures in the reasons of waiting jobs are those that the views show."""
        state, history = self.cluster.state, self.cluster.history
        if not plan.empty:
            return
        ready = [view for view in state.list_nodes() if view.node.ready]
        left = {view.node.name: len(view.node.devices) - len(view.used) for view in ready}
        held = self._held_by_pool(self.cluster.alive_workers())
        alike = Counter((reason.project, reason.message) for reason in plan.waiting.values())
        for uid, reason in plan.waiting.items():
            name = state.jobs[uid].spec.name
            count = alike[reason.project, reason.message]
            if "so it starts when" in reason.message and count > 1:
                self.fail(f"{count} jobs start at once: {reason.message!r}")
            if (found := FIRST_OF.search(reason.message)) and int(found[1]) != count:
                self.fail(f"{count} jobs wait for this: {reason.message!r}")
            if found := IDLE.search(reason.message):
                idle = int(found[1]) + int(found[2] or 0)
                types, pool = state.jobs[uid].spec.gpu_types or TYPES, state.jobs[uid].spec.node_pool
                usable = (node for node in left if type_of(node) in types and history.pool_of(node) == pool)
                unused = sum(left[node] for node in usable)
                if not self.cluster.lost and idle != unused:
                    self.fail(f"{name}: {unused} GPUs are unused, but {reason.message!r}")
            if found := HOLDS.search(reason.message):
                project, pool = found[1], found[2] or ""
                surplus = float(found[4] or 0)
                leaving = state.scheduler.ledger.queues[f"{project}@{pool}" if pool else project].leaving[0] / 1e6
                if abs(float(found[3]) + surplus + leaving - held[project, pool]) > EPSILON:
                    self.fail(f"{name}: project {project} holds {held[project, pool]}, but {reason.message!r}")

    def check_rest(self) -> None:
        """When nothing happens any more, no plan has anything to do and no waiting job can start."""
        state = self.cluster.state
        plan = self.check_restart()
        if not plan.empty:
            self.fail(f"the cluster does not rest: {plan}")
        held = [(r.worker.node, r.worker.devices, r.worker.share) for r in self.cluster.alive_workers()]
        free = free_devices(state.nodes, held)
        self._check_conditions(self.conditions.wrong_at_rest(state.jobs.values(), state.clock()))
        for job in state.jobs.values():
            left = left_for(job.uid, job.spec, free, plan.waiting, self.cluster.history)
            waits = job.status.phase is Phase.PENDING and job.held is None
            if waits and self._may_start(job) and fits(job.spec, left):
                self.fail(f"{job.spec.name} waits and could start: {job.status.reason}")
            policy = stop_policy_of(state.projects, job.spec.project)
            if policy is StopPolicy.HOLD_AND_DRAIN and state.wanted_of(job.uid) and not self._is_protected(job):
                self.fail(f"{job.spec.name} runs, and its project is drained")
            if (
                job.status.phase is Phase.RUNNING
                and self._may_grow(job)
                and gains(state.scheduler.jobs[job.uid], state.clock())
                and fits(job.spec, left, workers=1, beside=state.alive_of(job.uid)[0].worker.node)
            ):
                self.fail(f"{job.spec.name} could have one more worker: {job.status.reason}")

    def _may_grow(self, job: JobRecord) -> bool:
        """Return whether the job and its project's limit allow one more worker, or segment.

        Up to what it requests it may give way to a job of its project that waits, for which the guarantee is kept.
        """
        state, spec = self.cluster.state, job.spec
        held = sum(record.worker.gpus for record in state.alive_of(job.uid))
        more = spec.worker_gpus * (spec.segment or 1)
        if held + more > spec.largest or job.intent is not Intent.RUN:
            return False
        if stop_policy_of(state.projects, job.spec.project) is not StopPolicy.NONE and held >= spec.smallest:
            return False
        pending = (other for other in state.jobs.values() if other.status.phase is Phase.PENDING)
        if held < spec.gpus and any(other.spec.project == spec.project for other in pending):
            return False
        grown_at = state.scheduler.jobs[job.uid].grown_at
        if job.completing or job.growth_failed is not None or grown_at + spec.cool_down_s > state.clock():
            return False
        own = self._held_by_pool(self.cluster.alive_workers())
        return all(
            (limit := above.quota_in(spec.node_pool).limit) is None
            or own[above.name, spec.node_pool] + more <= limit + EPSILON
            for above in self._line(spec.project)
        )

    def _may_start(self, job: JobRecord) -> bool:
        """Return whether limits and, for a session, the guarantee admit its smallest size."""
        state, spec = self.cluster.state, job.spec
        project = state.projects.get(spec.project)
        if project is None or stop_policy_of(state.projects, job.spec.project) is not StopPolicy.NONE:
            return False
        size = spec.smallest * min(1.0, spec.share_of(0))
        held = self._held_by_pool(self.cluster.alive_workers())
        fixed = self._fixed_by_pool()
        return all(
            (quota.limit is None or held[where] + size <= quota.limit + EPSILON)
            and (spec.may_be_preempted or fixed[where] + size <= quota.guaranteed + EPSILON)
            for above in self._line(spec.project)
            for quota, where in [(above.quota_in(spec.node_pool), (above.name, spec.node_pool))]
        )

    def _fixed_by_pool(self) -> dict[tuple[str, str], float]:
        """Return what the cores of jobs hold, by project or department and pool."""
        own, fixed = defaultdict[str, float](float), defaultdict[tuple[str, str], float](float)
        for record in self.cluster.alive_workers():
            own[record.worker.job_uid] += record.worker.gpus
        for uid, gpus in own.items():
            job = self.cluster.state.jobs[uid]
            if self._is_protected(job):
                for above in self._line(job.spec.project):
                    fixed[above.name, job.spec.node_pool] += job.spec.protected_of(gpus)
        return fixed
