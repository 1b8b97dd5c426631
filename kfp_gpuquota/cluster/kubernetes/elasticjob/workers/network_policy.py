"""The NetworkPolicy of each ElasticJob: only its own workers may connect to its workers.

Gloo and NCCL listen on ports that they choose, and NCCL does not authenticate its peers. Egress stays open: workers
need DNS, the membership service and wherever their data is. Policies add up, so a user admits more, for example a
browser to a worker's TensorBoard, with another policy. Enforcement is up to the cluster's network plugin; traffic from
the worker's own node (the kubelet: probes, exec, logs, port-forward) is admitted by the plugins.

The policy is created before the first worker and goes with the job, which owns it. Without it no worker is created: a
protection that is silently absent would be worse than a job that waits with a reason. Its name is stored in
`status.networkPolicy`, so that a controller knows without reading policies which running jobs have none: those that an
earlier release started, and those that started while `isolateWorkers` was false.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.cluster.kubernetes.client.writes.request import create
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import owner_of
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules

ENSURED_FOR_S: Final = 60.0
"""Seconds after which the policy's existence is ensured again before workers are created."""

log = logging.getLogger(__name__)


def policy_name(job: ElasticJob) -> str:
    """Return the name of the job's NetworkPolicy; it is unique to the job."""
    return f"{job.metadata.name}-{job.metadata.uid[:8]}-workers"


def network_policy(job: ElasticJob) -> dict[str, Any]:
    """Return the job's NetworkPolicy. A pod of the same namespace with the job's label counts as its worker."""
    workers = {"matchLabels": {labels.JOB: job.metadata.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": policy_name(job),
            "namespace": job.metadata.namespace,
            "labels": {labels.JOB: job.metadata.name},
            "ownerReferences": [owner_of(job)],
        },
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": workers}]}],
        },
    }


class JobNetworkPolicies:
    """Creates the jobs' NetworkPolicies, unless QuotaPolicy's `isolateWorkers` is false."""

    def __init__(self, book: ElasticJobStore, writer: Writer, rules: CurrentRules, statuses: StatusRequests) -> None:
        self._book, self._writer, self._rules, self._statuses = book, writer, rules, statuses

    def ensure(self, uid: str, done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call `done` when the policy exists or none is wanted, or `failed`. An existing one is not changed."""
        state = self._book.runtime_states[uid]
        recent = time.monotonic() - state.isolation_ensured_at < ENSURED_FOR_S
        if recent or not self._rules.rules.isolates_workers:
            done()
            return

        def exists() -> None:
            state.isolation_ensured_at = time.monotonic()
            if not state.network_policy:
                state.network_policy = policy_name(state.object)
                self._statuses.changed(uid)
            done()

        body = network_policy(state.object)
        create(self._writer, "/apis/networking.k8s.io/v1", "networkpolicies", body, exists=exists, failed=failed)

    def add_missing(self, uid: str) -> None:
        """Create the policy of a running job that was started without one."""
        if not self._book.runtime_states[uid].network_policy:
            self.ensure(uid, lambda: None, partial(log.warning, "no NetworkPolicy for the workers of job %s: %s", uid))
