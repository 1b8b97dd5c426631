"""`gpuquota cluster status`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.cli.arguments.options import OutputOption, client
from kfp_gpuquota.cli.display.output import Format, age, show, table

if TYPE_CHECKING:
    from kfp_gpuquota.api.wire import Health


def status(output: OutputOption = Format.TABLE) -> None:
    """Show whether the cluster runs, where, whose it is, and with how many GPUs.

    Examples:
      gpuquota cluster status
      gpuquota cluster status -o json
    """
    from kfp_gpuquota.cluster.connect import runs_here  # noqa: PLC0415
    from kfp_gpuquota.errors import ClusterUnavailableError  # noqa: PLC0415

    if not runs_here():
        raise ClusterUnavailableError("the cluster does not run; start it with: gpuquota cluster start")
    reached = client()
    health, nodes = reached.health(), reached.list_nodes()
    total = as_number(sum(view.gpus for view in nodes))
    held = as_number(sum(view.gpus_in_use for view in nodes))
    models = ", ".join(sorted({model for view in nodes for model in view.types}))
    rows = [
        ("directory", health.home),
        *_who_uses_it(health),
        ("daemon", f"pid {health.pid}, version {health.version}, up {age(health.started_at)}"),
        ("nodes", f"{len(nodes)} with {show_gpus(total)} ({models})"),
        ("in use", f"{held} of {show_gpus(total)}"),
        *([("problem", health.problem)] if health.problem else []),
    ]
    show(
        {"health": health, "nodes": len(nodes), "gpus": total, "held": held},
        output,
        table(("CLUSTER", ""), rows),
    )


def _who_uses_it(health: Health) -> list[tuple[str, str]]:
    """Return rows for the status: whose cluster it is, where this machine has one that users share."""
    from kfp_gpuquota.cluster.connect import shared_socket  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.shared.config import SHARED_SOCKET, SHARED_VARIABLE  # noqa: PLC0415

    if health.shared:
        return [("users", f"shared by users of this machine ({shared_socket() or health.home})")]
    path = Path(os.environ.get(SHARED_VARIABLE) or SHARED_SOCKET)
    if path.exists():
        return [("users", f"your own; the one that users of this machine share is not used ({path})")]
    return []
