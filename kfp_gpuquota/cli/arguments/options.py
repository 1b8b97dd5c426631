"""Options that several commands share, and the client they talk through."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kfp_gpuquota.cli.arguments.completion import complete_format, complete_job, complete_project
from kfp_gpuquota.cli.arguments.names import resource
from kfp_gpuquota.cli.display.output import Format, parse_format
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.api.wire import NodeView, ProjectView
    from kfp_gpuquota.server.cluster_api import ClusterApi

Found = TypeVar("Found")


class DryRun(StrEnum):
    """The values of `--dry-run`, as kubectl has them."""

    NONE = "none"
    CLIENT = "client"
    SERVER = "server"


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
OutputOption = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        parser=parse_format,
        metavar=f"{'|'.join(Format)}|jsonpath=TEMPLATE",
        autocompletion=complete_format,
        help="How to show it.",
    ),
]
DryRunOption = Annotated[
    DryRun,
    typer.Option(
        "--dry-run",
        help="Check and show it, and change nothing: here (client, the default) or by the cluster.",
    ),
]
PrometheusOption = Annotated[
    str, typer.Option("--prometheus", metavar="URL", envvar="GPUQUOTA_PROMETHEUS", help="Prometheus' address.")
]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show it again after each change, until Ctrl-C.")]


def client(image: str = "") -> ClusterApi:
    """The client of the cluster that is chosen; the embedded one is started where it does not run.

    `image` is that of the jobs which it submits; a cluster without images ignores it, with a warning.
    """
    from kfp_gpuquota.cluster.connect import connect, kube_context  # noqa: PLC0415

    if image and kube_context() is None:
        echo(f"warning: -i {image} is ignored: on this machine jobs run its programs, in no image", err=True)
        image = ""
    return connect(image=image)


def project_or_configured(given: str) -> str:
    """The project to work in. Raises UsageError with the next step."""
    from kfp_gpuquota.cluster.connect import current_project  # noqa: PLC0415

    return current_project(given)


def project_or_all(given: str) -> str:
    """The project of which jobs are listed; "" for all."""
    from kfp_gpuquota.cluster.connect import listed_project  # noqa: PLC0415

    return listed_project(given)


def listed_project_or_error(reached: ClusterApi, given: str) -> str:
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


def named_nodes(reached: ClusterApi, names: Sequence[str], *, ignore_not_found: bool = False) -> list[NodeView]:
    """Return these nodes. Raises NotFoundError."""
    known = {view.node.name: view for view in reached.list_nodes()}
    return by_name("node", [name for name in names if name in known or not ignore_not_found], known)


def named_projects(reached: ClusterApi, names: Sequence[str], *, ignore_not_found: bool = False) -> list[ProjectView]:
    """Return these projects; what each lends follows from all of them. Raises NotFoundError."""
    known = {view.project.name: view for view in reached.list_projects()}
    wanted = [name for name in names if name in known or not ignore_not_found]
    return [known[name] if name in known else reached.get_project(name) for name in wanted]


def by_name(kind: str, names: Sequence[str], known: Mapping[str, Found]) -> list[Found]:
    """Return those of these names. Raises NotFoundError."""
    if missing := [name for name in names if name not in known]:
        raise NotFoundError(f"there is no {kind} {missing[0]!r}; see them with: gpuquota get {kind}s")
    return [known[name] for name in names]
