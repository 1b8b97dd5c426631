"""The real controller above simulated nodes and kubelets: the same histories, played as objects of an API server.

Jobs are ElasticJobs without `elastic_runtime`; shares of GPUs, which need pods that reserve them, are left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Device, Kind, Node
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import as_written
from tests.kubernetes import detached as watches
from tests.kubernetes.detached import Detached, Object
from tests.kubernetes.twin_world import EPOCH, Answering, World, pinned_to, plan_of, records_of
from tests.simulation import histories as h
from tests.simulation.invariants import ViolationError, contradiction
from tests.simulation.loop import SimulatedLoop
from tests.simulation.search import fits, free_devices
from tests.simulation.trainings import Pace

if TYPE_CHECKING:
    from kfp_gpuquota.api import JobSpec

REST_S = 150.0


class SimulatedController(Detached):
    """A controller in simulated time, whose requests the world answers."""

    def __init__(self, world: World) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(clock=lambda: EPOCH + loop.time())
        self.connection = Answering(world)
        self.controller._connection = self.connection
        self.controller._writer._connection = self.connection

    async def list(self, world: World) -> None:
        """Read all objects, and plan."""
        for path, bodies in world.objects.items():
            for body in bodies.values():
                self.see(path, body)
        await self.start()
        self.controller.reservations.start()
        self.controller.wake()

    async def stop(self) -> None:
        """End it: what it has not written is lost."""
        self.controller._stop_timers()
        await self.controller._writer.close()


@dataclass
class JobHistory:
    """What concerns one job: how often it started, and how often something happened to it."""

    spec: JobSpec
    pace: Pace
    pods: int = 0
    touched: bool = False  # a user or a failure ends its workers


@dataclass
class SimulatedKubernetes:
    """The world, its kubelets, and what must hold after each change of a pod."""

    history: h.History
    jobs: dict[str, JobHistory] = field(default_factory=dict)
    happened: int = 0
    violations: list[ViolationError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = cast("SimulatedLoop", asyncio.get_running_loop())
        self.world = _World(self)
        self.nodes = {f"n{i}": gpus for i, gpus in enumerate(self.history.nodes)}
        self.lost: set[str] = set()
        self.controller: SimulatedController | None = None
        for name in self.nodes:
            self._put_node(name)
        for project in self.history.projects:
            self._put_quota(project)

    def fail(self, what: str) -> None:
        """Keep the violation: the controller's own handlers do not hide it."""
        self.violations.append(ViolationError(f"at {self.loop.time():.2f} s: {what}"))

    async def play(self) -> None:
        """Play the history, wait until nothing happens any more, and check what must hold then."""
        await self._start()
        for after_s, happening in self.history.happenings:
            if after_s:
                await asyncio.sleep(after_s)
            await self._happen(happening)
        await asyncio.sleep(REST_S)
        self._check_rest()
        await self._check_restart()
        assert self.controller is not None
        await self.controller.stop()
        if self.violations:
            raise self.violations[0]

    async def _start(self) -> None:
        self.controller = SimulatedController(self.world)
        self.world.twin = self.controller  # type: ignore[assignment]
        await self.controller.list(self.world)

    # What happens

    async def _happen(self, happening: h.Any_) -> None:
        self.happened += 1
        match happening:
            case h.Submit(spec, pace) if not spec.shared:
                self._submit(spec, Pace(*pace))
            case h.SetQuota(project):
                self._put_quota(project)
            case h.Delete(chosen):
                for name in {name for name in map(self._job, chosen) if name}:
                    await asyncio.sleep(0.05)
                    self._delete(name)
            case h.Suspend(number) | h.Resume(number) if name := self._job(number):
                self._suspend(name, suspend=isinstance(happening, h.Suspend))
            case h.Crash(number, code) if running := self._running():
                self._end(running[number % len(running)], code)
            case h.LoseNode(number, returns_after_s):
                self._lose_node(list(self.nodes)[number % len(self.nodes)], returns_after_s)
            case h.Restart(away_s):
                assert self.controller is not None
                self.world.twin = None
                await self.controller.stop()
                await asyncio.sleep(away_s)
                await self._start()

    def _submit(self, spec: JobSpec, pace: Pace) -> None:
        template = {"spec": {"containers": [{"name": "main", "image": "none", "command": ["works"]}]}}
        meta = {"name": spec.name, "namespace": spec.project, "uid": spec.name, "generation": 1}
        self.jobs[spec.name] = JobHistory(spec, pace)
        self.world.put(watches.JOBS, {"metadata": meta, "spec": {**as_written(spec), "template": template}})

    def _job(self, number: int) -> str:
        names = [job["metadata"]["name"] for job in self.world.objects[watches.JOBS].values()]
        return names[number % len(names)] if names else ""

    def _delete(self, name: str) -> None:
        self.jobs[name].touched = True
        self.world.drop(watches.JOBS, f"{self.jobs[name].spec.project}/{name}")

    def _suspend(self, name: str, *, suspend: bool) -> None:
        job = self.world.objects[watches.JOBS][f"{self.jobs[name].spec.project}/{name}"]
        self.jobs[name].touched = True
        job["spec"]["suspend"] = suspend
        job["metadata"]["generation"] += 1
        self.world.put(watches.JOBS, job)

    def _put_quota(self, project: Any) -> None:
        spec = {"guaranteed": project.guaranteed, "priority": project.priority}
        if project.limit is not None:
            spec["limit"] = project.limit
        meta = {"name": project.name, "uid": f"quota-{project.name}"}
        self.world.put(watches.QUOTAS, {"metadata": meta, "spec": spec})

    def _put_node(self, name: str) -> None:
        allocatable = {labels.GPU_RESOURCE: str(self.nodes[name]), "cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
        self.world.put(watches.NODES, {"metadata": {"name": name, "uid": f"node-{name}"}, "spec": {}, "status": status})

    def _lose_node(self, name: str, returns_after_s: float) -> None:
        if name in self.lost or len(self.lost) + 1 == len(self.nodes):
            return
        self.lost.add(name)
        self.world.drop(watches.NODES, name)
        for key, pod in list(self.world.objects[watches.PODS].items()):
            if pod["spec"].get("nodeName") != name:
                continue
            if pod["status"]["phase"] in {"Pending", "Running"}:
                lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
                self.world.put(watches.PODS, {**pod, "status": {"phase": "Failed", "conditions": [lost]}})
            self.world.drop(watches.PODS, key)
        if returns_after_s:
            self.loop.call_later(returns_after_s, self._return_node, name)

    def _return_node(self, name: str) -> None:
        self.happened += 1
        self.lost.discard(name)
        self._put_node(name)

    # Kubelets

    def _running(self) -> list[str]:
        pods = self.world.objects[watches.PODS]
        return [key for key, pod in pods.items() if pod["status"]["phase"] == "Running"]

    def _end(self, key: str, code: int) -> None:
        pod = self.world.objects[watches.PODS].get(key)
        if pod is None or pod["status"]["phase"] not in {"Pending", "Running"}:
            return
        self.happened += 1
        if code:
            self.jobs[pod["metadata"]["labels"][labels.JOB]].touched = True
        ended = {"name": "main", "state": {"terminated": {"exitCode": code}}}
        phase = "Failed" if code else "Succeeded"
        self.world.put(watches.PODS, {**pod, "status": {"phase": phase, "containerStatuses": [ended]}})

    def pod_changed(self, key: str, pod: Object) -> None:
        """Do what a node does with the pod, and check what must hold."""
        job = self.jobs[pod["metadata"]["labels"][labels.JOB]]
        if "deletionTimestamp" in pod["metadata"]:
            self._check_release(job, pod)
            self.loop.call_later(job.pace.ends_s if job.pace.ends_s is not None else 10.0, self._remove, key, pod)
        elif not pod["spec"].get("nodeName"):
            self._check_devices()
            self._check_limit(job.spec)
            job.pods += 1
            if job.pods > job.spec.largest * (2 + self.happened):
                self.fail(f"{job.spec.name} has started {job.pods} workers after {self.happened} events")
            self.loop.call_soon(self._bind, key)

    def _bind(self, key: str) -> None:
        pod = self.world.objects[watches.PODS].get(key)
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            return
        node, job = pinned_to(pod), self.jobs[pod["metadata"]["labels"][labels.JOB]]
        if node in self.lost:
            return
        self.world.put(watches.PODS, {**pod, "spec": {**pod["spec"], "nodeName": node}})
        self.loop.call_later(job.pace.starts_s, self._run, key)
        if job.pace.works_s is not None:
            self.loop.call_later(job.pace.starts_s + job.pace.works_s, self._end, key, 0)

    def _run(self, key: str) -> None:
        pod = self.world.objects[watches.PODS].get(key)
        if pod is not None and pod["status"]["phase"] == "Pending":
            self.world.put(watches.PODS, {**pod, "status": {"phase": "Running"}})

    def _remove(self, key: str, pod: Object) -> None:
        found = self.world.objects[watches.PODS].get(key)
        if found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"]:
            self.happened += 1
            self.world.drop(watches.PODS, key)

    # What must hold

    def _holders(self) -> list[tuple[str, tuple[int, ...], Object]]:
        found = []
        for pod in self.world.objects[watches.PODS].values():
            if pod["status"]["phase"] in {"Pending", "Running"}:
                devices = pod["metadata"]["annotations"][labels.DEVICES]
                node = pod["spec"].get("nodeName") or pinned_to(pod)
                found.append((node, tuple(map(int, devices.split(","))), pod))
        return found

    def _check_devices(self) -> None:
        taken = Counter((node, device) for node, devices, _ in self._holders() for device in devices)
        for where, times in taken.items():
            if times > 1:
                self.fail(f"device {where} is held {times} times")

    def _check_limit(self, started: JobSpec) -> None:
        limit = self.world.objects[watches.QUOTAS][started.project]["spec"].get("limit", float("inf"))
        held = sum(len(d) for _, d, pod in self._holders() if self.jobs[_job_of(pod)].spec.project == started.project)
        if held > limit:
            self.fail(f"project {started.project} starts {started.name} and holds {held} of at most {limit}")

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
        held = [(node, devices, 1.0) for node, devices, _ in self._holders()]
        free = free_devices(self._nodes(), held)
        for key, job in self.world.objects[watches.JOBS].items():
            name, status = key.partition("/")[2], job.get("status", {})
            gpus = sum(len(devices) for _, devices, pod in self._holders() if _job_of(pod) == name)
            if status.get("gpus", 0) != gpus:
                self.fail(f"{name} holds {gpus} GPUs, its status says {status.get('gpus')}: {status.get('message')}")
            spec = self.jobs[name].spec
            if status.get("phase") == "Pending" and self._may_start(spec) and fits(spec, free):
                self.fail(f"{name} waits and could start: {status.get('message')}")

    async def _check_restart(self) -> None:
        """A restarted controller has the state that this one has, and would decide what it does."""
        assert self.controller is not None
        self.world.twin = None
        copied = World()
        copied.objects = deepcopy(self.world.objects)
        again = SimulatedController(copied)
        await again.list(copied)
        again.controller._stop_timers()
        now = EPOCH + self.loop.time()
        for what, found, afresh in (
            ("has", records_of(self.controller), records_of(again)),
            ("decides", plan_of(self.controller, now), plan_of(again, now)),
        ):
            if found != afresh:
                self.fail(f"a restarted controller {what} {afresh}, this one {found}")
        await again.stop()

    def _check_changes(self) -> None:
        """Each change of size of the tracked jobs has a reason that is about it."""
        assert self.controller is not None
        for job in self.controller.controller.elastic.book.jobs.values():
            for wrong in filter(None, map(contradiction, job.status.resizes)):
                self.fail(f"{job.spec.name} {wrong}")

    def _nodes(self) -> dict[str, Node]:
        sizes = {name: gpus for name, gpus in self.nodes.items() if name not in self.lost}
        return {n: Node(name=n, devices=tuple(Device(index=i) for i in range(gpus))) for n, gpus in sizes.items()}

    def _may_start(self, spec: JobSpec) -> bool:
        """Return whether limits and, for a job that cannot be preempted, the guarantee admit its smallest size."""
        quota = self.world.objects[watches.QUOTAS][spec.project]["spec"]
        held = fixed = 0
        for _, devices, pod in self._holders():
            other = self.jobs[_job_of(pod)].spec
            if other.project == spec.project:
                held += len(devices)
                fixed += 0 if other.may_be_preempted else len(devices)
        if held + spec.smallest > quota.get("limit", float("inf")):
            return False
        return spec.may_be_preempted or fixed + spec.smallest <= quota["guaranteed"]


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


def _job_of(pod: Object) -> str:
    name: str = pod["metadata"]["labels"][labels.JOB]
    return name


def play(history: h.History) -> None:
    """Play a history. Raises ViolationError."""
    loop = SimulatedLoop()

    async def run() -> None:
        await SimulatedKubernetes(history).play()

    try:
        loop.run_until_complete(run())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()
