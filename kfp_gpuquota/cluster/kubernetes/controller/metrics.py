"""Prometheus metrics of the controller."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kfp_gpuquota.api.history import counted_as
from kfp_gpuquota.api.resources import WHOLE_GPU, CountedNode, weighed

if TYPE_CHECKING:
    from kfp_gpuquota.api import Node
    from kfp_gpuquota.api.history import Holder
    from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
    from kfp_gpuquota.cluster.kubernetes.controller.controller import Controller
    from kfp_gpuquota.scheduler.state.model import Job

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

_RECLAIM_SECONDS: Final = (1.0, 3.0, 10.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0)

_WAIT_SECONDS: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)

ACCOUNTED_EVERY_S: Final = 1.0
"""The shortest interval after which GPU-seconds are added up: plans may follow one another faster."""
HOLDERS_EVERY_S: Final = 15.0
"""The same for those of each user, of which there may be many."""
MOST_HOLDERS: Final = 1000
"""Holders that are distinguished: workloads name their users as they like, and Prometheus keeps a series for each."""


class Metrics:
    """All metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._accounted_at: float | None = None
        self._holders_at: float | None = None
        self._holders: set[Holder] = set()
        self._add_usage()
        self._add_health()
        self.calls = Counter(
            "gpuquota_api_calls", "Calls to the API server", ["verb", "status"], registry=self.registry
        )
        self.plans = Histogram("gpuquota_plan_seconds", "Time to plan", buckets=_SECONDS, registry=self.registry)
        self.plan_failures = Counter("gpuquota_plan_failures", "Plans that raised an exception", registry=self.registry)
        self.decisions = Counter("gpuquota_decisions", "What plans decided, in jobs", ["kind"], registry=self.registry)
        self.reclaim_steps = Counter(
            "gpuquota_reclaim_steps",
            "Steps by which pods are stopped for others: suspended, evicted, refused, deleted, overdue, preempted",
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

    def _add_usage(self) -> None:
        """Add the metrics of holdings and waiting times by project."""
        self.waits = Histogram(
            "gpuquota_wait_seconds",
            "From a job's submission to its first start",
            ["project"],
            buckets=_WAIT_SECONDS,
            registry=self.registry,
        )
        self.starts_compared = Gauge(
            "gpuquota_expected_starts_compared", "Latest estimates of starts that are compared", registry=self.registry
        )
        self.starts_held = Gauge(
            "gpuquota_expected_starts_held_ratio",
            "The part of these whose range held the start",
            registry=self.registry,
        )
        self.gpus = Gauge("gpuquota_gpus", "GPUs in the plan", registry=self.registry)
        self.borrowed = Gauge(
            "gpuquota_borrowed_gpus", "GPUs held above the guarantee", ["project"], registry=self.registry
        )
        self.unmet = Gauge(
            "gpuquota_unmet_guarantee_gpus",
            "GPUs that the project asks for within its guarantee and does not hold",
            ["project"],
            registry=self.registry,
        )
        self.gpu_seconds = Counter(
            "gpuquota_gpu_seconds",
            "GPU-seconds held, by kind: guaranteed, borrowed",
            ["project", "kind"],
            registry=self.registry,
        )
        self.user_gpu_seconds = Counter(
            "gpuquota_user_gpu_seconds",
            "GPU-seconds held, by user and type of GPU",
            ["project", "user", "gpu_type"],
            registry=self.registry,
        )
        self.idle_gpu_seconds = Counter(
            "gpuquota_idle_gpu_seconds", "GPU-seconds that nobody held", registry=self.registry
        )

    def _add_health(self) -> None:
        """Add what shows that the process does its work."""
        self.overdue = Gauge(
            "gpuquota_plan_overdue_seconds",
            "For how long a plan is needed and was not made; 0: none is needed",
            registry=self.registry,
        )
        self.blocked_evictions = Gauge(
            "gpuquota_blocked_evictions", "Pods whose eviction was refused and is repeated", registry=self.registry
        )
        self.unpinned = Gauge(
            "gpuquota_unbound_pod_seconds",
            "For how long the oldest pod that was admitted without a pin is not bound; other pods get no pin meanwhile",
            registry=self.registry,
        )
        self.lists = Gauge(
            "gpuquota_lists", "How often a kind was listed; each after the first is a lost watch", ["path"],
            registry=self.registry,
        )  # fmt: skip
        self.certificate_expiry = Gauge(
            "gpuquota_certificate_expiry_timestamp_seconds",
            "When the webhook's certificate expires, in seconds since 1970; 0 in a process without one",
            registry=self.registry,
        )

    def started(self, job: Job, now: float) -> None:
        """Observe the wait of a job that starts for the first time. `now` is in seconds since 1970."""
        if not job.started_at:
            self.waits.labels(job.queue.name).observe(max(0.0, now - job.submitted_at))

    def account(self, snapshot: Snapshot, now: float | None = None) -> None:
        """Add up the GPU-seconds since the last call, by what is held now. `now` is in monotonic seconds."""
        now = time.monotonic() if now is None else now
        self._account_holders(snapshot, now)
        since, total = self._accounted_at, 0.0
        if since is not None and now - since < ACCOUNTED_EVERY_S:
            return
        self._accounted_at = now
        if since is None:
            return
        for name in snapshot.projects:
            held = snapshot.held(name)
            total += held.gpus
            for kind, gpus in (("borrowed", held.borrowed), ("guaranteed", held.gpus - held.borrowed)):
                if gpus > 0:
                    self.gpu_seconds.labels(name, kind).inc(gpus * (now - since))
        self.idle_gpu_seconds.inc(max(0.0, _gpus(snapshot) - total) * (now - since))

    def _account_holders(self, snapshot: Snapshot, now: float) -> None:
        since = self._holders_at
        if since is not None and now - since < HOLDERS_EVERY_S:
            return
        self._holders_at = now
        if since is None:
            return
        for holder, gpus in snapshot.state.held_by().items():
            counted = counted_as(holder, self._holders, MOST_HOLDERS)
            self.user_gpu_seconds.labels(*counted).inc(gpus * (now - since))

    def count_call(self, verb: str, status: int) -> None:
        """Count a call to the API server."""
        self.calls.labels(verb, str(status)).inc()

    def look(self, controller: Controller) -> None:
        """Update the gauges when they are scraped; deleted projects are left out."""
        snapshot = controller.snapshot
        self.account(snapshot)
        for gauge in (self.held, self.waiting, self.guaranteed, self.borrowed, self.unmet, self.quarantined):
            gauge.clear()
        self.gpus.set(_gpus(snapshot))
        self.overdue.set(controller.plans.health.overdue_s)
        self.blocked_evictions.set(controller.evictions.blocked)
        self.unpinned.set(controller.unpinned.oldest_s)
        for reflector in controller.reflectors:
            self.lists.labels(reflector.path).set(reflector.lists)
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
            self.guaranteed.labels(name).set(project.guaranteed_in_all)
            self.borrowed.labels(name).set(held.borrowed)
            self.unmet.labels(name).set(held.unmet)


def _gpus(snapshot: Snapshot) -> float:
    """Return the number of GPUs of nodes that take pods, with the resources that count as GPUs."""
    return sum(map(_gpus_of, snapshot.emitted_nodes.values()))


def _gpus_of(node: Node) -> float:
    if not node.ready:
        return 0
    others = weighed(dict(node.resources), node.gpu_weights) if isinstance(node, CountedNode) else 0
    return len(node.devices) + others / WHOLE_GPU
