"""The launcher's promise that it is still there: while it renews the lease, the job lives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.errors import ConflictError, GpuQuotaError, NotFoundError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.server.cluster_client import ClusterClient

DURATION_S: Final = 30.0
DURATION_VARIABLE: Final = "GPUQUOTA_LEASE_S"
# How long a job outlives a launcher that was stopped, where the cluster cannot ask the pipeline's run whether another
# attempt will come (no Workflow owns the job, or the controller may not read it). With a Workflow the job lives for as
# long as that waits for the step, be it minutes.
AFTER_STOP_S: Final = 90.0
RENEWALS: Final = 3
_LAST_CALL_WAITS_S: Final = 0.2


class LeaseKeeper(threading.Thread):
    """Renews a job's lease from a thread of its own, over a connection of its own, until `stop`.

    When another attempt has taken the job over it ends, and `taken_over` is set: the job is nobody's business here.
    """

    def __init__(
        self, connect: Callable[[], ClusterClient], lease: Lease, spec: JobSpec, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self._connect, self._lease, self._spec, self._say = connect, lease, spec, say
        self.taken_over = threading.Event()
        self._stopped = threading.Event()
        self._calling = threading.Lock()

    def run(self) -> None:
        """Renew until told to stop. A cluster that is away is asked again and again."""
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
                self._say(f"cannot renew the job's lease, trying on: {error.message}")

    def stop(self) -> None:
        """The job has ended."""
        self._stopped.set()

    def leave(self, after_s: float) -> None:
        """Stop, and with one quick call let the job live only `after_s` longer, unless somebody takes it over."""
        self._stopped.set()
        self._calling.acquire(timeout=_LAST_CALL_WAITS_S)  # a renewal in flight must not undo this
        try:
            self._renew(self._connect(), after_s)
        except ConflictError:
            self.taken_over.set()
        except GpuQuotaError as error:
            self._say(f"the job ends with its present lease: {error.message}")

    def _renew(self, client: ClusterClient, duration_s: float) -> None:
        lease = msgspec.structs.replace(self._lease, duration_s=duration_s)
        client.renew_lease(self._spec.project, self._spec.name, lease)
