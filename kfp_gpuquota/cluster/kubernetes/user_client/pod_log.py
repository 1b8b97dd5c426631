"""Follows a pod's log over streams that break off. Offsets are those of `objects.log_lines`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.objects.log_lines import LogLines
from kfp_gpuquota.errors import NotFoundError, RunError, UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
    from kfp_gpuquota.cluster.kubernetes.user_client.connection import Response

POLL_S: Final = 0.5
SILENCE_S: Final = 25.0


class PodLog:
    """A followed pod log. What has arrived is returned at once, also of a line that is not complete."""

    def __init__(self, calls: Calls, namespace: str, pod: str, offset: int) -> None:
        self._calls = calls
        self._path = join("/api/v1/namespaces", namespace, "pods", pod, "log")
        self._lines = LogLines(offset)
        self._stream: Response | None = None
        self._over = False

    @property
    def offset(self) -> int:
        """Return the offset behind what was read."""
        return self._lines.last

    def read(self, timeout_s: float) -> tuple[bytes, bool]:
        """Return the new bytes within the time limit, and whether more may follow.

        Without a time limit what there is now, else a stream is followed, which the next calls read on.
        """
        deadline = time.monotonic() + timeout_s
        while self._stream is None:
            try:
                follow = {"follow": "true"} if timeout_s > 0 else {}
                self._stream = self._calls.open(self._path, SILENCE_S, **self._lines.query(), **follow)
            except NotFoundError:
                return b"", False
            except (RunError, UsageError):  # its container has not started, or never will
                self.close()
                if not self._may_continue():
                    return b"", False
                if time.monotonic() >= deadline:
                    return b"", True
        try:
            while piece := self._stream.read_piece():
                self._lines.take(piece)
                if text := self._lines.arrived():  # else all of it was read before
                    return text, True
        except RunError:  # no output within SILENCE_S, or the connection was closed
            self.close()
            return b"", True
        more = self._may_continue()
        if not more:
            self._lines.finish()  # else who reads on behind its offset would get a last line without an end again
        self.close()
        return b"", more

    def _may_continue(self) -> bool:
        """Return whether more may follow: a stream ends with its pod, but also when the API server stops.

        A log has been read to its end when a stream that was opened after the pod's end has ended.
        """
        try:
            pod = self._calls.get(self._path.removesuffix("/log"))
        except NotFoundError:
            return False
        except (RunError, UsageError):
            return True
        time.sleep(POLL_S)  # a pod ends a moment after its container
        before, self._over = self._over, pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
        return not before

    def close(self) -> None:
        """Close the connection; the next read opens another one."""
        if self._stream is not None:
            self._stream.close()
            self._lines.reopened()
        self._stream = None
