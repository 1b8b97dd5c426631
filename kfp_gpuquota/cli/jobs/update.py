"""`gpuquota update`: other size bounds, or another priority, for a job that was submitted."""

from __future__ import annotations

import typer

from kfp_gpuquota.api.quantity import whole_number
from kfp_gpuquota.api.wire import JobUpdate
from kfp_gpuquota.cli.arguments.options import (
    JobArgument,
    OutputOption,
    ProjectOption,
    client,
    project_or_configured,
)
from kfp_gpuquota.cli.display.output import Format, show
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cli.jobs.arrays import one_job
from kfp_gpuquota.cli.jobs.submit import (  # noqa: TC001 (typer reads annotations at run time)
    MaxOption,
    MinOption,
    PriorityOption,
)
from kfp_gpuquota.errors import UsageError

app = typer.Typer()


@app.command("update", short_help="Change a job's size bounds or priority.")
def update(
    job: JobArgument,
    min_gpus: MinOption = None,
    max_gpus: MaxOption = None,
    priority: PriorityOption = None,
    project: ProjectOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change what is given, of a job that waits or runs. One that holds more than its new maximum shrinks.

    On Kubernetes the sizes of a job are fixed; its priority can be changed.

    Examples:
      gpuquota update elastic1 --max-gpus 8
      gpuquota update train1 --priority 80
    """
    changed = JobUpdate(
        min_gpus=None if min_gpus is None else whole_number("min_gpus", min_gpus),
        max_gpus=None if max_gpus is None else whole_number("max_gpus", max_gpus),
        priority=priority,
    )
    if changed == JobUpdate():
        raise UsageError(f"name what to change: gpuquota update {job} --min-gpus N, --max-gpus N or --priority N")
    reached, project = client(), project_or_configured(project)
    was_elastic = one_job(reached, project, job).spec.elastic
    updated = reached.update_job(project, job, changed)
    if output is Format.TABLE:
        echo(f"job {job} updated")
    else:
        show(updated, output)
    if updated.spec.elastic and not was_elastic:
        program = "its program has to use elastic_runtime: several workers of another one would each do all of the work"
        echo(f"warning: the job is elastic from now on, and {program}", err=True)
