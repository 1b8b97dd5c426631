"""The options of the page's process, and what is wrong with them."""

from __future__ import annotations

import argparse
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kfp_gpuquota.cluster.kubernetes.client.process import logging_setup
from kfp_gpuquota.errors import InvalidFieldError, UsageError
from kfp_gpuquota.web.site_config import base_of, origin_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Options(argparse.Namespace):
    """All options; `trusted_proxy` and `origin` may be given several times."""

    kubeconfig: str | None
    context: str | None
    host: str
    port: int
    probe_port: int
    base_path: str
    origin: list[str]
    trusted_proxy: list[Network]
    user_header: str
    groups_header: str
    dashboard: bool
    run_page: str
    what_if: str
    what_if_files: str
    submit: bool
    quotas: bool
    log_format: str
    log_level: str

    @property
    def base(self) -> str:
        """Return the path that begins every address, without a slash at its end."""
        return base_of(self.base_path)


def parsed(arguments: Sequence[str] | None) -> Options:
    """Return the options. Raises UsageError for those with which others than the users could be served."""
    options = _parser().parse_args(arguments, Options())
    loopback = ipaddress.ip_address(options.host).is_loopback
    if not loopback and not options.trusted_proxy:
        raise UsageError(
            f"--host is {options.host}, which others can reach, but no --trusted-proxy is given; name the network of "
            "the proxy that authenticates users, such as --trusted-proxy 127.0.0.6/32 for Istio's sidecar"
        )
    if not loopback and not options.origin:
        raise UsageError(
            "--origin is missing: the address of the pages in a browser, such as https://kubeflow.example.org"
        )
    if not options.origin:
        options.origin = [f"http://{options.host}:{options.port}", f"http://localhost:{options.port}"]
    return options


def _origin(text: str) -> str:
    try:
        return origin_of(text)
    except InvalidFieldError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _address(text: str) -> str:
    if text and not text.startswith(("/", "https://", "http://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; it begins with https:// or with / on the same host")
    return text


def _https(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme != "https" or not parts.netloc or parts.query):
        raise argparse.ArgumentTypeError(f"{text!r} is not like https://gpuquota-controller.gpuquota-system.svc")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuquota-web-page")
    parser.add_argument("--kubeconfig", help="by default $KUBECONFIG, the pod's service account or ~/.kube/config")
    parser.add_argument("--context", help="context of the kubeconfig; by default the current one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port of the pages (%(default)d)")
    parser.add_argument("--probe-port", type=int, default=0, help="port of /healthz and /readyz; 0: any free port")
    parser.add_argument("--base-path", default="/", metavar="PATH", help="path that begins every address (%(default)s)")
    parser.add_argument(
        "--origin", type=_origin, action="append", default=[], metavar="URL",
        help="scheme and host of the pages in a browser; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--trusted-proxy", type=ipaddress.ip_network, action="append", default=[], metavar="CIDR",
        help="network of a proxy that authenticates users and names them; may be given several times",
    )  # fmt: skip
    parser.add_argument("--user-header", default="kubeflow-userid", help="header with the user's name (%(default)s)")
    parser.add_argument(
        "--groups-header", default="", metavar="NAME",
        help="header with the user's groups, comma-separated, which the proxy must always set; none by default",
    )  # fmt: skip
    parser.add_argument(
        "--dashboard", action="store_true", help="pages of the same origin may show the pages in a frame"
    )
    parser.add_argument(
        "--run-page", type=_address, default="", metavar="URL",
        help="address of a run in Kubeflow Pipelines, with {namespace} and {run}; "
        "in Kubeflow: /_/pipeline/?ns={namespace}#/runs/details/{run}",
    )  # fmt: skip
    parser.add_argument(
        "--what-if", type=_https, default="", metavar="URL",
        help="the leading controller's --what-if-port; without it the page has no what-if form",
    )  # fmt: skip
    parser.add_argument(
        "--what-if-files", default="/var/run/secrets/gpuquota-controller", metavar="DIR",
        help="directory with the controller's ca.crt and a token for it (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--submit", action="store_true",
        help="users who may create ElasticJobs submit them on the page, whose account needs that right, too",
    )  # fmt: skip
    parser.add_argument(
        "--quotas", action="store_true",
        help="users who may patch GpuQuotas change them on the page, whose account needs that right, too",
    )  # fmt: skip
    logging_setup.add_options(parser)
    return parser
