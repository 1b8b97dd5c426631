"""`gpuquota run`: a command in the foreground, on GPUs of the quota."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.api import Kind, Phase
from kfp_gpuquota.api.quantity import gpus_or_fraction
from kfp_gpuquota.cli.arguments.options import ProjectOption, client
from kfp_gpuquota.cli.arguments.parsers import pairs
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cli.jobs.logs import follow_to_the_end
from kfp_gpuquota.cli.jobs.submit import (  # noqa: TC001 (typer reads annotations at run time)
    EnvironmentOption,
    GpuMemoryOption,
    GpusOption,
    ImageOption,
    InteractiveOption,
)
from kfp_gpuquota.cluster.submission import submit
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from types import FrameType

    from kfp_gpuquota.cluster.submission import JobHandle

app = typer.Typer()


INTERRUPTED = 130


@app.command("run", short_help="Run a command in the foreground.")
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARG]")],
    gpus: GpusOption = None,
    *,
    elastic: Annotated[bool, typer.Option("--elastic", help="From 1 GPU up to what the project may hold.")] = False,
    gpu_memory: GpuMemoryOption = None,
    interactive: InteractiveOption = False,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The job's name; else made of the command.")] = "",
    environment: EnvironmentOption = None,
    image: ImageOption = None,
    project: ProjectOption = "",
) -> None:
    """Run a command as a job: show what it prints, and end with its exit status. Ctrl-C cancels it.

    Examples:
      gpuquota run -g 1 -- python train.py
      gpuquota run -g 0.25 -- python evaluate.py > scores.txt
    """
    requested, fraction = gpus_or_fraction(gpus, memory=gpu_memory)
    reached = client(image or "")
    job = submit(
        command,
        name=name,
        project=project,
        gpus=requested if fraction is None else fraction,
        elastic=elastic,
        gpu_memory=gpu_memory,
        environment=pairs("environment", environment or [], "a variable is given as NAME=VALUE"),
        client=reached,
        kind=Kind.BUILD if interactive else Kind.TRAIN,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    code = follow_to_the_end(reached, job.project, job.name, outlives_interrupt=False)
    if code == INTERRUPTED:
        _cancel(job)
    raise typer.Exit(code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _cancel(job: JobHandle) -> None:
    """Stop the job where it has not ended by itself."""
    try:
        if not job.status.phase.final:
            job.cancel()
            echo(f"job {job.name} is {Phase.CANCELLED.value.lower()}", err=True)
    except NotFoundError:
        return
