"""The events of ElasticJobs' parts, and the objects that receive them.

    part (pods, decisions, timers) ──JobPartEvents──► ElasticJobs ──ElasticJobEvents──► controller
                                   ──StatusRequests─► status writer

The parts are constructed in dependency order: book, pods, membership, the engine's decisions, timers, pod events,
startup timeouts.
A call along that order is a plain method call; a report against it is a method of one of these protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kfp_gpuquota.api import Worker
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob


class StatusRequests(Protocol):
    """Requests to write jobs' statuses; implemented by `StatusWriter`."""

    def changed(self, key: str, /) -> None:
        """Write the job's status soon, if it has changed."""

    def decided(self, key: str, /) -> None:
        """Write the job's status at once, if an urgent field has changed."""


class ElasticJobEvents(Protocol):
    """Events of all ElasticJobs; implemented by the controller."""

    def node_failed(self, pod: PodView, /) -> None:
        """Exclude the pod's node for its job's next workers."""

    def workers_not_ready(self, job: Subject, message: str, /) -> None:
        """Warn the job's user: GPUs are released because workers did not start."""


class JobPartEvents(Protocol):
    """Events of the parts of ElasticJobs; implemented by `ElasticJobs`."""

    def job_read(self, job: ElasticJob, /) -> None:
        """Process a job's object that was read beside the watch."""

    def pod_not_created(self, worker: Worker, /) -> None:
        """Process that no pod was created for the worker."""
