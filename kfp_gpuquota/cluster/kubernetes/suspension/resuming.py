"""Resumes the objects that were suspended by the controller, when their own controllers have ended their pods.

| an object with the label | what happens |
|---|---|
| to be suspended, its controller has read that, and no pod of it runs | it is resumed, without label and annotation |
| to be suspended, but it has completed or failed | the same, so that nothing of ours stays |
| to be suspended | nothing yet |
| not to be suspended | its user has resumed it: the label and the annotation are removed |

An object without the label is its user's: a user who wants a suspended object to stay so removes the label.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import suspension, without_marks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.suspension.kinds import Kind, Suspendable

RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class Resuming:
    """The objects with the label, as watches report them.

    `running()` are the pods with GPUs that are not ending; None: not all pods were read yet.
    """

    def __init__(self, writer: Writer, events: Recorder, running: Callable[[], Iterable[PodView] | None]) -> None:
        self._writer, self._events, self._running = writer, events, running
        self._objects: dict[str, tuple[Kind, Suspendable]] = {}
        self._writing: set[str] = set()

    def put(self, kind: Kind, found: Suspendable) -> None:
        """Process a new or changed object with the label."""
        self._objects[found.metadata.uid] = kind, found
        self._sync(found.metadata.uid)

    def drop(self, uid: str) -> None:
        """Process that the object was deleted, or has no label any more."""
        self._objects.pop(uid, None)

    def _sync(self, uid: str) -> None:
        kind, found = self._objects.get(uid, (None, None))
        if kind is None or found is None or uid in self._writing or not found.by_controller:
            return
        if not found.suspended:
            write = without_marks(kind, found)
        elif not (found.has_suspended or found.has_finished):
            return
        elif not found.has_finished and self._may_run(kind, found):
            self._writing.add(uid)
            asyncio.get_running_loop().call_later(RETRY_S, self._again, uid)
            return
        else:
            write = suspension(kind, found, None)
        self._writing.add(uid)
        self._writer.submit(write, partial(self._written, kind, found), partial(self._failed, found))

    def _may_run(self, kind: Kind, found: Suspendable) -> bool:
        pods = self._running()
        return pods is None or any(kind.owns(found.metadata, pod) for pod in pods)

    def _written(self, kind: Kind, found: Suspendable, _answer: bytes) -> None:
        meta = found.metadata
        if found.suspended and not found.has_finished:
            subject = Subject(kind.kind, meta.name, meta.namespace, meta.uid, kind.api_version)
            self._events.record(subject, "Resumed", "its pods wait for their turn again")
        self._writing.discard(meta.uid)
        if self._objects.get(meta.uid, (kind, found))[1] is not found:
            self._sync(meta.uid)  # it has changed since

    def _failed(self, found: Suspendable, error: Exception) -> None:
        """Decide again after a pause, in which the watch reports the object's state."""
        meta = found.metadata
        log.warning("%s/%s could not be resumed: %s", meta.namespace, meta.name, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._again, meta.uid)

    def _again(self, uid: str) -> None:
        self._writing.discard(uid)
        self._sync(uid)
