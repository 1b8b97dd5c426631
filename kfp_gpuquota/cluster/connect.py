"""Connects a client to its cluster: the one that the environment or the user's settings name, else the embedded one.

| what is set                                   | the cluster                                                    |
|-----------------------------------------------|----------------------------------------------------------------|
| `$GPUQUOTA_URL` (and `$GPUQUOTA_TOKEN_FILE`)  | the server at that socket: unix:///PATH                        |
| `$GPUQUOTA_CONTEXT`, else the setting         | that context of the kubeconfig; "." is the current one         |
| ... = "embedded"                              | the embedded one                                               |
| nothing, inside of a pod                      | the cluster of the pod, as its service account                 |
| nothing                                       | the embedded one of this user                                  |

The embedded one is the user's own if it runs, or if `$GPUQUOTA_HOME` names it; else the one that the users of this
machine share, at `$GPUQUOTA_SHARED_SOCKET` (/run/gpuquota/socket), if there is one; else the user's own is started.
"""

from __future__ import annotations

import grp
import os
import pwd
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.local.home import HOME_VARIABLE, Home, default_home, write_private
from kfp_gpuquota.cluster.local.shared.config import SHARED_SOCKET, SHARED_VARIABLE
from kfp_gpuquota.cluster.local.start import ensure_running
from kfp_gpuquota.errors import UnauthorizedError, UsageError
from kfp_gpuquota.server.client import RETRY_FOR_S, Client
from kfp_gpuquota.server.transport.unix_sockets import socket_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
    from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection
    from kfp_gpuquota.cluster.operations import ClusterOperations
    from kfp_gpuquota.server.cluster_api import ClusterApi

URL_VARIABLE: Final = "GPUQUOTA_URL"
TOKEN_FILE_VARIABLE: Final = "GPUQUOTA_TOKEN_FILE"  # noqa: S105 (a variable's name)
PROJECT_VARIABLE: Final = "GPUQUOTA_PROJECT"
CONTEXT_VARIABLE: Final = "GPUQUOTA_CONTEXT"
EMBEDDED: Final = "embedded"
CURRENT: Final = "."
_REMEDY: Final = "it is shared by users of this machine, and started by root: systemctl status gpuquota"
_NO_NAMESPACE: Final = "default"
_POD_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The user's settings, stored as config.json in the cluster's directory."""

    project: str = ""
    context: str = ""


def connect(
    environment: Mapping[str, str] | None = None, *, image: str = "", retry_for_s: float = RETRY_FOR_S
) -> ClusterApi:
    """Return a client of the selected cluster; `image` is the image of the jobs that it submits.

    Raises ClusterStartError if the embedded cluster does not start, UsageError for a context that does not exist or an
    image on the embedded cluster.
    """
    environment = os.environ if environment is None else environment
    if url := environment.get(URL_VARIABLE):
        path, token_file = socket_path(url), _token_file(environment)
        return Client(lambda: (path, token_file.read_text().strip()), retry_for_s=retry_for_s)
    if (context := kube_context(environment)) is not None:
        return _kubernetes(context, environment, image, retry_for_s)
    if image:
        raise UsageError(
            f"the embedded cluster runs programs of this machine, not images such as {image!r}; images work on "
            "Kubernetes (--context NAME). Leave out -i here"
        )
    if (shared := shared_socket(environment)) is not None:
        return Client(lambda: (_open_to_us(shared), ""), retry_for_s=retry_for_s, remedy=_REMEDY)
    home = embedded_home(environment)

    def locate() -> tuple[Path, str]:
        ensure_running(home)
        return home.socket_file, home.token_file.read_text().strip()

    return Client(locate, retry_for_s=retry_for_s)


def kube_calls() -> Calls:
    """Return a blocking client of the selected context's API server, or of the kubeconfig's current one."""
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls  # noqa: PLC0415 (the embedded cluster does not need it)

    return Calls(_connection(kubeconfig_context(), os.environ))


def chosen_calls() -> Calls | None:
    """Return calls to the API server of the selected cluster; None if it is not a Kubernetes cluster."""
    return None if kube_context() is None else kube_calls()


def operations() -> ClusterOperations:
    """Return what an administrator does with the selected cluster as a whole; starts none."""
    if (calls := chosen_calls()) is not None:
        from kfp_gpuquota.cluster.kubernetes.operations.installed import KubernetesOperations  # noqa: PLC0415 (see above)

        return KubernetesOperations(calls)
    from kfp_gpuquota.cluster.local.operations import LocalOperations  # noqa: PLC0415 (a launcher does without)

    named = bool(os.environ.get(HOME_VARIABLE))
    elsewhere = not named and (bool(os.environ.get(URL_VARIABLE)) or shared_socket() is not None)
    return LocalOperations(embedded_home(), connect, elsewhere=elsewhere)


def kube_context(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the selected context of the kubeconfig ("": the current one, or the pod's); None: not on Kubernetes."""
    environment = os.environ if environment is None else environment
    if environment.get(URL_VARIABLE):
        return None
    chosen = _chosen_context(environment)
    if chosen == EMBEDDED:
        return None
    if chosen:
        return "" if chosen == CURRENT else chosen
    return "" if "KUBERNETES_SERVICE_HOST" in environment and _POD_TOKEN.exists() else None


def kubeconfig_context(environment: Mapping[str, str] | None = None) -> str:
    """Return the context for what is on Kubernetes whichever cluster has the jobs (KFP); "": the kubeconfig's own."""
    chosen = _chosen_context(os.environ if environment is None else environment)
    return "" if chosen in {EMBEDDED, CURRENT} else chosen


def embedded_home(environment: Mapping[str, str] | None = None) -> Home:
    """Return the embedded cluster's directory."""
    return Home(default_home(os.environ if environment is None else environment))


def shared_socket(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the socket of the cluster that this machine's users share, if it is the one that this user works with."""
    environment = os.environ if environment is None else environment
    path = environment.get(SHARED_VARIABLE, str(SHARED_SOCKET))
    if not path or environment.get(HOME_VARIABLE) or not Path(path).exists():
        return None
    return None if embedded_home(environment).is_locked() else Path(path)


def runs_here(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether an embedded cluster of this user, or one that several share, runs on this machine."""
    return embedded_home(environment).is_locked() or shared_socket(environment) is not None


def _open_to_us(socket: Path) -> Path:
    """Return the socket. Raises UnauthorizedError where this user may not connect to it."""
    if socket.exists() and not os.access(socket, os.R_OK | os.W_OK):
        group = _group_name(socket.stat().st_gid)
        raise UnauthorizedError(
            f"the cluster that users of this machine share is for those in group {group}, and this process is not; ask "
            f"an administrator for: usermod -aG {group} {_user_name()}, then log in again"
        )
    return socket


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Return the user's settings, or the defaults. Raises UsageError for an invalid file."""
    path = _settings_file(os.environ if environment is None else environment)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} cannot be read ({error}); correct it, or delete it") from error


def save_settings(settings: Settings, environment: Mapping[str, str] | None = None) -> None:
    """Store the user's settings."""
    path = _settings_file(os.environ if environment is None else environment)
    Home(path.parent).create()
    write_private(path, msgspec.json.encode(settings).decode())


def current_project(given: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Return the project: the one given, else $GPUQUOTA_PROJECT, else the configured one. Raises UsageError.

    On Kubernetes the configured one is the namespace of the context, as for kubectl.
    """
    environment = os.environ if environment is None else environment
    found = given or environment.get(PROJECT_VARIABLE, "")
    if not found and (context := kube_context(environment)) is not None:
        return _connection(context, environment).namespace
    found = found or load_settings(environment).project
    if not found:
        raise UsageError("no project is given; add -p PROJECT, or set it once: gpuquota config project PROJECT")
    return found


def listed_project(given: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Return the project whose jobs a list shows: as `current_project`, but "" (all projects) where none is set.

    A context without a namespace counts as none, because users rarely want the jobs in `default`.
    """
    environment = os.environ if environment is None else environment
    if found := given or environment.get(PROJECT_VARIABLE, ""):
        return found
    if (context := kube_context(environment)) is None:
        return load_settings(environment).project
    namespace = _connection(context, environment).namespace
    return "" if namespace == _NO_NAMESPACE else namespace


def _kubernetes(context: str, environment: Mapping[str, str], image: str, retry_for_s: float) -> ClusterApi:
    from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient  # noqa: PLC0415 (the embedded one does not need it)

    connection = _connection(context, environment)
    return KubernetesClient(connection, image=image, context=context, retry_for_s=retry_for_s)


def _connection(context: str, environment: Mapping[str, str]) -> Connection:
    return _opened(environment.get("KUBECONFIG", ""), context, os.getpid())


@lru_cache(maxsize=1)
def _opened(kubeconfig: str, context: str, pid: int) -> Connection:
    """Return one connection for all that a command does: a credential plugin runs once, and files are read once."""
    del pid  # a forked process reads them itself: its parent may have lived for long
    from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection  # noqa: PLC0415 (see above)

    return Connection.open(kubeconfig or None, context or None)


def _chosen_context(environment: Mapping[str, str]) -> str:
    return environment.get(CONTEXT_VARIABLE) or load_settings(environment).context


def _settings_file(environment: Mapping[str, str]) -> Path:
    return default_home(environment) / "config.json"


def _token_file(environment: Mapping[str, str]) -> Path:
    if TOKEN_FILE_VARIABLE not in environment:
        raise UsageError(f"{URL_VARIABLE} is set, but {TOKEN_FILE_VARIABLE} is not: name the file with the token")
    return Path(environment[TOKEN_FILE_VARIABLE])


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
