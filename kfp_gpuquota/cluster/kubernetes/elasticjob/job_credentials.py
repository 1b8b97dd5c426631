"""The Secret of each ElasticJob: its workers' token, and the authority that signs the membership service's certificate.

Invariant: `status.membershipDigest` is that of the Secret's content or of an older one, since it is stored after the
Secret. The Secret is never read (the controller may not), so the digest is how a later controller finds out that the
authority or the key has changed, and replaces it. A kubelet brings the new content into running pods within about a
minute; `elastic_runtime` reads both files at each connection.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.elasticjob import pod_builder

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book

    Done = Callable[[], None]
    Failed = Callable[[Exception], None]

ENSURED_FOR_S: Final = 60.0
"""A Secret that existed so lately is not created again for further workers; one that was deleted is, after that."""

log = logging.getLogger(__name__)


class JobSecrets:
    """Creates and replaces them. `changed(uid)`: the job's status is to be written."""

    def __init__(
        self, book: Book, writer: Writer, settings: pod_builder.PodSettings, *, changed: Callable[[str], None]
    ) -> None:
        self._book, self._writer, self._settings, self._changed = book, writer, settings, changed

    def ensure(self, uid: str, done: Done, failed: Failed) -> None:
        """Call `done` once the Secret exists and holds what it should, or `failed`."""
        facts = self._book.facts[uid]
        current = facts.secret == self._digest(uid)
        if current and time.monotonic() - facts.secret_ensured_at < ENSURED_FOR_S:
            done()
        else:
            self._create(uid, done, failed, replace=not current)

    def renew(self, uid: str) -> None:
        """Replace the Secret if its content is known to be another one."""
        facts = self._book.facts[uid]
        if facts.secret and facts.secret != self._digest(uid):
            log.info("the membership Secret of job %s is replaced: its authority or key changed", uid)
            self._replace(uid, lambda: None, partial(log.warning, "the Secret of job %s was not replaced: %s", uid))

    def _digest(self, uid: str) -> str:
        return pod_builder.secret_digest(uid, self._settings)

    def _create(self, uid: str, done: Done, failed: Failed, *, replace: bool) -> None:
        if uid not in self._book.facts:
            return
        body = pod_builder.membership_secret(self._book.facts[uid].object, self._settings)
        meta, digest = body["metadata"], self._digest(uid)

        def exists(_: bytes = b"") -> None:
            self._note(uid, digest)
            done()

        def refused(error: Exception) -> None:
            if not (isinstance(error, ApiError) and error.status == 409):
                failed(error)
            elif replace:
                self._replace(uid, done, failed)
            else:
                exists()

        path = f"/api/v1/namespaces/{meta['namespace']}/secrets"
        about = f"{meta['namespace']}/{meta['name']}"
        write = Write(verb="POST", path=path, about=about, lane=Lane.CREATE, body=body)
        self._writer.submit(write, exists, refused)

    def _replace(self, uid: str, done: Done, failed: Failed) -> None:
        """Delete it and create it again: that needs no right to change the Secrets of others."""
        facts = self._book.facts[uid]
        namespace, name = facts.object.metadata.namespace, pod_builder.secret_name(facts.object)
        create = partial(self._create, uid, done, failed, replace=False)

        def refused(error: Exception) -> None:
            if isinstance(error, ApiError) and error.gone:
                create()
            else:
                failed(error)

        path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._writer.submit(
            Write(verb="DELETE", path=path, about=f"{namespace}/{name}", lane=Lane.CREATE), lambda _: create(), refused
        )

    def _note(self, uid: str, digest: str) -> None:
        facts = self._book.facts.get(uid)
        if facts is None:
            return
        facts.secret_ensured_at = time.monotonic()
        if facts.secret != digest:
            facts.secret = digest
            self._changed(uid)
