"""Prometheus metrics of one node's memory agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.fractions import Row

_ROUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)


class AgentMetrics:
    """Metrics of one node's agent. Gauges have a series for each pod and GPU."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = ["namespace", "pod", "gpu"]
        self.used = Gauge("gpuquota_gpu_memory_used_mib", "GPU memory in use", of, registry=self.registry)
        self.request = Gauge("gpuquota_gpu_memory_request_mib", "GPU memory guaranteed", of, registry=self.registry)
        self.limit = Gauge("gpuquota_gpu_memory_limit_mib", "The most it may ever use", of, registry=self.registry)
        self.granted = Gauge("gpuquota_gpu_memory_granted_mib", "What it may use now", of, registry=self.registry)
        self.ended = Counter(
            "gpuquota_gpu_memory_ended_processes",
            "Processes ended (or reported, with the killer off) for holding GPU memory that others have requested, or "
            "above their limit",
            ["namespace", "pod", "reason", "beneficiary", "carried_out"],
            registry=self.registry,
        )
        self.over = Counter(
            "gpuquota_gpu_memory_over_mib", "By how much they were over", ["namespace", "pod"], registry=self.registry
        )
        self.rounds = Histogram(
            "gpuquota_gpu_memory_round_seconds", "Time of a round", buckets=_ROUNDS, registry=self.registry
        )

    def show(self, rows: Iterable[Row], notes: Mapping[str, ShareNote]) -> None:
        """Update the gauges when they are scraped: in each round that would cost as much as the round."""
        gauges = (self.used, self.request, self.limit, self.granted)
        for gauge in gauges:
            gauge.clear()
        for row in rows:
            if (note := notes.get(row.workload)) is not None and note.uid:
                of = (note.project, note.pod.partition("/")[2], row.device)
                amounts = (row.used_mib, row.request_mib, row.limit_mib, row.granted_mib)
                for gauge, mib in zip(gauges, amounts, strict=True):
                    gauge.labels(*of).set(mib)
