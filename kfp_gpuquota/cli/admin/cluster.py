"""`gpuquota cluster`: the embedded cluster's daemon."""

from __future__ import annotations

import typer

from kfp_gpuquota.cli.admin import cluster_state
from kfp_gpuquota.cli.admin.cluster_start import start
from kfp_gpuquota.cli.admin.cluster_status import status
from kfp_gpuquota.cli.admin.shared import stop_shared
from kfp_gpuquota.cli.arguments.options import client
from kfp_gpuquota.cli.display.terminal import echo


def stop() -> None:
    """Stop the daemon. Jobs go on running; the next command that needs the cluster starts and adopts them.

    One that several users share is stopped by its administrators, and started by root.

    Example:
      gpuquota cluster stop
    """
    from kfp_gpuquota.cluster.connect import embedded_home, shared_socket  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.start import await_stop  # noqa: PLC0415

    if (socket := shared_socket()) is not None:
        stop_shared(socket)
        return
    home = embedded_home()
    if not home.is_locked():
        echo("the cluster does not run")
        return
    reached = client()
    jobs = reached.list_jobs().jobs
    running = [job.spec.name for job in jobs if any(worker.phase != "Gone" for worker in job.status.workers)]
    reached.stop_cluster()
    await_stop(home)
    echo("the cluster has stopped" + (f"; still running: {', '.join(running)}" if running else ""))


app = typer.Typer(help="The embedded cluster on this machine.", no_args_is_help=True)
app.command("start", short_help="Start the cluster.")(start)
app.registered_commands += cluster_state.app.registered_commands
app.command("stop", short_help="Stop the cluster's daemon.")(stop)
app.command("status", short_help="Show the cluster.")(status)
