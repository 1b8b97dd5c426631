"""Where the pages are served, and what differs between kinds of clusters."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from kfp_gpuquota.errors import InvalidFieldError


@dataclass(frozen=True)
class Setting:
    """`base` begins every path (no slash at its end); `origins` are those of the pages, such as "https://example.org".

    `framed`: Kubeflow's dashboard of the same origin shows the pages in a frame, and names the namespace. `resizable`:
    the size bounds of a job can be changed. `what_if`: the cluster answers suppositions. `run_page` is the address of a
    run in Kubeflow Pipelines, with {run} and {namespace}; "" where there is none.
    """

    base: str
    origins: frozenset[str]
    framed: bool = False
    resizable: bool = True
    what_if: bool = True
    deletes: str = "The job is stopped, and its logs and checkpoints are removed."
    run_page: str = ""
    if_lost: str = "not connected; trying again"

    def run_address(self, namespace: str, run: str) -> str:
        """Return the address of a run's page, "" where there is none."""
        return self.run_page.replace("{namespace}", quote(namespace, "")).replace("{run}", quote(run, ""))


def origin_of(text: str) -> str:
    """Return the scheme and host of an address in a browser. Raises InvalidFieldError for another text."""
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/") or parts.query:
        raise InvalidFieldError(
            "origin", text, "it must be a scheme and a host", hint="like https://kubeflow.example.org"
        )
    return f"{parts.scheme}://{parts.netloc}".lower()


def base_of(path: str) -> str:
    """Return a path that begins every address, without a slash at its end."""
    return "/".join(["", *filter(None, path.split("/"))]).rstrip("/")
