"""The end of a pipeline's run, seen by the step's launcher as soon as it is decided.

KFP's Terminate changes the Workflow, and Argo acts on that within its requeue time, 10 s by default. The launcher
watches the same object, so its job is cancelled at once.
"""

from __future__ import annotations

import http.client
import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.blocking_client import Calls

Json = dict[str, Any]

WATCH_S: Final = 300
SILENCE_S: Final = 330.0
AGAIN_S: Final = 1.0


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class RunWatch(threading.Thread):
    """Calls `ended` once, when the run is terminated, ends or is deleted. Ends by itself where it may not watch."""

    def __init__(self, calls: Calls, namespace: str, workflow: str, ended: Callable[[], None]) -> None:
        super().__init__(name="run", daemon=True)
        self._calls, self._workflow, self._ended = calls, workflow, ended
        self._path = workflows.COLLECTION.format(namespace=quote(namespace))
        self._closed = threading.Event()
        self.over = threading.Event()

    def run(self) -> None:
        """Watch, and watch again where the API server was away."""
        while not self._closed.is_set():
            try:
                if self._is_over():
                    self.over.set()
                    self._ended()
                    return
            except (NotFoundError, UnauthorizedError):  # no Workflows here, or a role without this right
                return
            except (GpuQuotaError, msgspec.MsgspecError, OSError, http.client.HTTPException):
                self._closed.wait(AGAIN_S)

    def close(self) -> None:
        """The step has ended: whatever becomes of its run is not of interest any more."""
        self._closed.set()

    def _is_over(self) -> bool:
        """Whether the run is over; False when the watch ended without."""
        query = {"watch": "true", "fieldSelector": f"metadata.name={self._workflow}", "timeoutSeconds": WATCH_S}
        with self._calls.open(self._path, SILENCE_S, **query) as stream:
            while line := stream.readline():
                event = msgspec.json.decode(line, type=_Event)
                if self._closed.is_set() or event.type == "ERROR":
                    return False
                if event.type == "DELETED":
                    return True
                if workflows.is_over(msgspec.json.decode(event.object, type=workflows.Workflow)):
                    return True
        return False
