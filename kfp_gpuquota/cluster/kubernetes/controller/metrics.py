"""Prometheus metrics of the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.controller.controller import Controller

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

_RECLAIM_SECONDS: Final = (1.0, 3.0, 10.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0)


class Metrics:
    """All metrics of one process."""

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
        """Count a call to the API server."""
        self.calls.labels(verb, str(status)).inc()

    def look(self, controller: Controller) -> None:
        """Update the gauges when they are scraped; deleted projects are left out."""
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
