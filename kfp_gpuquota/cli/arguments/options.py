"""Options that several commands share, and the client they talk through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.cli.arguments.completion import complete_job, complete_project
from kfp_gpuquota.cli.arguments.names import resource
from kfp_gpuquota.cli.display.output import Format
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from kfp_gpuquota.server.cluster_client import ClusterClient


def _job(text: str) -> str:
    """The name in "train1" and "job/train1"."""
    return resource(text, "job")


JobArgument = Annotated[str, typer.Argument(metavar="JOB", callback=_job, autocompletion=complete_job)]
ProjectOption = Annotated[
    str,
    typer.Option(
        "--project",
        "-p",
        "--namespace",
        "-n",
        metavar="PROJECT",
        autocompletion=complete_project,
        help="The project (on Kubernetes the namespace); else the configured one.",
    ),
]
OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to show it.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show it again after each change, until Ctrl-C.")]


def client(image: str = "") -> ClusterClient:
    """The client of the cluster that is chosen; the embedded one is started where it does not run.

    `image` is that of the jobs which it submits. Raises UsageError where the cluster has no images.
    """
    from kfp_gpuquota.cluster.connect import connect  # noqa: PLC0415

    return connect(image=image)


def on_kubernetes() -> bool:
    """Return whether the chosen cluster is a Kubernetes cluster."""
    from kfp_gpuquota.cluster.connect import kube_context  # noqa: PLC0415

    return kube_context() is not None


def project_or_configured(given: str) -> str:
    """The project to work in. Raises UsageError with the next step."""
    from kfp_gpuquota.cluster.connect import current_project  # noqa: PLC0415

    return current_project(given)


def project_or_all(given: str) -> str:
    """The project of which jobs are listed; "" for all."""
    from kfp_gpuquota.cluster.connect import listed_project  # noqa: PLC0415

    return listed_project(given)


def listed_project_or_error(reached: ClusterClient, given: str) -> str:
    """As `project_or_all`. Raises NotFoundError for a project that does not exist."""
    chosen = project_or_all(given)
    if not chosen:
        return ""
    try:
        reached.get_project(chosen)
    except NotFoundError:
        if given:
            raise
        raise NotFoundError(
            f"the configured project {chosen!r} does not exist any more; choose another one with: gpuquota config "
            "project NAME, or list the jobs of all: gpuquota list -A"
        ) from None
    return chosen
