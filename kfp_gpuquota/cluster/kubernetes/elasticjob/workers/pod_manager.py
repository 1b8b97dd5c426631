"""Creates and deletes workers' pods, and handles refusals of the API server.

If a pod's name exists already, it may be the worker's own: the answer to an earlier attempt of the same write was lost.
The API server is asked, since the watch may be late; if it is another pod, the next worker has another name. Rejected:
to wait for the watch, whose delay has no bound: the worker's GPUs were given to others.

After any other refusal (a ResourceQuota, pod security, an invalid template) no pods of the job are created for a while,
and a condition states the reason.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.job_credentials import JobSecrets
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers import pod_builder
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.network_policy import JobNetworkPolicies
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing.gpu_config import with_assignment
from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Sharer
from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import note_of
from kfp_gpuquota.engine.records import with_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfp_gpuquota.api import Worker
    from kfp_gpuquota.cluster.kubernetes.client.reflector import WrittenPods
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import JobPartEvents, StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.sharing.reservations import DeviceAssignment, Reservations
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.engine.records import JobRecord

DELETE_AGAIN_S: Final = 5.0
KILL_GRACE_S: Final = 1.0
NAME_TAKEN_PAUSE_S: Final = 0.5

log = logging.getLogger(__name__)


class WorkerPods:
    """Pods of workers; `pods` are the existing ones by worker, and `killed` are workers that were killed.

    `classes(job)` are the DeviceClasses of the devices that the job's template claims.
    """

    def __init__(
        self,
        book: ElasticJobStore,
        writer: Writer,
        settings: pod_builder.PodSettings,
        reservations: Reservations,
        unpinned: UnpinnedPods,
        *,
        rules: CurrentRules,
        written_pods: WrittenPods,
        statuses: StatusRequests,
        events: JobPartEvents,
        classes: Callable[[ElasticJob], Sequence[str]],
    ) -> None:
        self._book, self._writer, self._settings = book, writer, settings
        self._reservations, self._unpinned = reservations, unpinned
        self._written_pods, self._statuses, self._events = written_pods, statuses, events
        self._classes = classes
        self._pod = msgspec.json.Decoder(Pod)
        self._secrets = JobSecrets(book, writer, settings, statuses)
        self._isolation = JobNetworkPolicies(book, writer, rules, statuses)
        self.pods: dict[str, PodView] = {}
        self.killed: set[str] = set()

    def make(self, uid: str, workers: list[Worker]) -> None:
        """Create the workers' pods, after the job's NetworkPolicy and Secret.

        The Secret comes first because a kubelet retries a missing one only after a long pause.
        """

        def make_pods() -> None:
            for worker in workers:
                self._make_pod(uid, worker)

        def failed(error: Exception) -> None:
            for worker in workers:
                self._not_made(worker, error)

        def make_secret() -> None:
            if uid in self._book.runtime_states:
                self._secrets.ensure(uid, make_pods, failed)
            else:  # the job was deleted meanwhile
                make_pods()

        self._isolation.ensure(uid, make_secret, failed)

    def renew_secret(self, uid: str) -> None:
        """Replace the Secret of a running job if it does not hold this controller's token and authority."""
        self._secrets.renew(uid)

    def isolate(self, uid: str) -> None:
        """Create the NetworkPolicy of a running job that was started without one."""
        self._isolation.add_missing(uid)

    def _make_pod(self, uid: str, worker: Worker, assignment: DeviceAssignment | None = None) -> None:
        record = self._book.workers.get(worker.id)
        if record is None or record.released or uid not in self._book.runtime_states:
            self._events.pod_not_created(worker)
            return
        job = self._book.jobs[uid]
        if job.spec.shared and assignment is None:
            self._reserve(job, worker)
            return
        state, settings = self._book.runtime_states[uid], self._settings
        if settings.shards:
            settings = msgspec.structs.replace(settings, coordinator=settings.shards[state.shard])
        body = pod_builder.worker_pod(state.object, job, worker, settings, self._classes(state.object))
        pinned = job.spec.shared or self._unpinned.is_pinned(pod_builder.view_of(body, worker), worker.node)
        selector = pod_builder.selector_of(job.spec, self._book.nodes.get(worker.node))
        body = pod_builder.located(body, worker.node, pinned=pinned, selector=selector)
        if assignment is not None:
            body = with_assignment(body, job.spec, assignment)
        namespace = body["metadata"]["namespace"]
        write = Write(
            verb="POST",
            path=pods_path(namespace),
            about=f"{namespace}/{body['metadata']['name']}",
            lane=Lane.CREATE,
            body=body,
        )
        self._writer.submit(write, partial(self._made, worker), partial(self._not_made, worker))

    def _reserve(self, job: JobRecord, worker: Worker) -> None:
        """Create the pod of a worker with shared GPUs when these are reserved and its part of them is free."""
        note = self.share_of(worker.id)
        assert note is not None, "a worker without a pod is in the book"
        ready, failed = partial(self._make_pod, job.uid, worker), partial(self._not_made, worker)
        self._reservations.prepare(Sharer(note, ready, failed))

    def share_of(self, worker: str) -> ShareNote | None:
        """Return the worker's share of GPUs; None for an untracked worker."""
        record = self._book.workers.get(worker)
        if record is None:
            return None
        meta = self._book.runtime_states[record.worker.job_uid].object.metadata
        pod = f"{meta.namespace}/{pod_builder.pod_name(meta.name, record.worker.index)}"
        return note_of(self._book.jobs[record.worker.job_uid].spec, worker, pod, record.worker.started_at)

    def _made(self, worker: Worker, answer: bytes) -> None:
        self._written_pods.note(self._pod.decode(answer))
        self._unpinned.drop(worker.id)  # tracked by its pod's uid from now on
        record = self._book.workers.get(worker.id)
        if record is not None and record.released:  # released while its pod was being created
            self.delete(worker.id, self._book.jobs[worker.job_uid].spec.grace_period_s)

    def _not_made(self, worker: Worker, error: Exception) -> None:
        """Look whose pod it is if its name exists (409); after any other refusal hold the job back."""
        state = self._book.runtime_states.get(worker.job_uid)
        if worker.id in self.pods:
            self._unpinned.release_failed(worker.id)
        elif isinstance(error, ApiError) and error.status == 409 and state is not None:
            self._look_at_taken(worker, state.object.metadata)
        else:
            self._hold_back(worker.job_uid, str(error))
            self._give_up(worker, 0.0)

    def _look_at_taken(self, worker: Worker, job: Metadata) -> None:
        name = pod_builder.pod_name(job.name, worker.index)
        give_up = partial(self._give_up, worker, NAME_TAKEN_PAUSE_S)

        def answered(answer: bytes) -> None:
            owners = self._pod.decode(answer).metadata.owner_references
            if any(owner.uid == worker.job_uid for owner in owners):
                self._made(worker, answer)
            else:
                give_up()

        about, path = f"{job.namespace}/{name}", join(pods_path(job.namespace), name)
        look = Write(verb="GET", path=path, about=about, lane=Lane.LOOK_UP, level=logging.DEBUG)
        self._writer.submit(look, answered, lambda _: give_up())

    def _give_up(self, worker: Worker, pause_s: float) -> None:
        self._unpinned.release_failed(worker.id)
        asyncio.get_running_loop().call_later(pause_s, self._events.pod_not_created, worker)

    def _hold_back(self, uid: str, why: str) -> None:
        """Create no pods of the job for a while after a refusal, with exponential backoff."""
        state = self._book.runtime_states.get(uid)
        if state is None or state.held_back == why:
            return
        log.warning("pods of job %s are refused: %s", state.object.metadata.name, why)
        state.held_back = why
        self._book.emit(scheduler.JobSuspended(uid))
        asyncio.get_running_loop().call_later(state.hold_pauses.next_s(), self._release_hold, uid)
        reason = Reason(code=ReasonCode.WORKER_FAILED, message=why)
        self._book.record(with_status(self._book.jobs[uid], reason=reason))

    def _release_hold(self, uid: str) -> None:
        job = self._book.jobs.get(uid)
        if job is not None and uid in self._book.runtime_states:
            self._book.runtime_states[uid].held_back = ""
            if not job.suspended and not job.over:
                self._book.emit(scheduler.JobResumed(uid))

    def kill(self, worker: str) -> None:
        """Kill the worker's process, which counts as a failure."""
        self.killed.add(worker)
        self.delete(worker, KILL_GRACE_S)

    def delete(self, worker: str, grace_s: float) -> None:
        """Delete the worker's pod; retried until it succeeds."""
        pod = self.pods.get(worker)
        if self._reservations.gives_up(worker):
            self._events.pod_not_created(self._book.workers[worker].worker)
        elif pod is not None:
            self._delete(pod, grace_s, partial(self.delete, worker, grace_s))

    def delete_pod(self, pod: PodView, grace_s: float) -> None:
        """Delete the pod of a worker that is in no record; retried until it succeeds."""
        self._delete(pod, grace_s, partial(self.delete_pod, pod, grace_s))

    def _delete(self, pod: PodView, grace_s: float, again: Callable[[], None]) -> None:
        def failed(error: Exception) -> None:
            if not (isinstance(error, ApiError) and error.status == 404):  # 409 may be a transient conflict
                asyncio.get_running_loop().call_later(DELETE_AGAIN_S, again)

        self._writer.submit(requests.deletion(pod.namespace, pod.name, pod.uid, grace_s), lambda _: None, failed)
