"""`gpuquota submit`: from a command line to a JobSpec."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.job import DEFAULT_COOL_DOWN_S, DEFAULT_GRACE_PERIOD_S
from kfp_gpuquota.cli.options import OutputOption, ProjectOption, client, project_or_configured
from kfp_gpuquota.cli.output import Format, show
from kfp_gpuquota.errors import InvalidFieldError, UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client

# What a command needs of the shell it was typed in to find the same programs and libraries. Not everything: the shell
# may hold secrets that do not belong into a job's record.
FORWARDED: Final = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL",
)  # fmt: skip

GpusOption = Annotated[str, typer.Option("--gpus", "-g", metavar="N", help="GPUs the job asks for.")]
ElasticOption = Annotated[
    bool, typer.Option("--elastic", help="May run with 1 GPU up to what the project may hold, and change on the way.")
]
MinOption = Annotated[str | None, typer.Option("--min-gpus", metavar="N", help="The fewest GPUs it runs with.")]
MaxOption = Annotated[str | None, typer.Option("--max-gpus", metavar="N", help="The most GPUs it makes use of.")]
PerWorkerOption = Annotated[
    str | None, typer.Option("--gpus-per-worker", metavar="N", help="GPUs of one process, on one node.")
]
InteractiveOption = Annotated[
    bool, typer.Option("--interactive", help="A build session: within quota only, never preempted.")
]
PreemptibleOption = Annotated[
    bool | None, typer.Option("--preemptible/--not-preemptible", help="Whether others may take its GPUs back.")
]
PriorityOption = Annotated[int | None, typer.Option("--priority", help="Within the project; default 50, sessions 100.")]
NodeOption = Annotated[str | None, typer.Option("--node", metavar="NAME", help="Run on this node only.")]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--environment", "-e", metavar="K=V", help="Set a variable; may be repeated.")
]
ImageOption = Annotated[str | None, typer.Option("--image", "-i", metavar="IMAGE", help="On Kubernetes only.")]
DirectoryOption = Annotated[
    str | None, typer.Option("--working-dir", metavar="DIR", help="Where the command runs; else here.")
]
GraceOption = Annotated[
    float, typer.Option("--grace-period", metavar="SECONDS", help="From SIGTERM to SIGKILL when it must stop.")
]
CoolDownOption = Annotated[
    float, typer.Option("--cool-down", metavar="SECONDS", help="After a change of size, not grown again for this long.")
]
MinRunTimeOption = Annotated[
    float, typer.Option("--min-run-time", metavar="SECONDS", help="Not stopped for others before it has run this long.")
]
CommandOption = Annotated[
    bool, typer.Option("--command", help="Accepted for runai's sake: what follows -- is always the whole command.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
CommandArgument = Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND [ARG]")]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("submit", short_help="Submit a job.")(submit)


def submit(
    name: NameArgument,
    command: CommandArgument = None,
    gpus: GpusOption = "1",
    *,
    elastic: ElasticOption = False,
    min_gpus: MinOption = None,
    max_gpus: MaxOption = None,
    gpus_per_worker: PerWorkerOption = None,
    interactive: InteractiveOption = False,
    preemptible: PreemptibleOption = None,
    priority: PriorityOption = None,
    node: NodeOption = None,
    environment: EnvironmentOption = None,
    image: ImageOption = None,
    working_dir: DirectoryOption = None,
    grace_period: GraceOption = DEFAULT_GRACE_PERIOD_S,
    cool_down: CoolDownOption = DEFAULT_COOL_DOWN_S,
    min_run_time: MinRunTimeOption = 0.0,
    whole_command: CommandOption = False,
    project: ProjectOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Submit a job: a training, or with --interactive a build session.

    It runs here, in this directory, with PATH, VIRTUAL_ENV, PYTHONPATH and the like of this shell.

    Examples:
      gpuquota submit train1 -g 1 -- python train.py
      gpuquota submit elastic1 -g 1 --elastic -- python train.py
      gpuquota submit elastic2 -g 2 --min-gpus 1 --max-gpus 4 -- python train.py
      gpuquota submit notebook -g 1 --interactive -- jupyter lab
    """
    del whole_command
    if image is not None:
        raise UsageError(
            f"the embedded cluster runs programs of this machine, not images such as {image!r}; images work on "
            "Kubernetes, where jobs are ElasticJob resources. Leave out -i here"
        )
    reached = client()
    project = project_or_configured(project)
    requested = _count("gpus", gpus)
    smallest = None if min_gpus is None else _count("min_gpus", min_gpus)
    largest = None if max_gpus is None else _count("max_gpus", max_gpus)
    if elastic:
        smallest = 1 if smallest is None else smallest
        largest = max(requested, _most(reached, project)) if largest is None else largest
    spec = JobSpec(
        name=name,
        project=project,
        command=tuple(command or ()),
        gpus=requested,
        min_gpus=smallest,
        max_gpus=largest,
        gpus_per_worker=None if gpus_per_worker is None else _count("gpus_per_worker", gpus_per_worker),
        kind=Kind.BUILD if interactive else Kind.TRAIN,
        preemptible=preemptible,
        priority=priority,
        node=node,
        environment={**_forwarded(), **_variables(environment or [])},
        working_directory=str(Path(working_dir or ".").absolute()),
        grace_period_s=grace_period,
        cool_down_s=cool_down,
        min_run_time_s=min_run_time,
    )
    job = reached.submit(spec)
    if output is Format.TABLE:
        typer.echo(f"job {name} submitted to project {project}; see it with: gpuquota describe {name} -p {project}")
    show(job, output)


def _most(reached: Client, project: str) -> int:
    """What the project may hold at the most: its limit, or all there is."""
    limit = reached.get_project(project).project.limit
    everything = sum(len(view.node.devices) for view in reached.list_nodes())
    return everything if limit is None else min(limit, everything)


def _forwarded() -> dict[str, str]:
    return {name: os.environ[name] for name in FORWARDED if name in os.environ}


def _variables(given: list[str]) -> dict[str, str]:
    pairs = [variable.partition("=") for variable in given]
    for variable, (_, equals, _value) in zip(given, pairs, strict=True):
        if not equals:
            raise InvalidFieldError("environment", variable, "a variable is given as NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _count(field: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidFieldError(field, text, "it must be a whole number of GPUs") from None
