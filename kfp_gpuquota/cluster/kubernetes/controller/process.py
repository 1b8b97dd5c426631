"""One replica of the controller: it always reviews pods, and plans while it is the leader.

The leader plans, writes and serves workers. A process that loses the lease exits and is restarted as a standby, because
its state may be outdated. Rejected: resetting the state in place, which would have to be complete.

It publishes the certificate of the authority that signs the controller's, so that the web page can verify it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.admission import server
from kfp_gpuquota.cluster.kubernetes.admission.mounted_certificate import MountedCertificate
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH, MERGE_PATCH, ApiError, Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import NO_FENCE
from kfp_gpuquota.cluster.kubernetes.client.leader.leader_election import LeaderElection
from kfp_gpuquota.cluster.kubernetes.client.leader.renewal import Renewal
from kfp_gpuquota.cluster.kubernetes.client.process import probes
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import first_to_end, until_done
from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.controller import debug_state, metrics, what_if
from kfp_gpuquota.cluster.kubernetes.controller.controller import Controller
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import service as membership_service
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import PodSettings
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import ReadyRules
from kfp_gpuquota.cluster.kubernetes.objects import custom_types, labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUTHORITY, AUTHORITY_FILE
from kfp_gpuquota.cluster.kubernetes.planner.process import PlannerProcess
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods
from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationSettings
from kfp_gpuquota.cluster.notifications import Notifications
from kfp_gpuquota.errors import ClusterUnavailableError, RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kfp_gpuquota.cluster.kubernetes.admission.pods import Verdict
    from kfp_gpuquota.engine.notifications import Notification


EVERY_S: Final = 60.0


async def keep_published(connection: Connection, namespace: str, trusted: Callable[[], bytes]) -> None:
    """Apply the ConfigMap once a minute until cancelled: it may have been deleted, or the authority renewed."""
    while True:
        try:
            await _publish(connection, namespace, trusted())
        except RunError as error:
            log.warning("the ConfigMap %s/%s could not be written: %s", namespace, AUTHORITY, error)
        await asyncio.sleep(EVERY_S)


async def _publish(connection: Connection, namespace: str, trusted: bytes) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": AUTHORITY, "labels": {"app.kubernetes.io/part-of": "gpuquota"}},
        "data": {AUTHORITY_FILE: trusted.decode()},
    }
    path = join("/api/v1/namespaces", namespace, "configmaps", AUTHORITY)
    params = {"fieldManager": labels.FIELD_MANAGER, "force": "true"}
    await connection.call("PATCH", path, body, content_type=APPLY_PATCH, params=params)


ACCOUNT: Final = "gpuquota-controller"

log = logging.getLogger(__name__)


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options of a replica."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str = "gpuquota-system"
    keys_namespace: str = (
        ""  # of the Secrets of the authority and the key; "": `namespace`, with which they are deleted
    )
    leader_elect: bool = False
    reviews_only: bool = False  # it never leads
    cert_dir: str = ""  # of the webhook's certificate; "": the process issues its own

    # Ports; 0 selects a free one
    webhook_port: int = 0  # 0: no webhook
    metrics_port: int = 0
    membership_port: int = 0
    what_if_port: int = 0  # where the web page asks what-ifs; 0: they are not answered

    # Workers of ElasticJobs
    advertise: str = ""  # the URL at which they reach the membership service
    membership_shards: tuple[str, ...] = ()  # URLs of the processes that serve them; (): this process
    runtime_image: str = ""
    workers_ready_timeout: float = ReadyRules().timeout_s
    workers_ready_tries: int = ReadyRules().tries
    workers_ready_pause: float = ReadyRules().pause_s
    page_url: str = ""  # the address of the web page; "": there is none
    notifications: str = ""  # the folder that names the webhooks; "": nobody is notified

    # Shared GPUs
    reservation_namespace: str = reservation_pods.NAMESPACE
    agent_namespace: str = reservation_pods.AGENTS_NAMESPACE
    reservation_image: str = reservation_pods.IMAGE
    reservation_runtime_class: str = ""
    reservation_priority_class: str = ""


class Replica:
    """One replica of the controller."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        self._metrics = metrics.Metrics()
        self._controller: Controller | None = None
        self._policies, self._rules = CurrentPolicies(), CurrentRules()
        self._notifications = Notifications(Path(options.notifications)) if options.notifications else None
        self._reviews = not options.webhook_port  # whether the webhook listens, if there is one

    async def run(self) -> None:
        """Run until cancelled, or until the lease is lost."""
        options = self._options
        async with AsyncExitStack() as stack:
            if self._notifications is not None:
                stack.push_async_callback(self._notifications.close)
            credentials = load_credentials(options.kubeconfig, options.context)
            connection = await stack.enter_async_context(Connection(credentials, count=self._metrics.count_call))
            served = probes.serving(
                self._metrics,
                options.metrics_port,
                ready=self._is_ready,
                refresh=self._look,
                healthy=self._is_healthy,
                further=() if options.reviews_only else (debug_state.route(connection, lambda: self._controller),),
            )
            log.info("metrics and probes on port %d", await stack.enter_async_context(served))
            if options.cert_dir:
                mounted = self._mounted_certificate()
                self._metrics.certificate_expiry.set_function(lambda: mounted.expires_at)
                await first_to_end(*self._reviewing(connection, mounted))
                return
            certificates = await self._certificates(connection)
            self._metrics.certificate_expiry.set_function(lambda: certificates.expires_at)
            if options.what_if_port and not options.reviews_only:
                answering = what_if.serving(
                    options.what_if_port, certificates.context, connection, lambda: self._controller
                )
                log.info("what-ifs are answered on port %d", await stack.enter_async_context(answering))
            tasks = [] if options.reviews_only else [self._lead(connection, certificates)]
            if options.webhook_port:
                tasks += self._reviewing(connection, certificates)
            else:
                tasks.append(certificates.keep())
            await first_to_end(*tasks)

    def _reviewing(
        self, connection: Connection, certificate: server.ServingCertificate
    ) -> list[Coroutine[Any, Any, None]]:
        user = f"system:serviceaccount:{self._options.namespace}:{ACCOUNT}"
        policies, rules = self._policies_of(connection), self._rules_of(connection)
        return [policies.run(), rules.run(), self._review(certificate, user, policies, rules)]

    def _mounted_certificate(self) -> MountedCertificate:
        """Return the certificate of --cert-dir. Raises UsageError, or RunError if it cannot be used."""
        if not self._options.reviews_only:
            raise UsageError(
                "--cert-dir is for a process that serves only the webhook; add --reviews-only, or leave --cert-dir out"
            )
        certificate = MountedCertificate(Path(self._options.cert_dir))
        certificate.refresh()
        return certificate

    def _policies_of(self, connection: Connection) -> Reflector[custom_types.PolicyObject]:
        book = self._policies
        kind = custom_types.PolicyObject
        return Reflector(connection, paths.WORKLOAD_POLICIES, kind, changed=book.put, deleted=book.drop)

    def _rules_of(self, connection: Connection) -> Reflector[custom_types.QuotaPolicyObject]:
        book, kind, path = self._rules, custom_types.QuotaPolicyObject, paths.QUOTA_POLICIES
        return Reflector(connection, path, kind, changed=book.put, deleted=book.drop)

    async def _review(
        self,
        certificate: server.ServingCertificate,
        user: str,
        policies: Reflector[custom_types.PolicyObject],
        rules: Reflector[custom_types.QuotaPolicyObject],
    ) -> None:
        """Serve the webhook after the policies were listed, so that they apply to every reviewed pod."""
        await policies.synced.wait()
        await rules.synced.wait()
        await server.serve(certificate, user, self._options.webhook_port, self._policies, self._rules, self)

    # As `ReviewEvents`

    def listens(self) -> None:
        """Record that the webhook's port is open."""
        self._reviews = True

    def reviewed(self, verdict: Verdict, seconds: float) -> None:
        """Count a review that took this long."""
        self._metrics.reviews.labels(str(verdict.allowed)).observe(seconds)

    # As the leader

    async def _lead(self, connection: Connection, certificates: server.Certificates) -> None:
        """Acquire the lease, and run the controller until the lease is lost."""
        options = self._options
        identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        election = LeaderElection(connection, options.namespace, identity)
        if options.leader_elect:
            await self._label(connection, leads=False)
            await election.acquire()
            await self._label(connection, leads=True)
        try:
            self._metrics.leads.set(1)
            renewal = Renewal(election, lambda: Connection(load_credentials(options.kubeconfig, options.context)))
            holding = renewal.hold() if options.leader_elect else asyncio.Event().wait()
            await first_to_end(holding, self._control(connection, certificates, election))
        finally:
            await election.release()

    async def _control(
        self, connection: Connection, certificates: server.Certificates, election: LeaderElection
    ) -> None:
        """Run the controller as soon as the workers' key can be read; the lease is renewed meanwhile."""
        namespace, options = self._keys_namespace, self._options
        key = await until_done("the workers' key", lambda: membership_service.read_or_make_key(connection, namespace))
        self._controller = controller = self._make_controller(connection, certificates, election, key)
        certificates.renewed = controller.elastic.trust
        tasks = [controller.run(), membership_service.keep_key(connection, namespace, key)]
        if options.what_if_port:
            tasks.append(keep_published(connection, options.namespace, lambda: _trusted(certificates)))
        await first_to_end(*tasks)

    async def _label(self, connection: Connection, *, leads: bool) -> None:
        if not self._options.membership_shards or self._options.what_if_port:  # else no Service selects the leader
            await _label(connection, leads=leads)

    @property
    def _keys_namespace(self) -> str:
        return self._options.keys_namespace or self._options.namespace

    def _make_controller(
        self, connection: Connection, certificates: server.Certificates, election: LeaderElection, key: bytes
    ) -> Controller:
        options = self._options
        settings = PodSettings(
            coordinator=options.advertise or f"https://{socket.gethostname()}:{options.membership_port}",
            authority=_trusted(certificates),
            key=key,
            runtime_image=options.runtime_image,
            shards=options.membership_shards,
        )
        return Controller(
            connection,
            settings,
            membership_port=options.membership_port,
            tls=certificates.context,
            metrics=self._metrics,
            reserving=ReservationSettings(
                namespace=options.reservation_namespace,
                agents=options.agent_namespace,
                image=options.reservation_image,
                runtime_class=options.reservation_runtime_class,
                priority_class=options.reservation_priority_class,
            ),
            ready=ReadyRules(options.workers_ready_timeout, options.workers_ready_tries, options.workers_ready_pause),
            fence=election.validity if options.leader_elect else NO_FENCE,
            epoch=election.epoch,
            page_url=options.page_url,
            planner=PlannerProcess,
            notify=self._notify,
        )

    async def _certificates(self, connection: Connection) -> server.Certificates:
        names = [*paths.service_names(server.SERVICE, self._options.namespace), "127.0.0.1", "localhost"]
        if self._options.what_if_port:
            names += paths.service_names(what_if.SERVICE, self._options.namespace)
        if host := urlsplit(self._options.advertise).hostname:
            names.append(host)
        certificates = server.Certificates(
            connection,
            self._keys_namespace,
            list(dict.fromkeys(names)),
            inject=bool(self._options.webhook_port) or not self._options.membership_shards,
        )
        await certificates.start()
        return certificates

    def _notify(self, one: Notification) -> None:
        if self._notifications is not None:
            self._notifications.notify(one)

    def _is_ready(self) -> bool:
        """Return whether this replica may get requests: its webhook listens, and if it leads it has listed all.

        A Service sends reviews to each ready replica, and the API server refuses a pod whose review is not answered.
        """
        if not self._reviews or self._options.reviews_only:
            return self._reviews
        return self._options.leader_elect if self._controller is None else self._controller.ready

    def _is_healthy(self) -> str:
        """Return the problem, "" if there is none: required plans fail."""
        health = self._controller.plans.health if self._controller is not None else None
        if health is None or health.healthy:
            return ""
        return f"no plan for {health.overdue_s:.0f} s, {health.failures} failures in a row"

    def _look(self) -> None:
        if self._controller is not None:
            self._metrics.look(self._controller)


def _trusted(certificates: server.Certificates) -> bytes:
    """Return the certificate of the authority; b"" before there is one."""
    return certificates.material.trusted if certificates.material else b""


async def _label(connection: Connection, *, leads: bool) -> None:
    """Set or remove the label on this pod by which the Services of the membership and of what-ifs select the leader.

    A restarted container removes the label of its predecessor until it leads.
    """
    namespace, name = os.environ.get("POD_NAMESPACE"), os.environ.get("POD_NAME")
    if not namespace or not name:
        return
    path = join("/api/v1/namespaces", namespace, "pods", name)
    body = {"metadata": {"labels": {labels.LEADER: "true" if leads else None}}}
    try:
        await connection.call("PATCH", path, body, content_type=MERGE_PATCH)
    except (ApiError, ClusterUnavailableError) as error:
        log.error("this pod's label as the leader's could not be set to %s; it may not be reached: %s", leads, error)
