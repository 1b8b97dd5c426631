"""Pods of workers, made and deleted; what the API server refuses, and what follows from that.

A name that is taken costs one attempt, since the next worker has another one. Anything else (a ResourceQuota, pod
security, a template that cannot be) holds the whole job back for a while, and its condition says why.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase, Reason, ReasonCode
from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.elasticjob import pod_builder
from kfp_gpuquota.cluster.kubernetes.elasticjob.job_credentials import JobSecrets
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.sharing.gpu_config import with_place
from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Sharer
from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import note_of
from kfp_gpuquota.cluster.records import with_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Worker
    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Place, Reservations
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.cluster.records import JobRecord

DELETE_AGAIN_S: Final = 5.0
NAME_TAKEN_PAUSE_S: Final = 0.5
LONGEST_HOLD_S: Final = 120.0

log = logging.getLogger(__name__)


class WorkerPods:
    """`pods` are those known, by worker. `noted(pod)` gets the answers of writes, `changed(uid)` is for the status,
    `given_up(worker)` is told of a worker whose pod was never made.
    """

    def __init__(
        self,
        book: Book,
        writer: Writer,
        settings: pod_builder.PodSettings,
        *,
        tell: Callable[[scheduler.Event], None],
        noted: Callable[[Pod], None],
        changed: Callable[[str], None],
        given_up: Callable[[Worker], None],
    ) -> None:
        self._book, self._writer, self._settings = book, writer, settings
        self._tell, self._noted, self._changed, self._given_up = tell, noted, changed, given_up
        self._pod = msgspec.json.Decoder(Pod)
        self._secrets = JobSecrets(book, writer, settings, changed=changed)
        self.pods: dict[str, PodView] = {}
        self.reservations: Reservations | None = None

    def make(self, uid: str, workers: list[Worker]) -> None:
        """Make the workers' pods, after the Secret that they mount: a kubelet that does not find it waits long."""

        def make_pods() -> None:
            for worker in workers:
                self._make_pod(uid, worker)

        def failed(error: Exception) -> None:
            for worker in workers:
                self._not_made(worker, error)

        self._secrets.ensure(uid, make_pods, failed)

    def renew_secret(self, uid: str) -> None:
        """Replace the Secret of a running job if it does not hold this controller's token and authority."""
        self._secrets.renew(uid)

    def _make_pod(self, uid: str, worker: Worker, place: Place | None = None) -> None:
        record = self._book.workers.get(worker.id)
        if record is None or record.released or uid not in self._book.facts:
            self._given_up(worker)
            return
        job = self._book.jobs[uid]
        if job.spec.shared and place is None and self.reservations is not None:
            self._reserve(self.reservations, job, worker)
            return
        facts, settings = self._book.facts[uid], self._settings
        if settings.shards:
            settings = msgspec.structs.replace(settings, coordinator=settings.shards[facts.shard])
        body = pod_builder.worker_pod(facts.object, job, worker, settings)
        if place is not None:
            body = with_place(body, job.spec, place)
        namespace = body["metadata"]["namespace"]
        write = Write(
            verb="POST",
            path=pods_path(namespace),
            about=f"{namespace}/{body['metadata']['name']}",
            lane=Lane.CREATE,
            body=body,
        )
        self._writer.submit(write, partial(self._made, worker), partial(self._not_made, worker))

    def _reserve(self, reservations: Reservations, job: JobRecord, worker: Worker) -> None:
        """It shares GPUs: its pod is made when these are reserved, and its part of them is free."""
        note = self.share_of(worker.id)
        assert note is not None, "a worker that is to be made is in the book"
        ready, failed = partial(self._make_pod, job.uid, worker), partial(self._not_made, worker)
        reservations.prepare(Sharer(note, ready, failed))

    def share_of(self, worker: str) -> ShareNote | None:
        """The part of GPUs that a worker was given; None for one that is not known."""
        record = self._book.workers.get(worker)
        if record is None:
            return None
        meta = self._book.facts[record.worker.job_uid].object.metadata
        pod = f"{meta.namespace}/{pod_builder.pod_name(meta.name, record.worker.index)}"
        return note_of(self._book.jobs[record.worker.job_uid].spec, worker, pod, record.worker.started_at)

    def _made(self, worker: Worker, answer: bytes) -> None:
        self._noted(self._pod.decode(answer))
        record = self._book.workers.get(worker.id)
        if record is not None and record.released:  # told to go while it was being made
            self.delete(worker.id, self._book.jobs[worker.job_uid].spec.grace_period_s)

    def _not_made(self, worker: Worker, error: Exception) -> None:
        """A name that is taken: the next worker has another one. Anything else: the job is held back for a while."""
        if worker.id in self.pods:
            return  # an earlier attempt of the same write came through, and the watch has told
        taken = isinstance(error, ApiError) and error.status == 409
        if not taken:
            self._hold_back(worker.job_uid, str(error))
        asyncio.get_running_loop().call_later(NAME_TAKEN_PAUSE_S if taken else 0.0, self._given_up, worker)

    def _hold_back(self, uid: str, why: str) -> None:
        """Its pods are refused (a ResourceQuota, pod security, a template that cannot be): not again at once."""
        facts = self._book.facts.get(uid)
        if facts is None or facts.held_back == why:
            return
        log.warning("pods of job %s are refused: %s", facts.object.metadata.name, why)
        facts.held_back = why
        self._tell(scheduler.JobSuspended(uid))
        asyncio.get_running_loop().call_later(facts.hold_s, self._release_hold, uid)
        facts.hold_s = min(2 * facts.hold_s, LONGEST_HOLD_S)
        job = self._book.jobs[uid]
        self._book.jobs[uid] = with_status(job, reason=Reason(code=ReasonCode.WORKER_FAILED, message=why))
        self._changed(uid)

    def _release_hold(self, uid: str) -> None:
        job = self._book.jobs.get(uid)
        if job is not None and uid in self._book.facts:
            self._book.facts[uid].held_back = ""
            if job.status.phase is not Phase.SUSPENDED and not job.status.phase.final and not job.ending:
                self._tell(scheduler.JobResumed(uid))

    def delete(self, worker: str, grace_s: float) -> None:
        """End the worker's pod; tried again until it is gone."""
        pod = self.pods.get(worker)
        if self.reservations is not None and self.reservations.gives_up(worker):
            self._given_up(self._book.workers[worker].worker)
        elif pod is not None:
            write = requests.deletion(pod.namespace, pod.name, pod.uid, grace_s)
            self._writer.submit(write, lambda _: None, partial(self._not_deleted, worker, grace_s))

    def _not_deleted(self, worker: str, grace_s: float, error: Exception) -> None:
        if isinstance(error, ApiError) and error.status == 404:
            return  # the watch says so as well; 409 may also be a conflict that passes
        asyncio.get_running_loop().call_later(DELETE_AGAIN_S, self.delete, worker, grace_s)
