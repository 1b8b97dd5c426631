"""`gpuquota debug`: what a cluster's planner sees."""

from __future__ import annotations

import typer

from kfp_gpuquota.cli.arguments.options import client
from kfp_gpuquota.cli.display.output import in_json
from kfp_gpuquota.cli.display.terminal import echo_data

app = typer.Typer(help="What a cluster's planner sees.", no_args_is_help=True)


@app.callback()
def debug() -> None:
    """Show what a cluster's planner sees."""


@app.command("state", short_help="Write projects, nodes, jobs and workers as JSON.")
def state() -> None:
    """Write what the planner sees as JSON: projects, nodes, jobs, workers, the time, and the plan that it makes.

    The file has names of jobs and labels of nodes, but no environment, command or Secret of any job. On Kubernetes this
    needs kubectl and the rights of the Role gpuquota-debug in gpuquota-system.

    Examples:
      gpuquota debug state > state.json
      gpuquota --context NAME debug state > state.json
      gpuquota simulate --state state.json
    """
    echo_data(in_json(client().debug_state().decode()))
