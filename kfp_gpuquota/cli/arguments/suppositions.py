"""Options for quotas and nodes that are only supposed to change: of `gpuquota what-if` and `twin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kfp_gpuquota.api.quantity import gpu_quota, whole_number
from kfp_gpuquota.api.wire import NewNode
from kfp_gpuquota.cli.arguments.parsers import pairs
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.cli.arguments.dumps import DumpedCluster
    from kfp_gpuquota.server.cluster_api import ClusterApi

GuaranteedOption = Annotated[
    list[str] | None,
    typer.Option("--guaranteed", metavar="PROJECT=N", help="A project's guaranteed quota; may be repeated."),
]
LimitOption = Annotated[
    list[str] | None, typer.Option("--limit", metavar="PROJECT=N", help="A project's limit; may be repeated.")
]
NodeOption = Annotated[
    list[str] | None, typer.Option("--without-node", metavar="NODE", help="A node is lost or drained; may be repeated.")
]
NewNodeOption = Annotated[
    list[str] | None,
    typer.Option("--with-node", metavar="GPUS[:POOL]", help="A node with so many GPUs is added; may be repeated."),
]


def new_node(text: str) -> NewNode:
    """Return the node of "8" or "8:POOL"."""
    gpus, _, pool = text.partition(":")
    try:
        return NewNode(gpus=whole_number("with_node", gpus), pool=pool)
    except InvalidFieldError as error:
        raise InvalidFieldError("with_node", text, error.rule) from None  # -g is the gpus of a job


def changed_projects(reached: ClusterApi | DumpedCluster, guaranteed: list[str], limit: list[str]) -> Iterator[Project]:
    """Yield the projects whose quotas change, as they would be. NotFoundError for one that does not exist."""
    rule = "a quota is given as PROJECT=N"
    least, most = pairs("guaranteed", guaranteed, rule), pairs("limit", limit, rule)
    for name in dict.fromkeys([*least, *most]):
        changed: dict[str, float | None] = {}
        if name in least:
            changed["guaranteed"] = gpu_quota("guaranteed", least[name])
        if name in most:
            changed["limit"] = None if most[name] == "none" else gpu_quota("limit", most[name])
        yield msgspec.structs.replace(reached.get_project(name).project, **changed)
