"""Watches a pipeline's run, so that its termination cancels the step's job at once.

KFP's Terminate changes the Workflow, and Argo acts on that within its requeue time, 10 s by default. The launcher
watches the same object, so that it need not wait for Argo to stop its pod.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

Json = dict[str, Any]

WATCH_S: Final = 300
IDLE_TIMEOUT_S: Final = 330.0
RETRY_S: Final = 1.0


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class RunWatch(threading.Thread):
    """Thread that calls `ended` once, when the run is terminated, finishes or is deleted.

    It exits where watching Workflows is not permitted.
    """

    def __init__(self, calls: Calls, namespace: str, workflow: str, ended: Callable[[], None]) -> None:
        super().__init__(name="run", daemon=True)
        self._calls, self._workflow, self._ended = calls, workflow, ended
        self._path = workflows.path(namespace)
        self._closed = threading.Event()
        self.over = threading.Event()

    def run(self) -> None:
        """Watch until the run is over; watch again when the API server was unavailable."""
        while not self._closed.is_set():
            try:
                if self._is_over():
                    self.over.set()
                    self._ended()
                    return
            except (NotFoundError, UnauthorizedError):  # no Workflows here, or a role without this right
                return
            except (GpuQuotaError, msgspec.MsgspecError):
                self._closed.wait(RETRY_S)

    def close(self) -> None:
        """Stop watching, because the step has ended."""
        self._closed.set()

    def _is_over(self) -> bool:
        """Return True when the run is over, False when the watch has expired before that."""
        query = {"watch": "true", "fieldSelector": f"metadata.name={self._workflow}", "timeoutSeconds": WATCH_S}
        with self._calls.open(self._path, IDLE_TIMEOUT_S, **query) as stream:
            for line in stream.lines():
                event = msgspec.json.decode(line, type=_Event)
                if self._closed.is_set() or event.type == "ERROR":
                    return False
                if event.type == "DELETED":
                    return True
                if workflows.is_over(msgspec.json.decode(event.object, type=workflows.Workflow)):
                    return True
        return False
