"""Prometheus metrics, and the small server for them and for probes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kfp_gpuquota.cluster.kubernetes.client.sockets import listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kfp_gpuquota.cluster.kubernetes.controller.controller import Controller

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

_RECLAIM_SECONDS: Final = (1.0, 3.0, 10.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0)


class Metrics:
    """All of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "gpuquota_api_calls", "Calls to the API server", ["verb", "status"], registry=self.registry
        )
        self.plans = Histogram("gpuquota_plan_seconds", "Time to plan", buckets=_SECONDS, registry=self.registry)
        self.plan_failures = Counter("gpuquota_plan_failures", "Plans that raised an exception", registry=self.registry)
        self.decisions = Counter("gpuquota_decisions", "What plans decided, in jobs", ["kind"], registry=self.registry)
        self.reclaim_steps = Counter(
            "gpuquota_reclaim_steps",
            "Steps by which pods are stopped for others: evicted, refused, deleted, overdue",
            ["step"],
            registry=self.registry,
        )
        self.reclaims = Histogram(
            "gpuquota_reclaim_seconds",
            "From the decision to stop a pod for others to its end",
            buckets=_RECLAIM_SECONDS,
            registry=self.registry,
        )
        self.reviews = Histogram(
            "gpuquota_review_seconds", "Time to review a pod", ["allowed"], buckets=_SECONDS, registry=self.registry
        )
        self.leads = Gauge("gpuquota_leader", "1 in the process that leads", registry=self.registry)
        self.waiting = Gauge("gpuquota_waiting_jobs", "Jobs that wait", ["project"], registry=self.registry)
        self.held = Gauge("gpuquota_held_gpus", "GPUs held", ["project"], registry=self.registry)
        self.guaranteed = Gauge("gpuquota_guaranteed_gpus", "Guaranteed quota", ["project"], registry=self.registry)
        self.nodes = Gauge("gpuquota_nodes", "Nodes known", registry=self.registry)
        self.quarantined = Gauge(
            "gpuquota_quarantined_objects", "Objects that cannot be read or handled", ["kind"], registry=self.registry
        )
        self.queued_writes = Gauge(
            "gpuquota_queued_writes", "Requests that wait for a slot", ["lane"], registry=self.registry
        )
        self.pods = Gauge("gpuquota_pods", "Pods that hold GPUs or wait for some", registry=self.registry)

    def count_call(self, verb: str, status: int) -> None:
        """One call to the API server."""
        self.calls.labels(verb, str(status)).inc()

    def look(self, controller: Controller) -> None:
        """The gauges, read off when somebody asks for them; those of projects that are gone are left out."""
        snapshot = controller.snapshot
        for gauge in (self.held, self.waiting, self.guaranteed, self.quarantined):
            gauge.clear()
        for kind, count in controller.quarantine.counts().items():
            self.quarantined.labels(kind).set(count)
        for lane, depth in controller.queued_writes().items():
            self.queued_writes.labels(lane).set(depth)
        self.nodes.set(len(snapshot.nodes))
        self.pods.set(len(snapshot.pods))
        for name, project in snapshot.projects.items():
            held = snapshot.held(name)
            self.held.labels(name).set(held.gpus)
            self.waiting.labels(name).set(held.waiting)
            self.guaranteed.labels(name).set(project.guaranteed)


class Registered(Protocol):
    """Metrics of any process."""

    @property
    def registry(self) -> CollectorRegistry:
        """Where they are kept."""


@asynccontextmanager
async def serving(
    metrics: Registered,
    port: int,
    *,
    ready: Callable[[], bool],
    look: Callable[[], None],
    healthy: Callable[[], str] = lambda: "",
) -> AsyncIterator[int]:
    """/metrics, /healthz and /readyz; gives the port. `healthy()` says what is wrong, "" where nothing is."""

    async def show(_: web.Request) -> web.Response:
        look()
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    async def health(_: web.Request) -> web.Response:
        wrong = healthy()
        return web.Response(status=503, text=wrong) if wrong else web.Response(text="ok")

    async def readiness(_: web.Request) -> web.Response:
        return web.Response(text="ok") if ready() else web.Response(status=503, text="not ready")

    app = web.Application()
    app.add_routes([web.get("/metrics", show), web.get("/healthz", health), web.get("/readyz", readiness)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(port)).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
