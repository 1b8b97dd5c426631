"""Submits runs to a KFP API server: its address, the user's credentials, and errors in one sentence.

`kfp.Client` sends the requests; each of its failures becomes one sentence with the next step for the user.

On a multi-user Kubeflow a request is authenticated by a token or a session's cookie, and a run belongs to a Profile's
namespace, which is the project of its routed steps.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import ssl
import tempfile
import threading
import urllib.error
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kfp
import kfp_server_api  # type: ignore[import-untyped]
import urllib3.exceptions
from kfp.client import ServiceAccountTokenVolumeCredentials

from kfp_gpuquota.dsl.pipelines.route import is_routed
from kfp_gpuquota.dsl.spec.options import PROJECT
from kfp_gpuquota.errors import ClusterUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.dsl.pipelines.pipeline_file import Package

Json = dict[str, Any]

PROBE_S: Final = 10.0
_TOKEN_PATH: Final = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105 (KFP's variable: the file of a pod's token)
_HEALTH: Final = "/apis/v2beta1/healthz"
# Loggers that KFP's client writes its tracebacks and its repeated requests to; the first is the root logger.
_CLIENTS_LOGGERS: Final = ("", "kfp_server_api.rest", "urllib3.connectionpool", "urllib3.util.retry")
_AUTHENTICATE: Final = "authenticate with --token-file FILE, --existing-token TOKEN or --cookie NAME=VALUE"


@dataclass(frozen=True)
class KfpServer:
    """Address and credentials of a KFP API server.

    `token` is sent as a bearer token, `cookie` unchanged (NAME=VALUE), `headers` in addition, for proxies. `ca_cert` is
    a file with the certificate authority of the server; "": the system's authorities.
    """

    host: str
    token: str = ""
    cookie: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    ca_cert: str = ""

    def submit(self, package: Package, arguments: Json, *, root: str = "", namespace: str = "") -> str:
        """Submit the pipeline, and return the run's id.

        `namespace` is the namespace of the Profile that runs it; on a multi-user server the default is the project of
        the routed steps. Raises ClusterUnavailableError and UsageError.
        """
        namespace = namespace_of_run(package, namespace, several_users=self.has_several_users())
        with tempfile.TemporaryDirectory() as directory, self._translated_errors(namespace):
            file = Path(directory) / "pipeline.yaml"
            file.write_text(package.text(), encoding="utf-8")
            run = self._client(namespace).create_run_from_pipeline_package(
                str(file),
                arguments=arguments,
                run_name=package.name,
                pipeline_root=root or None,
                namespace=namespace or None,
            )
        return str(run.run_id)

    def has_several_users(self) -> bool:
        """Return whether the server is in multi-user mode.

        Raises ClusterUnavailableError where it does not answer, UsageError where it refuses.
        """
        request = urllib.request.Request(self._address() + _HEALTH, headers=dict(self._all_headers()))  # noqa: S310
        try:
            with self._opener().open(request, timeout=PROBE_S) as response:
                return bool(json.load(response).get("multi_user"))
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refusal(error.code, error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        except (ValueError, AttributeError):
            raise UsageError(
                f"the server at {self.host} is not a KFP server; on Kubeflow the address is the dashboard's, followed "
                "by /pipeline"
            ) from None

    def _client(self, namespace: str) -> kfp.Client:
        credentials = None
        if not self.token and os.environ.get(_TOKEN_PATH):
            credentials = ServiceAccountTokenVolumeCredentials(path=os.environ[_TOKEN_PATH])
        client = kfp.Client(
            host=self._address(),
            existing_token=self.token or None,
            cookies=self.cookie or None,
            ssl_ca_cert=self.ca_cert or None,
            credentials=credentials,
            **({"namespace": namespace} if namespace else {}),
        )
        for name, value in self.headers:
            for api in (client._run_api, client._experiment_api, client._healthz_api, client._pipelines_api):  # noqa: SLF001
                api.api_client.set_default_header(name, value)
        return client

    def _address(self) -> str:
        """Return the server's URL; as in KFP's client, an address without a scheme is https."""
        return (self.host if self.host.startswith("http") else f"https://{self.host}").rstrip("/")

    def _all_headers(self) -> Iterator[tuple[str, str]]:
        if self.token:
            yield "Authorization", f"Bearer {self.token}"
        elif path := os.environ.get(_TOKEN_PATH):
            with contextlib.suppress(OSError):
                yield "Authorization", f"Bearer {Path(path).read_text().strip()}"
        if self.cookie:
            yield "Cookie", self.cookie
        yield from self.headers

    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context(cafile=self.ca_cert or None)
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirect)

    @contextlib.contextmanager
    def _translated_errors(self, namespace: str) -> Iterator[None]:
        """Translate errors of KFP's client, and suppress its logged tracebacks and its warnings about KFP 1 servers."""
        try:
            with _silenced(*_CLIENTS_LOGGERS), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                yield
        except kfp_server_api.ApiException as error:
            raise self._refusal(error.status, error.reason, namespace) from None
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise self._no_answer(error) from None

    def _no_answer(self, error: Exception) -> ClusterUnavailableError:
        why = str(getattr(error, "reason", error)).rpartition(": ")[2]
        return ClusterUnavailableError(f"the KFP server at {self.host} does not answer: {why}")

    def _refusal(self, status: int, reason: str, namespace: str = "") -> UsageError:
        if status in {301, 302, 303, 307, 308}:
            return UsageError(f"{self.host} redirects to a login page; {_AUTHENTICATE}")
        if status == http.HTTPStatus.UNAUTHORIZED:
            return UsageError(f"the KFP server at {self.host} requires authentication (401); {_AUTHENTICATE}")
        if status == http.HTTPStatus.FORBIDDEN:
            where = f" in namespace {namespace!r}" if namespace else ""
            return UsageError(
                f"the KFP server at {self.host} does not permit this user to run pipelines{where} (403); a run belongs "
                "to a Profile's namespace: pass one of yours with --namespace, and the same as --project"
            )
        return UsageError(f"the KFP server at {self.host} refuses the run: {status} {reason}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that returns redirects as they are: they lead to a login page, which the caller reports."""

    def redirect_request(self, *_: object) -> None:
        """Return None: the redirect is not followed."""


def namespace_of_run(package: Package, namespace: str, *, several_users: bool) -> str:
    """Return the namespace of a run: on a multi-user server a Profile's, which is the project of all routed steps.

    Raises UsageError where it is not given, or where a step names another project.
    """
    if not several_users:
        return namespace
    projects = sorted(_projects(package.spec))
    if not namespace and len(projects) == 1:
        namespace = projects[0]
    if not namespace:
        raise UsageError(
            "this KFP server has several users: name the Profile's namespace to run in, by --namespace NAME"
        )
    if others := [project for project in projects if project != namespace]:
        raise UsageError(
            f"the run is in namespace {namespace!r}, but some of its steps name project {others[0]!r}; on Kubeflow a "
            "project is its Profile's namespace: pass the same to --namespace and --project"
        )
    return namespace


def _projects(spec: Json) -> set[str]:
    containers = (
        executor["container"]
        for executor in spec.get("deploymentSpec", {}).get("executors", {}).values()
        if "container" in executor
    )
    return {
        entry["value"]
        for container in containers
        if is_routed(container.get("command"))
        for entry in container.get("env", [])
        if entry["name"] == PROJECT
    }


@contextlib.contextmanager
def _silenced(*names: str) -> Iterator[None]:
    """Drop what this thread writes to these loggers in the block; other threads and other loggers are not affected."""
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_kept)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_kept)
