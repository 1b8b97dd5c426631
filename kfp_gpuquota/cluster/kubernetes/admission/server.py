"""Serves pod reviews over HTTPS, with certificates that are renewed automatically.

Every replica serves, the one that leads and those that stand by. The authority and the serving certificate lie in one
Secret that all replicas share: the first that finds it missing or expiring renews it, the others load it. Each writes
the authority into the MutatingWebhookConfiguration, so nothing else (cert-manager, an install job) is needed, and puts
that back when it was deleted.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from aiohttp import web

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.certificates import KeyPair, Material, check, expires_at, maintained
from kfp_gpuquota.cluster.kubernetes.admission import pods
from kfp_gpuquota.cluster.kubernetes.admission.gate_configuration import MISSING_S, GateConfiguration
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.http.sockets import listen
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import until_done
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.transport.accepting import LimitedSite
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits, address
from kfp_gpuquota.server.transport.tls import load_pair
from kfp_gpuquota.server.users_memory import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfp_gpuquota.cluster.kubernetes.admission.pods import Verdict
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies

PATH: Final = "/admission/pods"
SECRET: Final = "gpuquota-webhook"  # noqa: S105  the name of one
SERVICE: Final = "gpuquota-webhook"
REFRESH_EVERY_S: Final = 60.0  # who takes our authority out of the configuration closes the gate: not for long
RETRY_AFTER_S: Final = 10.0
ATTEMPTS: Final = 5
MAX_BODY_BYTES: Final = 8 << 20  # a review holds the object once or twice, and etcd takes 1.5 MiB of one
MAX_BODIES_BYTES: Final = 128 << 20  # of all that are read at a time: every pod may connect to this port
BODY_S: Final = 5.0  # the API server waits no longer
_CONFLICT: Final = 409

log = logging.getLogger(__name__)


class _Secret(msgspec.Struct):
    metadata: Metadata
    data: dict[str, str] | None = None


class ReviewEvents(Protocol):
    """Events of the webhook; implemented by the replica."""

    def listens(self) -> None:
        """Process that the port is open."""

    def reviewed(self, verdict: Verdict, seconds: float, /) -> None:
        """Count a review that took this long."""


def build_app(
    controller: str,
    policies: CurrentPolicies,
    rules: CurrentRules,
    events: ReviewEvents | None = None,
    body_s: float = BODY_S,
) -> web.Application:
    """Return the application. `controller` is the controller's user name; the books hold what is in effect."""

    async def handle(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(body_s):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        started = time.perf_counter()
        try:
            reply, verdict = pods.answer(body, controller, policies.all, rules.rules)
        except pods.MalformedReviewError as error:
            return web.Response(status=400, text=str(error))
        if events is not None:
            events.reviewed(verdict, time.perf_counter() - started)
        return web.Response(body=reply, content_type="application/json")

    def refusal(error: RunError) -> web.Response:
        return web.Response(status=503, text=error.message)

    bounds = bounded(refusal, MAX_BODY_BYTES, _source, MAX_BODIES_BYTES)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[bounds])
    app.router.add_post(PATH, handle)
    return app


def _source(request: web.Request) -> str:
    return address(request.transport.get_extra_info("peername") if request.transport else None)


class ServingCertificate(Protocol):
    """A TLS context whose certificate `keep` renews, until it is cancelled."""

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections."""

    async def keep(self) -> None:
        """Renew the certificate until cancelled."""


class Certificates:
    """Manages the certificate in its Secret, in this process's TLS context, and in the webhook's configuration.

    `inject` False: the webhook's configuration is another process's. `renewed(trusted)` is called when clients are to
    trust something else than before. A Secret that was deleted or damaged is written again with what this process
    holds: another authority would disconnect all clients that trust this one.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        names: Sequence[str],
        *,
        renewed: Callable[[bytes], None] = lambda _: None,
        inject: bool = True,
    ) -> None:
        self._connection, self._names, self.renewed = connection, tuple(names), renewed
        self._injects, self._configuration = inject, GateConfiguration(connection)
        self._secrets = join("/api/v1/namespaces", namespace, "secrets")
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.material: Material | None = None

    @property
    def expires_at(self) -> float:
        """Return when the certificate expires, in seconds since 1970; 0 before there is one."""
        return expires_at(self.material.serving.certificate) if self.material else 0.0

    async def start(self) -> None:
        """Return when there is a certificate. The webhook's configuration may be updated later, by `keep`."""
        await until_done("the webhook's certificate", self._start)

    async def _start(self) -> None:
        try:
            await self.refresh(time.time())
        except RunError as error:
            if self.material is None:
                raise
            log.warning("the webhook's configuration could not be updated: %s", error)

    async def refresh(self, now: float) -> Material:
        """Renew expiring certificates, load new ones, and update the webhook's configuration. Raises RunError."""
        material = await self._agreed(now)
        before, self.material = self.material, material
        if before is None or before.serving != material.serving:
            load_pair(self.context, material.serving.certificate, material.serving.key)
        if before is not None and before.trusted != material.trusted:
            self.renewed(material.trusted)
        if self._injects:
            await self._configuration.maintain(material.trusted, now)
        return material

    async def keep(self) -> None:
        """Refresh until cancelled; failures are retried soon, and the current certificate is used in the meantime."""
        while True:
            try:
                await self.refresh(time.time())
                pause = MISSING_S if self._configuration.missing else REFRESH_EVERY_S
            except RunError as error:
                log.warning("the webhook's certificate could not be looked after: %s", error)
                pause = RETRY_AFTER_S
            await asyncio.sleep(pause)

    async def _agreed(self, now: float) -> Material:
        """Return the Secret's content after this or another process has renewed it."""
        for _ in range(ATTEMPTS):
            found, version = await self._read()
            material = maintained(found or self.material, self._names, now)
            if material is found or await self._written(material, version):
                return material
        raise RunError(f"the Secret {SECRET} is changed by others all the time; who else writes it?")

    async def _read(self) -> tuple[Material | None, str]:
        try:
            secret = await self._connection.read(join(self._secrets, SECRET), _Secret)
        except ApiError as error:
            if not error.not_found:
                raise
            return None, ""
        return _from_secret(secret), secret.metadata.resource_version

    async def _written(self, material: Material, version: str) -> bool:
        """Write the material; return whether no other process was faster."""
        try:
            if version:
                await self._connection.call("PUT", join(self._secrets, SECRET), _to_secret(material, version))
            else:
                await self._connection.call("POST", self._secrets, _to_secret(material, version))
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            return False
        return True


async def serve(
    certificates: ServingCertificate,
    controller: str,
    port: int,
    policies: CurrentPolicies,
    rules: CurrentRules,
    events: ReviewEvents | None = None,
) -> None:
    """Serve reviews until cancelled. The first certificate must exist: call `refresh` before."""
    runner = LimitedRunner(build_app(controller, policies, rules, events), Limits(per_source=512), access_log=None)
    await runner.setup()
    try:
        await LimitedSite(runner, listen(port), certificates.context).start()
        if events is not None:
            events.listens()
        await certificates.keep()
    finally:
        await runner.cleanup()


def _to_secret(material: Material, version: str) -> dict[str, Any]:
    files = {
        "ca.crt": material.trusted,
        "ca.key": material.authority.key,
        "tls.crt": material.serving.certificate,
        "tls.key": material.serving.key,
    }
    metadata: dict[str, Any] = {"name": SECRET, "labels": {"app.kubernetes.io/part-of": "gpuquota"}}
    if version:
        metadata["resourceVersion"] = version
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def _from_secret(secret: _Secret) -> Material | None:
    """Return the Secret's material; None for an invalid Secret, which is then rewritten."""
    try:
        files = {name: base64.b64decode(text) for name, text in (secret.data or {}).items()}
        end = b"-----END CERTIFICATE-----\n"
        current = files["ca.crt"].partition(end)[0] + end
        material = Material(
            authority=KeyPair(certificate=current, key=files["ca.key"]),
            serving=KeyPair(certificate=files["tls.crt"], key=files["tls.key"]),
            trusted=files["ca.crt"],
        )
        check(material)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        log.warning("the Secret %s cannot be used and is made again: %s", SECRET, error)
        return None
    return material
