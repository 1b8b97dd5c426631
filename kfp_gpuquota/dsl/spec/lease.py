"""The lease of a step's job: the launcher renews it, and the cluster cancels the job when it expires."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.errors import ConflictError, GpuQuotaError, NotFoundError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.server.cluster_api import ClusterApi

DURATION_S: Final = 30.0
DURATION_VARIABLE: Final = "GPUQUOTA_LEASE_S"
# How long a job survives a stopped launcher where the cluster cannot read from the pipeline's run whether another
# attempt will follow (no Workflow owns the job, or the controller may not read it). With a Workflow the job survives as
# long as the Workflow waits for the step.
AFTER_STOP_S: Final = 90.0
RENEWALS: Final = 3
_LAST_CALL_WAITS_S: Final = 0.2


class LeaseKeeper(threading.Thread):
    """Thread that renews a job's lease over its own connection until `stop`.

    It exits and sets `taken_over` when another attempt of the step has become the lease's holder.
    """

    def __init__(
        self, connect: Callable[[], ClusterApi], lease: Lease, spec: JobSpec, log_line: Callable[[str], None]
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self._connect, self._lease, self._spec, self._log_line = connect, lease, spec, log_line
        self.taken_over = threading.Event()
        self._stopped = threading.Event()
        self._calling = threading.Lock()

    def run(self) -> None:
        """Renew the lease until `stop`; while the cluster is unavailable, retry."""
        client = self._connect()
        while not self._stopped.wait(self._lease.duration_s / RENEWALS):
            try:
                with self._calling:
                    if not self._stopped.is_set():
                        self._renew(client, self._lease.duration_s)
            except ConflictError:
                self.taken_over.set()
                return
            except NotFoundError:
                return
            except RunError as error:
                self._log_line(f"cannot renew the job's lease, retrying: {error.message}")

    def stop(self) -> None:
        """Stop renewing the lease."""
        self._stopped.set()

    def shorten(self, after_s: float, reason: str = "") -> None:
        """Stop, and with one request shorten the lease to `after_s` seconds; another attempt can still take it over.

        `reason` is why the job is cancelled by 0 s.
        """
        self._stopped.set()
        self._calling.acquire(timeout=_LAST_CALL_WAITS_S)  # a renewal in flight must not undo this
        try:
            self._renew(self._connect(), after_s, reason)
        except ConflictError:
            self.taken_over.set()
        except GpuQuotaError as error:
            self._log_line(f"cannot shorten the lease; the job ends when it expires: {error.message}")

    def _renew(self, client: ClusterApi, duration_s: float, reason: str = "") -> None:
        lease = msgspec.structs.replace(self._lease, duration_s=duration_s, reason=reason)
        client.renew_lease(self._spec.project, self._spec.name, lease)
