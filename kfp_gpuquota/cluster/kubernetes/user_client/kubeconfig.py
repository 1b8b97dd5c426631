"""The user's way to an API server, as the official package reads it: from kubeconfig files, or of a pod's account.

Three rules of kubectl are applied here, because not all versions of the package have them: the first file that names a
current context decides, a cluster's `proxy-url` or else $HTTPS_PROXY is used, and a user may impersonate another.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from kfp_gpuquota.errors import ClusterUnavailableError, InvalidFieldError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

Json = dict[str, Any]
T = TypeVar("T")

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_TIMEOUT_S: Final = 60.0
LOGIN_TIMEOUT_S: Final = 300.0
"""The time limit of a credential plugin on a terminal, where it may ask its user to log in."""
_MALFORMED: Final = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""What the package raises for a file that is not shaped like a kubeconfig."""
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """How to reach one API server. `configuration` is the package's or a PodAccount; `headers` impersonate a user."""

    server: str
    namespace: str
    configuration: Any
    origin: str
    headers: tuple[tuple[str, str], ...] = ()
    plugin: str = ""

    def authorization(self) -> str:
        """Return the header Authorization, which a credential plugin may have to renew; "" if there is no token.

        Raises ClusterUnavailableError for a plugin that does not end.
        """
        settings, _ = _run(self.configuration.auth_settings, self.plugin)
        value: str = settings.get("BearerToken", {}).get("value") or ""
        return value.strip()


class Package(NamedTuple):
    """The modules of the official package that are used; the same names in version 30 and in the newest."""

    kube_config: ModuleType
    configuration: ModuleType
    rest: ModuleType


def load_package() -> Package:
    """Return the modules. Raises UsageError with the remedy if the package is not installed.

    Rejected: a reader of kubeconfig files of our own, which lacked most of this one, and entries in `sys.modules` that
    defer the parts nobody uses: 0.2 s of a command's start were not worth what only the import system understood.
    """
    try:
        from kubernetes.client import configuration, rest  # type: ignore[import-untyped]  # noqa: PLC0415 (0.4 s)
        from kubernetes.config import kube_config  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        missing = error.name.partition(".")[0] if error.name else error
        raise UsageError(
            f"a cluster on Kubernetes needs the Python package kubernetes, and {missing} is not "
            "installed here; install it with: pip install 'kfp-gpuquota[kubernetes]'"
        ) from error
    return Package(kube_config, configuration, rest)


def load_access(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """Load the access that `kubeconfig` describes, else $KUBECONFIG, else the pod's account, else ~/.kube/config.

    Several files are separated as in $PATH, and merged. Raises NotFoundError if there is none of them,
    InvalidFieldError for a context or entry that is missing, UsageError for a file that cannot be read, and
    ClusterUnavailableError for a credential plugin that returns no credentials.
    """
    if explicit := kubeconfig or os.environ.get("KUBECONFIG", ""):
        return from_files(explicit, context)
    if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(SERVICE_ACCOUNT)
    return from_files(str(Path.home() / ".kube" / "config"), context)


@dataclass(frozen=True)
class PodAccount:
    """The service account of a pod: three files, for which the package is not imported (0.15 s and 9 MiB of a step)."""

    host: str
    directory: Path
    verify_ssl: ClassVar = True

    @property
    def proxy(self) -> str | None:
        """Return the proxy that the environment names for the API server."""
        proxies = getproxies()
        bypassed = proxy_bypass(urlsplit(self.host).netloc)
        return None if bypassed else proxies.get("https") or proxies.get("all")

    @property
    def ssl_ca_cert(self) -> str:
        """Return the file with the API server's authority."""
        return str(self.directory / "ca.crt")

    def auth_settings(self) -> Json:
        """Return the token, which the kubelet renews, in the package's form. Raises UsageError."""
        return {"BearerToken": {"value": f"Bearer {self._text('token')}"}}

    def namespace(self) -> str:
        """Return the namespace of the pod. Raises UsageError."""
        return self._text("namespace")

    def _text(self, name: str) -> str:
        try:
            if text := (self.directory / name).read_text().strip():
                return text
            raise UsageError(f"the service account of this pod cannot be used: {self.directory / name} is empty")
        except OSError as error:
            raise UsageError(f"the service account of this pod cannot be used: {error}") from error


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of the service account of the pod that this process runs in. Raises UsageError."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT") or "443"
    account = PodAccount(f"https://{f'[{host}]' if ':' in host else host}:{port}", directory)
    account.auth_settings()
    return Access(account.host, account.namespace(), account, "of this pod's service account")


def from_files(paths: str, context: str | None = None) -> Access:
    """Return the access of a context, by default the current one, of the kubeconfig files `paths`."""
    if not any(Path(part).expanduser().exists() for part in paths.split(os.pathsep) if part):
        raise NotFoundError(f"the kubeconfig {paths} does not exist; name another one in the variable KUBECONFIG")
    parts = load_package()
    reader = parts.kube_config
    try:
        return _access(parts, reader.KubeConfigMerger(paths), context)
    except (reader.ConfigException, reader.yaml.YAMLError, *_MALFORMED) as error:
        raise UsageError(f"the kubeconfig {paths} cannot be used ({error}); see: kubectl config view") from error


def _access(parts: Package, files: Any, context: str | None) -> Access:
    """Return the access of a context of merged files; `files` is the package's KubeConfigMerger."""
    chosen = context or _current_context(files)
    entry = _entry(files, "contexts", "context", chosen)
    cluster = _entry(files, "clusters", "cluster", entry.get("cluster", ""))
    user = _entry(files, "users", "user", entry["user"]) if entry.get("user") else {}
    configuration, plugin = parts.configuration.Configuration(), _plugin(user)
    loader = parts.kube_config.KubeConfigLoader(
        files.config, active_context=chosen, config_base_path=None, config_persister=files.save_changes
    )
    _, said = _run(lambda: loader.load_and_set(configuration), plugin)
    if plugin and not configuration.auth_settings() and not configuration.cert_file:
        raise _no_credentials(plugin, said or "it returned neither a token nor a certificate")
    _set_proxy(configuration, cluster.get("proxy-url") or "")
    return Access(
        server=configuration.host,
        namespace=entry.get("namespace") or "default",
        configuration=configuration,
        origin=f"of context {chosen!r} in your kubeconfig",
        headers=tuple(_impersonation(user)),
        plugin=plugin,
    )


def _current_context(files: Any) -> str:
    """Return the current context of the first file that names one, as kubectl has it; the package takes the last."""
    named: Iterator[str] = (config.get("current-context") or "" for config in files.config_files.values())
    return next(filter(None, named), "")


def _entry(files: Any, kind: str, part: str, name: str) -> Json:
    entries = {entry.value["name"]: entry.value.get(part) or {} for entry in files.config.value[kind]}
    if name not in entries:
        raise InvalidFieldError(f"kubeconfig {kind}", name, f"the file has: {', '.join(sorted(entries)) or 'none'}")
    return dict(entries[name])


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(" ".join(record.getMessage().split()))


def _plugin(user: Json) -> str:
    """Return the program or the provider that gets a user's credentials from elsewhere; "" if they are in the file."""
    if "exec" in user:
        return str(user["exec"].get("command", ""))
    return str(user["auth-provider"].get("name", "")) if "auth-provider" in user else ""


def _run(action: Callable[[], T], plugin: str) -> tuple[T, str]:
    """Return the result of `action`, and what the package logs instead of raising an error of the plugin.

    The package sets no time limit for a plugin, so one runs in a thread. Raises ClusterUnavailableError.
    """
    if not plugin:
        return action(), ""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:  # noqa: BLE001 (raised in the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run, name="credential plugin", daemon=True)
    limit_s = LOGIN_TIMEOUT_S if sys.stdin.isatty() and sys.stdout.isatty() else PLUGIN_TIMEOUT_S
    kept = _Kept()
    logging.getLogger().addHandler(kept)  # without any handler the message would be printed
    try:
        thread.start()
        thread.join(limit_s)
    finally:
        logging.getLogger().removeHandler(kept)
    if errors:
        raise errors[0]
    if not results:
        raise _no_credentials(plugin, f"it has not ended within {limit_s:g} s")
    return results[0], " ".join(kept.messages)


def _no_credentials(plugin: str, why: str) -> ClusterUnavailableError:
    return ClusterUnavailableError(
        f"the credential plugin {plugin!r} of your kubeconfig gave no credentials: {why}; log in with it again, "
        "and try: kubectl auth whoami"
    )


def _set_proxy(configuration: Any, of_cluster: str) -> None:
    configuration.proxy, configuration.no_proxy = of_cluster or None, None
    server = urlsplit(configuration.host)
    if of_cluster or server.hostname in _LOCAL:
        return
    of_environment = getproxies()
    configuration.proxy = of_environment.get(server.scheme) or of_environment.get("all")
    configuration.no_proxy = of_environment.get("no")


def _impersonation(user: Json) -> Iterator[tuple[str, str]]:
    """Yield the headers with which the API server acts as another user; a header may occur several times."""
    if not user.get("as"):
        return
    yield "Impersonate-User", user["as"]
    if uid := user.get("as-uid"):
        yield "Impersonate-Uid", uid
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", group
    for name, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{quote(name, safe='')}", value
