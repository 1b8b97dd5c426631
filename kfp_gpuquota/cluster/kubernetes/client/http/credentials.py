"""Address of and credentials for the API server, from a kubeconfig file or from the pod's service account.

The official client's loader was rejected: it costs 60 MB of memory and does not expose what it loads. This one supports
a server, its certificate authority (file or data), a token (also from a file), a client certificate, and the `exec`
plugins that cloud providers use.
"""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError, NotFoundError
from kfp_gpuquota.server.transport.tls import load_pair

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_READ_AGAIN_S: Final = 60.0
EXEC_TIMEOUT_S: Final = 60.0
_NEVER: Final = float("inf")


@dataclass
class Credentials:
    """How to reach one API server: `namespace` is the context's default, `headers` are those of impersonation."""

    server: str
    tls: ssl.SSLContext | None = None
    namespace: str = "default"
    _token: str = field(default="", repr=False)
    _token_file: Path | None = None
    _exec: dict[str, Any] | None = None
    _valid_until: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()

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
        if self._exec is not None:
            return _run_plugin(self._exec, self.server)
        return self._token, _NEVER


def load_credentials(kubeconfig: str | None = None, context: str | None = None) -> Credentials:
    """Load credentials from `kubeconfig`, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

    Raises NotFoundError if none of them exists, InvalidFieldError for a reference to a missing entry of the file.
    """
    if explicit := kubeconfig or os.environ.get("KUBECONFIG", ""):
        return from_file(*_chosen([Path(part) for part in explicit.split(os.pathsep) if part], context))
    if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(SERVICE_ACCOUNT)
    default = Path.home() / ".kube" / "config"
    if default.exists():
        return from_file(default, context)
    raise NotFoundError("no kubeconfig was found; pass --kubeconfig or set the environment variable KUBECONFIG")


def _chosen(paths: list[Path], context: str | None) -> tuple[Path, str | None]:
    """Return the kubeconfig file that holds the context (by default the current one), and the context's name.

    kubectl merges the files of $KUBECONFIG, so a context of one may refer to a cluster of another. Here a context, its
    cluster and its user must be in one file, as the tools that write these files have it.
    """
    configs = {path: yaml.safe_load(path.read_text()) or {} for path in paths if path.exists()}
    wanted = context or next((name for config in configs.values() if (name := config.get("current-context"))), None)
    for path, config in configs.items():
        if any(entry["name"] == wanted for entry in config.get("contexts") or []):
            return path, wanted
    return next(iter(configs), paths[0]), context


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
    token_file = user.get("tokenFile")
    return Credentials(
        server=str(cluster["server"]).rstrip("/"),
        tls=_tls(cluster, user, path.parent) if str(cluster["server"]).startswith("https") else None,
        namespace=entry.get("namespace", "default"),
        _token=user.get("token", ""),
        _token_file=path.parent / token_file if token_file else None,
        _exec=user.get("exec"),
        headers=_impersonation(user),
    )


def _named(config: dict[str, Any], kind: str, part: str, name: str) -> dict[str, Any]:
    entries = {entry["name"]: entry.get(part) or {} for entry in config.get(kind) or []}
    if name not in entries:
        raise InvalidFieldError(f"kubeconfig {kind}", name, f"the file has: {', '.join(sorted(entries)) or 'none'}")
    return dict(entries[name])


def _impersonation(user: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if not user.get("as"):
        return ()
    groups = (("Impersonate-Group", group) for group in user.get("as-groups") or ())
    return ("Impersonate-User", user["as"]), *groups


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


def _run_plugin(plugin: dict[str, Any], server: str) -> tuple[str, float]:
    """Run a credential plugin (client.authentication.k8s.io); return the token and its expiry in seconds since 1970."""
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {entry["name"]: entry["value"] for entry in plugin.get("env") or []}
    try:
        answer = subprocess.run(
            [plugin["command"], *(plugin.get("args") or [])],
            env={**os.environ, **environment, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()},
            capture_output=True,
            timeout=EXEC_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterUnavailableError(
            f"the credential plugin {plugin['command']!r} returned no token for {server}: {error}"
        ) from error
    status = msgspec.json.decode(answer.stdout).get("status", {})
    expiry = status.get("expirationTimestamp")
    return status.get("token", ""), datetime.fromisoformat(expiry).timestamp() if expiry else _NEVER
