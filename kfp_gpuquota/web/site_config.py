"""Where the pages are served, and what differs between kinds of clusters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from kfp_gpuquota.errors import InvalidFieldError

_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[a-z0-9.\-_]+(:[0-9]+)?|\[[0-9a-f:.]+\](:[0-9]+)?")
_NO_MORE: Final = (("", "", ""), ("/", "", ""))


@dataclass(frozen=True)
class SiteConfig:
    """The site of one cluster."""

    base: str  # begins every path; no slash at its end
    origins: frozenset[str]  # of the pages, such as "https://example.org"
    framed: bool = False  # Kubeflow's dashboard of the same origin shows the pages, and names the namespace
    resizable: bool = True  # the size bounds of a job can be changed
    what_if: bool = True  # the cluster answers suppositions
    submits: bool = True  # jobs can be submitted
    images: bool = False  # a job runs in an image, and not in a directory of this machine
    quotas: bool = True  # quotas can be changed
    uses_known: bool = True  # reasons of jobs have what their users use
    http_api: bool = True  # the cluster has the API under /v1
    deletes: str = "The job is stopped, and its logs and checkpoints are removed."
    run_page: str = ""  # a run in Kubeflow Pipelines, with {run} and {namespace}; "" where there is none

    @property
    def path(self) -> str:
        """Return the base without escapes, as a request's path has it: a hub's user may be ann%40example.org."""
        return unquote(self.base)

    def run_address(self, namespace: str, run: str) -> str:
        """Return the address of a run's page, "" where there is none."""
        return self.run_page.replace("{namespace}", quote(namespace, "")).replace("{run}", quote(run, ""))


def origin_of(text: str) -> str:
    """Return the scheme and host of an address in a browser. Raises InvalidFieldError for another text."""
    try:
        parts = urlsplit(text.lower())
        standard = parts.port == _PORTS.get(parts.scheme)
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in _PORTS or not _HOST.fullmatch(parts.netloc) or parts[2:] not in _NO_MORE:
        raise InvalidFieldError(
            "origin", text, "it must be a scheme and a host", hint="like https://kubeflow.example.org"
        )
    host = parts.netloc.removesuffix(f":{parts.port}") if standard else parts.netloc  # browsers leave it out
    return f"{parts.scheme}://{host}"


def base_of(path: str) -> str:
    """Return a path that begins every address, without a slash at its end."""
    return "/".join(["", *filter(None, path.split("/"))]).rstrip("/")
