"""Credentials of the controller and the node agent: the pod's service account, or a kubeconfig file.

From a kubeconfig they read a server, its certificate authority, a token (also from a file) and a client certificate.
What people have besides, credential plugins or several files, is for the official client, which user_client/ uses: it
costs 60 MB of memory, and these programs run for months with the account of their pod.
"""

from __future__ import annotations

import base64
import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.errors import InvalidFieldError, NotFoundError, UsageError
from kfp_gpuquota.server.transport.tls import load_pair

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_READ_AGAIN_S: Final = 60.0
_NEVER: Final = float("inf")
_ONLY_FOR_USERS: Final = ("exec", "auth-provider", "as")


@dataclass
class Credentials:
    """How to reach one API server: `namespace` is the context's default."""

    server: str
    tls: ssl.SSLContext | None = None
    namespace: str = "default"
    _token: str = field(default="", repr=False)
    _token_file: Path | None = None
    _valid_until: float = 0.0

    def token(self, now: float | None = None) -> str:
        """Return the bearer token, read again as it rotates; "" if a client certificate (or nothing) authenticates."""
        now = time.time() if now is None else now
        if now >= self._valid_until:
            self._token, self._valid_until = self._read_token(now)
        return self._token

    def invalidate_token(self) -> None:
        """Discard the cached token, which the server refused; the next call reads it again."""
        self._valid_until = 0.0

    def _read_token(self, now: float) -> tuple[str, float]:
        if self._token_file is not None:
            return self._token_file.read_text().strip(), now + TOKEN_READ_AGAIN_S
        return self._token, _NEVER


def load_credentials(kubeconfig: str | None = None, context: str | None = None) -> Credentials:
    """Load credentials from `kubeconfig`, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

    Raises NotFoundError if none of them exists, InvalidFieldError for a reference to a missing entry of the file.
    """
    if explicit := kubeconfig or os.environ.get("KUBECONFIG", ""):
        return from_file(Path(explicit), context)
    if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(SERVICE_ACCOUNT)
    default = Path.home() / ".kube" / "config"
    if default.exists():
        return from_file(default, context)
    raise NotFoundError("no kubeconfig was found; pass --kubeconfig or set the environment variable KUBECONFIG")


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Credentials:
    """Return the credentials of the service account of the pod that this process runs in."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return Credentials(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(directory / "ca.crt")),
        namespace=(directory / "namespace").read_text().strip(),
        _token_file=directory / "token",
    )


def from_file(path: Path, context: str | None = None) -> Credentials:
    """Return the credentials of a kubeconfig's context, by default the current one."""
    if not path.exists():
        raise NotFoundError(f"the kubeconfig {path} does not exist; pass another one with --kubeconfig")
    config = yaml.safe_load(path.read_text()) or {}
    chosen = context or config.get("current-context", "")
    entry = _named(config, "contexts", "context", chosen)
    cluster = _named(config, "clusters", "cluster", entry.get("cluster", ""))
    user = _named(config, "users", "user", entry["user"]) if entry.get("user") else {}
    if other := next((name for name in _ONLY_FOR_USERS if name in user), None):
        raise UsageError(
            f"{path}: the user of context {chosen!r} has {other!r}; give the controller a token or a certificate"
        )
    token_file = user.get("tokenFile")
    return Credentials(
        server=str(cluster["server"]).rstrip("/"),
        tls=_tls(cluster, user, path.parent) if str(cluster["server"]).startswith("https") else None,
        namespace=entry.get("namespace", "default"),
        _token=user.get("token", ""),
        _token_file=path.parent / token_file if token_file else None,
    )


def _named(config: dict[str, Any], kind: str, part: str, name: str) -> dict[str, Any]:
    entries = {entry["name"]: entry.get(part) or {} for entry in config.get(kind) or []}
    if name not in entries:
        raise InvalidFieldError(f"kubeconfig {kind}", name, f"the file has: {', '.join(sorted(entries)) or 'none'}")
    return dict(entries[name])


def _tls(cluster: dict[str, Any], user: dict[str, Any], base: Path) -> ssl.SSLContext:
    authority = _data(cluster, "certificate-authority", base)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _data(user, "client-certificate", base), _data(user, "client-key", base)
    if certificate and key:
        load_pair(context, certificate, key)
    return context


def _data(section: dict[str, Any], field_name: str, base: Path) -> bytes:
    if inline := section.get(f"{field_name}-data"):
        return base64.b64decode(inline)
    named = section.get(field_name)
    return (base / named).read_bytes() if named else b""
