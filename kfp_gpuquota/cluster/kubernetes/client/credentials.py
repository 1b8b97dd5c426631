"""Where the API server is and who asks: from a kubeconfig file, or from the service account of the pod.

A small loader of its own, because the official client's costs 60 MB of memory and keeps what it loads to itself. What
it understands: a server, its authority (file or data), a token (also from a file), a client certificate, and `exec`
plugins, which is what cloud providers use.
"""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError, NotFoundError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_READ_AGAIN_S: Final = 60.0
EXEC_TIMEOUT_S: Final = 60.0
_NEVER: Final = float("inf")


@dataclass
class Credentials:
    """How to reach one API server. `namespace` is the one that its user works in, `headers` say whom to act as."""

    server: str
    tls: ssl.SSLContext | None = None
    namespace: str = "default"
    _token: str = field(default="", repr=False)
    _token_file: Path | None = None
    _exec: dict[str, Any] | None = None
    _valid_until: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()

    def token(self, now: float | None = None) -> str:
        """The bearer token, read again as it rotates; "" where a certificate (or nothing) says who asks."""
        now = time.time() if now is None else now
        if now >= self._valid_until:
            self._token, self._valid_until = self._read_token(now)
        return self._token

    def forget_token(self) -> None:
        """The server refused it: read it anew next time."""
        self._valid_until = 0.0

    def _read_token(self, now: float) -> tuple[str, float]:
        if self._token_file is not None:
            return self._token_file.read_text().strip(), now + TOKEN_READ_AGAIN_S
        if self._exec is not None:
            return _run_plugin(self._exec, self.server)
        return self._token, _NEVER


def load_credentials(kubeconfig: str | None = None, context: str | None = None) -> Credentials:
    """From `kubeconfig`, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

    NotFoundError where there is none of them, InvalidFieldError for a file that names what it does not hold.
    """
    if explicit := kubeconfig or os.environ.get("KUBECONFIG", ""):
        return from_file(*_chosen([Path(part) for part in explicit.split(os.pathsep) if part], context))
    if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(SERVICE_ACCOUNT)
    default = Path.home() / ".kube" / "config"
    if default.exists():
        return from_file(default, context)
    raise NotFoundError("there is no kubeconfig; name one with --kubeconfig or the variable KUBECONFIG")


def _chosen(paths: list[Path], context: str | None) -> tuple[Path, str | None]:
    """Of several kubeconfigs, as $KUBECONFIG may name, the one that holds the context; by default the current one.

    kubectl merges the files, so that a context of one may name a cluster of another; here a context, its cluster and
    its user stand in one file, as the tools that write such files have it.
    """
    there = {path: yaml.safe_load(path.read_text()) or {} for path in paths if path.exists()}
    wanted = context or next((name for config in there.values() if (name := config.get("current-context"))), None)
    for path, config in there.items():
        if any(entry["name"] == wanted for entry in config.get("contexts") or []):
            return path, wanted
    return next(iter(there), paths[0]), context


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Credentials:
    """Those of the pod that this process runs in."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return Credentials(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(directory / "ca.crt")),
        namespace=(directory / "namespace").read_text().strip(),
        _token_file=directory / "token",
    )


def from_file(path: Path, context: str | None = None) -> Credentials:
    """Those of a kubeconfig's context, by default its current one."""
    if not path.exists():
        raise NotFoundError(f"there is no kubeconfig {path}; name another one with --kubeconfig")
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
        raise InvalidFieldError(f"kubeconfig {kind}", name, f"it holds {', '.join(sorted(entries)) or 'none'}")
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
        _load_pair(context, certificate, key)
    return context


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # OpenSSL's interface reads files only; the key lies there for the moment of reading, for nobody else
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)


def _data(section: dict[str, Any], field_name: str, base: Path) -> bytes:
    if inline := section.get(f"{field_name}-data"):
        return base64.b64decode(inline)
    named = section.get(field_name)
    return (base / named).read_bytes() if named else b""


def _run_plugin(plugin: dict[str, Any], server: str) -> tuple[str, float]:
    """Ask a credential plugin (client.authentication.k8s.io): (token, when it ends)."""
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
            f"the credential plugin {plugin['command']!r} gave no token for {server}: {error}"
        ) from error
    status = msgspec.json.decode(answer.stdout).get("status", {})
    ends = status.get("expirationTimestamp")
    return status.get("token", ""), datetime.fromisoformat(ends).timestamp() if ends else _NEVER
