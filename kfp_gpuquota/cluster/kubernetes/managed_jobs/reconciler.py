"""Runs Jobs with `managedBy: gpuquota.dev/elastic` as ElasticJobs, and writes their status.

| the Job | its ElasticJob | what happens |
|---|---|---|
| has finished, or is being deleted | any | nothing: the ElasticJob goes with the Job |
| runs or is suspended | none | it is created; one of this name that is not the Job's: again after a pause |
| has changed | was derived from other fields | these fields are patched, but not size and pool, which are fixed |
| any | status has changed | the Job's status is written |
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import JSON_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write, create
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import Built, StatusWriter
from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import (
    Owner,
    changed_fields,
    elastic_job_of,
    fixed_differences,
    job_status_of,
    owner_of,
    without_times,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from typing import Any

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.managed_jobs.conversion import ManagedJob
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob

RETRY_S: Final = 2.0
LONGEST_RETRY_S: Final = 60.0

log = logging.getLogger(__name__)


class ManagedJobs:
    """The Jobs with the label, and the ElasticJobs that Jobs own, as watches report them."""

    def __init__(self, writer: Writer, events: Recorder) -> None:
        self._writer, self._events = writer, events
        self._jobs: dict[str, ManagedJob] = {}
        self._names: dict[tuple[str, str], str] = {}  # (namespace, name) -> the Job's uid
        self._elastic: dict[Owner, ElasticJob] = {}
        self._owners: dict[str, Owner] = {}  # by the ElasticJob's uid
        self._writing: set[str] = set()
        self._statuses = StatusWriter(writer, self._status)
        self._pauses: dict[str, Backoff] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False

    def start(self) -> None:
        """Begin to write, after all objects have been listed."""
        self._started = True
        for uid in list(self._jobs):
            self._sync(uid)

    def close(self) -> None:
        """Cancel all timers."""
        self._statuses.close()
        for timer in self._timers.values():
            timer.cancel()

    # As watched

    def put_job(self, job: ManagedJob) -> None:
        """Process a new or changed Job."""
        if job.ours:
            meta = job.metadata
            self._jobs[meta.uid] = job
            self._names[meta.namespace, meta.name] = meta.uid
            self._sync(job.metadata.uid)

    def drop_job(self, uid: str) -> None:
        """Process a Job's deletion."""
        job = self._jobs.pop(uid, None)
        if job is not None and self._names.get(key := (job.metadata.namespace, job.metadata.name)) == uid:
            del self._names[key]
        self._pauses.pop(uid, None)
        self._writing.discard(uid)
        self._statuses.forget(uid)

    def put_elastic_job(self, elastic: ElasticJob) -> None:
        """Process a new or changed ElasticJob, of anybody."""
        owner = owner_of(elastic)
        if owner is None:
            return
        self._elastic[owner], self._owners[elastic.metadata.uid] = elastic, owner
        job = self._jobs.get(owner.uid)
        if job is not None and self._found(job) is elastic:
            self._writing.discard(owner.uid)
            self._pauses.pop(owner.uid, None)
            self._sync(owner.uid)

    def drop_elastic_job(self, elastic_uid: str) -> None:
        """Process an ElasticJob's deletion: the Job, or the next one of its name, gets another one."""
        owner = self._owners.pop(elastic_uid, None)
        found = None if owner is None else self._elastic.get(owner)
        if owner is None or found is None or found.metadata.uid != elastic_uid:
            return
        del self._elastic[owner]
        following = self._names.get((found.metadata.namespace, found.metadata.name))
        if following is not None and self._found(self._jobs[following]) is None:
            self._again(following)

    def _found(self, job: ManagedJob) -> ElasticJob | None:
        return self._elastic.get(Owner(job.metadata.namespace, job.metadata.uid))

    # As written

    def _sync(self, uid: str) -> None:
        job = self._jobs.get(uid)
        if job is None or not self._started or job.metadata.deletion_timestamp is not None:
            return
        self._statuses.changed(uid)
        if job.has_finished or uid in self._writing:
            return
        found = self._found(job)
        try:
            wanted = elastic_job_of(job)
        except InvalidFieldError as error:
            self._warn(job, "InvalidJob", error.message)
            if found is not None and found.spec.suspend != job.spec.suspend:  # it can be stopped all the same
                self._write(uid, _patch(found, {"suspend": job.spec.suspend}, _derived(found)))
            return
        if found is None:
            self._writing.add(uid)
            create(
                self._writer,
                paths.GROUP,
                "elasticjobs",
                wanted,
                exists=lambda: None,  # the watch reports it
                failed=partial(self._refused, uid),
                taken=partial(self._taken, uid),
            )
        elif found.metadata.deletion_timestamp is None:
            self._update(job, found, wanted)

    def _update(self, job: ManagedJob, found: ElasticJob, wanted: dict[str, Any]) -> None:
        if kept := fixed_differences(found, wanted["spec"]):
            self._warn(
                job, "NotChanged", f"it keeps {', '.join(kept)}: size and pool cannot be changed; create another Job"
            )
        if (before := _derived(found)) != (derived := _derived_of(wanted)):
            self._write(job.metadata.uid, _patch(found, changed_fields(before, wanted["spec"]), derived))

    def _write(self, uid: str, patch: Write) -> None:
        self._writing.add(uid)
        self._writer.submit(patch, partial(self._written, uid), partial(self._refused, uid))

    def _written(self, uid: str, _answer: bytes) -> None:
        self._writing.discard(uid)

    def _taken(self, uid: str) -> None:
        """Try again: it is the one of an earlier Job of that name, which will go, or a user's."""
        job = self._jobs.get(uid)
        if job is None or self._found(job) is not None:
            return
        self._warn(job, "NameTaken", f"there is another ElasticJob {job.metadata.name}; it runs when that is deleted")
        self._later(uid)

    def _refused(self, uid: str, error: Exception) -> None:
        has_changed = isinstance(error, ApiError) and error.status == 409  # it is read again, and nobody has to act
        if (job := self._jobs.get(uid)) is not None and not has_changed:
            self._warn(job, "Refused", f"its ElasticJob was refused: {error}")
        self._later(uid)

    def _later(self, uid: str) -> None:
        if timer := self._timers.pop(uid, None):
            timer.cancel()
        pause_s = self._pauses.setdefault(uid, Backoff(RETRY_S, LONGEST_RETRY_S)).next_s()
        self._timers[uid] = asyncio.get_running_loop().call_later(pause_s, self._again, uid)

    def _again(self, uid: str) -> None:
        self._timers.pop(uid, None)
        self._writing.discard(uid)
        self._sync(uid)

    def _status(self, uid: str) -> Built | None:
        job = self._jobs.get(uid)
        elastic = None if job is None else self._found(job)
        if job is None or elastic is None or job.has_finished or job.metadata.deletion_timestamp is not None:
            return None
        meta = job.metadata
        status = job_status_of(job, elastic, datetime.now(UTC))
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid},
            "status": status,
        }
        return Built(job.path, f"{meta.namespace}/{meta.name}", body, urgent=without_times(status))

    def _warn(self, job: ManagedJob, reason: str, message: str) -> None:
        meta = job.metadata
        subject = Subject("Job", meta.name, meta.namespace, meta.uid, "batch/v1")
        self._events.record(subject, reason, message, warning=True)


def _derived(found: ElasticJob) -> str:
    return (found.metadata.annotations or {}).get(labels.DERIVED, "")


def _derived_of(wanted: dict[str, Any]) -> str:
    return str(wanted["metadata"]["annotations"][labels.DERIVED])


def _patch(found: ElasticJob, fields: dict[str, Any], derived: str) -> Write:
    """Return the patch that gives the ElasticJob these fields, and the digests of what was `derived`; others stay.

    It changes nothing if the ElasticJob has changed since: the API server compares the version that an update has, and
    answers with a conflict (409). A failed "test" (422) could not be told from fields that it refuses.
    """
    meta = found.metadata
    note = labels.DERIVED.replace("/", "~1")
    no_notes = [] if meta.annotations else [{"op": "add", "path": "/metadata/annotations", "value": {}}]
    return Write(
        verb="PATCH",
        path=paths.job(meta.namespace, meta.name),
        about=f"{meta.namespace}/{meta.name}",
        body=[
            {"op": "test", "path": "/metadata/uid", "value": meta.uid},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta.resource_version},
            *no_notes,
            {"op": "add", "path": f"/metadata/annotations/{note}", "value": derived},
            *({"op": "add", "path": f"/spec/{name}", "value": value} for name, value in fields.items()),
        ],
        content_type=JSON_PATCH,
    )
