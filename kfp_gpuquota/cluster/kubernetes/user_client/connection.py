"""One connection pool to an API server: the official package's, with the user's certificates, token and proxy."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlencode

from kfp_gpuquota.api.request_paths import check_path
from kfp_gpuquota.cluster.kubernetes.user_client.kubeconfig import Access, PodAccount, load_access, load_package
from kfp_gpuquota.errors import ClusterUnavailableError, GpuQuotaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import urllib3

CONNECT_TIMEOUT_S: Final = 10.0
PIECE: Final = 1 << 16
USER_AGENT: Final = "gpuquota"


class Connection:
    """Sends requests to one API server; threads may share it, and a forked process opens connections of its own.

    What `load` reads is read again by `renew`. Nothing here is repeated: see `calls.Calls`.
    """

    def __init__(self, load: Callable[[], Access]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._access = load()
        self._pool = _new_pool(self._access)
        self._owner_pid = os.getpid()

    @classmethod
    def open(cls, kubeconfig: str | None = None, context: str | None = None) -> Self:
        """Return a connection as `kubeconfig.load_access` finds it. Raises its errors; does not connect yet."""
        return cls(lambda: load_access(kubeconfig, context))

    @property
    def server(self) -> str:
        """Return the API server's URL."""
        return self._access.server

    @property
    def namespace(self) -> str:
        """Return the namespace of the context, or of the pod."""
        return self._access.namespace

    @property
    def origin(self) -> str:
        """Return whose credentials these are, as a message continues after "the credentials"."""
        return self._access.origin

    def renew(self) -> None:
        """Read the credentials again: a token was rotated, a certificate was replaced, a plugin has newer ones."""
        access = self._load()
        with self._lock:
            self._access, self._pool = access, _new_pool(access)

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that authenticate a request."""
        authorization = self._access.authorization()
        return [*self._access.headers, *([("Authorization", authorization)] if authorization else [])]

    def send(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes | None = None,
        *,
        timeout_s: float,
    ) -> Response:
        """Send one request, and return the response when its head has arrived.

        `timeout_s` limits each wait for data, not the whole response. Raises ClusterUnavailableError, or UsageError for
        a server whose certificate is not the one that the kubeconfig describes.
        """
        import urllib3  # noqa: PLC0415 (the package has imported it)

        check_path(target)
        sent = urllib3.HTTPHeaderDict([("Accept", "application/json"), ("User-Agent", USER_AGENT)])
        for name, value in headers:
            sent.add(name, value)
        timeout = urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s)
        try:
            found = self._own_pool().request(
                method,
                self.server + target,
                headers=sent,
                body=body,
                timeout=timeout,
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unavailable(error) from error
        return Response(found, self._unavailable)

    def _own_pool(self) -> urllib3.PoolManager:
        with self._lock:
            if self._owner_pid != os.getpid():  # forked: connections of the parent are not this process's to use
                self._pool, self._owner_pid = _new_pool(self._access), os.getpid()
            return self._pool

    def _unavailable(self, error: Exception) -> GpuQuotaError:
        return _explained(self._access, error)


class Response:
    """The head of a response, and its body as it arrives. Raises ClusterUnavailableError where that breaks off."""

    def __init__(self, found: urllib3.BaseHTTPResponse, unavailable: Callable[[Exception], GpuQuotaError]) -> None:
        self._found, self._unavailable = found, unavailable
        self.status = found.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def header(self, name: str) -> str:
        """Return a header of the response, "" if it has none of this name."""
        return self._found.headers.get(name, "")

    @property
    def retry_after_s(self) -> float:
        """Return the pause that the server asks for, 0 if it asks for none."""
        after = self.header("Retry-After")
        return float(after) if after.isdecimal() else 0.0

    def read(self) -> bytes:
        """Return the rest of the body, and give the connection back to the pool."""
        return self._reading(self._found.read)

    def read_piece(self, size: int = PIECE) -> bytes:
        """Return the next bytes as soon as there are any, at most `size`; b"" at the end."""
        return self._reading(lambda: self._found.read1(size))

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the body as they arrive."""
        rest = b""
        while piece := self.read_piece():
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def close(self) -> None:
        """Close the connection, unless the body was read to its end."""
        self._found.close()

    def _reading(self, read: Callable[[], bytes]) -> bytes:
        import urllib3  # noqa: PLC0415 (imported above)

        try:
            return read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self.close()
            raise self._unavailable(error) from error


def url(path: str, query: Mapping[str, object]) -> str:
    """Return a path with its query; parameters without a value are left out."""
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _new_pool(access: Access) -> urllib3.PoolManager:
    import urllib3  # noqa: PLC0415 (it takes longer than all of a command that needs no API server)

    configuration = access.configuration
    if not configuration.verify_ssl:  # the user's own decision; kubectl does not warn at each call, either
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    try:
        if isinstance(configuration, PodAccount):
            return _pool_of_pod(configuration)
        pool: urllib3.PoolManager = load_package().rest.RESTClientObject(configuration).pool_manager
    except (ValueError, urllib3.exceptions.HTTPError) as error:
        raise UsageError(
            f"the proxy {configuration.proxy!r} of the API server {access.server} cannot be used: {error}"
        ) from error
    return pool


def _pool_of_pod(account: PodAccount) -> urllib3.PoolManager:
    import urllib3  # noqa: PLC0415

    options: dict[str, Any] = {"maxsize": 4, "cert_reqs": "CERT_REQUIRED", "ca_certs": account.ssl_ca_cert}
    if proxy := account.proxy:
        return urllib3.ProxyManager(proxy, **options)
    return urllib3.PoolManager(**options)


def _explained(access: Access, error: Exception) -> GpuQuotaError:
    """Return an error that names the first cause and the next step; urllib3 wraps causes several times."""
    import ssl  # noqa: PLC0415 (urllib3 has imported it)

    import urllib3  # noqa: PLC0415

    cause: BaseException = error
    behind_proxy = False
    while (inner := cause.__cause__ or cause.__context__) is not None:
        behind_proxy = behind_proxy or isinstance(cause, urllib3.exceptions.ProxyError)
        cause = inner
    server = access.server
    if isinstance(cause, ssl.SSLCertVerificationError):
        return UsageError(
            f"the certificate of the API server {server} is not accepted ({cause.verify_message}); see "
            "certificate-authority-data and tls-server-name of the cluster in: kubectl config view"
        )
    if behind_proxy:
        return ClusterUnavailableError(
            f"the proxy {access.configuration.proxy} does not connect to the API server {server} ({cause}); see "
            "proxy-url in: kubectl config view, or $HTTPS_PROXY"
        )
    return ClusterUnavailableError(f"the API server {server} does not respond ({cause}); see: kubectl cluster-info")
