"""Manages the Secret of each ElasticJob: its workers' token, and the CA of the membership service's certificate.

Invariant: `status.membershipDigest` is the digest of the Secret's content or of an older one, since it is stored after
the Secret. The controller has no right to read Secrets of jobs, so by the digest a restarted controller detects that
the CA or the key has changed, and replaces the Secret. The kubelet updates the files in running pods within about a
minute; `elastic_runtime` reads both files for each connection.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write, create
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers import pod_builder

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore

    Done = Callable[[], None]
    Failed = Callable[[Exception], None]

ENSURED_FOR_S: Final = 60.0
"""Seconds after which the Secret's existence is ensured again before workers are created."""

log = logging.getLogger(__name__)


class JobSecrets:
    """Creates and replaces the jobs' Secrets."""

    def __init__(
        self, book: ElasticJobStore, writer: Writer, settings: pod_builder.PodSettings, statuses: StatusRequests
    ) -> None:
        self._book, self._writer, self._settings, self._statuses = book, writer, settings, statuses

    def ensure(self, uid: str, done: Done, failed: Failed) -> None:
        """Call `done` when the Secret exists with the current content, or `failed`."""
        state = self._book.runtime_states[uid]
        current = state.secret == self._digest(uid)
        if current and time.monotonic() - state.secret_ensured_at < ENSURED_FOR_S:
            done()
        else:
            self._create(uid, done, failed, replace=not current)

    def renew(self, uid: str) -> None:
        """Replace the Secret if its stored digest is not the current one."""
        state = self._book.runtime_states[uid]
        if state.secret and state.secret != self._digest(uid):
            log.info("the membership Secret of job %s is replaced: its authority or key changed", uid)
            self._replace(uid, lambda: None, partial(log.warning, "the Secret of job %s was not replaced: %s", uid))

    def _digest(self, uid: str) -> str:
        return pod_builder.secret_digest(uid, self._settings)

    def _create(self, uid: str, done: Done, failed: Failed, *, replace: bool) -> None:
        if uid not in self._book.runtime_states:
            return
        body = pod_builder.membership_secret(self._book.runtime_states[uid].object, self._settings)
        digest = self._digest(uid)

        def exists() -> None:
            self._note(uid, digest)
            done()

        taken = partial(self._replace, uid, done, failed) if replace else exists
        create(self._writer, "/api/v1", "secrets", body, exists=exists, failed=failed, taken=taken)

    def _replace(self, uid: str, done: Done, failed: Failed) -> None:
        """Delete and create the Secret: that needs no right to update other Secrets."""
        state = self._book.runtime_states[uid]
        namespace, name = state.object.metadata.namespace, pod_builder.secret_name(state.object)
        again = partial(self._create, uid, done, failed, replace=False)

        def refused(error: Exception) -> None:
            if isinstance(error, ApiError) and error.not_found:
                again()
            else:
                failed(error)

        path = join("/api/v1/namespaces", namespace, "secrets", name)
        self._writer.submit(
            Write(verb="DELETE", path=path, about=f"{namespace}/{name}", lane=Lane.CREATE), lambda _: again(), refused
        )

    def _note(self, uid: str, digest: str) -> None:
        state = self._book.runtime_states.get(uid)
        if state is None:
            return
        state.secret_ensured_at = time.monotonic()
        if state.secret != digest:
            state.secret = digest
            self._statuses.changed(uid)
