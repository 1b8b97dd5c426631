"""`python -m kfp_gpuquota.cluster.kubernetes`: the controller."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.client import logging_setup
from kfp_gpuquota.cluster.kubernetes.client.signals import until_stopped
from kfp_gpuquota.cluster.kubernetes.controller.process import Options, Replica
from kfp_gpuquota.cluster.kubernetes.elasticjob.startup_backoff import ReadyRules
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Sequence

LEADS_NO_MORE: Final = 3
# Allocations. What is made mostly stays, so Python's 700 costs a seventh of a burst's CPU.
GARBAGE_AFTER: Final = 10_000

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    options = _parser().parse_args(arguments)
    gc.set_threshold(GARBAGE_AFTER)
    logging_setup.configure(options.log_format, options.log_level)
    given = {name: value for name, value in vars(options).items() if name not in {"log_format", "log_level"}}
    try:
        return asyncio.run(_serve(Options(**given)))
    except GpuQuotaError as error:
        log.error("%s", error.message)
        return error.exit_code


async def _serve(options: Options) -> int:
    return 0 if await until_stopped(Replica(options).run()) else LEADS_NO_MORE


def _urls(text: str) -> tuple[str, ...]:
    return tuple(url for url in text.split(",") if url)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuquota-controller")
    parser.add_argument("--kubeconfig", help="by default $KUBECONFIG, the pod's service account, ~/.kube/config")
    parser.add_argument("--context", help="of the kubeconfig; by default its current one")
    parser.add_argument("--namespace", default="gpuquota-system", help="of the controller itself")
    parser.add_argument(
        "--keys-namespace", default="", help="of the certificate authority and the workers' key; by default --namespace"
    )
    parser.add_argument("--webhook-port", type=int, default=0, help="0: pods are not reviewed here")
    parser.add_argument("--reviews-only", action="store_true", help="review pods, and never lead")
    parser.add_argument("--metrics-port", type=int, default=0, help="0: any free one")
    parser.add_argument("--membership-port", type=int, default=0, help="0: any free one")
    parser.add_argument("--advertise", default="", help="URL under which workers reach the membership port")
    parser.add_argument(
        "--membership-shards", type=_urls, default=(), metavar="URL,URL",
        help="of the membership's own processes, by number; without them this one serves workers while it leads",
    )  # fmt: skip
    parser.add_argument("--runtime-image", default="", help="image with elastic_runtime, for images that lack it")
    parser.add_argument(
        "--reservation-namespace", default=reservation_pods.NAMESPACE, help="of pods that hold shared GPUs"
    )
    parser.add_argument("--agent-namespace", default=reservation_pods.AGENTS_NAMESPACE, help="of the nodes' agents")
    parser.add_argument(
        "--reservation-image", default=reservation_pods.IMAGE, help="of these pods: any that has a shell"
    )
    parser.add_argument("--reservation-runtime-class", default="", help="of these pods, where GPUs need one (nvidia)")
    parser.add_argument("--reservation-priority-class", default="", help="of these pods")
    ready = ReadyRules()
    parser.add_argument(
        "--workers-ready-timeout", type=float, default=ready.timeout_s, metavar="SECONDS",
        help="workers that do not come up in so long give their GPUs back (%(default)g); 0: never",
    )  # fmt: skip
    parser.add_argument(
        "--workers-ready-tries", type=int, default=ready.tries, metavar="N",
        help="an ElasticJob whose workers do not come up so many times in a row fails (%(default)d); 0: never",
    )  # fmt: skip
    parser.add_argument(
        "--workers-ready-pause", type=float, default=ready.pause_s, metavar="SECONDS",
        help="before it is tried again, twice as long each time, up to an hour (%(default)g)",
    )  # fmt: skip
    parser.add_argument("--leader-elect", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--log-format", default="text", choices=logging_setup.FORMATS, help="json: one object a line")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
