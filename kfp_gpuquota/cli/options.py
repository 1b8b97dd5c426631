"""Options that several commands share, and the client they talk through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.cli.output import Format

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client

ProjectOption = Annotated[
    str, typer.Option("--project", "-p", metavar="PROJECT", help="The project; else the configured one.")
]
OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to show it.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show it again after each change, until Ctrl-C.")]


def client() -> Client:
    """The client of the cluster that the environment names; the embedded one is started where it does not run."""
    from kfp_gpuquota.cluster.connect import connect  # noqa: PLC0415

    return connect()


def project_or_configured(given: str) -> str:
    """The project to work in. Raises UsageError with the next step."""
    from kfp_gpuquota.cluster.connect import current_project  # noqa: PLC0415

    return current_project(given)
