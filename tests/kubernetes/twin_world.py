"""A cluster in memory: it keeps objects, applies the controller's requests to them, and plays its other programs.

The test double of an API server that a detached controller writes to, so that thousands of restarts take seconds. It
does only what the plan depends on: patches of pods and jobs, evictions, deletions, creations. Everything is sent to the
watches of the controller in the order in which it happened.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.pods.recovery import is_not_bindable
from kfp_gpuquota.engine.expected_starts import RunTimesOfWaiting
from tests.kubernetes import detached as watches
from tests.kubernetes.controlled import gpus_of, is_over
from tests.kubernetes.detached import Detached, Object, Unanswered
from tests.kubernetes.test_admission import patched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

SETTLE_STEPS = 2000
NODE_NAMES = ("n0", "n1", "n2")
EPOCH = 1_767_225_600  # 2026-01-01
ORDER = (
    watches.POLICIES,
    watches.NODES,
    watches.NAMESPACES,
    watches.QUOTAS,
    watches.CLAIMS,
    watches.VOLUMES,
    watches.JOBS,
    watches.RAY_CLUSTERS,
    watches.PODS,
)


class Answering(Unanswered):
    """Applies each request to the world, and answers with the object."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def answer(self, verb: str, path: str, body: object) -> bytes:
        """Answer as an API server does."""
        return msgspec.json.encode(self.world.answer(verb, path, body))


class Twin(Detached):
    """A controller whose requests the world answers."""

    def __init__(self, world: World) -> None:
        super().__init__(clock=lambda: float(EPOCH + world.seconds))
        self.connection = Answering(world)
        self.controller._connection = self.connection
        self.controller._writer._connection = self.connection

    async def start(self) -> None:
        """All was listed."""
        await super().start()
        self.controller.reservations.start()
        self.controller.wake()

    async def settle(self, *, losses: bool = True) -> None:
        """Return when the controller has planned, and all its requests were answered.

        With `losses` time passes until what loses work is carried out, too.
        """
        quiet = 0
        for _ in range(SETTLE_STEPS):
            controller = self.controller
            for statuses in (controller.elastic.statuses, controller._quota_status):
                for key, timer in list(statuses._dirty.items()):  # they wait for a moment in which nothing changes
                    timer.cancel()
                    statuses._look(key)
            busy = controller.plans.busy or controller._writer._tasks
            quiet = 0 if busy else quiet + 1
            if quiet > 3 and not (losses and self._let_losses_settle()):
                return
            await asyncio.sleep(0.0005 if busy else 0)
        raise AssertionError("the controller plans and writes without end")

    def _let_losses_settle(self) -> bool:
        """Let what plans want to stop be wanted since long ago; return whether that changes anything."""
        wanted = self.controller.plans._settling._wanted
        if all(since == -math.inf for since in wanted.values()):
            return False
        wanted.update(dict.fromkeys(wanted, -math.inf))
        self.controller.wake()
        return True


class World:
    """All objects by collection and key (`namespace/name`), and the controller that watches them."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {path: {} for path in ORDER}
        self.twin: Twin | None = None
        self._uids, self.seconds = itertools.count(1), 0

    # Objects

    def put(self, path: str, body: Object) -> Object:
        """Create or replace an object."""
        meta = body["metadata"]
        meta.setdefault("uid", f"{meta['name']}-{next(self._uids)}")
        meta.setdefault("creationTimestamp", self.now())
        self.objects[path][_key(meta)] = body
        self._send(path, body, "MODIFIED")
        return body

    def drop(self, path: str, key: str) -> None:
        """Delete an object at once."""
        if (body := self.objects[path].pop(key, None)) is not None:
            self._send(path, body, "DELETED")

    def now(self) -> str:
        """Return a later time each time it is called."""
        self.seconds += 1
        hours, minutes = self.seconds // 3600, self.seconds // 60 % 60
        return f"2026-01-01T{hours:02}:{minutes:02}:{self.seconds % 60:02}Z"

    def _send(self, path: str, body: Object, event: str) -> None:
        if self.twin is not None:
            self.twin.see(path, msgspec.json.decode(msgspec.json.encode(body)), event)

    # Requests of the controller

    def answer(self, verb: str, path: str, body: Any) -> object:
        """Carry out a request. Raises ApiError for what does not exist."""
        collection, namespace, name, part = _parts(path)
        kept = self.objects.get(collection)
        if kept is None:
            return {}  # events, Secrets and others that no plan depends on
        if verb == "POST" and not name:
            return self._create(collection, _created(namespace, body))
        found = kept.get(f"{namespace}/{name}" if namespace else name)
        if found is None:
            raise ApiError(404, "NotFound", f"{path} does not exist")
        if verb == "DELETE" or part == "eviction":
            if collection == watches.PODS and labels.RESERVES in found["metadata"].get("labels", {}):
                self.drop(collection, f"{namespace}/{name}")  # it ends at once, as it has started
                return found
            self._delete(found["metadata"], body)
        elif verb == "PATCH" and isinstance(body, list):
            found = patched(found, body)
        elif verb == "PATCH" and part == "status":
            found["status"] = body["status"]  # server-side apply removes the fields that its manager left out
        elif verb == "PATCH":
            _merge(found, {key: value for key, value in body.items() if key != "metadata"})
            _merge(found["metadata"], {"annotations": body.get("metadata", {}).get("annotations", {})})
        elif verb == "GET":
            return found
        return self.put(collection, found)

    def _create(self, collection: str, body: Object) -> Object:
        if _key(body["metadata"]) in self.objects[collection]:
            raise ApiError(409, "AlreadyExists", f"{_key(body['metadata'])} exists")
        return self.put(collection, body)

    def _delete(self, meta: Object, options: Object | None) -> None:
        """Mark an object as being deleted; the grace period is that of the first deletion."""
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = self.now()
            if (grace_s := (options or {}).get("gracePeriodSeconds")) is not None:
                meta["deletionGracePeriodSeconds"] = grace_s

    # What kube-scheduler, kubelets, KubeRay and users do

    def run_pods(self, *, start: bool = True, choice: int = 0) -> None:
        """Bind all admitted pods, and run them; of the nodes of those without a pin, `choice` selects one."""
        for pod in [pod for pod in self._unbound() if labels.RESERVED_ON not in _notes(pod)]:
            if node := pinned_to(pod):
                self._bind(pod, node, start)
        for pod in self.unpinned():
            if nodes := [node for node in NODE_NAMES if self._fits(pod, node)]:
                self._bind(pod, nodes[choice % len(nodes)], start)

    def unpinned(self) -> list[Object]:
        """Return the pods that were released without a pin, and are not bound."""
        return [pod for pod in self._unbound() if labels.RESERVED_ON in _notes(pod)]

    def refuse(self, pod: Object) -> None:
        """Report that no node fits the pod, for longer than the controller waits."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0 nodes fit"}
        pod["status"] = {"phase": "Pending", "conditions": [condition]}
        self.put(watches.PODS, pod)
        if self.twin is not None:
            view = self.twin.controller.snapshot.pods[pod["metadata"]["uid"]]
            if is_not_bindable(view):
                self.twin.controller._recovery._not_bindable(view)

    def run_kuberay(self) -> bool:
        """Delete and create the pods of Ray clusters as their groups request; return whether any was."""
        return any(self._size(cluster, cluster["spec"]["workerGroupSpecs"][0]) for cluster in self._ray_clusters())

    def _unbound(self) -> list[Object]:
        pods = self.objects[watches.PODS].values()
        admitted = (pod for pod in pods if not pod["spec"].get("schedulingGates") and not pod["spec"].get("nodeName"))
        return [pod for pod in admitted if "deletionTimestamp" not in pod["metadata"]]

    def _bind(self, pod: Object, node: str, start: bool) -> None:
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Running" if start else "Pending"}
        self.put(watches.PODS, pod)

    def _fits(self, pod: Object, node: str) -> bool:
        """Return whether kube-scheduler's filters of labels, taints, volumes and GPUs admit the pod."""
        if self.twin is None or node not in self.twin.controller.snapshot.emitted_nodes:
            return False
        snapshot = self.twin.controller.snapshot
        view, found = snapshot.pods[pod["metadata"]["uid"]], snapshot.emitted_nodes[node]
        here = (p for p in self.objects[watches.PODS].values() if p["spec"].get("nodeName") == node)
        held = sum(gpus_of(p) for p in here if not is_over(p))
        free = int(self.objects[watches.NODES][node]["status"]["allocatable"][labels.GPU_RESOURCE]) - held
        return found.ready and free >= view.gpus and view.constraints.within(view.volume_terms).admit(found)

    def _ray_clusters(self) -> list[Object]:
        return list(self.objects[watches.RAY_CLUSTERS].values())

    def _size(self, cluster: Object, group: Object) -> bool:
        uid, pods = cluster["metadata"]["uid"], list(self.objects[watches.PODS].values())
        own = [p for p in pods if any(o["uid"] == uid for o in p["metadata"].get("ownerReferences", ()))]
        own = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
        named = group.get("scaleStrategy", {}).get("workersToDelete", ())
        surplus = [pod for pod in own if is_over(pod) or pod["metadata"]["name"] in named]
        for pod in surplus:
            pod["metadata"]["deletionTimestamp"] = self.now()
            self.put(watches.PODS, pod)
        wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
        missing = wanted - (len(own) - len(surplus))
        for _ in range(missing):
            self._add_worker(cluster, group)
        return bool(surplus) or missing > 0

    def _add_worker(self, cluster: Object, group: Object) -> None:
        meta = cluster["metadata"]
        owner = {"kind": "RayCluster", "apiVersion": "ray.io/v1", "name": meta["name"], "uid": meta["uid"]}
        written = {"ray.io/cluster": meta["name"], "ray.io/group": group["groupName"], "ray.io/node-type": "worker"}
        number = next(self._uids)
        pod = {
            "metadata": {
                "name": f"{meta['name']}-worker-{number}",
                "namespace": meta["namespace"],
                "uid": f"ray-pod-{number}",
                "labels": written,
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": deepcopy(group["template"]["spec"]),
            "status": {"phase": "Pending"},
        }
        self.put(watches.PODS, pod)

    def end_terminating(self) -> None:
        """Remove the pods that are being deleted."""
        pods = self.objects[watches.PODS]
        for key in [key for key, pod in pods.items() if "deletionTimestamp" in pod["metadata"]]:
            self.drop(watches.PODS, key)


@asynccontextmanager
async def running(world: World, *, follows: bool = False) -> AsyncIterator[Twin]:
    """A controller that has listed the world's objects, and plans; if it `follows`, it sees changes as it starts."""
    twin = Twin(world)
    for path in ORDER:
        for body in world.objects[path].values():
            twin.see(path, msgspec.json.decode(msgspec.json.encode(body)))
    if follows:
        world.twin = twin
    try:
        await twin.start()
        yield twin
    finally:
        twin.controller._stop_timers()
        await twin.controller._writer.close()


def plan_of(twin: Detached, now: float) -> dict[str, list[str]]:
    """Return what the controller would decide now, in terms of pods: the names of its own records do not count."""
    controller = twin.controller
    state = controller.current_state()
    assert state is not None
    for event in RunTimesOfWaiting(controller.elastic.book).changes(state):
        state.apply(event)
    plan = scheduler.plan(state, now)
    plain, names = controller.snapshot.plain, _pods_of_slots(twin)

    def workers(ids: Iterable[str]) -> list[str]:
        return sorted(names.get(one, one) for one in ids)

    def pods(job: str) -> object:
        return sorted(plain.jobs[job].members) if job in plain.jobs else job

    return {
        "bind": sorted(repr((pods(one.job), one.placements, one.reason.message)) for one in plan.bind),
        "evict": sorted(repr((workers(one.workers), one.reason.message)) for one in plan.evict),
        "move": sorted(repr((workers([one.worker]), one.to, one.reason.message)) for one in plan.move),
        "resize": sorted(
            repr((pods(one.job), one.add, workers(one.remove), one.reason.message)) for one in plan.resize
        ),
        "nominate": sorted(repr((pods(one.job), one.placements, one.reason.message)) for one in plan.nominate),
        "waiting": sorted(repr((pods(job), reason.message)) for job, reason in plan.waiting.items()),
    }


def records_of(twin: Detached) -> list[str]:
    """Return what the scheduler's state has of each job, in terms of pods: all that a plan may depend on but times.

    A job that gets no more workers is what its workers hold: which of them once started together decides nothing.
    """
    controller = twin.controller
    plain, names = controller.snapshot.plain.jobs, _pods_of_slots(twin)
    found = []
    for job in controller.snapshot.state.jobs.values():
        rank = job.priority, job.preemptible, job.movable
        tasks = ((names.get(t.id, t.id), t) for t in job.tasks.values())
        held = sorted((name, t.status.name, t.node and t.node.name, t.devices, t.request) for name, t in tasks)
        if job.completing or job.removed or (job.uid in plain and job.wanted == job.active == 1):
            found += [repr((rank, one)) for one in held]
            continue
        pods = sorted(plain[job.uid].members) if job.uid in plain else job.uid
        sizes = job.gang, job.wanted, job.most, job.active
        promise = job.promised and (job.promised, job.promised_at)
        life = job.submitted_at, job.suspended, job.removed, promise
        found.append(repr((rank, pods, sizes, life, held, [task.request for task in job.pending])))
    return sorted(found)


def _pods_of_slots(twin: Detached) -> dict[str, str]:
    """Return the pods of Ray clusters' workers by their slots, which a restarted controller names otherwise."""
    units = twin.controller.ray._set.units.values()
    return {slot.id: slot.pod.uid for unit in units for slot in unit.slots.values() if slot.pod is not None}


def _created(namespace: str, body: Object) -> Object:
    """Return a new object; a reservation's pod runs at once, and reports its GPU."""
    body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    notes = body["metadata"].get("annotations", {})
    if node := notes.get(labels.RESERVES_ON):
        gpu = f"GPU-{node}-{body['metadata']['labels'][labels.RESERVES]}"
        report = {"name": "report", "state": {"terminated": {"exitCode": 0, "message": gpu}}}
        body["spec"] = {**body["spec"], "nodeName": node}
        body["status"] = {"phase": "Running", "initContainerStatuses": [report]}
    return {"status": {"phase": "Pending"}, **body}


def _key(meta: Object) -> str:
    return f"{meta['namespace']}/{meta['name']}" if "namespace" in meta else str(meta["name"])


def _parts(path: str) -> tuple[str, str, str, str]:
    """Return (collection, namespace, name, subresource) of a request's path."""
    parts = path.split("?", maxsplit=1)[0].strip("/").split("/")
    root = parts[:2] if parts[0] == "api" else parts[:3]
    rest, namespace = parts[len(root) :], ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    name, part = ([*rest, "", ""])[1:3]
    return "/" + "/".join([*root, rest[0]]), namespace, name, part


def _merge(into: Object, changes: Object) -> None:
    for key, value in changes.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def pinned_to(pod: Object, among: Iterable[str] = NODE_NAMES) -> str:
    """Return the node of these that the pod was sent to; "" if it is gated, or may run on several."""
    affinity = pod["spec"].get("affinity") or {}
    required = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    if labels.DEVICES not in _notes(pod):
        return ""
    for term in required.get("nodeSelectorTerms", []):
        nodes = [node for node in among if all(_admits(match, node) for match in term.get("matchFields", []))]
        if len(nodes) == 1:  # kube-scheduler would bind it there, whatever the rest of the terms says
            return nodes[0]
    return ""


def _notes(pod: Object) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"].get("annotations") or {}
    return found


def _admits(match: Object, node: str) -> bool:
    return bool((node in match["values"]) == (match["operator"] == "In"))
