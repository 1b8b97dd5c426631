"""A cluster in simulated time: carries plans out, with workers that take their time to leave, and checks invariants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Device, JobSpec, Kind, Node, Project
from kfp_gpuquota.api.affinity import GPU_PRODUCT, keeps_off
from kfp_gpuquota.scheduler import (
    JobRemoved,
    JobResumed,
    JobSubmitted,
    JobSuspended,
    NodeChanged,
    Placement,
    PlacementsPromised,
    Plan,
    QuotaChanged,
    State,
    WorkerGone,
    WorkerLeaving,
    WorkerStarted,
    changed_promises,
    plan,
)
from kfp_gpuquota.scheduler.state.model import GPU, MILLI

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.scheduler.state.model import Job


def stopped(decided: Plan) -> list[str]:
    """Return the workers that the plan asks to leave."""
    whole = [worker for one in decided.evict for worker in one.workers]
    return [*whole, *(w for one in decided.resize for w in one.remove), *(one.worker for one in decided.move)]


@dataclass
class Running:
    """A worker of the simulated cluster."""

    job: str
    node: str
    devices: tuple[int, ...]
    share: float = 1.0
    cpu: float = 0.0
    leaving: bool = False

    @property
    def gpus(self) -> float:
        return len(self.devices) * self.share


@dataclass
class World:
    """Jobs are named by their uid. Time advances by one second a round."""

    state: State = field(default_factory=State)
    now: float = 0.0
    specs: dict[str, JobSpec] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    machines: dict[str, Node] = field(default_factory=dict)
    projects: dict[str, Project] = field(default_factory=dict)
    workers: dict[str, Running] = field(default_factory=dict)
    serial: int = 0
    crashed: bool = False

    def node(self, name: str, gpus: int, *, ready: bool = True, **more: object) -> None:
        self.nodes[name] = gpus
        devices = tuple(Device(index=i) for i in range(gpus))
        node = Node(name=name, devices=devices, ready=ready, **more)  # type: ignore[arg-type]
        self.machines[name] = node
        self.state.apply(NodeChanged(node))

    def set_ready(self, name: str, *, ready: bool) -> None:
        """The node is cordoned, or no longer; otherwise it is as it was."""
        self.machines[name] = msgspec.structs.replace(self.machines[name], ready=ready)
        self.state.apply(NodeChanged(self.machines[name]))

    def project(self, name: str, guaranteed: float = 0, limit: float | None = None, **more: object) -> None:
        self.projects[name] = Project(name=name, guaranteed=guaranteed, limit=limit, **more)  # type: ignore[arg-type]
        self.state.apply(QuotaChanged(self.projects[name]))

    def submit(
        self,
        name: str,
        project: str,
        gpus: int = 1,
        low: int | None = None,
        high: int | None = None,
        user: str = "",
        **more: object,
    ) -> str:
        spec = JobSpec(name=name, project=project, command=("true",), gpus=gpus, min_gpus=low, max_gpus=high, **more)  # type: ignore[arg-type]
        return self.submit_spec(spec, user)

    def submit_spec(self, spec: JobSpec, user: str = "") -> str:
        self.now += 1
        self.specs[spec.name] = spec
        self.state.apply(JobSubmitted(spec.name, spec, self.now, user=user))
        return spec.name

    def session(self, name: str, project: str, gpus: int = 1) -> str:
        return self.submit(name, project, gpus, kind=Kind.BUILD)

    def remove(self, name: str) -> None:
        self.state.apply(JobRemoved(name))
        del self.specs[name]
        for worker in self.of(name):
            self.workers[worker].leaving = True

    def of(self, job: str) -> list[str]:
        return [w for w, r in self.workers.items() if r.job == job]

    def size(self, job: str) -> int:
        """Return the GPUs that the job holds and need not release."""
        return sum(len(r.devices) for r in self.workers.values() if r.job == job and not r.leaving)

    def held(self, project: str) -> float:
        return sum(r.gpus for r in self.workers.values() if self._project_of(r) == project)

    def nodes_of(self, job: str) -> set[str]:
        return {r.node for r in self.workers.values() if r.job == job}

    def start(self, job: str, placement: Placement) -> None:
        self.serial += 1
        worker = f"w{self.serial:05}"
        spec = self.specs[job]
        self.workers[worker] = Running(job, placement.node, placement.devices, spec.share_of(0), spec.cpu or 0.0)
        self.state.apply(WorkerStarted(worker, job, placement.node, placement.devices, self.now))

    def leave(self, worker: str) -> None:
        self.workers[worker].leaving = True
        self.state.apply(WorkerLeaving(worker, self.now))

    def exit(self, worker: str) -> None:
        del self.workers[worker]
        self.state.apply(WorkerGone(worker))

    def crash(self, worker: str) -> None:
        """End the worker without a request."""
        self.crashed = True
        del self.workers[worker]
        self.state.apply(WorkerGone(worker, self.now))

    def suspend(self, job: str) -> None:
        self.state.apply(JobSuspended(job))
        for worker in self.of(job):
            if not self.workers[worker].leaving:
                self.leave(worker)

    def resume(self, job: str) -> None:
        self.state.apply(JobResumed(job))

    def release(self) -> None:
        """End every leaving worker."""
        for worker in [w for w, r in self.workers.items() if r.leaving]:
            self.exit(worker)

    def carry_out(self, decided: Plan, *, asked: int | None = None) -> None:
        """Carry the plan out; of the workers that it stops only the first `asked` are asked to leave."""
        self._check_kept(decided)
        for worker in stopped(decided)[:asked]:
            self.leave(worker)
        started = [(one.job, one.add) for one in decided.resize] + [(one.job, one.placements) for one in decided.bind]
        for job, placements in started:
            for placement in placements:
                self.start(job, placement)
        self.promise(decided)
        if decided.defragmented is not None:
            self.state.apply(decided.defragmented)
        if asked is None:  # else part of a gang may be left
            self.check()

    def _check_kept(self, decided: Plan) -> None:
        """No worker leaves a node for another job while its own job keeps a promise there: it would grow again."""
        for one in decided.resize:
            kept = set(self.state.promises.get(one.job, ())) & set(decided.promises.get(one.job, ()))
            nodes = {promise.node for promise in kept if not promise.part}
            left = [worker for worker in one.remove if self.workers[worker].node in nodes]
            moving = any(self.workers[worker].leaving for worker in self.of(one.job))  # they have destinations
            assert moving or not left, f"{one.job} loses {left}, and keeps {kept}"

    def promise(self, decided: Plan) -> None:
        for uid, placements in changed_promises(self.state.promises, decided).items():
            self.state.apply(PlacementsPromised(uid, placements, self.now, decided.victims.get(uid, ())))

    def plan(self) -> Plan:
        return plan(self.state, self.now)

    def step(self) -> Plan:
        """Plan once and carry it out; leaving workers do not exit yet."""
        self.now += 1
        decided = self.plan()
        self.carry_out(decided)
        return decided

    def settle(self, rounds: int = 30) -> list[Plan]:
        """Plan, carry out, release and wait as planned until nothing changes; fail after too many rounds."""
        plans = []
        for _ in range(rounds):
            decided = self.step()
            plans.append(decided)
            quiet = decided.empty and not any(r.leaving for r in self.workers.values())
            if quiet and decided.again_at is None:
                return plans
            if quiet and decided.again_at is not None:
                assert decided.again_at > self.now
                self.now = decided.again_at - 1  # a round takes one second
            self.release()
        raise AssertionError(f"no fixed point in {rounds} rounds: {plans[-2:]}")

    def check(self) -> None:
        """What must hold at every moment."""
        taken: dict[tuple[str, int], float] = {}
        for worker in self.workers.values():
            for device in worker.devices:
                taken[worker.node, device] = taken.get((worker.node, device), 0.0) + worker.share
                assert taken[worker.node, device] <= 1 + 1e-9, f"more than all of {worker.node}/{device} is held"
                assert device < self.nodes[worker.node], f"{worker.node} has no device {device}"
        for name, project in self.projects.items():
            assert project.limit is None or self.held(name) <= project.limit + 1e-9, f"{name} is above its limit"
            cores = sum(r.cpu for r in self.workers.values() if self._project_of(r) == name)
            assert project.limit_cpu is None or cores <= project.limit_cpu + 1e-9, f"{name} is above its limit of CPUs"
        for node in self.machines.values():
            self._check_node(node)
        for name, spec in self.specs.items():
            whole = self.crashed or self.size(name) == 0 or self.size(name) >= spec.smallest
            assert whole, f"{name} runs below its gang"
            assert self.size(name) <= spec.largest
            self._check_places(name, spec)

    def _check_node(self, node: Node) -> None:
        mine = [r for r in self.workers.values() if r.node == node.name]
        assert node.cpu is None or sum(r.cpu for r in mine) <= node.cpu + 1e-9, f"{node.name} has too few CPUs"
        assert node.max_workers is None or len(mine) <= node.max_workers, f"{node.name} has too many workers"

    def _check_places(self, name: str, spec: JobSpec) -> None:
        where = [self.machines[node] for node in self.nodes_of(name)]
        for node in where:
            assert spec.node_selector.items() <= node.labels.items(), f"{name} may not run on {node.name}"
            assert keeps_off(node.taints, spec.tolerations) is None, f"{name} does not tolerate {node.name}"
        if spec.required_topology is not None:
            assert len({node.labels.get(spec.required_topology) for node in where}) <= 1, f"{name} is torn apart"
        if spec.segment_topology is not None and spec.segment is not None and not self.crashed:
            mine = [self.machines[r.node].labels for r in self.workers.values() if r.job == name and not r.leaving]
            counts = Counter(labels[spec.segment_topology] for labels in mine)
            assert not any(n % spec.segment for n in counts.values()), f"{name} has parts of segments: {counts}"
        if spec.gpu_types:
            types = {node.labels.get(GPU_PRODUCT) for node in where}
            assert types <= {*spec.gpu_types}, f"{name} does not accept {types}"
            assert len(types) <= 1, f"{name} runs on several types"

    def check_indexes(self) -> None:
        """Check that the state's running counts equal a new count."""
        for host in self.state.ledger.hosts.values():
            mine = [r for r in self.workers.values() if r.node == host.name]
            free = set(host.devices) - {d for r in mine for d in r.devices}
            coming = set(host.devices) - {d for r in mine if not r.leaving for d in r.devices}
            assert (host.idle_whole, host.future_whole) == (len(free), len(coming)), host.name
        self._check_users()
        for queue in self.state.ledger.queues.values():
            mine = [r for r in self.workers.values() if queue in self.state.jobs[r.job].queue.path]
            assert queue.leaving[0] == round(GPU * sum(r.gpus for r in mine if r.leaving))
            assert queue.held[0] == round(GPU * sum(r.gpus for r in mine if not r.leaving))
            assert queue.held[1] == round(MILLI * sum(r.cpu for r in mine if not r.leaving))
            counts = Counter(r.job for r in mine if not r.leaving)
            jobs = [(self.state.jobs[uid], count) for uid, count in counts.items()]
            fixed = sum(job.request.amount(0).gpu * count for job, count in self._cores(jobs))
            assert queue.fixed[0] == fixed, queue.name
            assert queue.lent[0] == sum(job.request.amount(0).gpu * max(0, n - job.wanted) for job, n in jobs)

    def _check_users(self) -> None:
        """Check that what users hold equals a new count."""
        jobs = list(self.state.jobs.values())
        for queue in self.state.ledger.queues.values():
            for user in queue.users.values():
                mine = [job for job in jobs if job.user is user]
                held = [[r.gpus for r in self.workers.values() if r.job == job.uid and not r.leaving] for job in mine]
                counted = sum(sum(gpus[: job.wanted]) for job, gpus in zip(mine, held, strict=True))
                assert user.held == round(GPU * counted), user
                occupied = sum(r.gpus for r in self.workers.values() if any(r.job == job.uid for job in mine))
                assert user.occupied == round(GPU * occupied), user

    def _cores(self, jobs: Iterable[tuple[Job, int]]) -> Iterable[tuple[Job, int]]:
        """Yield the jobs that cannot be preempted, with the workers that nobody may take."""
        for job, count in jobs:
            if not (job.preemptible or job.exceeds):
                yield job, min(count, job.gang)

    def _project_of(self, running: Running) -> str:
        job = self.state.jobs[running.job]
        return job.queue.name
