"""The real controller above simulated nodes and kubelets: the same histories, played as objects of an API server.

Jobs are ElasticJobs; of some, kube-scheduler checks more than the plan does, so that their pods are not pinned.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Device, Kind, Node, Phase, StopPolicy
from kfp_gpuquota.cluster.kubernetes.client.writes import status_writer
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import as_written
from kfp_gpuquota.cluster.kubernetes.quota.quotas import quota_spec
from tests.kubernetes import detached as watches
from tests.kubernetes.twin_world import EPOCH, World, plan_of, records_of
from tests.simulation import histories as h
from tests.simulation import trainings
from tests.simulation.conditions import Conditions, stop_policy_of
from tests.simulation.controller import SimulatedController
from tests.simulation.gathering import Gathering, is_gathered
from tests.simulation.invariants import EPSILON, ViolationError, contradictions, gains
from tests.simulation.kubelets import JobHistory, Kubelets, job_of
from tests.simulation.loop import SimulatedLoop
from tests.simulation.records import facts_of, only_in, wrongly_accounted
from tests.simulation.running import no_tracebacks
from tests.simulation.search import fits, free_devices, left_for
from tests.simulation.trainings import TICK_S, Pace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.engine.job_book import Change
    from kfp_gpuquota.engine.records import JobRecord
    from tests.kubernetes.detached import Object

REST_S = 150.0
QUIET_S = 65.0
"""How long workers may take to leave, at most."""
SETTLED_S = 30.0
"""Longer than the cool-down after a change of size, of which a restarted controller does not know."""
COLLECTED_S = 1.0
PLANNED_S = 0.5
"""A controller that has just started has planned, and written its promises."""
UNPINNED_EVERY = 7
"""Of each seventh job kube-scheduler checks more than the plan does."""


@dataclass
class SimulatedKubernetes:
    """The world, its kubelets, and what must hold after each change of a pod."""

    history: h.History
    happened: int = 0
    violations: list[ViolationError] = field(default_factory=list)
    conditions: Conditions = field(default_factory=Conditions)
    records: dict[str, JobRecord] = field(default_factory=dict)  # at the end

    def __post_init__(self) -> None:
        self.loop = cast("SimulatedLoop", asyncio.get_running_loop())
        self.gathering = Gathering(self.history.defragmentation)
        self.world = _World(self)
        self.kubelets = Kubelets(self.loop, random.Random(self.history.seed), self.world, self._count)
        self.jobs = self.kubelets.jobs
        self.kubelets.nodes |= {f"n{i}": gpus for i, gpus in enumerate(self.history.nodes)}
        self.controller: SimulatedController | None = None
        self._replaced: asyncio.Future[None] = self.loop.create_future()
        self._replaced.set_result(None)
        for name in self.kubelets.nodes:
            self._put_node(name)
        for project in self.history.projects:
            self._put_quota(project)
        rules: dict[str, Any] = {"reserveAfterSeconds": self.history.reserve_after_s}
        if (rule := self.history.defragmentation) is not None:
            rules["defragmentation"] = {
                "window": rule.window,
                "timeZone": rule.time_zone,
                "budgetGpuMinutes": rule.budget_gpu_minutes,
                "maxGpuMinutesPerGpu": rule.max_gpu_minutes_per_gpu,
                "minAgeSeconds": rule.min_age_s,
            }
        if self.history.usage_half_life_s is not None:
            rules["usageHalfLifeSeconds"] = self.history.usage_half_life_s
        self.world.put(watches.POLICIES, {"metadata": {"name": "default", "uid": "rules"}, "spec": rules})

    def fail(self, what: str) -> None:
        """Keep the violation: the controller's own handlers do not hide it."""
        self.violations.append(ViolationError(f"at {self.loop.time():.2f} s: {what}"))

    def _count(self) -> None:
        self.happened += 1

    async def play(self) -> None:
        """Play the history, wait until nothing happens any more, and check what must hold then."""
        await self._start()
        self.loop.call_later(TICK_S, self._tick)
        for after_s, happening in self.history.happenings:
            if after_s:
                await asyncio.sleep(after_s)
            await self._replaced
            await self._happen(happening)
        await asyncio.sleep(REST_S)
        await self._replaced
        await self._until_exited()
        await self._until_written()
        self._check_rest()
        await self._check_restart()
        assert self.controller is not None
        self.records = {job.spec.name: job for job in _jobs(self.controller)}
        await self.controller.stop()
        if self.violations:
            raise self.violations[0]

    async def _until_exited(self) -> None:
        """Return when those workers are gone that are to leave, and what follows is done: a job may wait for them."""
        until, quiet_s = self.loop.time() + QUIET_S, 0.0 if self._leaving() else SETTLED_S
        while quiet_s < SETTLED_S and self.loop.time() < until:
            await asyncio.sleep(1.0)
            quiet_s = 0.0 if self._leaving() else quiet_s + 1.0

    def _leaving(self) -> bool:
        assert self.controller is not None
        return any(one.released and one.alive for one in self.controller.controller.elastic.book.workers.values())

    async def _until_written(self) -> None:
        """Return when the API server has all that the controller has decided: then it may end at any moment."""
        while self._writes():
            await asyncio.sleep(0.1)

    def _writes(self) -> bool:
        """Return whether something is not written yet, or the controller ends and another one follows."""
        assert self.controller is not None
        controller, ends = self.controller.controller, (self.controller.connection.asks or 0) < 0
        soon = self.loop.time() + status_writer.QUIET_S  # later ones show progress only, without end
        waits = any(timer.when() <= soon for timer in controller.elastic.statuses._dirty.values())
        return waits or bool(controller._writer._tasks) or ends or not self._replaced.done()

    async def _start(self) -> None:
        exist = {job["metadata"]["name"] for job in self.world.objects[watches.JOBS].values()}
        self.conditions.deleted(self.jobs.keys() - exist)
        self.controller = SimulatedController(self.world, self.fail, self.conditions, self._check_gathering)
        self.world.twin = self.controller  # type: ignore[assignment]
        await self.controller.list(self.world)
        self.kubelets.trainings.engine_started(self.controller.membership)

    def _tick(self) -> None:
        self.loop.call_later(TICK_S, self._tick)
        self.kubelets.trainings.tick()

    # What happens

    async def _happen(self, happening: h.Any_) -> None:
        self.happened += 1
        match happening:
            case h.Submit(spec, pace, steps, lease_s):
                lease = {"lease": {"holder": "nobody", "durationSeconds": lease_s}} if lease_s else {}
                self._submit(spec, Pace(*pace), lease)
                if steps is not None:
                    self.kubelets.trainings.finished_steps[spec.name] = steps
            case h.SetQuota(project):
                self._put_quota(project)
            case h.Delete(chosen):
                for name in {name for name in map(self._job, chosen) if name}:
                    await asyncio.sleep(0.05)
                    self._delete(name)
            case h.Suspend(number) | h.Resume(number) if name := self._job(number):
                self._change(name, suspend=isinstance(happening, h.Suspend))
            case h.Update(number, low, _, priority) if name := self._job(number):
                self._change(name, priority=(10, 60, 90)[(low - 1) % 3] if priority is None else priority)
            case h.Restart(away_s, loses):
                await self._restart(away_s, loses)
            case h.Kill(asks):
                assert self.controller is not None
                self.controller.connection.asks, self.controller.connection.ended = asks, self._killed
            case _:
                self._fault(happening)

    def _killed(self) -> None:
        self._replaced = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        """Start another controller at once; it keeps what this one has promised, and stored."""
        assert self.controller is not None
        decided, stored = self.controller.book.promised, self._stored_promises()
        if any(self.jobs[job_of(pod)].touched for _, _, pod in self.kubelets.holders()):
            stored = {}  # what a user has deleted or suspended may be what leaves
        stored = {job: found for job, found in stored.items() if len(decided.get(job, ())) == len(found)}
        await self._restart(0.0)
        happened = self.happened
        await asyncio.sleep(PLANNED_S)
        kept = self._stored_promises()
        jobs = self.controller.book.jobs
        for job, placements in stored.items() if happened == self.happened else ():
            waits = job in jobs and not self.controller.book.alive_of(job) and not jobs[job].suspended
            if waits and kept.get(job) != placements:
                self.fail(f"the next controller drops the promise of {job}: {placements}")

    def _stored_promises(self) -> dict[str, Any]:
        """Return the placements promised by job for which workers leave, as the quotas' status has them."""
        quotas = self.world.objects[watches.QUOTAS].values()
        found = [promise for quota in quotas for promise in quota.get("status", {}).get("promises", ())]
        return {promise["job"]: promise["placements"] for promise in found if promise.get("victims")}

    async def _restart(self, away_s: float, loses: int | None = None) -> None:
        assert self.controller is not None
        self.world.twin = None
        self.kubelets.trainings.engine_stopped()
        await self.controller.stop()
        if loses is not None:
            self._fault(h.LoseNode(loses, 0.0))
        await asyncio.sleep(away_s)
        await self._start()

    def _fault(self, happening: h.Any_) -> None:
        match happening:
            case h.Crash(number, code) if running := self.kubelets.running():
                self.kubelets.fail(running[number % len(running)], code)
            case h.Silence(number):
                self.kubelets.silence(number)
            case h.LoseNode(number, returns_after_s):
                nodes = list(self.kubelets.nodes)
                self._lose_node(nodes[number % len(nodes)], returns_after_s)

    def _submit(self, spec: JobSpec, pace: Pace, lease: Object) -> None:
        pod: dict[str, Any] = {"containers": [{"name": "main", "image": "none", "command": ["works"]}]}
        if int(spec.name[1:]) % UNPINNED_EVERY == 2:
            pod["topologySpreadConstraints"] = [{"whenUnsatisfiable": "DoNotSchedule"}]
        meta = {"name": spec.name, "namespace": spec.project, "uid": spec.name, "generation": 1, "labels": spec.labels}
        if spec.begin_at is not None:
            spec = msgspec.structs.replace(spec, begin_at=spec.begin_at - trainings.EPOCH + EPOCH)
        self.jobs[spec.name] = JobHistory(spec, pace)
        fields = {**as_written(spec), **lease, "template": {"spec": pod}}
        self.world.put(watches.JOBS, {"metadata": meta, "spec": fields})

    def _job(self, number: int) -> str:
        names = [job["metadata"]["name"] for job in self.world.objects[watches.JOBS].values()]
        return names[number % len(names)] if names else ""

    def _delete(self, name: str) -> None:
        self.jobs[name].touched = True
        self.world.drop(watches.JOBS, f"{self.jobs[name].spec.project}/{name}")
        self.loop.call_later(COLLECTED_S, self._collect, name)

    def _collect(self, name: str) -> None:
        """Delete the pods of a deleted job, as the garbage collector does, also while no controller runs."""
        for key, pod in self.kubelets.workers():
            if job_of(pod) == name and "deletionTimestamp" not in pod["metadata"]:
                namespace, _, pod_name = key.partition("/")
                self.world.answer("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod_name}", {})

    def _change(self, name: str, **fields: object) -> None:
        job = self.world.objects[watches.JOBS][f"{self.jobs[name].spec.project}/{name}"]
        self.jobs[name].touched = True
        job["spec"] |= fields
        job["metadata"]["generation"] += 1
        self.world.put(watches.JOBS, job)

    def _put_quota(self, project: Any) -> None:
        self._quotas_changed_at = self.loop.time()
        meta = {"name": project.name, "uid": f"quota-{project.name}"}
        self.world.put(watches.QUOTAS, {"metadata": meta, "spec": quota_spec(project)})

    def _put_node(self, name: str) -> None:
        gpus = str(self.kubelets.nodes[name])
        allocatable = {labels.GPU_RESOURCE: gpus, "cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
        pool = {labels.POOL: h.POOL} if name in self.history.pooled else {}
        meta = {"name": name, "uid": f"node-{name}", "labels": self.history.labels_of(name) | pool}
        self.world.put(watches.NODES, {"metadata": meta, "spec": {}, "status": status})

    def _lose_node(self, name: str, returns_after_s: float) -> None:
        lost = self.kubelets.lost
        if name in lost or len(lost) + 1 == len(self.kubelets.nodes):
            return
        self.kubelets.lose_node(name)
        if returns_after_s:
            self.loop.call_later(returns_after_s, self._return_node, name)

    def _return_node(self, name: str) -> None:
        self.happened += 1
        self.kubelets.lost.discard(name)
        self._put_node(name)

    def pod_changed(self, key: str, pod: Object) -> None:
        """Do what a node does with the pod, and check what must hold."""
        if labels.JOB not in pod["metadata"].get("labels", {}):
            return
        job = self.jobs[job_of(pod)]
        if "deletionTimestamp" in pod["metadata"]:
            self._check_release(job, pod)
            self.kubelets.terminate(key, pod)
        elif not pod["spec"].get("nodeName"):
            self._check_devices()
            self._check_limit(job.spec)
            self._check_held(job.spec)
            job.pods += 1
            if job.pods > job.spec.largest * (2 + self.happened):
                self.fail(f"{job.spec.name} has started {job.pods} workers after {self.happened} events")
            self.kubelets.created(key)

    # What must hold

    def _shares(self) -> list[tuple[str, tuple[int, ...], float]]:
        """Return (node, devices, share) of all holders.

        A pod that kube-scheduler has bound to a full node, as the plan sees it, has a device beyond the node's count:
        it holds any of them that is free.
        """
        held = sorted(self.kubelets.holders(), key=lambda one: max(one[1], default=0))
        taken: dict[str, set[int]] = {node: set() for node in self.kubelets.nodes}
        found = []
        for node, devices, pod in held:
            count = self.kubelets.nodes.get(node, 0)
            free = (device for device in range(count) if device not in taken[node])
            real = tuple(device if device < count else next(free, device) for device in devices)
            taken.setdefault(node, set()).update(real)
            found.append((node, real, self.jobs[job_of(pod)].spec.share_of(0)))
        return found

    def _held_by(self, project: str, pool: str, *, fixed: bool = False) -> float:
        """Return the GPUs that a project's workers hold in a pool; with `fixed` those that cannot be preempted."""
        held = defaultdict[str, float](float)
        for _, devices, pod in self.kubelets.holders():
            held[job_of(pod)] += len(devices) * self.jobs[job_of(pod)].spec.share_of(0)
        specs = ((self.jobs[job].spec, gpus) for job, gpus in held.items())
        own = ((spec, gpus) for spec, gpus in specs if (spec.project, spec.node_pool) == (project, pool))
        return sum(spec.protected_of(gpus) if fixed else gpus for spec, gpus in own)

    def _line(self, project: str) -> list[str]:
        """Return the names of a project and of its departments, from below."""
        found = [project]
        while above := self.world.objects[watches.QUOTAS][found[-1]]["spec"].get("parent"):
            found.append(above)
        return found

    def _exceeded(self, spec: JobSpec, gpus: float, *, fixed: bool = False) -> str:
        """Return the limit, or with `fixed` the guarantee of the job's project, or of a department of it, in the pool
        of the job that would be exceeded with so many GPUs more; "" if none would.
        """
        quotas = self.world.objects[watches.QUOTAS]
        for name in self._line(spec.project):
            quota = quotas[name]["spec"]
            if spec.node_pool:
                quota = quota.get("pools", {}).get(spec.node_pool, {"guaranteed": 0})
            most = quota["guaranteed"] if fixed else quota.get("limit", float("inf"))
            below = [project for project in quotas if name in self._line(project)]
            held = sum(self._held_by(project, spec.node_pool, fixed=fixed) for project in below)
            if held + gpus > most + EPSILON:
                return f"project {name} with {held:g} and {gpus:g} more of at most {most:g}"
        return ""

    def _check_devices(self) -> None:
        """Of pods that are not pinned, only kube-scheduler decides which devices they get."""
        taken: Counter[tuple[str, int]] = Counter()
        for node, devices, pod in self.kubelets.holders():
            if labels.RESERVED_ON not in pod["metadata"]["annotations"]:
                share = self.jobs[job_of(pod)].spec.share_of(0)
                taken.update({(node, device): share for device in devices})
        for where, share in taken.items():
            if share > 1 + EPSILON:
                self.fail(f"{share:g} of device {where} is held")
        types = defaultdict[str, set[str]](set)
        for node, _, pod in (one for one in self.kubelets.holders() if one[0]):  # a reservation may be on no node
            types[job_of(pod)].add(h.type_of(node))
            if self.history.pool_of(node) != (pool := self.jobs[job_of(pod)].spec.node_pool):
                self.fail(f"{job_of(pod)} asks for node pool {pool!r}, and is on {node}")
        for name, found in types.items():
            accepted = self.jobs[name].spec.gpu_types
            if accepted and (len(found) > 1 or not found <= {*accepted}):
                self.fail(f"{name} accepts {accepted}, and has {found}")

    def _node_of(self, name: str) -> str:
        return next((node for node, _, pod in self.kubelets.holders() if job_of(pod) == name), "")

    def _check_limit(self, started: JobSpec) -> None:
        if exceeded := self._exceeded(started, 0.0):
            self.fail(f"{started.name} starts: {exceeded}")

    def _check_held(self, started: JobSpec) -> None:
        """In a project with a stop policy only the gang of a job that runs is completed, or what was decided."""
        assert self.controller is not None
        if self.loop.time() == self._quotas_changed_at:
            return
        book = self.controller.controller.elastic.book
        if stop_policy_of(self.controller.controller.snapshot.projects, started.project) is StopPolicy.NONE:
            return
        uid = book.uid_of(started.project, started.name)
        pods = [key for key, pod in self.kubelets.workers() if job_of(pod) == started.name]
        asked = 0 if uid is None else sum(one.worker.gpus for one in book.alive_of(uid) if not one.released)
        if len(pods) < 2 or asked > started.smallest:
            self.fail(f"{started.name} gets a worker, and its project is held")

    def _check_release(self, job: JobHistory, pod: Object) -> None:
        over = pod["status"]["phase"] in {"Succeeded", "Failed"}
        if job.spec.kind is Kind.BUILD and not job.touched and not over:
            self.fail(f"session {job.spec.name} loses a worker")

    def _check_rest(self) -> None:
        """No plan has anything to do, statuses show what pods hold, and no waiting job can start."""
        assert self.controller is not None
        state = self.controller.controller.current_state()
        assert state is not None
        plan = scheduler.plan(state, EPOCH + self.loop.time())
        if not plan.empty:
            self.fail(f"the cluster does not rest: {plan}")
        self._check_changes()
        for wrong in self.conditions.wrong_at_rest(_jobs(self.controller), EPOCH + self.loop.time()):
            self.fail(wrong)
        for wrong in filter(None, (wrongly_accounted(job, EPOCH + self.loop.time()) for job in _jobs(self.controller))):
            self.fail(wrong)
        self._check_teams()
        free = free_devices(self._nodes(), self._shares())
        records = {job.spec.name: job for job in _jobs(self.controller)}
        for key, job in self.world.objects[watches.JOBS].items():
            name, status = key.partition("/")[2], job.get("status", {})
            spec = self.jobs[name].spec
            left = left_for(job["metadata"]["uid"], spec, free, plan.waiting, self.history)
            gpus = sum(len(devices) for _, devices, pod in self.kubelets.holders() if job_of(pod) == name)
            gpus *= spec.share_of(0)  # type: ignore[assignment]
            if abs(status.get("gpus", 0) - gpus) > EPSILON:
                self.fail(f"{name} holds {gpus} GPUs, its status says {status.get('gpus')}: {status.get('message')}")
            if (charged := status.get("restarts", 0)) > (failed := self.jobs[name].failures):
                self.fail(f"{name} is charged {charged} restarts, and failed {failed} times")
            waits = status.get("phase") == "Pending" and records[name].held is None
            if self._is_stopped(spec, gpus, waits=waits):
                continue
            if waits and self._may_start(spec) and fits(spec, left):
                self.fail(f"{name} waits and could start: {status.get('message')}")
            if (
                status.get("phase") == "Running"
                and self._may_grow(name, gpus)
                and gains(state.jobs[job["metadata"]["uid"]], EPOCH + self.loop.time())
                and fits(spec, left, workers=1, beside=self._node_of(name))
            ):
                self.fail(f"{name} could have one more worker: {status.get('message')}")

    def _check_teams(self) -> None:
        """What the quotas' statuses say that teams hold and borrow is what their pods hold."""
        for name, quota in self.world.objects[watches.QUOTAS].items():
            held = {pool: self._held_by(name, pool) for pool in ("", h.POOL)}
            pools = {"": quota["spec"], **quota["spec"].get("pools", {})}
            borrowed = sum(
                max(0.0, gpus - pools.get(pool, {"guaranteed": 0})["guaranteed"]) for pool, gpus in held.items()
            )
            status = quota.get("status", {})
            found = status.get("gpus", 0), status.get("borrowed", 0)
            if max(abs(found[0] - sum(held.values())), abs(found[1] - borrowed)) > 0.01:
                self.fail(f"project {name} holds {held} and borrows {borrowed:g}, its status says {found}")

    def _is_stopped(self, spec: JobSpec, gpus: float, *, waits: bool) -> bool:
        """Return whether a stop policy keeps the job from getting more; what is drained must not run."""
        assert self.controller is not None
        policy = stop_policy_of(self.controller.controller.snapshot.projects, spec.project)
        if policy is StopPolicy.HOLD_AND_DRAIN and gpus and not waits and spec.may_be_preempted:
            self.fail(f"{spec.name} runs, and its project is drained")
        return policy is not StopPolicy.NONE and (waits or gpus >= spec.smallest)

    async def _check_restart(self) -> None:
        """A restarted controller has the state that this one has, and would decide what it does.

        But it tries the nodes again that kube-scheduler has refused: for how long they are excluded is not stored.
        """
        assert self.controller is not None
        self.world.twin = None
        copied = World()
        copied.objects = deepcopy(self.world.objects)
        again = SimulatedController(copied, self.fail)
        await again.list(copied)
        again.controller._stop_timers()
        now, excluded = EPOCH + self.loop.time(), self.controller.controller._exclusions._until
        compared: list[tuple[str, Any, Any]] = [
            ("knows", facts_of(_jobs(self.controller)), facts_of(_jobs(again))),
            ("has", records_of(self.controller), records_of(again)),
            ("decides", plan_of(self.controller, now), plan_of(again, now)),
        ]
        rough = excluded or self.history.usage_half_life_s is not None  # past use is stored to some seconds
        for what, found, afresh in compared[:1] if rough else compared:
            if found != afresh:
                self.fail(f"a restarted controller {what} {only_in(afresh, found)}, this one {only_in(found, afresh)}")
        await again.stop()

    def _check_gathering(self, change: Change) -> None:
        """Jobs move to gather free GPUs within the window and what is stored of its budget, and no protected ones."""
        assert self.controller is not None
        book = self.controller.book
        moved = ((book.jobs[uid], new) for uid, new in change.jobs.items() if new is not None and uid in book.jobs)
        for old in (old for old, new in moved if is_gathered(old, new)):
            for wrong in self.gathering.observe(book, old, change, book.clock()):
                self.fail(wrong)
            if not old.spec.may_be_preempted:
                self.fail(f"{old.spec.name} is not preemptible, and moves to gather GPUs")
            status = self.world.objects[watches.POLICIES]["default"].get("status", {})
            stored = status.get("defragmentation", {}).get("gpuSeconds", 0.0)
            if change.defragmented is None or change.defragmented.lost_gpu_s > stored + EPSILON:
                self.fail(f"moves that gather GPUs cost {change.defragmented}, of which {stored} are stored")

    def _check_changes(self) -> None:
        """Each change of size of the tracked jobs has a reason that is about it."""
        assert self.controller is not None
        for job in self.controller.controller.elastic.book.jobs.values():
            for wrong in contradictions(job):
                self.fail(f"{job.spec.name} {wrong}")

    def _nodes(self) -> dict[str, Node]:
        sizes = {name: gpus for name, gpus in self.kubelets.nodes.items() if name not in self.kubelets.lost}
        return {n: Node(name=n, devices=tuple(Device(index=i) for i in range(gpus))) for n, gpus in sizes.items()}

    def _may_grow(self, name: str, held: float) -> bool:
        """Return whether a job that holds so many GPUs, and its project's limit, allow one more worker."""
        assert self.controller is not None
        spec = self.jobs[name].spec
        record = next(job for job in _jobs(self.controller) if job.spec.name == name)
        state = self.controller.controller.current_state()
        assert state is not None
        settled = state.jobs[record.uid].grown_at + spec.cool_down_s <= EPOCH + self.loop.time()
        pending = (other for other in _jobs(self.controller) if other.status.phase is Phase.PENDING)
        if held < spec.gpus and any(other.spec.project == spec.project for other in pending):
            return False  # what it may still request may be kept for one of these
        if record.completing or record.growth_failed is not None or not settled:
            return False
        more = spec.worker_gpus * (spec.segment or 1)
        return not self._exceeded(spec, more) and held + more <= spec.largest

    def _may_start(self, spec: JobSpec) -> bool:
        """Return whether limits and, for a job that cannot be preempted, the guarantee admit its smallest size."""
        size = spec.smallest * spec.share_of(0)
        if self._exceeded(spec, size):
            return False
        return spec.may_be_preempted or not self._exceeded(spec, size, fixed=True)


class _World(World):
    """A world in simulated time, whose kubelets see each change of a pod."""

    def __init__(self, simulated: SimulatedKubernetes) -> None:
        super().__init__()
        self._simulated = simulated

    def now(self) -> str:
        at = datetime.fromtimestamp(EPOCH + self._simulated.loop.time(), UTC)
        return at.strftime("%Y-%m-%dT%H:%M:%SZ")

    def put(self, path: str, body: Object) -> Object:
        before = self.objects[path].get(f"{body['metadata'].get('namespace')}/{body['metadata']['name']}")
        known = before is not None and "deletionTimestamp" in before["metadata"]
        deleted = "deletionTimestamp" in body["metadata"]
        found = super().put(path, body)
        if path == watches.PODS and (before is None or (deleted and not known) or before is body):
            self._simulated.pod_changed(f"{found['metadata']['namespace']}/{found['metadata']['name']}", found)
        return found


def _jobs(controller: SimulatedController) -> Iterable[JobRecord]:
    return controller.controller.elastic.book.jobs.values()


def play(history: h.History) -> SimulatedKubernetes:
    """Play a history. Raises ViolationError."""
    loop = SimulatedLoop()

    async def run() -> SimulatedKubernetes:
        simulated = SimulatedKubernetes(history)
        await simulated.play()
        return simulated

    try:
        with no_tracebacks():
            return loop.run_until_complete(run())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()
