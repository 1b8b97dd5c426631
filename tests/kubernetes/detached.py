"""A controller without an API server: the test is the watch, and every request is recorded and refused or answered.

A test double, for what no API server can be brought to give: objects that its own validation refuses, and thousands of
generated ones in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import Credentials
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import NO_FENCE, Fence
from kfp_gpuquota.cluster.kubernetes.controller.controller import Controller
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import PodSettings
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import WatchLine
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
NAMESPACES = "/api/v1/namespaces"
QUOTAS = f"/apis/{labels.API_VERSION}/gpuquotas"
JOBS = f"/apis/{labels.API_VERSION}/elasticjobs"
PROFILES = "/apis/kubeflow.org/v1/profiles"
POLICIES = f"/apis/{labels.API_VERSION}/quotapolicies"
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
RAY_CLUSTERS = "/apis/ray.io/v1/rayclusters"
LIMIT_RANGES = "/api/v1/limitranges"
Object = dict[str, Any]


class Unanswered(Connection):
    """Records every request; no server answers it, unless a subclass does."""

    def __init__(self) -> None:
        super().__init__(Credentials(server="https://nowhere.invalid"), retry_for_s=0.0)
        self.asked: list[tuple[str, str, Any]] = []

    async def call(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "",
        params: Mapping[str, str] | None = None,
        retry_for_s: float | None = None,
        fence: Fence = NO_FENCE,
    ) -> bytes:
        """Record it, and answer."""
        self.asked.append((verb, path, body))
        await asyncio.sleep(0)
        return self.answer(verb, path, body)

    def answer(self, verb: str, path: str, body: object) -> bytes:
        """Fail as an API server does that is away."""
        raise ClusterUnavailableError(f"no server answers {verb} {path}")


class Detached:
    """The controller, and the watches that the test plays."""

    def __init__(self, **options: Any) -> None:
        self.connection = Unanswered()
        self.controller = Controller(self.connection, PodSettings(coordinator="https://nowhere.invalid"), **options)
        # of two watches of a kind, which differ in their labels, the first
        self._reflectors = {reflector._path: reflector for reflector in reversed(self.controller.reflectors)}
        self._versions = itertools.count(1)
        self.pods: list[Object] = []  # as they were created

    def see(self, path: str, body: Object | bytes, event: str = "MODIFIED") -> None:
        """One line of the watch of `path`, as the API server would send it."""
        if isinstance(body, dict):
            metadata = {**body.get("metadata", {}), "resourceVersion": str(next(self._versions))}
            body = msgspec.json.encode({**body, "metadata": metadata})
        self._reflectors[path]._take(WatchLine(event, msgspec.Raw(body)))
        self._reflectors[path].catch_up()

    async def start(self) -> None:
        """All was listed."""
        self.controller.start_claims()
        await self.controller.snapshot.start(self.controller.gangs.join)
        self.controller.snapshot.emit(self.controller._move_budget.recalled())
        self.controller.profiles.start()
        self.controller.managed_jobs.start()

    def node(self, name: str = "node", gpus: int = 8, **metadata: Any) -> None:
        """A node that is ready."""
        allocatable = {labels.GPU_RESOURCE: str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
        self.see(NODES, {"metadata": {"name": name, "uid": f"node-{name}", **metadata}, "spec": {}, "status": status})

    def team(self, name: str, guaranteed: int = 4) -> None:
        """A team with a quota."""
        self.see(QUOTAS, {"metadata": {"name": name, "uid": f"quota-{name}"}, "spec": {"guaranteed": guaranteed}})

    def pod(self, team: str, name: str, gpus: int | str = 1, *, node: str = "", **more: Any) -> str:
        """A pod that is gated, or runs on `node`; its uid."""
        uid = str(more.pop("uid", f"{team}-{name}"))
        container = {"name": "main", "resources": {"limits": {labels.GPU_RESOURCE: str(gpus)}}}
        spec = {"nodeName": node} if node else {"schedulingGates": [{"name": labels.QUOTA_GATE}]}
        body = {
            "metadata": {"name": name, "namespace": team, "uid": uid, **more.pop("metadata", {})},
            "spec": {"containers": [container], **spec, **more},
            "status": {"phase": "Running" if node else "Pending"},
        }
        self.pods.append(body)
        self.see(PODS, body)
        return uid

    def sent(self, uid: str) -> bool:
        """The pod was planned: it was sent to a node, or is being sent."""
        member = self.controller.snapshot.plain.members.get(uid)
        return member is not None and member.sent_to is not None

    def taken(self, node: str = "node") -> int:
        """Devices of the node that pods hold."""
        held = self.controller.snapshot.allocator._of.values()
        return sum(len(devices) for name, devices in held if name == node)


@asynccontextmanager
async def detached(**options: Any) -> AsyncIterator[Detached]:
    """A controller that has not listed anything yet; what it began is ended with the block."""
    running = Detached(**options)
    try:
        yield running
    finally:
        running.controller._stop_timers()
        await running.controller._writer.close()
