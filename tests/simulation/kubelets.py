"""kube-scheduler and kubelets in simulated time: pods are bound, run, hang, end, and are removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import worker_id
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes import detached as watches
from tests.kubernetes.twin_world import pinned_to
from tests.simulation.trainings import ELASTIC, KILLED, Member, Pace, Trainings

if TYPE_CHECKING:
    import random
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterator, Mapping

    from kfp_gpuquota.api import JobSpec
    from tests.kubernetes.detached import Object
    from tests.kubernetes.twin_world import World

BIND_AGAIN_S: Final = 1.0
GRACE_S: Final = 10.0
LOST: Final = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "node is gone"}
_ALIVE: Final = {"Pending", "Running"}


@dataclass
class JobHistory:
    """What concerns one job: how often it started, its own failures, and whether its workers may end."""

    spec: JobSpec
    pace: Pace
    pods: int = 0
    failures: int = 0
    touched: bool = False  # a user or a failure ends its workers


@dataclass(eq=False, kw_only=True)
class Container(Member):
    """The process in a worker's pod."""

    key: str


class Kubelets:
    """The nodes with their pods. `happened()` is called for each event that the controller did not cause."""

    def __init__(self, loop: AbstractEventLoop, rng: random.Random, world: World, happened: Callable[[], None]) -> None:
        self._loop, self._rng, self._world, self._happened = loop, rng, world, happened
        self.nodes: dict[str, int] = {}
        self.lost: set[str] = set()
        self.jobs: dict[str, JobHistory] = {}
        self.trainings = Trainings(loop, rng, lambda member, code: self.end(cast("Container", member).key, code))
        self._processes: dict[str, Container] = {}  # by key of the pod

    def workers(self) -> Iterator[tuple[str, Object]]:
        """Yield the workers' pods with their keys."""
        pods = self._world.objects[watches.PODS]
        return ((key, pod) for key, pod in list(pods.items()) if labels.JOB in pod["metadata"].get("labels", {}))

    def running(self) -> list[str]:
        """Return the keys of the pods that run."""
        return [key for key, pod in self.workers() if pod["status"]["phase"] == "Running"]

    def holders(self) -> Iterator[tuple[str, tuple[int, ...], Object]]:
        """Yield (node, devices, pod) of all workers that hold devices, or for which devices are reserved."""
        for _, pod in self.workers():
            if pod["status"]["phase"] in _ALIVE:
                notes = pod["metadata"]["annotations"]
                node = pod["spec"].get("nodeName") or pinned_to(pod, self.nodes) or notes.get(labels.RESERVED_ON, "")
                yield node, tuple(map(int, filter(None, notes[labels.DEVICES].split(",")))), pod

    # kube-scheduler

    def created(self, key: str) -> None:
        """Bind the pod soon."""
        self._loop.call_soon(self._bind, key)

    def _bind(self, key: str) -> None:
        pod = self._world.objects[watches.PODS].get(key)
        if pod is None or "deletionTimestamp" in pod["metadata"] or pod["spec"].get("nodeName"):
            return
        job = self.jobs[job_of(pod)]
        pinned = pinned_to(pod, self.nodes)
        allowed = [pinned] if pinned else self.nodes
        nodes = [name for name in allowed if self._may_run(pod, name) and self._fits(name, job.spec, key)]
        if not nodes:
            refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0 nodes fit"}
            if pod["status"].get("conditions") != [refused]:
                self._world.put(watches.PODS, {**pod, "status": {"phase": "Pending", "conditions": [refused]}})
            self._loop.call_later(BIND_AGAIN_S, self._bind, key)
            return
        node = nodes[self._rng.randrange(len(nodes))]
        bound = {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": {"phase": "Pending"}}
        self._world.put(watches.PODS, bound)
        self._loop.call_later(job.pace.starts_s, self._run, key, pod["metadata"]["uid"])

    def _may_run(self, pod: Object, node: str) -> bool:
        """Return whether the node has the labels that the pod's selector and affinity require."""
        found = self._world.objects[watches.NODES].get(node, {"metadata": {}})["metadata"].get("labels", {})
        selector = pod["spec"].get("nodeSelector") or {}
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity", {})
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [{}])
        terms = (term.get("matchExpressions", []) for term in required)
        return selector.items() <= found.items() and any(all(_matches(one, found) for one in term) for term in terms)

    def _fits(self, node: str, spec: JobSpec, key: str) -> bool:
        """Return whether the node is there and has idle GPUs; those with shares are planned only."""
        if node in self.lost:
            return False
        there = (pod for other, pod in self.workers() if other != key and pod["spec"].get("nodeName") == node)
        specs = [self.jobs[job_of(pod)].spec for pod in there if pod["status"]["phase"] in _ALIVE]
        if spec.shared:
            return True
        reserved = self._world.objects[watches.PODS].values()
        shared = sum(
            labels.RESERVES in pod["metadata"].get("labels", {}) and pod["spec"].get("nodeName") == node
            for pod in reserved
        )
        held = sum(other.worker_gpus for other in specs if not other.shared)
        return bool(held + shared + spec.worker_gpus <= self.nodes[node])

    # Kubelets

    def _run(self, key: str, uid: str) -> None:
        pod = self._world.objects[watches.PODS].get(key)
        if pod is None or pod["metadata"]["uid"] != uid or pod["status"]["phase"] != "Pending":
            return
        if "deletionTimestamp" in pod["metadata"]:
            return  # its kubelet does not start it any more
        job = self.jobs[job_of(pod)]
        index = int(pod["metadata"]["labels"][labels.WORKER])
        process = Container(id=worker_id(job_of(pod), index), job_uid=job_of(pod), pace=job.pace, key=key)
        self._processes[key] = process
        self._world.put(watches.PODS, {**pod, "status": {"phase": "Running"}})
        if job.spec.command[0] == ELASTIC:
            self._loop.call_later(job.pace.joins_s, self.trainings.join, process)
        elif job.pace.works_s is not None:
            self._loop.call_later(job.pace.works_s, self._end_process, process, 0)

    def terminate(self, key: str, pod: Object) -> None:
        """End a pod that is being deleted: at once if it does not run, else within its grace period.

        A worker of a training leaves by its membership; it does not end on SIGTERM.
        """
        uid = pod["metadata"]["uid"]
        process = self._processes.get(key)
        if process is None or not process.alive:
            self._loop.call_later(0.1, self._remove, key, uid)
            return
        grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds", GRACE_S))
        ends_s = process.pace.ends_s
        if process.training is None and not process.silent and ends_s is not None and ends_s <= grace_s:
            self._loop.call_later(ends_s, self._end_process, process, 0)
        else:
            self._loop.call_later(grace_s, self._end_process, process, KILLED)

    def fail(self, key: str, code: int) -> None:
        """End the worker's process by itself."""
        job, process = self.jobs[job_of(self._world.objects[watches.PODS][key])], self._processes.get(key)
        # With code 0, too: the peers of a training may notice its broken connections before its end is seen.
        job.failures += code != 0 or (process is not None and process.training is not None)
        self.end(key, code)

    def silence(self, number: int) -> None:
        """Make one of the processes of trainings hang."""
        found = [p for p in self._processes.values() if p.alive and p.training is not None]
        if found:
            found.sort(key=lambda process: process.id)
            process = found[number % len(found)]
            self.trainings.silence(process)
            job = self.jobs[process.job_uid]
            job.failures += 1
            job.touched = True

    def end(self, key: str, code: int) -> None:
        """End the process of a pod."""
        if (process := self._processes.get(key)) is not None:
            self._end_process(process, code)

    def _end_process(self, process: Container, code: int) -> None:
        if not process.alive:
            return
        process.code = code
        self.trainings.ended(process)
        self._happened()
        if code:
            self.jobs[process.job_uid].touched = True
        pod = self._world.objects[watches.PODS].get(process.key)
        if pod is None:
            return
        uid, deleted = pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]
        if not deleted or self._rng.random() < 0.5:
            self._world.put(watches.PODS, {**pod, "status": _ended(code, self._world.now())})
        if deleted:
            self._loop.call_later(0.1, self._remove, process.key, uid)

    def _remove(self, key: str, uid: str) -> None:
        found = self._world.objects[watches.PODS].get(key)
        if found is not None and found["metadata"]["uid"] == uid:
            self._happened()
            self._world.drop(watches.PODS, key)

    def lose_node(self, name: str) -> None:
        """End all pods of a node, which the pod garbage collector removes."""
        self.lost.add(name)
        self._world.drop(watches.NODES, name)
        for key, pod in list(self._world.objects[watches.PODS].items()):
            if pod["spec"].get("nodeName") != name:
                continue
            if (process := self._processes.get(key)) is not None and process.alive:
                process.code = KILLED
                self.trainings.ended(process)
            if pod["status"]["phase"] in _ALIVE and key not in self._reservations():
                self._world.put(watches.PODS, {**pod, "status": {"phase": "Failed", "conditions": [LOST]}})
            self._world.drop(watches.PODS, key)

    def _reservations(self) -> set[str]:
        pods = self._world.objects[watches.PODS].items()
        return {key for key, pod in pods if labels.RESERVES in pod["metadata"].get("labels", {})}


def _ended(code: int, at: str) -> dict[str, Any]:
    terminated = {"name": "main", "state": {"terminated": {"exitCode": code, "finishedAt": at}}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [terminated]}


def job_of(pod: Object) -> str:
    """Return the name of the pod's job, which is its uid as well."""
    name: str = pod["metadata"]["labels"][labels.JOB]
    return name


def _matches(expression: Mapping[str, Any], found: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    match expression["operator"]:
        case "Exists":
            return key in found
        case "DoesNotExist":
            return key not in found
        case "In":
            return found.get(key) in values
        case "NotIn":
            return found.get(key) not in values
        case other:
            raise ValueError(f"this kube-scheduler has no operator {other}")
