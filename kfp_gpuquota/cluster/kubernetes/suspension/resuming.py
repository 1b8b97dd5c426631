"""Resumes the objects that were suspended by the controller, when their own controllers have ended their pods.

| an object with the label | what happens |
|---|---|
| to be suspended, and its controller has done so | it is resumed, and the label and the annotation are removed |
| to be suspended | nothing yet |
| not to be suspended | its user has resumed it: the label and the annotation are removed |

An object without the label is its user's: a user who wants a suspended object to stay so removes the label.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Subject
from kfp_gpuquota.cluster.kubernetes.suspension.kinds import suspension, without_marks

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.suspension.kinds import Kind, Suspendable

RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class Resuming:
    """The objects with the label, as watches report them."""

    def __init__(self, writer: Writer, events: Recorder) -> None:
        self._writer, self._events = writer, events
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
        elif found.has_suspended:
            write = suspension(kind, found, None)
        else:
            return
        self._writing.add(uid)
        self._writer.submit(write, partial(self._written, kind, found), partial(self._failed, found))

    def _written(self, kind: Kind, found: Suspendable, _answer: bytes) -> None:
        meta = found.metadata
        self._writing.discard(meta.uid)
        if found.suspended:
            subject = Subject(kind.kind, meta.name, meta.namespace, meta.uid, kind.api_version)
            self._events.record(subject, "Resumed", "its pods wait for their turn again")

    def _failed(self, found: Suspendable, error: Exception) -> None:
        """Decide again after a pause, in which the watch reports the object's state."""
        meta = found.metadata
        log.warning("%s/%s could not be resumed: %s", meta.namespace, meta.name, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._again, meta.uid)

    def _again(self, uid: str) -> None:
        self._writing.discard(uid)
        self._sync(uid)
