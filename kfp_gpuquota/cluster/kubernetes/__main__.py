"""`python -m kfp_gpuquota.cluster.kubernetes` runs the controller."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kfp_gpuquota.cluster.kubernetes.client.process import logging_setup
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import until_stopped
from kfp_gpuquota.cluster.kubernetes.controller.process import Replica, ReplicaOptions
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import ReadyRules
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_LOST: Final = 3
# Allocations until a garbage collection. Most objects are long-lived, so Python's 700 costs 1/7 of a burst's CPU time.
GARBAGE_AFTER: Final = 10_000

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the controller until a signal arrives; return the exit code."""
    options = _parser().parse_args(arguments)
    gc.set_threshold(GARBAGE_AFTER)
    logging_setup.configure(options.log_format, options.log_level)
    given = {name: value for name, value in vars(options).items() if name not in {"log_format", "log_level"}}
    try:
        return asyncio.run(_serve(ReplicaOptions(**given)))
    except GpuQuotaError as error:
        log.error("%s", error.message)
        return error.exit_code


async def _serve(options: ReplicaOptions) -> int:
    return 0 if await until_stopped(Replica(options).run()) else LEASE_LOST


def _web_address(text: str) -> str:
    """Return the URL. Raises ArgumentTypeError."""
    parts = urlsplit(text)
    if text and (parts.scheme not in {"http", "https"} or not parts.netloc):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as https://kubeflow.example.org/gpuquota/")
    return text


def _urls(text: str) -> tuple[str, ...]:
    return tuple(url for url in text.split(",") if url)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuquota-controller")
    parser.add_argument("--kubeconfig", help="by default $KUBECONFIG, the pod's service account or ~/.kube/config")
    parser.add_argument("--context", help="context of the kubeconfig; by default the current one")
    parser.add_argument("--namespace", default="gpuquota-system", help="namespace of the controller")
    parser.add_argument(
        "--keys-namespace",
        default="",
        help="namespace of the Secrets with the certificate authority and the workers' key; by default --namespace",
    )
    parser.add_argument("--webhook-port", type=int, default=0, help="0: this process serves no webhook")
    parser.add_argument("--reviews-only", action="store_true", help="serve the webhook and never lead")
    parser.add_argument(
        "--cert-dir", default="", metavar="DIR",
        help="directory with the webhook's tls.crt and tls.key, which another program renews; with --reviews-only",
    )  # fmt: skip
    parser.add_argument("--metrics-port", type=int, default=0, help="0: any free port")
    parser.add_argument("--membership-port", type=int, default=0, help="0: any free port")
    parser.add_argument(
        "--what-if-port", type=int, default=0,
        help="port on which the web page asks what would happen, over TLS; 0: this is not answered",
    )  # fmt: skip
    parser.add_argument("--advertise", default="", help="URL at which workers reach the membership port")
    parser.add_argument(
        "--membership-shards", type=_urls, default=(), metavar="URL,URL",
        help="URLs of the membership shards, in order; without shards the leader serves the workers itself",
    )  # fmt: skip
    parser.add_argument("--runtime-image", default="", help="image with elastic_runtime, for images without it")
    parser.add_argument(
        "--reservation-namespace",
        default=reservation_pods.NAMESPACE,
        help="namespace of the pods that hold shared GPUs",
    )
    parser.add_argument(
        "--agent-namespace", default=reservation_pods.AGENTS_NAMESPACE, help="namespace of the node agents"
    )
    parser.add_argument(
        "--reservation-image", default=reservation_pods.IMAGE, help="image of the reservation pods: any with a shell"
    )
    parser.add_argument(
        "--reservation-runtime-class",
        default="",
        help="runtime class of the reservation pods, if GPUs need one (nvidia)",
    )
    parser.add_argument("--reservation-priority-class", default="", help="priority class of the reservation pods")
    ready = ReadyRules()
    parser.add_argument(
        "--workers-ready-timeout", type=float, default=ready.timeout_s, metavar="SECONDS",
        help="workers that are not ready after so many seconds release their GPUs (%(default)g); 0: never",
    )  # fmt: skip
    parser.add_argument(
        "--workers-ready-tries", type=int, default=ready.tries, metavar="N",
        help="an ElasticJob whose workers do not become ready in N attempts in a row fails (%(default)d); 0: never",
    )  # fmt: skip
    parser.add_argument(
        "--workers-ready-pause", type=float, default=ready.pause_s, metavar="SECONDS",
        help="pause before the next attempt, doubled each time, up to an hour (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--page-url", type=_web_address, default="", metavar="URL",
        help="the web page as browsers reach it: each job's page is then in its status and in its step's log",
    )  # fmt: skip
    parser.add_argument(
        "--notifications", default="", metavar="DIR",
        help="directory with a file NAME.json for each webhook that is notified of what happens to ElasticJobs",
    )  # fmt: skip
    parser.add_argument("--leader-elect", action=argparse.BooleanOptionalAction, default=False)
    logging_setup.add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
