"""A cluster in memory: it keeps objects, applies the controller's requests to them, and plays kubelets and users.

The test double of an API server that a detached controller writes to, so that thousands of restarts take seconds. It
does only what the plan depends on: patches of pods and jobs, evictions, deletions, creations. Everything is sent to the
watches of the controller in the order in which it happened.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes import detached as watches
from tests.kubernetes.detached import Detached, Object, Unanswered
from tests.kubernetes.test_admission import patched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SETTLE_STEPS = 2000
NODE_NAMES = ("n0", "n1", "n2")
EPOCH = 1_767_225_600  # 2026-01-01
ORDER = (
    watches.NODES,
    watches.NAMESPACES,
    watches.QUOTAS,
    watches.CLAIMS,
    watches.VOLUMES,
    watches.JOBS,
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
        super().__init__(clock=lambda: EPOCH + 40_000.0)
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
            statuses = controller.elastic.statuses
            for job, timer in list(statuses._dirty.items()):  # they wait for a moment in which nothing changes
                timer.cancel()
                statuses._look(job)
            busy = controller._planning is not None or controller._writer._tasks
            quiet = 0 if busy else quiet + 1
            if quiet > 3 and not (losses and self._let_losses_settle()):
                return
            await asyncio.sleep(0.0005 if busy else 0)
        raise AssertionError("the controller plans and writes without end")

    def _let_losses_settle(self) -> bool:
        """Let what plans want to stop be wanted since long ago; return whether that changes anything."""
        wanted = self.controller._settling._wanted
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
        self._uids, self._seconds = itertools.count(1), itertools.count(EPOCH)

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
        seconds = next(self._seconds) - EPOCH
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"2026-01-01T{hours:02}:{minutes:02}:{seconds % 60:02}Z"

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
            return self.put(collection, _created(namespace, body))
        found = kept.get(f"{namespace}/{name}" if namespace else name)
        if found is None:
            raise ApiError(404, "NotFound", f"{path} does not exist")
        if verb == "DELETE" or part == "eviction":
            if collection == watches.PODS and labels.RESERVES in found["metadata"].get("labels", {}):
                self.drop(collection, f"{namespace}/{name}")  # it ends at once, as it has started
                return found
            found["metadata"].setdefault("deletionTimestamp", self.now())
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

    # What kubelets and users do

    def run_pods(self, *, start: bool = True) -> None:
        """Bind all admitted pods to their nodes, and run them."""
        for pod in [p for p in self.objects[watches.PODS].values() if not p["spec"].get("nodeName")]:
            node = pinned_to(pod)
            if node and not pod["spec"].get("schedulingGates"):
                pod["spec"]["nodeName"] = node
                pod["status"] = {"phase": "Running" if start else "Pending"}
                self.put(watches.PODS, pod)

    def end_terminating(self) -> None:
        """Remove the pods that are being deleted."""
        pods = self.objects[watches.PODS]
        for key in [key for key, pod in pods.items() if "deletionTimestamp" in pod["metadata"]]:
            self.drop(watches.PODS, key)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[Twin]:
    """A controller that has listed the world's objects, and plans."""
    twin = Twin(world)
    for path in ORDER:
        for body in world.objects[path].values():
            twin.see(path, msgspec.json.decode(msgspec.json.encode(body)))
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
    plan = scheduler.plan(state, now)
    plain = controller.snapshot.plain

    def pods(job: str) -> object:
        return sorted(plain.jobs[job].members) if job in plain.jobs else job

    return {
        "bind": sorted(repr((pods(one.job), one.placements, one.reason.message)) for one in plan.bind),
        "evict": sorted(repr((sorted(one.workers), one.reason.message)) for one in plan.evict),
        "move": sorted(repr((one.worker, one.to, one.reason.message)) for one in plan.move),
        "resize": sorted(repr((pods(one.job), one.add, sorted(one.remove), one.reason.message)) for one in plan.resize),
        "nominate": sorted(repr((pods(one.job), one.placements, one.reason.message)) for one in plan.nominate),
        "waiting": sorted(repr((pods(job), reason.message)) for job, reason in plan.waiting.items()),
    }


def records_of(twin: Detached) -> list[str]:
    """Return what the scheduler's state has of each job, in terms of pods: all that a plan may depend on but times.

    A job that gets no more workers is what its workers hold: which of them once started together decides nothing.
    """
    controller = twin.controller
    plain = controller.snapshot.plain.jobs
    found = []
    for job in controller.snapshot.state.jobs.values():
        rank = job.priority, job.preemptible, job.movable
        held = sorted((t.id, t.status.name, t.node and t.node.name, t.devices, t.request) for t in job.tasks.values())
        if job.completing or (job.uid in plain and job.wanted == job.active == 1):
            found += [repr((rank, one)) for one in held]
            continue
        pods = sorted(plain[job.uid].members) if job.uid in plain else job.uid
        sizes = job.gang, job.wanted, job.most, job.active
        life = job.submitted_at, job.suspended, job.removed
        found.append(repr((rank, pods, sizes, life, held, [task.request for task in job.pending])))
    return sorted(found)


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


def pinned_to(pod: Object) -> str:
    """Return the node that the pod was sent to; "" if it is gated, or may run on several."""
    affinity = pod["spec"].get("affinity") or {}
    required = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    if labels.DEVICES not in pod["metadata"].get("annotations", {}):
        return ""
    for term in required.get("nodeSelectorTerms", []):
        nodes = [node for node in NODE_NAMES if all(_admits(match, node) for match in term.get("matchFields", []))]
        if len(nodes) == 1:  # kube-scheduler would bind it there, whatever the rest of the terms says
            return nodes[0]
    return ""


def _admits(match: Object, node: str) -> bool:
    return bool((node in match["values"]) == (match["operator"] == "In"))
