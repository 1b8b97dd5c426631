"""`gpuquota what-if`: what would start, grow, shrink or stop, before anything is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.job_sentences import expected_start_of
from kfp_gpuquota.api.quantity import gpus_or_fraction, parse_gpu_memory, whole_number
from kfp_gpuquota.api.wire import JobName, Supposition
from kfp_gpuquota.cli.arguments.options import OutputOption, ProjectOption, client, project_or_configured
from kfp_gpuquota.cli.arguments.suppositions import (
    GuaranteedOption,
    LimitOption,
    NewNodeOption,
    NodeOption,
    changed_projects,
    new_node,
)
from kfp_gpuquota.cli.display.output import Format, show
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.api.wire import Effect
    from kfp_gpuquota.cli.arguments.dumps import DumpedCluster
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()


GpusOption = Annotated[
    str | None, typer.Option("--gpus", "-g", metavar="N", help="A job that asks for so many GPUs, or a part of one.")
]
MinOption = Annotated[str | None, typer.Option("--min-gpus", metavar="N", help="The fewest GPUs that job runs with.")]
MemoryOption = Annotated[str | None, typer.Option("--gpu-memory", metavar="SIZE", help="GPU memory that job asks for.")]
InteractiveOption = Annotated[bool, typer.Option("--interactive", help="That job is a build session.")]
DeleteOption = Annotated[
    list[str] | None, typer.Option("--delete", metavar="JOB", help="A job of the project is deleted; may be repeated.")
]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="JSON", help="Ask this file of `gpuquota debug state` instead of the cluster."),
]
NAME = "this-job"


@app.command("what-if", short_help="Show what would happen, and do nothing.")
def what_if(
    gpus: GpusOption = None,
    *,
    min_gpus: MinOption = None,
    gpu_memory: MemoryOption = None,
    interactive: InteractiveOption = False,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    delete: DeleteOption = None,
    without_node: NodeOption = None,
    with_node: NewNodeOption = None,
    state: StateOption = None,
    project: ProjectOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Show which jobs would start, grow, shrink or stop if jobs, quotas or nodes changed.

    On Kubernetes this needs kubectl and the rights of the Role gpuquota-debug in gpuquota-system, or a file.

    Examples:
      gpuquota what-if -g 4 --interactive
      gpuquota what-if --guaranteed team-b=4 --limit team-b=8
      gpuquota what-if --delete train1 -g 2
      gpuquota what-if --without-node node-3
      gpuquota what-if --with-node 8
      gpuquota what-if --state state.json --guaranteed team-b=4
    """
    reached = _answering(state)
    jobs: tuple[JobSpec, ...] = ()
    if gpus is not None or gpu_memory is not None:
        jobs = (_job(gpus, min_gpus, gpu_memory, project_or_configured(project), interactive=interactive),)
    supposed = Supposition(
        submit=jobs,
        projects=tuple(changed_projects(reached, guaranteed or [], limit or [])),
        delete=tuple(JobName(project=project_or_configured(project), name=name) for name in delete or []),
        without_nodes=tuple(without_node or []),
        with_nodes=tuple(map(new_node, with_node or [])),
    )
    if supposed == Supposition():
        raise UsageError("name a change, for example: gpuquota what-if -g 2, or --guaranteed team-a=4")
    outlook = reached.what_if(supposed)
    show(outlook, output, "\n".join(_line(*effect) for effect in outlook.effects()) or "nothing would change")


def _answering(state: Path | None) -> ClusterApi | DumpedCluster:
    if state is None:
        return client()
    from kfp_gpuquota.cli.arguments.dumps import DumpedCluster, read_dump  # noqa: PLC0415 (a cluster answers by itself)

    return DumpedCluster(read_dump(state))


def _job(gpus: str | None, min_gpus: str | None, memory: str | None, project: str, *, interactive: bool) -> JobSpec:
    requested, fraction = gpus_or_fraction(gpus, memory=memory)
    return JobSpec(
        name=NAME,
        project=project,
        command=("true",),
        gpus=requested,
        min_gpus=None if min_gpus is None else whole_number("min_gpus", min_gpus),
        gpu_fraction=fraction,
        gpu_memory_mib=None if memory is None else parse_gpu_memory("gpu_memory", memory),
        kind=Kind.BUILD if interactive else Kind.TRAIN,
    )


def _line(verb: str, effect: Effect) -> str:
    why = f": {effect.reason.message}" if effect.reason is not None else ""
    expected = effect.expected_start
    then = "" if expected is None else f"; expected start: {expected_start_of(expected, time.time())}"
    return f"{effect.job} of {effect.project} {verb}{why}{then}"
