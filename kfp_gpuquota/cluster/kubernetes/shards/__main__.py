"""`python -m kfp_gpuquota.cluster.kubernetes.shards` runs a membership shard, which serves workers and the leader.

It needs only one permission: to read the certificate and the key in the namespace of the keys.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Gauge

from kfp_gpuquota.cluster.kubernetes.admission import server
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.client.process import logging_setup, probes
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import first_to_end, until_done, until_stopped
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership import service as membership_service
from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.reporting import LIMITS
from kfp_gpuquota.cluster.kubernetes.shards.server import ControlEndpoint, serving
from kfp_gpuquota.cluster.kubernetes.shards.shard_jobs import ShardJobs
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Sequence

GARBAGE_AFTER: Final = 10_000

log = logging.getLogger(__name__)


class ShardMetrics:
    """Metrics of one shard."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.jobs = Gauge("gpuquota_membership_jobs", "Jobs that this shard serves", registry=self.registry)
        self.workers = Gauge("gpuquota_membership_workers", "Workers connected", registry=self.registry)
        self.leader = Gauge("gpuquota_membership_leader", "1 while a leader is connected", registry=self.registry)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the shard until a signal arrives; return the exit code."""
    options = _parser().parse_args(arguments)
    gc.set_threshold(GARBAGE_AFTER)
    logging_setup.configure(options.log_format, options.log_level)
    try:
        asyncio.run(until_stopped(_run(options)))
    except GpuQuotaError as error:
        log.error("%s", error.message)
        return error.exit_code
    return 0


async def _run(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(Connection(load_credentials(options.kubeconfig, options.context)))
        key = await until_done(
            "the workers' key", lambda: membership_service.read_or_make_key(connection, options.keys_namespace)
        )
        names = ["127.0.0.1", "localhost", *filter(None, [urlsplit(options.advertise).hostname])]
        certificates = server.Certificates(connection, options.keys_namespace, names, inject=False)
        await certificates.start()
        jobs = ShardJobs(key, LIMITS)
        control = ControlEndpoint(jobs)
        port = await stack.enter_async_context(serving(jobs, control, options.port, certificates.context))
        shown = ShardMetrics()

        def look() -> None:
            shown.jobs.set(len(jobs.jobs))
            shown.workers.set(jobs.service.connected)
            shown.leader.set(control.connected)

        served = probes.serving(shown, options.metrics_port, ready=lambda: True, refresh=look)
        log.info("metrics and probes on port %d", await stack.enter_async_context(served))
        log.info("workers are served on port %d", port)
        await first_to_end(certificates.keep(), membership_service.keep_key(connection, options.keys_namespace, key))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuquota-membership")
    parser.add_argument("--kubeconfig", help="by default $KUBECONFIG, the pod's service account, ~/.kube/config")
    parser.add_argument("--context", help="of the kubeconfig; by default its current one")
    parser.add_argument("--keys-namespace", default="gpuquota-system", help="of the certificate and the workers' key")
    parser.add_argument("--port", type=int, default=0, help="for workers and the leader; 0: any free one")
    parser.add_argument("--metrics-port", type=int, default=0, help="0: any free one")
    parser.add_argument("--advertise", default="", help="URL under which workers reach the port")
    logging_setup.add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
